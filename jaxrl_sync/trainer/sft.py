"""Supervised warm-up before version 0: cross-entropy on demonstrations, by the trainer's own update.

The plain policy gradient with advantage 1 on the answer's tokens is the gradient of their mean negative
log-likelihood, so the compiled update of the loss ``none`` serves; only the reported ``loss`` is ``nll``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jax.sharding import Mesh

from jaxrl_sync.batch.pack import PackConfig, pack
from jaxrl_sync.batch.rollout import Sample
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.config import LossConfig, OptimizerConfig, TrainerConfig
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.trainer.step import build_step
from jaxrl_sync.trainer.trainer import data_rank, split


def supervised(
    model: DecoderConfig,
    config: TrainerConfig,
    mesh: Mesh,
    state: TrainState,
    batches: Iterable[Sequence[Sample]],
    optimizer: OptimizerConfig,
    barrier: Callable[[], object] = lambda: None,
) -> tuple[TrainState, list[float]]:
    """One update per batch of demonstrations: the state afterwards and the mean nll of each update.

    ``state`` is donated. Every process is given the same batches and trains on its own rows; they meet in
    ``barrier`` once they have compiled. Moments and
    counters start fresh in the state that is returned: it is version 0 of what follows.
    """
    tuned = dataclasses.replace(config, optimizer=optimizer, temperature=1.0, extras=())
    step = build_step(model, tuned, LossConfig(), mesh)
    rank, ranks = data_rank(mesh, config.rows)
    shape = PackConfig(ranks, config.rows // ranks, config.seq_len)
    state = dataclasses.replace(state, opt_state=train_state.fresh_moments(model, tuned, mesh, state.params))
    accumulator, curve = step.zeros(), []
    step.compile(state, accumulator, step.empty(config.rows // ranks))
    barrier()
    for samples in batches:
        packed = pack(samples, shape)
        micros = [step.put(fields) for fields in split(packed.for_rank(rank), packed.micro_batches)]
        state, accumulator, metrics = step.update(state, accumulator, micros, packed.num_valid_tokens)
        curve.append(metrics["nll"])
    moments = train_state.fresh_moments(model, config, mesh, state.params)
    return dataclasses.replace(state, opt_state=moments, updates=step.count(0)), curve
