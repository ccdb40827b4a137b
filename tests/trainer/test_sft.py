"""The supervised warm-up: it learns its demonstrations and leaves a fresh version 0."""

from __future__ import annotations

import dataclasses

import numpy as np

from jaxrl_sync.batch.rollout import Sample
from jaxrl_sync.trainer.config import LossConfig, OptimizerConfig
from jaxrl_sync.trainer.sft import supervised
from tests.trainer.batches import build, samples, trainer_config


def _demonstration(item: Sample) -> Sample:
    """Answers that follow from the prompt: the prompt's first token again and again."""
    tokens = np.where(item.loss_mask, item.tokens[0], item.tokens).astype(np.int32)
    return dataclasses.replace(item, tokens=tokens, advantage=1.0)


def test_the_loss_falls_and_moments_start_again() -> None:
    config = trainer_config(1, 2, 2)
    step, state = build(config, LossConfig())
    batches = [[_demonstration(s) for s in samples(24, seed=i)] for i in range(30)]
    optimizer = OptimizerConfig(learning_rate=1e-2)
    state, curve = supervised(step.model, config, step.mesh, state, batches, optimizer)
    assert len(curve) == 30
    assert curve[0] > 2.5 and np.mean(curve[-5:]) < 0.5 * curve[0]
    assert int(state.updates) == 0
    assert all(not np.asarray(x).any() for x in (state.opt_state[1][0].count, state.opt_state[1][2].count))
