"""The engine as its clients see it: results, limits, stops, aborts, timeouts, pauses, streams, refusals."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.inference.config import EngineConfig, EngineConfigError
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.errors import (
    EngineError,
    NotServingError,
    PoisonedError,
    QueueFullError,
    RequestError,
)
from jaxrl_sync.inference.request import Request, TokenChunk
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
)

CONFIG = dataclasses.replace(SMALL, extras=("entropy",), max_waiting=5)


@pytest.fixture(scope="module")
def shared() -> Iterator[Engine]:
    with make_engine(CONFIG) as engine:
        yield engine


@pytest.fixture
def engine(shared: Engine) -> Iterator[Engine]:
    yield shared
    shared.resume()
    shared.abort(list(shared._uids))
    shared.step()
    assert shared.stats().running == 0 and shared.stats().waiting == 0


class Clock:
    """A clock that a test moves."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.invariant(43)
@pytest.mark.parametrize("sampling", [{}, {"temperature": 0.6, "top_k": 4}, {"top_p": 0.5}])
def test_logprobs_are_those_of_a_whole_forward_pass(engine: Engine, sampling: dict[str, Any]) -> None:
    prompt = (3, 1, 4, 1, 5)
    (result,) = generate(engine, ask("a", prompt, 4, max_tokens=9, **sampling))
    assert len({s.tokens for s in result.samples}) > 1
    for s in result.samples:
        expected = reference_logprobs(0, prompt, s.tokens, sampling.get("temperature", 1.0))
        np.testing.assert_allclose(s.logprobs, expected, atol=2e-5)


@pytest.mark.invariant(9)
def test_every_sequence_of_a_sample_has_one_entry_per_token(engine: Engine) -> None:
    (result,) = generate(engine, ask("a", (5,), 3, max_tokens=7))
    for s in result.samples:
        assert len(s.tokens) == len(s.logprobs) == len(s.versions) == len(s.extras["entropy"]) == 7
        assert s.finish_reason == "length" and set(s.versions) == {0}
        assert all(0 < e < np.log(24) + 1e-5 for e in s.extras["entropy"])
    assert result.lineages == ("test",)
    assert min(dataclasses.astuple(result.timing)) >= 0 and result.timing.prefill_s > 0


def test_a_stop_token_ends_a_sample_and_is_returned(engine: Engine) -> None:
    (free,) = generate(engine, ask("a", temperature=0.0, max_tokens=8))
    tokens = free.samples[0].tokens
    at = next(i for i in range(8) if tokens[i] not in tokens[:i] and i > 0)
    (stopped,) = generate(engine, ask("a", temperature=0.0, max_tokens=8, stop_token_ids=(tokens[at],)))
    assert stopped.samples[0].tokens == tokens[: at + 1]
    assert stopped.samples[0].finish_reason == "stop"


def test_eos_stops_unless_ignored() -> None:
    with make_engine(SMALL) as engine:
        tokens = generate(engine, ask(temperature=0.0))[0].samples[0].tokens
    with make_engine(dataclasses.replace(SMALL, eos_token_ids=(tokens[1],))) as engine:
        stopped = generate(engine, ask(temperature=0.0))[0].samples[0]
        ignored = generate(engine, ask(temperature=0.0, ignore_eos=True))[0].samples[0]
    assert stopped.tokens == tokens[: tokens.index(tokens[1]) + 1] and stopped.finish_reason == "stop"
    assert ignored.tokens == tokens and ignored.finish_reason == "length"


def test_max_len_bounds_a_sample(engine: Engine) -> None:
    prompt = tuple(range(20)) + tuple(range(9))
    sample = generate(engine, ask("a", prompt, max_tokens=50))[0].samples[0]
    assert len(sample.tokens) == CONFIG.max_len - len(prompt) and sample.finish_reason == "length"


def test_more_work_than_slots(engine: Engine) -> None:
    requests = [ask(f"g{i}", (i, 2), n, max_tokens=3 + i) for i, n in enumerate([3, 20, 8, 1])]
    for request, result in zip(requests, generate(engine, *requests), strict=True):
        assert [len(s.tokens) for s in result.samples] == [request.sampling.max_tokens] * request.n
        assert len({s.tokens for s in result.samples}) > 1 or request.n == 1


def test_seed_replaces_the_request_id(engine: Engine) -> None:
    a, b, c, d = generate(
        engine, ask("a", seed=7), ask("b", seed=7), ask("c", seed=8), ask("a2", max_tokens=6)
    )
    assert a.samples[0] == b.samples[0]
    assert len({r.samples[0].tokens for r in (a, c, d)}) == 3


def test_abort_returns_what_there_is(engine: Engine) -> None:
    handle, other = engine.submit(ask("a", n=2, max_tokens=20)), engine.submit(ask("b"))
    engine.step()
    assert engine.abort(["a", "unknown"]) == 1
    result, rest = run_until(engine, [handle, other])
    assert [s.finish_reason for s in result.samples] == ["abort"] * 2
    assert [len(s.tokens) for s in result.samples] == [CONFIG.decode_steps_per_dispatch] * 2
    assert rest.samples[0].finish_reason == "length"
    assert engine.abort(["a"]) == 0


@pytest.mark.invariant(25)
def test_a_rollout_that_never_ends_times_out_with_what_there_is() -> None:
    clock = Clock()
    with make_engine(SMALL, clock=clock) as engine:
        handle = engine.submit(ask("a", max_tokens=29, timeout_s=2.0))
        queued = engine.submit(ask("b", n=8, timeout_s=1.0))
        engine.step()
        clock.now = 2.5
        engine.step()
        sample = handle.result(0).samples[0]
        assert sample.finish_reason == "timeout" and len(sample.tokens) == 2
        assert [(s.finish_reason, s.tokens) for s in queued.result(0).samples] == [("timeout", ())] * 8


@pytest.mark.invariant(33)
def test_pause_wait_ends_what_runs_and_keeps_the_queue(engine: Engine) -> None:
    running = engine.submit(ask("a", n=8))
    engine.step()
    paused, waiting = engine.pause("wait"), engine.submit(ask("b"))
    run_until(engine, [running])
    assert engine.step() is None and paused.result(0) == "paused" and engine.state == "paused"
    assert not waiting.future.done()
    engine.resume()
    assert run_until(engine, [waiting])[0].samples[0].finish_reason == "length"
    assert engine.stats().state == "ready"


@pytest.mark.invariant(33)
def test_pause_abort_returns_everything(engine: Engine) -> None:
    handles = [engine.submit(ask("a", n=8, max_tokens=20)), engine.submit(ask("b"))]
    engine.step()
    paused = engine.pause("abort")
    a, b = run_until(engine, handles)
    assert {s.finish_reason for s in a.samples + b.samples} == {"abort"}
    assert [len(s.tokens) for s in a.samples] == [2] * 8 and b.samples[0].tokens == ()
    engine.step()
    assert paused.result(0) == "paused"


def test_a_pause_that_was_resumed_ends_its_future(engine: Engine) -> None:
    handle = engine.submit(ask("a", max_tokens=20))
    engine.step()
    paused = engine.pause("wait")
    engine.step()
    assert not paused.done()
    engine.resume()
    run_until(engine, [handle])
    assert paused.result(0) == "ready"


def test_streams_carry_the_tokens_of_the_result(engine: Engine) -> None:
    chunks: list[TokenChunk] = []
    handle = engine.submit(ask("a", n=2, max_tokens=5), chunks.append)
    (result,) = run_until(engine, [handle])
    for i, sample in enumerate(result.samples):
        mine = [c for c in chunks if c.sample == i]
        assert [len(c.tokens) for c in mine] == [2, 2, 1]
        assert sum((c.tokens for c in mine), ()) == sample.tokens
        assert sum((c.logprobs for c in mine), ()) == sample.logprobs
        assert [c.finish_reason for c in mine] == [None, None, "length"]


def test_an_aborted_stream_ends_with_its_reason(engine: Engine) -> None:
    chunks: list[TokenChunk] = []
    handle = engine.submit(ask("a", max_tokens=20), chunks.append)
    engine.step()
    engine.abort(["a"])
    run_until(engine, [handle])
    assert chunks[-1] == TokenChunk(0, (), (), (), "abort") and len(chunks) == 2


def test_a_listener_that_raises_does_not_end_the_engine(engine: Engine) -> None:
    def broken(chunk: TokenChunk) -> None:
        raise RuntimeError("listener")

    (result,) = run_until(engine, [engine.submit(ask("a"), broken)])
    assert len(result.samples[0].tokens) == 6


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (ask(prompt=(24,)), "token id: expected < 24"),
        (ask(prompt=(1,) * 32), "prompt: expected at most 31 tokens, got 32"),
        (ask(stop_token_ids=(1, 2, 3, 4)), "stop_token_ids: expected at most 3"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(engine: Engine, request_: Request, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        engine.submit(request_)


def test_a_second_request_of_the_same_id_and_a_full_queue_are_refused(engine: Engine) -> None:
    engine.submit(ask("a"))
    with pytest.raises(RequestError, match="'a' is already running"):
        engine.submit(ask("a"))
    for i in range(4):
        engine.submit(ask(str(i)))
    with pytest.raises(QueueFullError, match="5 groups wait, limit 5"):
        engine.submit(ask("z"))


def test_the_thread_serves_and_sleeps() -> None:
    stop = threading.Event()
    with make_engine(CONFIG) as engine:
        thread = threading.Thread(target=engine.run, args=(stop,))
        thread.start()
        try:
            results = [engine.submit(ask(f"{i}", n=4)).result(240) for i in range(3)]
            assert all(len(r.samples) == 4 for r in results)
            dispatches = engine.stats().dispatches
            time.sleep(0.2)
            assert engine.stats().dispatches == dispatches == 3 * 3
            assert engine.pause("keep").result(60) == "paused"
            assert engine.resume().result(60) == "ready"
            late = engine.submit(ask("late", max_tokens=29, timeout_s=0.05))
            engine.pause("keep").result(60)
            assert late.result(60).samples[0].finish_reason in ("timeout", "length")
        finally:
            stop.set()
            thread.join(60)
    assert engine.state == "closed" and not thread.is_alive()


def test_an_engine_without_weights_refuses_and_a_closed_one_fails_what_waits() -> None:
    engine = Engine(SMALL, TINY, tp_mesh())
    assert engine.state == "starting" and engine.version is None
    with pytest.raises(NotServingError, match="no version"):
        engine.submit(ask())
    engine.install(engine_weights(0, tp_mesh()), version=_version(0))
    engine.step()
    handle = engine.submit(ask())
    engine.close()
    with pytest.raises(NotServingError, match="closed"):
        handle.result(0)
    with pytest.raises(NotServingError, match="closed"):
        engine.submit(ask())


@pytest.mark.invariant(32)
def test_a_poisoned_engine_refuses_until_the_next_version() -> None:
    with make_engine(SMALL) as engine:
        handle = engine.submit(ask("a", max_tokens=20))
        engine.step()
        engine.poison("slot 1 is incomplete")
        assert engine.state == "poisoned" and engine.stats().poison_reason == "slot 1 is incomplete"
        with pytest.raises(PoisonedError, match="slot 1 is incomplete"):
            handle.result(0)
        with pytest.raises(PoisonedError, match="slot 1 is incomplete"):
            engine.submit(ask("b"))
        steps = engine.stats().steps
        assert engine.step() is None and engine.stats().steps == steps
        healed = engine.install(engine_weights(0, tp_mesh()), _version(0))
        engine.step()
        assert healed.result(0).version == _version(0) and engine.stats().state == "ready"
        assert len(generate(engine, ask("b"))[0].samples[0].tokens) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": 7}, "engine.slots: expected a multiple of tp=2, got 7"),
        ({"max_len": 1}, "engine.max_len: expected >= 2"),
        ({"extras": ("router",)}, "engine.extras"),
        ({"kv_policy": "drop"}, "engine.kv_policy: expected keep or recompute, got 'drop'"),
        ({"eos_token_ids": (1, 2, 3, 4)}, "engine.max_stop_ids: expected >= 4"),
    ],
)
def test_bad_configurations_are_named(change: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineConfigError, match=message):
        config: EngineConfig = dataclasses.replace(SMALL, **change)
        Engine(config, TINY, tp_mesh(2))


def test_a_tree_of_another_shape_is_refused_by_name() -> None:
    with make_engine(SMALL) as engine:
        tree = engine_weights(1, tp_mesh())
        tree["layers"]["1"]["down"] = tree["layers"]["1"]["down"].T
        swap = engine.install(tree, _version(1))
        engine.step()
        with pytest.raises(
            EngineError, match=r"layers/1/down: expected float32\[48, 32\], got float32\[32, 48\]"
        ):
            swap.result(0)
        assert engine.version == _version(0) and engine.state == "ready"


def _version(number: int) -> Version:
    return Version("test", number)
