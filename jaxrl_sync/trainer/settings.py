"""The trainer's dataclasses, made from a run's config."""

from __future__ import annotations

from jaxrl_sync.config import RunConfig
from jaxrl_sync.trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainerConfig


def trainer_config(config: RunConfig) -> TrainerConfig:
    """Mesh, optimizer, numerics and batch shape; a cosine schedule ends with the run."""
    t = config.trainer
    optimizer = OptimizerConfig(
        learning_rate=t.learning_rate,
        schedule=t.schedule,
        warmup_steps=t.warmup_steps,
        total_steps=config.run.steps,
        final_fraction=t.final_fraction,
        beta1=t.beta1,
        beta2=t.beta2,
        eps=t.eps,
        weight_decay=t.weight_decay,
        max_grad_norm=t.max_grad_norm,
    )
    return TrainerConfig(
        mesh=MeshConfig(t.mesh.dp, t.mesh.fsdp, t.mesh.tp),
        optimizer=optimizer,
        rows=t.rows,
        seq_len=t.seq_len,
        compute_dtype=t.compute_dtype,
        remat=t.remat,
        logprob_chunk=t.logprob_chunk,
        gather=t.gather,
        init_std=t.init_std,
        temperature=config.loop.sampling.temperature,
        extras=config.engine.extras,
    )


def loss_config(config: RunConfig) -> LossConfig:
    """The objective; a correction that is not stated is ``none``."""
    fields = config.loss.model_dump(exclude={"normalize_std"})
    return LossConfig(**{**fields, "correction": config.loss.correction or "none"})
