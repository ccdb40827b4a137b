"""The trainer's dataclasses, made from the config of a run."""

from __future__ import annotations

from jaxrl_sync.config import RunConfig
from jaxrl_sync.trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainerConfig


def trainer_config(run: RunConfig) -> TrainerConfig:
    """Mesh, optimizer and batch shape; log-probs are taken at the temperature of the rollouts."""
    t = run.trainer
    return TrainerConfig(
        mesh=MeshConfig(t.mesh.dp, t.mesh.fsdp, t.mesh.tp),
        optimizer=OptimizerConfig(
            learning_rate=t.learning_rate,
            schedule=t.schedule,
            warmup_steps=t.warmup_steps,
            total_steps=run.run.steps,
            final_fraction=t.final_fraction,
            beta1=t.beta1,
            beta2=t.beta2,
            eps=t.eps,
            weight_decay=t.weight_decay,
            max_grad_norm=t.max_grad_norm,
        ),
        rows=t.rows,
        seq_len=t.seq_len,
        compute_dtype=t.compute_dtype,
        remat=t.remat,
        logprob_chunk=t.logprob_chunk,
        gather=t.gather,
        init_std=t.init_std,
        temperature=run.loop.sampling.temperature,
    )


def loss_config(run: RunConfig) -> LossConfig:
    """The objective; ``loss.correction`` left open means none, which the config allows only at bound 0."""
    fields = run.loss.model_dump(exclude={"correction", "normalize_std"})
    return LossConfig(correction=run.loss.correction or "none", **fields)
