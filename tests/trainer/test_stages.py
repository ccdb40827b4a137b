"""Stages: the field they add, on the trainer's mesh and on another; the reference stays frozen."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_sync.trainer import axes
from jaxrl_sync.trainer.config import LossConfig
from jaxrl_sync.trainer.stages import LogprobStage, build_stages
from tests.trainer.batches import MODEL, build, micros, packed, samples, trainer_config


@pytest.mark.parametrize("first", [0, 4])
def test_the_proximal_stage_adds_the_live_policy_on_any_mesh(first: int) -> None:
    config = trainer_config(1, 2, 2)
    step, state = build(config)
    batch = micros(step, packed(samples(20)))
    mesh = axes.make_mesh(config.mesh, jax.devices()[first : first + 4])
    stage = LogprobStage("proximal", MODEL, config, mesh)
    for micro in stage.run(state.params, batch):
        found = micro["proximal_logprobs"]
        assert found.sharding == micro["tokens"].sharding
        np.testing.assert_array_equal(found, step.logprobs(state.params, micro))
    assert stage.compiled._cache_size() == 1


def test_the_reference_stage_keeps_its_weights_through_donated_updates() -> None:
    config, loss = trainer_config(1, 2, 2), LossConfig(correction="tis_token")
    step, state = build(config, loss)
    batch = packed(samples(6))
    kl = LossConfig(correction="tis_token", kl_coef=0.1)
    (stage,) = build_stages(MODEL, config, kl, step.mesh, state.params)
    micro = micros(step, batch)
    before = np.asarray(stage.run(state.params, micro)[0]["reference_logprobs"])
    state, _, _ = step.update(state, step.zeros(), micro, batch.num_valid_tokens)
    after = np.asarray(stage.run(state.params, micro)[0]["reference_logprobs"])
    np.testing.assert_array_equal(before, after)
    live = np.asarray(step.logprobs(state.params, micro[0]))
    assert np.abs(live - before).max() > 1e-3
    with pytest.raises(ValueError, match="needs reference weights"):
        build_stages(MODEL, config, kl, step.mesh, None)
