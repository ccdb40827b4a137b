"""What happens around a new version, an evaluation, a lost hub: the real loop against doubles."""

from __future__ import annotations

import dataclasses
import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.batch.pack import unpack
from jaxrl_sync.config.sections import RunConfig
from jaxrl_sync.orchestrator import process, weight_watcher
from jaxrl_sync.orchestrator.config import LoopConfig, loop_config
from jaxrl_sync.transfer.hub.client import HubClient, Member

from .harness import Running, context, world


def _change(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> None:
    """Loop settings that no config key reaches."""

    def make(run: RunConfig) -> LoopConfig:
        return dataclasses.replace(loop_config(run), **changes)

    monkeypatch.setattr(process, "loop_config", make)


@pytest.mark.invariant(38)
@pytest.mark.invariant(35)
def test_stale_rollouts_are_aborted_before_the_swap_and_nothing_else_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _change(monkeypatch, stale_policy="drop", log_interval_s=0.1)
    with world(tmp_path, engines=1) as (url, engines, trainer):
        engines[0].behaviour.hang = lambda body: body["request_id"].startswith("train-0-v0")
        began: dict[int, float] = {}

        def others_are_done(step: int) -> bool:
            """No step is over before all rollouts have ended but the one that hangs: none gets too stale."""
            since, seen = began.setdefault(step, time.time()), running.progress()
            aborted = any(kind == "abort" for _, kind, _ in engines[0].log)
            running_still = 4 if step <= 2 and not aborted else 0  # the samples of the one that hangs
            return seen["t"] > since and (seen["version"], seen["inflight"]) == (step - 1, running_still)

        trainer.gate = others_are_done
        loop = {"staleness_bound": 1, "step_timeout_s": 120.0, "group_timeout_s": 120.0}
        running = Running(context(tmp_path, url, run={"steps": 8}, loop=loop))
        running.join(240)
        log = [(kind, value) for _, kind, value in engines[0].log]
        aborted = [value for kind, value in log if kind == "abort"]
        assert aborted == [("train-0-v0",)], "publishing a version aborts only what it makes too stale"
        too_stale = [kind == "swap" and value >= 2 for kind, value in log].index(True)
        assert log.index(("abort", ("train-0-v0",))) < too_stale
        assert running.summary["flow"]["reasons"] == {"train/cancelled/stale": 4}
        again = [value for kind, value in log if kind == "generate" and str(value).startswith("train-0-")]
        assert len(again) == 2 and again[1].endswith("-a1"), "its prompt came again"
        assert len(trainer.frames) == 8


@pytest.mark.invariant(32)
@pytest.mark.invariant(33)
def test_an_engine_that_fails_a_swap_keeps_serving_and_is_asked_again(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.15) as (url, engines, trainer):
        running = Running(context(tmp_path, url, run={"steps": 12}, loop={"staleness_bound": 4}))
        while len(trainer.frames) < 3:
            time.sleep(0.01)
        engines[0].behaviour.swap_status = 504
        while running.progress().get("swap_failures", 0) < 2:
            time.sleep(0.01)
        engines[0].behaviour.swap_status = 0
        running.join(240)
        assert len(trainer.frames) == 12
        numbers = [value for _, kind, value in engines[0].log if kind == "swap"]
        assert numbers == sorted(set(numbers)) and numbers[-1] == 12
        assert running.summary["swap_failures"] >= 2
        assert max(map(int, running.summary["staleness"])) <= 4


@pytest.mark.invariant(56)
@pytest.mark.invariant(57)
def test_an_evaluation_is_pinned_to_one_version_while_other_engines_move_on(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.1) as (url, engines, trainer):
        for engine in engines:  # the first one lasts until a step is trained and told, however slow this is
            engine.behaviour.hang = lambda b: b["request_id"].startswith("eval-") and len(trainer.frames) < 2
        running = Running(
            context(tmp_path, url, run={"steps": 12}, eval={"every_steps": 100, "timeout_s": 20.0})
        )
        running.join(240)
        rows = running.rows("eval")
        assert [r["trigger"] for r in rows] == [0, 12]
        assert [r["missing"] for r in rows] == [0, 0]
        first = [e for e in engines if e.pins and e.pins[0].number == 0]
        assert len(first) == 1, "one engine of two is the evaluation's share"
        assert {p.number for p in first[0].pins} <= {0, 12}
        during = [r["t"] for r in running.rows("step") if r["t"] < rows[0]["t"]]
        assert during, "training went on during the evaluation"
        assert running.summary["flow"]["eval"]["cancelled"] == 0


@pytest.mark.invariant(57)
@pytest.mark.parametrize(("done", "expected"), [(True, [6]), (False, [3, 6])])
def test_a_resume_repeats_only_an_evaluation_that_got_lost(
    tmp_path: Path, done: bool, expected: list[int]
) -> None:
    rows = [{"kind": "step", "step": s, "t": 0.0} for s in (1, 2, 3)]
    if done:
        rows.append({"kind": "eval", "step": 3, "trigger": 3, "accuracy": 0.5, "t": 0.0})
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    with world(tmp_path, number=3) as (url, _, trainer):
        running = Running(context(tmp_path, url, eval={"every_steps": 3}))
        running.join(240)
        assert [f.header.step for f in trainer.frames] == [4, 5, 6]
        fresh = [r["trigger"] for r in running.rows("eval") if r["t"] > 0]
        assert fresh == expected


@pytest.mark.invariant(18)
@pytest.mark.invariant(19)
def test_a_hub_that_stays_away_ends_the_run_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _change(monkeypatch, hub_timeout_s=3.0)
    with world(tmp_path, train_s=0.05) as (url, _, trainer):
        running = Running(context(tmp_path, url, run={"steps": 5000}))
        while len(trainer.frames) < 2:
            time.sleep(0.01)
        trainer.hub_stop.set()
        assert running.ended_within(240)
        assert "hub" in str(running.error) and running.exit_code == 4


@pytest.mark.invariant(14)
def test_shipping_never_leads_training_by_more_than_the_target(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.05) as (url, _, trainer):
        running = Running(
            context(tmp_path, url, run={"steps": 10}, loop={"target_lag": 1, "staleness_bound": 3})
        )
        running.join(240)
        assert max(r["outbox"] for r in running.rows("step")) <= 2
        assert len(trainer.frames) == 10


@pytest.mark.invariant(22)
def test_a_slow_trainer_fills_the_queue_to_its_bound_and_no_further(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.3) as (url, _, trainer):
        trainer.freeze.set()
        running = Running(
            context(tmp_path, url, run={"steps": 8}, loop={"staleness_bound": 2, "target_lag": 1})
        )
        while running.progress().get("queued", 0) < 12:  # of the step that is with the trainer
            time.sleep(0.01)
        trainer.freeze.clear()
        running.join(240)
        queued = [r["flow"]["train"]["queued"] for r in running.rows("step")]
        assert 0 < max(queued) <= 3 * 12
        assert all(r["queue"]["ready_groups"] <= 9 for r in running.rows("step"))


@pytest.mark.invariant(9)
@pytest.mark.invariant(10)
@pytest.mark.invariant(33)
@pytest.mark.invariant(41)
@pytest.mark.invariant(44)
def test_pausing_with_abort_resumes_every_rollout_on_the_new_weights(tmp_path: Path) -> None:
    extras: dict[str, Any] = {"entropy": lambda token: token + 0.25, "choice": lambda token: 7 * token}
    with world(tmp_path, train_s=0.05) as (url, engines, trainer):
        for engine in engines:
            engine.behaviour.token_s, engine.behaviour.tokens = 0.03, 6
            engine.behaviour.extras = extras
            engine.behaviour.stuck = lambda body, at: body["request_id"] == "train-0-v0" and at == 3
        sampling = {"sampling": {"max_tokens": 6}}
        running = Running(
            context(tmp_path, url, run={"steps": 8}, loop=sampling, sync={"pause_mode": "abort"})
        )
        running.join(240)
        modes = engines[0].swap_modes
        assert modes[0] == "keep" and set(modes[1:]) == {"abort"}
        resumed = [r for e in engines for r in e.requests if "+" in r["request_id"]]
        first = {r["request_id"]: len(r["prompt"]) for e in engines for r in e.requests}
        for r in resumed:
            budget = len(r["prompt"]) - first[r["request_id"].split(".")[0]] + r["sampling"]["max_tokens"]
            assert budget == 6, "generated and allowed tokens add up to the limit"
        assert any(r["sampling"]["max_tokens"] < 6 for r in resumed)
        assert len(trainer.frames) == 8
        for frame in trainer.frames:
            for segment in unpack(frame.fields):
                versions = segment["versions"][segment["loss_mask"]]
                assert len(versions) <= 6 and (versions[1:] >= versions[:-1]).all()
                for name, of_token in extras.items():  # resumed, packed and framed: still at their tokens
                    wanted = np.where(segment["loss_mask"], of_token(segment["tokens"]), 0)
                    assert np.array_equal(segment[name], wanted), name
        assert trainer.frames[0].fields["choice"].dtype == np.int32
        assert all(r["extras"].keys() == extras.keys() for r in running.rows("step"))
        assert running.summary["multi_version_fraction"] > 0
        assert running.summary["flow"]["train"]["cancelled"] == 0


def test_a_hub_that_forgot_everybody_costs_no_rollout_of_an_engine_that_answers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgetful = threading.Event()

    class Forgetful(HubClient):
        def members(self, role: str | None = None) -> list[Member]:
            return [] if forgetful.is_set() else super().members(role)

    monkeypatch.setattr(process, "HubClient", Forgetful)
    monkeypatch.setattr(weight_watcher, "_HEALTH_S", 60.0)  # it answers, however slow this machine is
    with world(tmp_path, train_s=0.1) as (url, engines, trainer):
        running = Running(context(tmp_path, url, run={"steps": 24}))
        while len(trainer.frames) < 3:
            time.sleep(0.01)
        forgetful.set()
        seen = len(trainer.frames)
        time.sleep(1.5)  # the directory is read twice a second
        while len(trainer.frames) <= seen:  # training goes on meanwhile
            time.sleep(0.01)
        forgetful.clear()
        running.join(240)
        assert running.summary["engines_lost"] == 0
        assert running.summary["flow"]["train"]["errored"] == 0
        assert len(trainer.frames) == 24 and len(engines) == 2
