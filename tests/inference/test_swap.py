"""Swaps between two decode steps: versions per token, old and new caches, pins, failures, stamps."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference import probe
from jaxrl_sync.inference.errors import EngineError, SwapTimeoutError, VersionMismatchError
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import (
    SMALL,
    TINY,
    ask,
    engine_weights,
    generate,
    make_engine,
    reference_logprobs,
    run_until,
    tp_mesh,
    trainer_weights,
)

V0, V1, V2 = Version("test", 0), Version("test", 1), Version("test", 2)


@pytest.mark.invariant(10)
@pytest.mark.parametrize("tp", [1, 2])
def test_a_swap_in_mid_generation_drains_nothing_and_compiles_nothing(tp: int) -> None:
    with make_engine(SMALL, tp=tp) as engine:
        generate(engine, ask("warm", (1,) * 4, max_tokens=2))
        compiled = engine.compiled()
        handle = engine.submit(ask("a", n=4, max_tokens=10))
        engine.step()
        swap = engine.install(engine_weights(1, tp_mesh(tp)), V1)
        engine.step()
        assert engine.version == V1 and engine.stats().running == 4
        report = swap.result(0)
        (result,) = run_until(engine, [handle])
        again = engine.install(engine_weights(1, tp_mesh(tp)), V1)
        assert again.result(0).pause_s == 0.0
        for sample in result.samples:
            assert sample.versions == (0, 0, *(1,) * 8) and len(sample.tokens) == 10
        assert report.version == V1 and report.step == engine.stats().steps - 8 and report.pause_s >= 0
        assert engine.compiled() == compiled and engine.stats().swaps == 1


def test_tokens_before_the_swap_are_of_the_old_and_after_it_of_the_new_weights() -> None:
    """Greedy, kv_policy recompute: each half equals a whole forward pass of its own weights."""
    config = dataclasses.replace(SMALL, kv_policy="recompute")
    with make_engine(config) as engine:
        handle = engine.submit(ask("a", (2, 7, 1), max_tokens=8))
        engine.step()
        engine.step()
        engine.install(engine_weights(1, tp_mesh()), V1)
        (result,) = run_until(engine, [handle])
        sample = result.samples[0]
    assert sample.versions == (0,) * 4 + (1,) * 4
    for seed, part in ((0, slice(0, 4)), (1, slice(4, 8))):
        expected = reference_logprobs(seed, (2, 7, 1), sample.tokens)[part]
        np.testing.assert_allclose(sample.logprobs[part], expected, atol=2e-5)


def test_keep_goes_on_with_the_old_cache() -> None:
    results: dict[str, Any] = {}
    for policy in ("keep", "recompute"):
        with make_engine(dataclasses.replace(SMALL, kv_policy=policy)) as engine:
            handle = engine.submit(ask("a", (2, 7, 1), max_tokens=8))
            engine.step()
            engine.install(engine_weights(1, tp_mesh()), V1)
            results[policy] = run_until(engine, [handle])[0].samples[0]
    keep, again = results["keep"], results["recompute"]
    assert keep.tokens[:2] == again.tokens[:2] and keep.logprobs[:2] == again.logprobs[:2]
    assert abs(keep.logprobs[2] - again.logprobs[2]) > 1e-3 or keep.tokens[2] != again.tokens[2]


@pytest.mark.invariant(36)
@pytest.mark.invariant(37)
def test_after_a_swap_output_equals_that_of_a_fresh_engine() -> None:
    prompts = [ask(str(i), (i, 5, 2 * i), 2, temperature=t) for i, t in enumerate([0.0, 0.0, 1.0, 0.8])]
    with make_engine(SMALL) as engine:
        generate(engine, *prompts)
        engine.install(engine_weights(1, tp_mesh()), V1)
        after = generate(engine, *prompts)
    with make_engine(SMALL, seed=1) as fresh:
        for result, expected in zip(after, generate(fresh, *prompts), strict=True):
            assert [s.tokens for s in result.samples] == [s.tokens for s in expected.samples]
            assert [s.logprobs for s in result.samples] == [s.logprobs for s in expected.samples]
            assert {v for s in result.samples for v in s.versions} == {1}


@pytest.mark.invariant(56)
def test_a_swap_waits_for_pinned_groups_and_pins_are_checked() -> None:
    with make_engine(SMALL) as engine:
        pinned = engine.submit(ask("pinned", max_tokens=8, version=V0))
        free = engine.submit(ask("free", max_tokens=20))
        engine.step()
        swap = engine.install(engine_weights(1, tp_mesh()), V1)
        (result,) = run_until(engine, [pinned])
        assert set(result.samples[0].versions) == {0} and not swap.done()
        (mixed,) = run_until(engine, [free])
        assert set(mixed.samples[0].versions) == {0, 1} and swap.result(0).version == V1
        with pytest.raises(
            VersionMismatchError, match="'late' pins version test:0, the engine serves test:1"
        ):
            engine.submit(ask("late", version=V0))
        with pytest.raises(VersionMismatchError):
            engine.submit(ask("other", version=Version("another", 1)))


@pytest.mark.invariant(56)
def test_a_held_version_serves_until_it_is_released_or_the_hold_runs_out() -> None:
    now = [0.0]
    with make_engine(SMALL, clock=lambda: now[0]) as engine:
        engine.hold(V0, 5.0)
        swap = engine.install(engine_weights(1, tp_mesh()), V1)
        engine.step()
        assert generate(engine, ask("in between", version=V0))[0].samples[0].versions == (0,) * 6
        assert not swap.done()
        engine.release()
        engine.step()
        assert swap.result(0).version == V1
        with pytest.raises(VersionMismatchError, match="hold of test:0: the engine serves test:1"):
            engine.hold(V0, 5.0)
        engine.hold(V1, 5.0)
        again = engine.install(engine_weights(2, tp_mesh()), Version("test", 2))
        engine.step()
        assert not again.done()
        now[0] = 6.0
        engine.step()
        assert again.done()


def test_a_version_that_is_being_replaced_cannot_be_held() -> None:
    with make_engine(SMALL) as engine:

        def take() -> Any:
            with pytest.raises(VersionMismatchError):
                engine.hold(V0, 5.0)
            return engine_weights(1, tp_mesh())

        engine.request_swap(V1, take)
        engine.step()
        assert engine.version == V1


def test_a_pin_that_a_swap_overtakes_is_refused_not_served() -> None:
    """Submitted while the step that swaps executes: the swap is decided, the label not yet moved."""
    with make_engine(SMALL) as engine:
        late: list[Any] = []

        def take() -> Any:
            late.append(engine.submit(ask("late", version=V0)))
            return engine_weights(1, tp_mesh())

        engine.request_swap(V1, take)
        engine.step()
        engine.step()
        with pytest.raises(VersionMismatchError, match="the engine serves test:1"):
            late[0].result(0)


def test_a_swap_past_its_deadline_changes_nothing() -> None:
    now = [0.0]
    with make_engine(SMALL, clock=lambda: now[0]) as engine:
        pinned = engine.submit(ask("pinned", max_tokens=20, version=V0))
        engine.step()
        swap = engine.request_swap(V1, lambda: engine_weights(1, tp_mesh()), timeout_s=3.0)
        now[0] = 3.5
        (result,) = run_until(engine, [pinned])
        with pytest.raises(SwapTimeoutError, match="test:1: pinned groups"):
            swap.result(0)
        assert engine.version == V0 and len(result.samples[0].tokens) == 20
        retried = engine.install(engine_weights(1, tp_mesh()), V1)
        engine.step()
        assert retried.result(0).version == engine.version == V1


@pytest.mark.invariant(32)
@pytest.mark.invariant(33)
def test_a_swap_that_fails_leaves_the_old_version_serving() -> None:
    with make_engine(SMALL) as engine:
        handle = engine.submit(ask("a", max_tokens=8))
        engine.step()

        def take() -> Any:
            raise OSError("segment is gone")

        swap = engine.request_swap(V1, take)
        (result,) = run_until(engine, [handle])
        with pytest.raises(OSError, match="segment is gone"):
            swap.result(0)
        assert engine.version == V0 and set(result.samples[0].versions) == {0}
        assert engine.stats().swaps == 0 and engine.state == "ready"


def test_a_swap_happens_while_paused_and_frozen_samples_go_on_with_it() -> None:
    with make_engine(SMALL) as engine:
        handle = engine.submit(ask("a", max_tokens=6))
        engine.step()
        engine.pause("keep")
        swap = engine.install(engine_weights(1, tp_mesh()), V1)
        engine.step()
        assert swap.result(0).version == V1 and engine.state == "paused"
        engine.resume()
        assert run_until(engine, [handle])[0].samples[0].versions == (0, 0, 1, 1, 1, 1)


def test_a_newer_swap_replaces_one_that_waits() -> None:
    with make_engine(SMALL) as engine:
        first = engine.install(engine_weights(1, tp_mesh()), V1)
        second = engine.install(engine_weights(2, tp_mesh()), V2)
        engine.step()
        with pytest.raises(EngineError, match="replaced by test:2"):
            first.result(0)
        assert second.result(0).version == engine.version == V2


def test_a_swap_that_fails_after_it_was_replaced_leaves_its_successor_alone() -> None:
    with make_engine(SMALL) as engine:
        successors = []

        def take() -> Any:
            successors.append(engine.install(engine_weights(2, tp_mesh()), V2))
            raise OSError("segment is gone")

        first = engine.request_swap(V1, take)
        engine.step()
        engine.step()
        with pytest.raises(EngineError, match="replaced by test:2"):
            first.result(0)
        assert successors[0].result(0).version == engine.version == V2


def test_two_lineages_in_one_sample_are_both_named() -> None:
    with make_engine(SMALL) as engine:
        handle = engine.submit(ask("a", max_tokens=4))
        engine.step()
        engine.install(engine_weights(1, tp_mesh()), Version("restarted", 0))
        assert run_until(engine, [handle])[0].lineages == ("test", "restarted")


@pytest.mark.invariant(31)
@pytest.mark.parametrize("tp", [1, 2])
def test_stamps_prove_that_no_pass_mixes_versions(tp: int) -> None:
    config = dataclasses.replace(SMALL, version_probe=True)
    mesh = tp_mesh(tp)
    with make_engine(config, tp=tp) as engine:
        for number in range(1, 6):
            handle = engine.submit(ask(f"a{number}", n=3, max_tokens=6))
            output = engine.step()
            assert output is not None and output.stamps == (number - 1, number - 1)
            engine.install(engine_weights(number, mesh, config=config, stamp=number), Version("test", number))
            output = engine.step()
            assert output is not None and output.stamps == (number, number)
            run_until(engine, [handle])
        assert engine.stats().mixed_version_steps == 0
        mixed = engine_weights(9, mesh, config=config, stamp=9)
        old = engine_weights(8, mesh, config=config, stamp=8)
        mixed["layers"]["1"] = old["layers"]["1"]
        engine.install(mixed, Version("test", 9))
        generate(engine, ask("b", max_tokens=6))
        assert engine.stats().mixed_version_steps == 6


def test_stamps_travel_through_the_conversion() -> None:
    config = dataclasses.replace(SMALL, version_probe=True)
    convert = probe.stamped_convert(lambda p: qwen3.convert(p, TINY, 1, jnp.float32))
    stamped = convert(probe.add_source_stamp(trainer_weights(3), TINY, 41))
    expected = engine_weights(3, tp_mesh(), config=config, stamp=41)
    jax.tree.map(np.testing.assert_array_equal, stamped, expected)
    assert stamped["layers"]["1"]["version_stamp"].tolist() == [41]


def test_weights_are_arguments_not_constants_of_the_step() -> None:
    with make_engine(SMALL) as engine:
        outputs: list[tuple[float, ...]] = []
        for seed in (1, 2, 1):
            engine.install(engine_weights(seed, tp_mesh()), Version("test", 10 + len(outputs)))
            outputs.append(generate(engine, ask("same", temperature=0.0))[0].samples[0].logprobs)
        assert outputs[0] == outputs[2] != outputs[1]
