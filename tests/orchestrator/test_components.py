"""The parts of the loop on their own: waiting, threads, supervision, playing, the run directory."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import subprocess
import sys
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.orchestrator.config import SamplingConfig
from jaxrl_sync.orchestrator.engines import Engine, EngineClient, EngineSet
from jaxrl_sync.orchestrator.errors import DeadlineError, LoopError, PeerDiedError
from jaxrl_sync.orchestrator.groups import OpenGroup
from jaxrl_sync.orchestrator.logger import PeriodicLogger, percentile
from jaxrl_sync.orchestrator.loop import supervise
from jaxrl_sync.orchestrator.play import Player
from jaxrl_sync.orchestrator.rundir import MetricsFile, evals_done, read_rows
from jaxrl_sync.orchestrator.signal import Signal
from jaxrl_sync.orchestrator.source import Draw
from jaxrl_sync.orchestrator.threads import CallPool, in_thread
from jaxrl_sync.orchestrator.trainer_link import TrainerWatch
from jaxrl_sync.tasks.registry import make_task
from jaxrl_sync.transfer.version import Version


def test_the_orchestrator_never_imports_jax() -> None:
    code = (
        "import sys; import jaxrl_sync.orchestrator.process; from jaxrl_sync.tasks.registry import make_task;"
        "make_task('addition', {}); make_task('guess', {}); make_task('faulty', {});"
        "bad = [m for m in sys.modules if m == 'jax' or m.startswith(('jax.', 'jaxlib'))]; print(bad)"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"


@pytest.mark.invariant(21)
def test_a_change_before_or_without_the_predicate_is_handled() -> None:
    async def case() -> None:
        signal, box = Signal(), [0]
        seen = signal.count
        signal.notify()
        assert await signal.changed(seen, 0.01), "a notify before the wait is not lost"

        async def wake() -> None:
            signal.notify()  # the predicate does not hold yet: the waiter must test and wait on
            await asyncio.sleep(0.02)
            box[0] = 1
            signal.notify()

        task = asyncio.create_task(wake())
        await signal.until(lambda: box[0] == 1, 30.0, "the box")
        await task

    asyncio.run(case())


@pytest.mark.invariant(18)
def test_a_wait_that_is_too_long_is_an_error_with_a_name() -> None:
    never = threading.Event()

    async def case() -> None:
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for version 3 on engine-0"):
            await Signal().until(lambda: False, 0.05, lambda: "version 3 on engine-0")
        with pytest.raises(DeadlineError, match=r"waited 0\.05 s for the hub"):
            await in_thread(never.wait, timeout_s=0.05, what="the hub")
        never.set()

    asyncio.run(case())


@pytest.mark.invariant(20)
def test_calls_that_hang_are_replaced_and_bounded_and_never_block_the_loop() -> None:
    async def case() -> None:
        pool, gate = CallPool(2, max_hung=3), threading.Event()
        ticks = 0

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.005)
                ticks += 1

        ticker = asyncio.create_task(tick())
        for _ in range(3):
            with pytest.raises(DeadlineError, match="a score"):
                await pool.run(gate.wait, timeout_s=0.05, what="a score")
        assert pool.hung == 3 and ticks >= 3, "at least one in each wait"
        with pytest.raises(LoopError, match="3 calls hang in threads"):
            await pool.run(int, timeout_s=1.0, what="a score")
        gate.set()
        while pool.hung:
            await asyncio.sleep(0.01)
        assert await pool.run(lambda: 7, timeout_s=30.0, what="a score") == 7
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda: 1 // 0, timeout_s=30.0, what="a score")
        ticker.cancel()
        pool.close()

    asyncio.run(case())


@pytest.mark.invariant(20)
def test_the_lag_of_a_blocked_event_loop_is_measured(tmp_path: Path) -> None:
    async def case() -> None:
        logger = PeriodicLogger(tmp_path, 0.05, lambda: {"step": 1})
        task = asyncio.create_task(logger.run())
        await asyncio.sleep(0.2)
        before = logger.lag_max_s  # of this machine
        time.sleep(before + 0.5)
        await asyncio.sleep(0.1)
        assert logger.lag_max_s > before + 0.3 and logger.lag()["max"] == logger.lag_max_s
        while not (tmp_path / "progress.json").exists():  # written in a thread
            await asyncio.sleep(0.01)
        task.cancel()
        assert json.loads((tmp_path / "progress.json").read_text()) == {"step": 1}

    asyncio.run(case())
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.0 and percentile([], 0.5) == 0.0


async def _for_ever() -> None:
    await asyncio.sleep(3600)


async def _after(seconds: float, error: BaseException | None = None) -> None:
    await asyncio.sleep(seconds)
    if error is not None:
        raise error


@pytest.mark.invariant(19)
@pytest.mark.invariant(28)
@pytest.mark.parametrize("where", ["endless", "ending"])
def test_the_first_component_that_dies_ends_all_with_its_error(where: str) -> None:
    async def case() -> None:
        parts: dict[str, dict[str, Coroutine[Any, Any, None]]] = {
            "endless": {"a": _for_ever()},
            "ending": {"b": _for_ever()},
        }
        parts[where]["c"] = _after(0.02, ValueError("the cause"))
        with pytest.raises(ValueError, match="the cause"):
            await supervise(parts["endless"], parts["ending"], 60.0)
        assert len(asyncio.all_tasks()) == 1, "a task was left behind"

    asyncio.run(case())


@pytest.mark.invariant(19)
def test_an_endless_component_that_returns_is_a_failure_and_an_ending_one_is_awaited() -> None:
    async def case() -> None:
        with pytest.raises(LoopError, match="RolloutDispatcher ended although it has no end"):
            await supervise({"RolloutDispatcher": _after(0.01)}, {"b": _for_ever()}, 1.0)
        await supervise({"a": _for_ever()}, {"b": _after(0.01), "c": _after(0.03)}, 1.0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(case())


@pytest.mark.invariant(28)
def test_shutdown_does_not_wait_for_a_task_that_refuses_to_end() -> None:
    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                if done:
                    raise

    done: list[int] = []

    async def case() -> None:
        with pytest.raises(LoopError, match=r"stubborn did not end within 0\.2 s"):
            await supervise({"stubborn": stubborn()}, {"b": _after(0.01)}, 0.2)
        done.append(1)

    asyncio.run(case())


class _Script(EngineClient):
    """Answers requests from a list of (tokens, finish reason), one entry per sample asked for."""

    def __init__(self, answers: list[tuple[list[int], str]], version: int = 5) -> None:
        self.answers, self.version = answers, version
        self.bodies: list[dict[str, Any]] = []

    async def generate(self, engine: Engine, request: Any, timeout_s: float) -> dict[str, Any]:
        self.bodies.append(dict(request))
        samples = []
        for _ in range(request["n"]):
            tokens, reason = self.answers.pop(0)
            numbers = [self.version] * len(tokens)
            samples.append(
                {
                    "tokens": tokens,
                    "logprobs": [-0.5] * len(tokens),
                    "versions": numbers,
                    "finish_reason": reason,
                    "extras": {"entropy": [t / 8 for t in tokens]},
                }
            )
        self.version += 1
        return {"samples": samples, "lineages": ["a"], "timing": {}}


def _play(
    task: Any, uid: str, client: _Script, size: int, max_tokens: int
) -> tuple[dict[int, Episode], dict[int, tuple[str, str]]]:
    episodes: dict[int, Episode] = {}
    losses: dict[int, tuple[str, str]] = {}

    async def case() -> None:
        engine = Engine("e0", "http://x", 8, 64, state="serving", version=Version("a", 5))
        group = OpenGroup(
            7, "train", Draw(0, 0, 0), 0, "e0", Version("a", 5), time.monotonic(), 30.0, ["running"] * size
        )
        player = Player(lambda group: task, client, CallPool(2), 5.0)
        await player.play(
            group,
            engine,
            lambda: uid,
            "train-0-v5",
            SamplingConfig(max_tokens=max_tokens),
            False,
            lambda index, episode: episodes.update({index: episode}),
            lambda index, fate, reason, detail: losses.update({index: (fate, reason)}),
        )

    asyncio.run(case())
    return episodes, losses


@pytest.mark.invariant(9)
@pytest.mark.invariant(10)
@pytest.mark.invariant(42)
@pytest.mark.invariant(44)
def test_turns_go_on_with_the_whole_context_and_environment_tokens_are_masked() -> None:
    task = make_task("guess", {"max_turns": 3})
    uid = task.dataset("train", 0)[0]
    eos = task.stop_token_ids[0]
    junk = [task.tokenizer.encode("?")[0], eos]
    client = _Script(
        [(junk, "stop"), (junk, "stop"), (junk, "stop"), (junk, "stop"), (junk, "stop"), (junk, "stop")]
    )
    episodes, losses = _play(task, uid, client, size=2, max_tokens=30)
    assert not losses and sorted(episodes) == [0, 1]
    assert [b["n"] for b in client.bodies] == [2, 1, 1, 1, 1]
    prompt = task.prompt(uid)
    wrong = task.tokenizer.encode("!")
    for episode in episodes.values():
        assert len(episode.turns) == 3
        flat = [int(t) for turn in episode.turns for t in (*turn.prompt, *turn.tokens)]
        assert flat[: len(prompt)] == prompt and flat[len(prompt) :].count(wrong[0]) == 2
        assert [list(t.prompt) for t in episode.turns[1:]] == [wrong, wrong]
        sample = dataclasses.replace(episode, reward=Reward(1.0)).sample()
        assert list(sample.extras["entropy"]) == list(np.where(sample.loss_mask, sample.tokens / 8, 0))
    seconds = [b for b in client.bodies if b["request_id"].startswith("train-0-v5.0.")]
    assert seconds[0]["prompt"] == [*prompt, *junk, *wrong]
    assert len({b["request_id"] for b in client.bodies}) == 5
    assert {b["sampling"]["seed"] for b in client.bodies} == {None}


@pytest.mark.invariant(9)
@pytest.mark.invariant(10)
@pytest.mark.invariant(41)
@pytest.mark.invariant(44)
def test_an_aborted_answer_is_resumed_with_what_is_left_of_its_budget() -> None:
    task = make_task("addition", {})
    client = _Script([([1, 2], "abort"), ([3], "abort"), ([4, 5, 6, 7], "length")])
    episodes, losses = _play(task, "1+2", client, size=1, max_tokens=7)
    assert not losses
    assert [b["sampling"]["max_tokens"] for b in client.bodies] == [7, 5, 4]
    prompt = task.prompt("1+2")
    assert client.bodies[2]["prompt"] == [*prompt, 1, 2, 3]
    (turn,) = episodes[0].turns
    assert list(turn.tokens) == [1, 2, 3, 4, 5, 6, 7] and list(turn.versions) == [5, 5, 6, 7, 7, 7, 7]
    assert len(turn.tokens) == len(turn.logprobs) == len(turn.versions) <= 7
    assert list(turn.extras["entropy"]) == [t / 8 for t in (1, 2, 3, 4, 5, 6, 7)]


@pytest.mark.invariant(5)
def test_bad_answers_are_counted_by_what_they_are() -> None:
    task = make_task("addition", {})
    answers = [([1], "timeout"), ([1], "error"), ([], "stop"), ([1, 2], "stop")]
    episodes, losses = _play(task, "1+2", _Script(answers), size=4, max_tokens=7)
    assert losses == {0: ("cancelled", "engine:timeout"), 1: ("errored", "engine:error")}
    assert sorted(episodes) == [2, 3]
    _, losses = _play(task, "no sum", _Script([]), size=2, max_tokens=7)
    assert losses == {0: ("errored", "prompt:TaskError"), 1: ("errored", "prompt:TaskError")}


@pytest.mark.invariant(61)
@pytest.mark.invariant(63)
def test_rows_behind_the_resume_point_and_torn_lines_leave_the_metrics_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [{"kind": "step", "step": s} for s in (1, 2, 3)] + [{"kind": "eval", "step": 2, "trigger": 2}]
    path.write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"kind": "step", "st')
    file = MetricsFile(tmp_path, resume_step=2)
    assert evals_done(file.earlier) == {2}
    file.append({"kind": "step", "step": 3, "again": True})
    file.close()
    assert [r["step"] for r in read_rows(path)] == [1, 2, 2, 3]
    assert read_rows(path)[-1]["again"]
    assert path.with_name("metrics.1.jsonl").read_text().count("\n") == 4, "the earlier attempt is kept"


def test_an_engine_that_comes_back_is_another_incarnation() -> None:
    engines = EngineSet()
    info = {"url": "http://127.0.0.1:1", "slots": 4, "max_len": 9, "incarnation": "x"}
    joined, gone = engines.update({"e0": info})
    assert [e.name for e in joined] == ["e0"] and not gone and not engines.serving()
    joined[0].state, joined[0].version = "serving", Version("a", 3)
    assert [v.slots for v in engines.serving()] == [4]
    again, lost = engines.update({"e0": {**info, "incarnation": "y"}})
    assert lost == joined and lost[0].state == "gone" and again[0].version is None
    assert not engines.serving() and engines.lost == 1
    assert "e0 joining at None" in engines.describe()


@pytest.mark.invariant(19)
def test_a_trainer_that_leaves_the_directory_for_too_long_is_named_and_one_that_comes_back_is_not() -> None:
    watch = TrainerWatch(5.0, ("trainer-0",))
    for now, listed in [(0.0, ["trainer-0"]), (1.0, []), (5.9, []), (6.0, ["trainer-1", "trainer-0"])]:
        watch.see(listed, now)
    watch.see(["trainer-0"], 7.0)
    watch.see(["trainer-0"], 11.9)
    with pytest.raises(PeerDiedError, match="trainer process trainer-1 is gone: .* for 6 s"):
        watch.see(["trainer-0"], 13.0)
