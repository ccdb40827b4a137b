"""Sleep and wake: weights and cache are let go, and running samples go on with the next version."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import httpx
import numpy as np
import pytest

from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.errors import EngineError, VersionMismatchError
from jaxrl_sync.inference.front import Handle
from jaxrl_sync.inference.request import GroupResult
from jaxrl_sync.inference.server import EngineServer
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import (
    SMALL,
    ask,
    engine_weights,
    generate,
    make_engine,
    run_until,
    tp_mesh,
)

V0, V1 = Version("test", 0), Version("test", 1)


def _state(engine: Engine) -> str:
    return engine.state


def _wake(engine: Engine, seed: int, version: Version, tp: int = 1) -> None:
    swapped = engine.install(engine_weights(seed, tp_mesh(tp)), version)
    engine.step()
    assert swapped.result(0).version == version


def _interrupted(seed: int, release: bool, tp: int = 1) -> GroupResult:
    """A sample that sleeps after its first tokens and goes on with the weights of ``seed``."""
    with make_engine(SMALL, tp) as engine:
        handle = engine.submit(ask("long", n=2, max_tokens=20, temperature=0.0))
        engine.step()
        freed = engine.sleep(release_cache=release)
        assert (freed > 0) == release and _state(engine) == "sleeping"
        assert engine.step() is None, "a sleeping engine has nothing to execute"
        _wake(engine, seed, V1, tp)
        assert _state(engine) == "ready"
        return run_until(engine, [handle])[0]


@pytest.mark.invariant(40)
@pytest.mark.parametrize("tp", [1, 2])
def test_after_a_sleep_with_equal_weights_the_tokens_are_those_without_one(tp: int) -> None:
    with make_engine(SMALL, tp) as engine:
        (plain,) = generate(engine, ask("long", n=2, max_tokens=20, temperature=0.0))
    for release in (True, False):
        slept = _interrupted(0, release, tp)
        for mine, theirs in zip(slept.samples, plain.samples, strict=True):
            assert mine.tokens == theirs.tokens
            np.testing.assert_allclose(mine.logprobs, theirs.logprobs, rtol=1e-4, atol=1e-5)
            assert set(mine.versions) == {0, 1} and sorted(mine.versions) == list(mine.versions)


def test_a_released_cache_is_computed_again_with_the_new_weights() -> None:
    """As with ``kv_policy = "recompute"``; a kept one goes on as it was, which gives other log-probs."""
    released, kept = (_interrupted(1, release) for release in (True, False))
    again = _interrupted(1, True)
    assert released.samples == again.samples
    assert released.samples[0].logprobs != kept.samples[0].logprobs


@pytest.mark.invariant(56)
def test_an_engine_does_not_sleep_under_a_pinned_group_or_a_hold() -> None:
    with make_engine(SMALL) as engine:
        pinned = engine.submit(ask("pinned", version=V0))
        for _ in range(2):  # waiting in the inbox, then running
            assert engine.tied
            with pytest.raises(EngineError, match="version test:0 is pinned or held"):
                engine.sleep(release_cache=True)
            engine.step()
        run_until(engine, [pinned])
        engine.hold(V0, 60.0)
        assert engine.tied
        engine.release()
        assert not engine.tied
        engine.sleep(release_cache=True)
        with pytest.raises(VersionMismatchError, match="sleeps until its next version"):
            engine.submit(ask("late", version=V0))
        with pytest.raises(VersionMismatchError):
            engine.hold(V0, 1.0)


def test_requests_wait_while_it_sleeps_and_can_be_aborted() -> None:
    with make_engine(SMALL) as engine:
        engine.sleep(release_cache=True)
        waiting = engine.submit(ask("waiting"))
        aborted = engine.submit(ask("aborted"))
        assert engine.step() is None
        engine.abort(["aborted"])
        _wake(engine, 1, V1)
        results = run_until(engine, [waiting, aborted])
        assert set(results[0].samples[0].versions) == {1}
        assert results[1].samples[0].finish_reason == "abort"


def test_time_asleep_does_not_count_for_the_deadline_of_a_request() -> None:
    """It did: a group whose engine slept for an update had that much less time to generate."""
    now = [0.0]
    with make_engine(SMALL, clock=lambda: now[0]) as engine:
        running = engine.submit(ask("running", max_tokens=28, timeout_s=10.0))
        engine.step()
        now[0] = 4.0
        engine.sleep(release_cache=True)
        now[0] = 5.0
        waiting = engine.submit(ask("waiting", max_tokens=28, timeout_s=10.0))
        now[0] = 100.0
        assert engine.step() is None and not running.future.done() and not waiting.future.done()
        _wake(engine, 0, V1)
        now[0] = 105.9  # of its 10 s "running" had 4 before and 5.9 after
        engine.step()
        assert not running.future.done()
        now[0] = 106.1
        engine.step()
        assert running.future.result(0).samples[0].finish_reason == "timeout"
        assert len(running.future.result(0).samples[0].tokens) == 6 and not waiting.future.done()
        now[0] = 110.1
        engine.step()
        assert waiting.future.result(0).samples[0].finish_reason == "timeout"


@pytest.mark.parametrize(("sleeps", "status"), [(True, 200), (False, 504)])
def test_an_answer_may_be_late_by_as_long_as_the_engine_slept(
    sleeps: bool, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_sync.inference.server.ENGINE_GRACE_S", 0.1)
    future: Future[Any] = Future()
    started = time.monotonic()
    front: Any = SimpleNamespace(submit=lambda request: Handle("r", future), abort=lambda ids: 0)
    front.version, front.state, token = V0, "sleeping", "ab" * 32

    def slept_s() -> float:
        return time.monotonic() - started if sleeps else 0.0

    answer = SimpleNamespace(to_json=lambda name: {"engine": name})
    with EngineServer(front, token=token, slept_s=slept_s) as server:
        if sleeps:
            threading.Timer(1.0, future.set_result, (answer,)).start()
        body = ask("r", timeout_s=0.2).to_json()
        found = httpx.post(
            server.url + "/generate", json=body, headers=auth.bearer_headers(token), timeout=20
        )
    assert found.status_code == status, found.text


@pytest.mark.parametrize("mode", ["wait", "abort"])
def test_a_pause_before_a_sleep_ends_what_runs(mode: Any) -> None:
    with make_engine(SMALL) as engine:
        running = engine.submit(ask("running", max_tokens=20))
        engine.step()
        paused = engine.pause(mode)
        for _ in range(40):
            if paused.done():
                break
            engine.step()
        assert running.result(0).samples[0].finish_reason == {"wait": "length", "abort": "abort"}[mode]
        engine.sleep(release_cache=True)
        engine.resume()
        _wake(engine, 1, V1)
        assert set(generate(engine, ask("next"))[0].samples[0].versions) == {1}


@pytest.mark.invariant(32)
@pytest.mark.invariant(56)
def test_an_engine_that_stands_decodes_nothing_whoever_resumes_and_takes_no_pins() -> None:
    with make_engine(SMALL) as engine:
        pinned = engine.submit(ask("pinned", version=V0))
        assert not engine.refuse_pins(), "a pinned group needs the version"
        run_until(engine, [pinned])
        engine.hold(V0, 60.0)
        assert not engine.refuse_pins()
        engine.release()
        running = engine.submit(ask("running", max_tokens=20))
        engine.step()
        assert engine.refuse_pins()
        for late in (lambda: engine.submit(ask("late", version=V0)), lambda: engine.hold(V0, 1.0)):
            with pytest.raises(VersionMismatchError):
                late()
        standing = engine.stand()
        assert not standing.done(), "a step may still run"
        engine.step()
        assert standing.result(0) == "sleeping"
        engine.resume()
        waiting = engine.submit(ask("waiting"))
        assert engine.step() is None, "nothing may read the weights"
        engine.go_on()
        results = run_until(engine, [running, waiting, engine.submit(ask("pin", version=V0))])
        assert [len(r.samples[0].tokens) for r in results] == [20, 6, 6]
        assert engine.refuse_pins() and engine.stand()
        _wake(engine, 1, V1)
        assert set(generate(engine, ask("new", version=V1))[0].samples[0].versions) == {1}


def test_the_cause_is_named_when_a_sleeping_engine_with_samples_gets_no_weights() -> None:
    with make_engine(SMALL) as engine:
        engine.submit(ask("running", max_tokens=20))
        engine.step()
        engine.sleep(release_cache=True)

        def broken() -> Any:
            raise MemoryError("no room for the weights")

        engine.request_swap(V1, broken)
        with pytest.raises(EngineError, match="swap to test:1: no room for the weights"):
            engine.step()
