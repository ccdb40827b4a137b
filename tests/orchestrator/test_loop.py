"""The real loop over real sockets, against doubles that inject faults."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from jaxrl_sync.batch.frame import BatchFrame
from jaxrl_sync.batch.pack import unpack
from jaxrl_sync.orchestrator import process
from jaxrl_sync.orchestrator.config import loop_config
from jaxrl_sync.orchestrator.errors import BarrenError
from jaxrl_sync.orchestrator.source import DataSource
from jaxrl_sync.tasks.registry import make_task
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.client import HubClient, Member

from .doubles import EngineDouble, hub
from .harness import Running, context, world


@pytest.mark.invariant(2)
@pytest.mark.invariant(3)
@pytest.mark.invariant(14)
@pytest.mark.invariant(26)
@pytest.mark.invariant(27)
@pytest.mark.invariant(56)
@pytest.mark.invariant(60)
def test_a_whole_run_trains_every_step_and_evaluates_first_and_last(tmp_path: Path) -> None:
    with world(tmp_path) as (url, engines, trainer):
        running = Running(context(tmp_path, url, eval={"every_steps": 3}))
        running.join(240)
        assert [f.header.step for f in trainer.frames] == [1, 2, 3, 4, 5, 6]
        assert [f.header.last for f in trainer.frames] == [False] * 5 + [True]
        assert all(f.header.num_valid_tokens == int(f.fields["loss_mask"].sum()) for f in trainer.frames)
        summary = running.summary
        assert summary["cause"] == "done" and summary["identities_ok"]
        assert [r["step"] for r in running.rows("step")] == [1, 2, 3, 4, 5, 6]
        triggers = [r["trigger"] for r in running.rows("eval")]
        assert triggers == sorted(set(triggers)) and triggers[0] == 0 and triggers[-1] == 6
        assert all(r["missing"] == 0 for r in running.rows("eval"))
        train = summary["flow"]["train"]
        assert train["shipped"] == 6 * 12 and train["running"] == 0
        assert summary["permits"]["acquired"] == summary["permits"]["released"]
        assert sum(summary["staleness"].values()) == 72 and max(map(int, summary["staleness"])) <= 2
        for engine in engines:
            kinds = [kind for _, kind, _ in engine.log]
            if "generate" in kinds:  # one that joins late may find nothing left to do
                assert kinds.index("swap") < kinds.index("generate"), "generated before its first version"


@pytest.mark.invariant(12)
def test_bound_zero_sends_the_same_batches_as_a_plain_loop_whatever_the_engines(tmp_path: Path) -> None:
    batches = []
    for name, engines in (("one", 1), ("two", 2)):
        with world(tmp_path / name, engines=engines) as (url, doubles, trainer):
            if engines == 2:
                doubles[1].behaviour.token_s = 0.02
            case = context(tmp_path / name, url, loop={"staleness_bound": 0})
            Running(case).join(240)
            batches.append(trainer.frames)
            assert all(
                (f.fields["versions"][f.fields["loss_mask"]] == f.header.step - 1).all()
                for f in trainer.frames
            )
    for a, b in zip(*batches, strict=True):
        assert a.header == b.header
        for field in a.fields:
            assert np.array_equal(a.fields[field], b.fields[field]), (a.header.step, field)


@pytest.mark.invariant(1)
@pytest.mark.invariant(19)
@pytest.mark.invariant(65)
def test_a_killed_engine_costs_its_rollouts_and_serves_again_only_with_current_weights(
    tmp_path: Path,
) -> None:
    with world(tmp_path, train_s=0.1) as (url, engines, trainer):
        for engine in engines:
            engine.behaviour.token_s = 0.02
        running = Running(context(tmp_path, url, run={"steps": 20}))
        while len(trainer.frames) < 5:
            time.sleep(0.01)
        engines[1].kill()
        while len(trainer.frames) < 8:
            time.sleep(0.01)
        trainer.train_s = 1.0  # it takes part before the last step, however slow this is
        while not any(kind == "swap" and value >= 7 for _, kind, value in engines[0].log):
            time.sleep(0.01)  # that much is known to be published
        again = EngineDouble("engine-1", url, tmp_path / "token", engines[0].behaviour)
        try:
            while not any(kind == "generate" for _, kind, _ in again.log) and not running.ended_within(0.01):
                pass
            trainer.train_s = 0.1
            running.join(240)
        finally:
            again.close()
        assert len(trainer.frames) == 20
        first = next(kind for _, kind, _ in again.log)
        assert first == "swap"
        numbers = [value for _, kind, value in again.log if kind == "swap"]
        assert numbers[0] >= 7
        assert any(kind == "generate" for _, kind, _ in again.log), "the restarted engine took part again"
        flow = running.summary["flow"]
        assert flow["train"]["errored"] == flow["reasons"].get("train/errored/engine_lost", 0)
        assert running.summary["engines_lost"] >= 1


@pytest.mark.invariant(6)
@pytest.mark.invariant(24)
def test_prompts_that_raise_are_retried_given_up_and_replaced(tmp_path: Path) -> None:
    args = {"size": 1000, "max_new_tokens": 4, "prompt_raises": "3,5", "score_raises": "7"}
    with world(tmp_path) as (url, _, trainer):
        case = context(tmp_path, url, task={"args": {**args, "size": 12}}, run={"steps": 8})
        running = Running(case)
        running.join(240)
        assert len(trainer.frames) == 8
        reasons = running.summary["flow"]["reasons"]
        given_up = running.summary["flow"]["prompts_given_up"]
        assert given_up >= 3
        assert reasons["train/errored/prompt:InjectedError"] >= 2 * 3 * 4
        assert reasons["train/errored/score:InjectedError"] >= 3 * 4
        assert running.summary["flow"]["train"]["errored"] >= given_up * 3 * 4
        assert "train/cancelled/stale" not in reasons and "train/dropped/stale" not in reasons


@pytest.mark.invariant(24)
def test_a_task_that_only_raises_ends_the_run_with_its_cause(tmp_path: Path) -> None:
    args = {"size": 10, "max_new_tokens": 4, "score_raises": "*"}
    with world(tmp_path) as (url, _, _trainer):
        running = Running(context(tmp_path, url, task={"args": args}, loop={"max_consecutive_drops": 5}))
        with pytest.raises(
            Exception,
            match=r"5 prompts in a row gave .* ended as: score raised InjectedError: injected fault in score",
        ) as caught:
            running.join(240)
        assert running.exit_code == 1 and isinstance(caught.value, BarrenError)
        assert "BarrenError" in running.summary["cause"]


@pytest.mark.invariant(23)
def test_data_that_ends_early_ends_the_run_with_a_short_batch(tmp_path: Path) -> None:
    with world(tmp_path) as (url, _, trainer):
        args = {"size": 10, "max_new_tokens": 4}
        running = Running(context(tmp_path, url, task={"args": args}, loop={"epochs": 1}, run={"steps": 99}))
        running.join(240)
        assert [len(unpack(f.fields)) for f in trainer.frames] == [12, 12, 12, 4]
        assert [f.header.last for f in trainer.frames] == [False, False, False, True]
        assert running.rows("eval")[-1]["version"] == 4 and running.summary["cause"] == "done"


@pytest.mark.invariant(23)
@pytest.mark.invariant(29)
def test_data_whose_last_prompt_fails_ends_the_run_at_the_last_published_version(tmp_path: Path) -> None:
    last = DataSource(7, 0).at(6).item
    with world(tmp_path, publish_every=3) as (url, engines, trainer):
        args = {"size": 7, "max_new_tokens": 4, "score_raises": str(last)}
        loop = {"epochs": 1, "pipeline_depth": 1}
        case = context(tmp_path, url, task={"args": args}, loop=loop, sync={"every_steps": 3})
        running = Running(case)
        running.join(240)
        assert [f.header.last for f in trainer.frames] == [False, False], "nobody could know"
        assert running.summary["cause"] == "done" and running.summary["flow"]["prompts_given_up"] == 1
        assert {e.version.number for e in engines if e.version} == {0}


@pytest.mark.invariant(55)
def test_a_mix_of_tasks_is_trained_in_its_ratio_and_evaluated_task_by_task(tmp_path: Path) -> None:
    args = {"size": 40, "max_new_tokens": 4}
    mix = [
        {"name": "faulty", "label": "even", "weight": 2.0, "args": {**args, "score_raises": "3,5,6,9"}},
        {"name": "addition", "weight": 1.0},
    ]
    with world(tmp_path) as (url, engines, trainer):
        case = context(tmp_path, url, task={"name": "", "args": {}, "mix": mix}, run={"steps": 12})
        running = Running(case)
        running.join(240)
        assert len(trainer.frames) == 12
        rows = [row["tasks"] for row in running.rows("step")]
        trained = {
            label: sum(row.get(label, {"groups": 0})["groups"] for row in rows)
            for label in ("even", "addition")
        }
        assert sum(trained.values()) == 36 and abs(trained["even"] - 24) <= 6
        shares = running.summary["tasks"]
        assert {k: v["groups"] for k, v in shares.items()} == trained
        assert shares["even"]["weight"] == pytest.approx(2 / 3)
        assert all("digits" in row["addition"]["components"] for row in rows if "addition" in row)
        assert running.summary["flow"]["prompts_given_up"] > 0
        for row in running.rows("eval"):
            assert {label: score["samples"] for label, score in row["tasks"].items()} == {
                "even": 3,
                "addition": 4,
            }
            assert row["samples"] == 7 and row["missing"] == 1, "an item whose score raises is missing"
        prompts = {tuple(r["prompt"]) for e in engines for r in e.requests}
        assert len({len(p) for p in prompts}) > 1
        assert [row["label"] for row in trainer.frames[-1].header.cursor["mix"]] == ["even", "addition"]


def test_an_empty_data_set_is_one_clear_error(tmp_path: Path) -> None:
    with world(tmp_path) as (url, _, _trainer):
        running = Running(context(tmp_path, url, task={"args": {"size": 0}}))
        with pytest.raises(Exception, match="the task has 0 training prompts, expected at least 1"):
            running.join(240)


@pytest.mark.invariant(25)
def test_a_rollout_that_never_ends_is_cancelled_and_its_permits_return(tmp_path: Path) -> None:
    with world(tmp_path) as (url, engines, trainer):
        for engine in engines:
            engine.behaviour.hang = lambda body: body["request_id"].startswith("train-4-")
        running = Running(context(tmp_path, url, loop={"group_timeout_s": 6.0, "staleness_bound": 0}))
        running.join(240)
        assert len(trainer.frames) == 6
        flow = running.summary["flow"]
        assert sum(n for r, n in flow["reasons"].items() if "timeout" in r) == 4
        assert running.summary["permits"]["acquired"] == running.summary["permits"]["released"]


@pytest.mark.invariant(19)
def test_a_trainer_that_freezes_ends_the_run_by_name(tmp_path: Path) -> None:
    with world(tmp_path) as (url, _, trainer):
        running = Running(context(tmp_path, url, loop={"step_timeout_s": 3.0}, run={"steps": 5000}))
        while len(trainer.frames) < 2 and not running.ended_within(0.01):
            pass
        trainer.freeze.set()
        assert running.ended_within(240)
        assert running.error is not None and "trainer" in str(running.error)
        assert running.exit_code == 4
        trainer.freeze.clear()


@pytest.mark.invariant(19)
def test_a_trainer_that_dies_after_its_last_step_ends_the_run_by_name(tmp_path: Path) -> None:
    with world(tmp_path, ttl_s=1.0) as (url, engines, trainer):
        for engine in engines:  # the last evaluation, in which nobody needs the trainer, has no end
            engine.behaviour.hang = lambda body: (
                body["request_id"].startswith("eval-") and (body["version"]["number"] == 6)
            )
        running = Running(context(tmp_path, url, loop={"trainer_wait_s": 0.5}))
        while running.progress().get("phase") != "finishing" and not running.ended_within(0.01):
            pass
        trainer.kill()
        assert running.ended_within(240)
        assert "trainer process trainer-0 is gone" in str(running.error) and running.exit_code == 4


@pytest.mark.invariant(19)
def test_a_trainer_that_dies_while_it_starts_ends_the_wait_for_it_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []

    class Looking(HubClient):
        def members(self, role: str | None = None) -> list[Member]:
            found = super().members(role)
            looks.append(len(found))
            return found

    monkeypatch.setattr(process, "HubClient", Looking)
    auth.create_token(tmp_path / "token")
    with hub(tmp_path / "token", threading.Event()) as url, HubClient(url, tmp_path / "token") as client:
        lease = client.register("trainer", "trainer-0", ttl_s=120.0)
        patient = {"start_timeout_s": 600.0}
        running = Running(context(tmp_path, url, loop={"trainer_wait_s": 0.5}, run=patient))
        while looks.count(1) < 4 and not running.ended_within(0.01):
            pass  # who never saw it can't miss it
        assert running.error is None
        lease._ttl_s = 1.0
        lease.update()
        lease._closed.set()
        assert running.ended_within(240)
        assert "trainer process trainer-0 is gone" in str(running.error) and running.exit_code == 4


@pytest.mark.invariant(18)
@pytest.mark.invariant(19)
def test_without_a_serving_engine_the_run_ends_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        process, "loop_config", lambda c: dataclasses.replace(loop_config(c), engine_wait_s=3.0)
    )
    with world(tmp_path) as (url, engines, _trainer):
        for engine in engines:
            engine.behaviour.swap_status = 500
        running = Running(context(tmp_path, url))
        assert running.ended_within(240)
        assert "no engine has served for 3 s" in str(running.error)
        assert "engine-0 joining at None" in str(running.error)


@pytest.mark.invariant(28)
def test_a_request_to_stop_ends_the_run_within_seconds(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.2) as (url, _, trainer):
        case = context(tmp_path, url, run={"steps": 500})
        running = Running(case)
        while len(trainer.frames) < 2:
            time.sleep(0.01)
        case.stop.set()
        assert running.ended_within(240), "500 steps of 0.2 s would take longer"
        assert running.exit_code == 130
        assert json.loads((case.run_dir / "progress.json").read_text())["phase"] == "interrupted"
        assert [r["step"] for r in running.rows("step")] == [f.header.step for f in trainer.frames]
        summary = running.summary
        assert summary["permits"]["acquired"] == summary["permits"]["released"]
        assert summary["flow"]["train"]["running"] == 0


@pytest.mark.invariant(58)
@pytest.mark.invariant(63)
def test_a_resumed_run_goes_on_at_the_cursor_with_growing_steps(tmp_path: Path) -> None:
    prompts: list[set[str]] = []
    cursor, steps_of = None, []
    for attempt in range(2):
        number = 3 * attempt
        with world(tmp_path, number=number, cursor=cursor, lineage=f"life{attempt}") as (
            url,
            engines,
            trainer,
        ):
            steps = 6 if attempt else 500
            case = context(tmp_path, url, run={"steps": steps}, eval={"prompts": 1})
            running = Running(case)
            if attempt:
                running.join(240)
            else:
                while len(trainer.frames) < 5:
                    time.sleep(0.01)
                case.stop.set()
                assert running.ended_within(240)
                cursor = dict(trainer.frames[2].header.cursor)
            frames = trainer.frames[: 3 if attempt == 0 else None]
            steps_of = [r["step"] for r in running.rows("step")]
            prompts.append({str(p) for f in frames for p in _prompts(f)})
    assert steps_of == [1, 2, 3, 4, 5, 6]
    assert (tmp_path / "metrics.1.jsonl").exists()
    assert len(prompts[0]) == len(prompts[1]) == 9
    assert not prompts[0] & prompts[1], "a prompt was trained twice"
    assert prompts[0] | prompts[1] == {str(p) for p in _first_prompts(18)}


def _prompts(frame: BatchFrame) -> set[tuple[int, ...]]:
    """The prompts of all segments of a frame."""
    found = set()
    for segment in unpack(frame.fields):
        prompt = segment["tokens"][~segment["loss_mask"]]
        found.add(tuple(int(t) for t in prompt))
    return found


def _first_prompts(count: int) -> list[tuple[int, ...]]:
    """The prompts of the first positions of the stream."""
    task = make_task("faulty", {"size": 1000, "max_new_tokens": 4})
    source, data = DataSource(1000, 0), task.dataset("train", 0)
    return [tuple(task.prompt(data[source.at(p).item])) for p in range(count)]
