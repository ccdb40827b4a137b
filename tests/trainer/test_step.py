"""One update: independent of split, packing and mesh; compiled once; in place; safe against bad numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sync.trainer.config import LossConfig
from jaxrl_sync.trainer.trainer import BatchError, Trainer
from tests.trainer.batches import (
    ROWS,
    build,
    frame,
    host,
    micros,
    packed,
    same_bits,
    samples,
    trainer_config,
)

MEANS = ("loss", "nll", "entropy", "mismatch_k3", "ratio_std", "ess", "grad_norm", "clipped_low", "advantage")


def _update(config: Any, batch: Any, times: int = 1) -> tuple[Any, dict[str, float]]:
    step, state = build(config)
    accumulator = step.zeros()
    metrics: dict[str, float] = {}
    for _ in range(times):
        state, accumulator, metrics = step.update(
            state, accumulator, micros(step, batch), batch.num_valid_tokens
        )
    return host(state.params), metrics


def _close(a: tuple[Any, dict[str, float]], b: tuple[Any, dict[str, float]], atol: float) -> None:
    for name in MEANS:
        assert a[1][name] == pytest.approx(b[1][name], rel=2e-4, abs=1e-5), name
    assert a[1]["tokens"] == b[1]["tokens"]
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=atol, rtol=0), a[0], b[0])


@pytest.fixture(scope="module")
def plain() -> tuple[Any, Any, tuple[Any, dict[str, float]]]:
    """Samples, their packing in rows of one micro-batch, and one update on a single device."""
    items = samples(14, seed=2, longest=16)
    batch = packed(items)
    assert batch.micro_batches == 1
    return items, batch, _update(trainer_config(), batch)


@pytest.mark.invariant(46)
def test_an_update_does_not_depend_on_the_split_into_micro_batches_and_packing(plain: Any) -> None:
    """Adam's first step moves by lr * sign-like amounts: 1e-5 of the weights for sums in another order."""
    items, batch, expected = plain
    split_up = packed(items, rows=2)
    assert split_up.micro_batches >= 3
    _close(_update(trainer_config(rows=2), split_up), expected, 2e-5)


@pytest.mark.invariant(46)
@pytest.mark.parametrize(
    ("dp", "fsdp", "tp"),
    [(1, 4, 1), (1, 2, 2), (1, 1, 8), pytest.param(2, 2, 2, marks=pytest.mark.slow)],
    ids=lambda n: str(n),
)
def test_every_mesh_gives_the_same_update(plain: Any, dp: int, fsdp: int, tp: int) -> None:
    _, batch, expected = plain
    _close(_update(trainer_config(dp, fsdp, tp), batch), expected, 2e-5)


@pytest.mark.slow
def test_remat_and_per_layer_gathering_change_nothing(plain: Any) -> None:
    _, batch, expected = plain
    config = trainer_config(1, 2, 2, remat=True, gather="layer", scan_unroll=1)
    _close(_update(config, batch), expected, 2e-5)


def test_bfloat16_compute_stays_near_float32(plain: Any) -> None:
    _, batch, _ = plain
    step32, state = build(trainer_config())
    step16, _ = build(trainer_config(compute_dtype="bfloat16"))
    micro = micros(step32, batch)[0]
    exact = np.asarray(step32.logprobs(state.params, micro))
    rough = np.asarray(step16.logprobs(state.params, micro))
    assert 0 < np.abs(exact - rough).max() < 0.1


def _pointers(tree: Any) -> set[int]:
    return {s.data.unsafe_buffer_pointer() for x in jax.tree.leaves(tree) for s in x.addressable_shards}


def test_updates_compile_once_and_reuse_their_buffers() -> None:
    step, state = build(trainer_config(1, 2, 2), LossConfig(correction="tis_token"))
    accumulator = step.zeros()
    for seed, count in ((1, 6), (2, 30), (3, 50)):
        batch = packed(samples(count, seed=seed))
        old, old_accumulator = state, accumulator
        before = _pointers((state.params, state.opt_state, accumulator.grads))
        state, accumulator, metrics = step.update(
            state, accumulator, micros(step, batch), batch.num_valid_tokens
        )
        assert all(x.is_deleted() for x in jax.tree.leaves((old.params, old.opt_state, old_accumulator)))
        if seed > 1:  # the first state lies in numpy's memory, which XLA does not write to
            assert _pointers((state.params, state.opt_state, accumulator.grads)) <= before
        assert metrics["tokens"] == batch.num_valid_tokens
    assert step.accumulate._cache_size() == 1
    assert step.apply._cache_size() == 1
    assert all(not np.asarray(x).any() for x in jax.tree.leaves(accumulator))
    assert int(state.updates) == 3


@pytest.mark.invariant(47)
def test_a_gradient_that_is_not_finite_changes_no_weight_and_is_reported() -> None:
    step, state = build(trainer_config(1, 2, 2), LossConfig(correction="tis_token"))
    batch = packed(samples(6))
    fields = {name: a[0].copy() for name, a in batch.for_rank(0).items()}
    fields["advantages"][fields["loss_mask"]] = np.inf
    before = host((state.params, state.opt_state))
    state, _, metrics = step.update(state, step.zeros(), [step.put(fields)], batch.num_valid_tokens)
    assert metrics["skipped"] == 1 and not np.isfinite(metrics["grad_norm"])
    assert same_bits(before, (state.params, state.opt_state))
    assert int(state.updates) == 1


def _trainer(loss: LossConfig, **settings: Any) -> Trainer:
    config = trainer_config(1, 2, 2, **settings)
    step, state = build(config, loss)
    return Trainer(step.model, config, loss, step.mesh, state)


def test_a_rehearsal_leaves_no_trace_and_training_compiles_nothing_more() -> None:
    trainer = _trainer(LossConfig(correction="decoupled", anchor="proximal"))
    before = host(trainer.state)
    assert trainer.warm_up() > 0
    assert same_bits(before, trainer.state)
    metrics = trainer.train(frame(packed(samples(30)), 1))
    assert metrics["micro_batches"] > 1 and metrics["stage_s"] > 0 and metrics["skipped"] == 0
    assert trainer.step.accumulate._cache_size() == 1
    assert trainer.stages[0].compiled._cache_size() == 1
    bad = frame(packed(samples(4), rows=ROWS // 2), 2)
    with pytest.raises(BatchError, match="rows=4, seq_len=32, data_rank=0; expected 8, 32, 0"):
        trainer.train(bad)
    empty = frame(packed(samples(4)), 2)
    empty = dataclasses.replace(empty, header=dataclasses.replace(empty.header, num_valid_tokens=0))
    with pytest.raises(BatchError, match="num_valid_tokens=0"):
        trainer.train(empty)


@pytest.mark.invariant(44)
def test_extras_reach_the_micro_batches_and_compile_nothing_more() -> None:
    trainer = _trainer(LossConfig(correction="clip"), extras=("entropy",))
    trainer.warm_up()
    items = [dataclasses.replace(s, extras={"entropy": s.logprobs * -2}) for s in samples(30)]
    seen: list[Any] = []
    accumulate = trainer.step.accumulate

    def watch(params: Any, accumulator: Any, micro: Any) -> Any:
        seen.append(host(micro))
        return accumulate(params, accumulator, micro)

    trainer.step = dataclasses.replace(trainer.step, accumulate=watch)
    trainer.train(frame(packed(items), 1))
    assert len(seen) > 1 and accumulate._cache_size() == 1
    for micro in seen:
        assert micro["entropy"].dtype == np.float32 and micro["entropy"].any()
        assert np.array_equal(micro["entropy"], micro["rollout_logprobs"] * -2)
    with pytest.raises(BatchError, match="batch of step 2 has no field 'entropy', expected tokens, "):
        trainer.train(frame(packed(samples(4)), 2))
