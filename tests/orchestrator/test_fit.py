"""Preflight of a run: what lasts and differs ends it by name, what is still to come is waited for."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_sync.orchestrator import process
from jaxrl_sync.orchestrator.config import loop_config
from jaxrl_sync.orchestrator.fit import LASTING_S, Fit, PreflightError
from jaxrl_sync.transfer.hub.client import HubClient

from .harness import Running, context, world

TTL_S = 10.0
LASTS_S = TTL_S + LASTING_S
MEMORY = {"who": "subscriber e.0", "what": "memory", "found": "1 bytes free", "expected": "9 (9 slot)"}
PLAN = {"who": "subscriber e.0", "what": "plan digest", "found": "a", "expected": "b as subscriber f.0 has"}
OLD = {"who": "subscriber e.0", "what": "source layout that it planned with", "found": "s", "expected": "r"}
RANKS = {"who": "publisher trainer", "what": "ranks registered", "found": "[0]", "expected": "all of [2]"}


def answer(*rows: dict[str, str], engines: tuple[str, ...] = (), unknown: tuple[str, ...] = ()) -> Any:
    ok = not rows and not unknown
    found = {"differences": list(rows), "unknown": list(unknown), "publishers": [], "engines": list(engines)}
    return {"ok": ok, **found}


def fit_of(engines: int, limit_s: float, **more: Any) -> Fit:
    return Fit(lambda: {}, engines, limit_s=limit_s, hub_timeout_s=1.0, ttl_s=TTL_S, **more)


class Judge:
    """A Fit for two engines whose clock a test turns."""

    def __init__(self) -> None:
        self.now = 0.0
        self.fit = fit_of(2, 60.0, clock=lambda: self.now)

    def at(self, now: float, *rows: dict[str, str], **more: Any) -> bool:
        self.now = now
        self.fit.judge(answer(*rows, **more))
        return self.fit.settled


def test_it_is_settled_once_all_are_there_have_planned_and_fit() -> None:
    judge = Judge()
    assert not judge.at(0, RANKS)
    assert not judge.at(30, engines=("e",))
    assert not judge.at(40, engines=("e", "f"), unknown=("subscriber f.0",))
    assert judge.at(41, engines=("e", "f"))


def test_memory_that_may_lack_is_warned_of_and_the_run_goes_on(caplog: pytest.LogCaptureFixture) -> None:
    judge, may = Judge(), {**MEMORY, "what": "memory at most"}
    assert not judge.at(0, may, RANKS, engines=("e", "f"))
    assert not judge.at(LASTS_S + 1, may, engines=("e",))
    assert judge.at(LASTS_S + 2, may, engines=("e", "f")) and judge.fit.state == "fits"
    assert "memory at most is 1 bytes free, expected 9 (9 slot)" in caplog.text


def test_who_never_comes_does_not_hold_it_up_for_ever() -> None:
    judge = Judge()
    assert not judge.at(59, RANKS, engines=("e",))
    assert judge.at(61, RANKS, engines=("e",))


def test_a_difference_that_passes_is_forgiven() -> None:
    judge = Judge()
    judge.at(0, PLAN)
    judge.at(LASTS_S - 0.1, PLAN)
    judge.at(LASTS_S, engines=("e",))
    judge.at(LASTS_S + 1, PLAN)
    assert judge.at(2 * LASTS_S, engines=("e", "f"))


def test_engines_that_have_yet_to_plan_with_another_trainer_are_waited_for() -> None:
    judge = Judge()
    assert not judge.at(0, OLD, RANKS, engines=("e", "f"))
    assert not judge.at(50, OLD, engines=("e", "f"))
    assert judge.at(55, engines=("e", "f")) and judge.fit.state == "fits"


@pytest.mark.parametrize(("rows", "code"), [([MEMORY], 3), ([PLAN], 1), ([MEMORY, RANKS, PLAN], 1)])
def test_one_that_lasts_is_named(rows: list[dict[str, str]], code: int) -> None:
    judge = Judge()
    judge.at(0, *rows)
    with pytest.raises(PreflightError, match=r"subscriber e\.0: ") as error:
        judge.at(LASTS_S, *rows)
    assert error.value.exit_code == code and "publisher" not in str(error.value)
    assert all(row["expected"] in str(error.value) for row in rows if row is not RANKS)


def test_nobody_is_compared_where_engines_live_with_the_trainer() -> None:
    assert fit_of(0, 1.0).settled


@pytest.mark.parametrize(
    ("sections", "state"),
    [
        ({}, "waiting"),
        ({"engine": {"placement": "colocated"}}, "none"),
        ({"sync": {"transport": "file"}}, "none"),  # who reads a folder tells the hub nothing
    ],
)
def test_who_is_compared_follows_from_the_config(tmp_path: Path, sections: Any, state: str) -> None:
    run = context(tmp_path, "http://127.0.0.1:1", **sections)
    hub: Any = SimpleNamespace(preflight=dict)
    assert process._fit(run, loop_config(run.config), hub).state == state


def test_a_run_whose_engine_lacks_memory_ends_with_its_name(tmp_path: Path) -> None:
    """The orchestrator's process, a real hub: an engine tells it that its slots don't fit."""
    with world(tmp_path, train_s=0.05) as (url, _, _trainer), HubClient(url, tmp_path / "token") as hub:
        told = {"model": "policy", "slot_bytes": 1 << 40, "free_bytes": 1 << 20}
        lease = hub.register("subscriber", "engine-0", info=told, ttl_s=30.0)
        running = Running(context(tmp_path, url, run={"steps": 100_000}))
        with pytest.raises(PreflightError, match=r"subscriber engine-0\.0: memory is 1048576 bytes free"):
            running.join(240)
        assert running.exit_code == 3 and "PreflightError" in running.summary["cause"]
        lease.close()
