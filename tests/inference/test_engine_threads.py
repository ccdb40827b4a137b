"""Many client threads against one running engine: everything submitted ends, counters agree, no deadlock."""

from __future__ import annotations

import dataclasses
import random
import threading
import time

import pytest

from jaxrl_sync.inference.errors import NotServingError
from jaxrl_sync.inference.front import Handle
from jaxrl_sync.inference.request import GroupResult
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import SMALL, ask, engine_weights, make_engine, tp_mesh

ROUNDS = 20


@pytest.mark.invariant(9)
@pytest.mark.invariant(10)
@pytest.mark.invariant(31)
def test_clients_swaps_pauses_and_aborts_at_once() -> None:
    config = dataclasses.replace(SMALL, version_probe=True)
    trees = [engine_weights(i, tp_mesh(), config=config, stamp=i) for i in range(2)]
    handles: list[Handle] = []
    lock, done, errors = threading.Lock(), threading.Event(), list[BaseException]()

    def client(seed: int) -> None:
        rng = random.Random(seed)
        for i in range(10**6):
            if done.is_set():
                return
            request = ask(
                f"c{seed}-{i}", (1 + seed, i % 24), rng.randint(1, 5), max_tokens=rng.randint(1, 20)
            )
            handle = engine.submit(dataclasses.replace(request, timeout_s=rng.choice([0.01, 30.0])))
            with lock:
                handles.append(handle)
            if rng.random() < 0.2:
                engine.abort([request.request_id])
            elif rng.random() < 0.5:
                handle.result(30)

    def operator() -> None:
        rng = random.Random(99)
        for number in range(1, ROUNDS + 1):
            engine.install(trees[number % 2], Version("test", number)).result(30)
            engine.pause(rng.choice(["keep", "wait"])).result(30)
            engine.resume().result(30)
            time.sleep(0.02)

    def guarded(work: object, *args: object) -> None:
        try:
            work(*args)  # type: ignore[operator]
        except BaseException as error:
            errors.append(error)
        if work is operator:
            done.set()

    stop = threading.Event()
    with make_engine(config) as engine:
        engine.warm_up()
        loop = threading.Thread(target=guarded, args=(engine.run, stop))
        workers = [threading.Thread(target=guarded, args=(client, i)) for i in range(4)]
        workers.append(threading.Thread(target=guarded, args=(operator,)))
        for thread in (loop, *workers):
            thread.start()
        for thread in workers:
            thread.join(60)
        results = [h.result(30) for h in handles]
        stop.set()
        loop.join(30)
        stats = engine.stats()
    assert not errors
    assert stats.mixed_version_steps == 0 and stats.swaps == ROUNDS
    assert stats.running == stats.waiting == 0
    check_samples(results, stats.samples_finished, stats.tokens_generated)


def check_samples(results: list[GroupResult], finished: int, generated: int) -> None:
    """Lengths agree, versions never go back, and the engine's counters are the sums over its answers."""
    samples = [s for r in results for s in r.samples]
    assert len(samples) == finished > 50
    for s in samples:
        assert len(s.tokens) == len(s.logprobs) == len(s.versions)
        assert list(s.versions) == sorted(s.versions)
    assert sum(len(s.tokens) for s in samples) == generated
    assert {s.finish_reason for s in samples} <= {"length", "abort", "timeout"}


def test_a_sample_that_ended_in_a_step_that_raised_still_reaches_its_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with make_engine(SMALL) as engine:
        late = engine.submit(ask("late", max_tokens=8, timeout_s=0.05))
        other = engine.submit(ask("other", max_tokens=8))
        engine.step()
        time.sleep(0.1)

        def execute(plan: object) -> None:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(engine._runner, "execute", execute)
        with pytest.raises(RuntimeError, match="the device is gone"):
            engine.step()
        engine.close()
        assert late.result(0).samples[0].finish_reason == "timeout"
        with pytest.raises(NotServingError):
            other.result(0)
