"""``sync.mode`` and ``sync.initiator``: what each of them does to the staleness of what is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.batch.pack import unpack
from jaxrl_sync.config.errors import ConfigError
from jaxrl_sync.config.load import validate
from jaxrl_sync.config.modes import check_mode
from jaxrl_sync.orchestrator import process
from jaxrl_sync.orchestrator.config import loop_config
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub.client import HubClient, Lease
from jaxrl_sync.transfer.version import Version

from .harness import Running, context, world

SAMPLES = 12


def _histograms(running: Running) -> list[dict[int, int]]:
    """Samples by staleness, step by step."""
    return [{int(k): n for k, n in row["staleness"].items()} for row in running.rows("step")]


def _case(tmp_path: Path, url: str, mode: str, bound: int | None = None, **sections: Any) -> Any:
    sync = {"mode": mode, **sections.pop("sync", {})}
    case = context(tmp_path, url, sync=sync, loop={"staleness_bound": bound}, **sections)
    check_mode(case.config)
    return case


@pytest.mark.invariant(11)
@pytest.mark.invariant(12)
@pytest.mark.parametrize("initiator", ["push", "pull"])
def test_sync_generates_a_batch_only_when_every_engine_holds_the_version_before_it(
    tmp_path: Path, initiator: str
) -> None:
    with world(tmp_path, train_s=0.05, moves_itself=initiator == "pull") as (url, engines, trainer):
        engines[1].behaviour.swap_s = 0.15
        running = Running(
            _case(tmp_path, url, "sync", sync={"initiator": initiator}, eval={"every_steps": 2})
        )
        running.join(240)
        assert _histograms(running) == [{0: SAMPLES}] * 6
        assert all(len(f.fields["versions"]) for f in trainer.frames)
        if initiator == "push":
            for number in range(1, 6):
                first = min(
                    t
                    for e in engines
                    for t, kind, value in e.log
                    if kind == "generate" and f"train-{3 * number}-v{number}" in str(value)
                )
                swaps = [t for e in engines for t, kind, value in e.log if (kind, value) == ("swap", number)]
                assert len(swaps) == 2
                slow = max(t for t, kind, value in engines[1].log if (kind, value) == ("swap", number))
                assert first > slow + 0.1, "generated before the slower engine held the version"
        else:
            assert all(e.version is not None and e.version.number == 6 for e in engines)
            assert [v for _, kind, v in engines[0].log if kind == "took"][-1] == 6
        assert [r["missing"] for r in running.rows("eval")] == [0] * 4


@pytest.mark.invariant(11)
def test_one_step_off_trains_every_batch_but_the_first_on_samples_one_update_old(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.1) as (url, engines, trainer):
        engines[1].behaviour.token_s = 0.03
        running = Running(_case(tmp_path, url, "one_step_off", run={"steps": 8}))
        running.join(240)
        assert _histograms(running) == [{0: SAMPLES}] + [{1: SAMPLES}] * 7
        for frame in trainer.frames:
            versions = {int(v) for s in unpack(frame.fields) for v in s["versions"][s["loss_mask"]]}
            assert versions == {max(0, frame.header.step - 2)}, "a batch is of one version"


@pytest.mark.parametrize(("mode", "overlaps"), [("sync", False), ("one_step_off", True)])
def test_one_step_off_generates_while_the_trainer_trains_and_sync_never_does(
    tmp_path: Path, mode: str, overlaps: bool
) -> None:
    with world(tmp_path, train_s=0.3) as (url, engines, trainer):
        while_training: list[str] = []

        def note(body: dict[str, Any]) -> bool:
            """Of the second batch on, the first request goes on once the trainer trains, where it may."""
            kind, position = body["request_id"].split("-")[:2]
            if kind == "train" and trainer.training is not None:
                while_training.append(body["request_id"])
            return overlaps and kind == "train" and int(position) >= 3 and not while_training

        trainer.gate = lambda step: bool(while_training) or not overlaps

        for engine in engines:
            engine.behaviour.hang = note
        Running(_case(tmp_path, url, mode)).join(240)
        assert bool(while_training) == overlaps


@pytest.mark.invariant(11)
@pytest.mark.parametrize("initiator", ["push", "pull"])
def test_async_trains_on_samples_of_many_ages_within_the_bound(tmp_path: Path, initiator: str) -> None:
    with world(tmp_path, train_s=0.05, moves_itself=initiator == "pull") as (url, engines, trainer):
        engines[1].behaviour.token_s = 0.05
        running = Running(_case(tmp_path, url, "async", 3, run={"steps": 16}, sync={"initiator": initiator}))
        running.join(240)
        total: dict[int, int] = {}
        for row in _histograms(running):
            for age, n in row.items():
                total[age] = total.get(age, 0) + n
        assert sum(total.values()) == 16 * SAMPLES
        assert max(total) <= 3 and len(total) >= 2 and max(total) >= 2
        if initiator == "pull":
            assert all("took" in {kind for _, kind, _ in e.log} for e in engines)


def test_a_pulling_engine_holds_the_version_that_it_is_evaluated_on(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.1, moves_itself=True) as (url, engines, trainer):
        for engine in engines:
            engine.behaviour.eval_s = 0.5
        running = Running(
            _case(tmp_path, url, "async", 2, run={"steps": 12}, eval={"every_steps": 4, "timeout_s": 20.0})
        )
        running.join(240)
        rows = running.rows("eval")
        assert [r["missing"] for r in rows] == [0] * len(rows) and len(rows) >= 3
        assert any(kind == "hold" for e in engines for _, kind, _ in e.log)
        assert running.summary["flow"]["eval"]["errored"] == 0, "no pinned request found another version"


def test_the_end_of_one_evaluation_never_ends_the_hold_of_the_next(tmp_path: Path) -> None:
    with world(tmp_path, engines=1, train_s=0.05, moves_itself=True) as (url, engines, trainer):
        engines[0].behaviour.eval_s, engines[0].behaviour.release_s = 0.2, 0.3
        running = Running(_case(tmp_path, url, "async", 2, run={"steps": 8}, eval={"every_steps": 1}))
        running.join(240)
        holds = [kind for _, kind, _ in engines[0].log if kind in ("held", "released")]
        evals = len(running.rows("eval"))
        assert evals >= 3 and holds == ["held", "released"] * evals, "and the last one is ended too"
        assert running.summary["flow"]["eval"]["errored"] == 0


def test_a_slow_engine_skips_versions_and_the_bound_holds(tmp_path: Path) -> None:
    with world(tmp_path, train_s=0.05) as (url, engines, trainer):

        def behind(number: int) -> bool:
            """Whether a swap still lasts: until the other engine is two versions further, or has the last."""
            held = engines[0].version
            return held is None or held.number < min(number + 2, 24)

        def taken(step: int) -> bool:
            """The other engine takes every version: no further one comes before."""
            held = engines[0].version
            return held is not None and held.number >= step - 1

        engines[1].behaviour.swap_hangs = behind
        trainer.gate = taken
        running = Running(_case(tmp_path, url, "async", 4, run={"steps": 24}))
        running.join(240)
        slow = [value for _, kind, value in engines[1].log if kind == "swap"]
        fast = [value for _, kind, value in engines[0].log if kind == "swap"]
        assert slow == sorted(set(slow)) and slow[-1] == 24
        assert len(slow) < len(fast) and any(b - a > 1 for a, b in zip(slow, slow[1:], strict=False))
        assert max(age for row in _histograms(running) for age in row) <= 4


def test_groups_outlive_a_step_that_takes_longer_than_they_may_when_their_engine_sleeps_meanwhile(
    tmp_path: Path,
) -> None:
    """They were cancelled, one batch after another: time asleep counted for ``loop.group_timeout_s``."""
    with world(tmp_path, engines=1, train_s=8.0, colocated=True) as (url, engines, trainer):
        slept = list[int]()

        def hangs(body: dict[str, Any]) -> bool:
            """One group is under way when the first step is trained, however slow this is."""
            return body["request_id"].startswith("train-3-") and not slept and trainer.training is None

        def asleep() -> bool:
            if trainer.training is not None:
                slept.append(trainer.training)
            return trainer.training is not None

        engines[0].behaviour.hang = hangs
        engines[0].behaviour.asleep = asleep
        engines[0].behaviour.token_s = 0.1
        loop = {"staleness_bound": 2, "group_timeout_s": 7.0}
        evals = {"timeout_s": 60.0}
        running = Running(
            context(tmp_path, url, run={"steps": 2}, sync={"mode": "async"}, loop=loop, eval=evals)
        )
        running.join(240)
        flow = running.summary["flow"]["train"]
        assert slept and flow["cancelled"] == flow["errored"] == 0, flow
        assert [r["missing"] for r in running.rows("eval")] == [0, 0]


def test_an_evaluated_version_is_pinned_at_the_hub_until_its_evaluation_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int]] = []

    class Pinning(HubClient):
        def pin(self, version: Version, by: str, *_: Any, lease: Lease | None = None, **__: Any) -> None:
            calls.append((f"pin {by}", version.number))
            assert lease is not None and not lease.lost.is_set(), "it ends with the orchestrator"
            if version.number == 6:
                raise TransferError("nobody holds it")

        def unpin(self, version: Version, by: str, model: str = "policy") -> None:
            calls.append((f"unpin {by}", version.number))

    monkeypatch.setattr(process, "HubClient", Pinning)
    with world(tmp_path) as (url, _, _trainer):
        running = Running(_case(tmp_path, url, "async", 2, eval={"pin": True}, hub={"ttl_s": 60.0}))
        running.join(240)
        assert [r["missing"] for r in running.rows("eval")] == [0, 0], "also of one that nobody keeps"
    first = calls[0][1]
    assert calls == [("pin eval", first), ("unpin eval", first), ("pin eval", 6), ("unpin eval", 6)]


CONFLICTS: list[tuple[dict[str, Any], str]] = [
    (
        {"sync": {"mode": "sync"}, "loop": {"staleness_bound": 2}},
        r"sync.mode='sync' means loop.staleness_bound=0, found 2",
    ),
    (
        {"sync": {"mode": "one_step_off"}, "loop": {"staleness_bound": 0}},
        r"sync.mode='one_step_off' means loop.staleness_bound=1, found 0",
    ),
    (
        {"sync": {"mode": "async"}, "loop": {"staleness_bound": 0}},
        r"sync.mode='async' needs loop.staleness_bound >= 1, found 0",
    ),
    (
        {"sync": {"mode": "async"}, "loop": {"staleness_bound": None}},
        r"sync.mode='async' needs loop.staleness_bound, found nothing",
    ),
    (
        {"sync": {"mode": "sync", "every_steps": 2}, "loop": {"staleness_bound": None}},
        r"sync.mode='sync' publishes after every update, found sync.every_steps=2",
    ),
    (
        {"sync": {"mode": "one_step_off", "initiator": "pull"}, "loop": {"staleness_bound": None}},
        r"sync.mode='one_step_off' needs sync.initiator='push', found 'pull'",
    ),
    (
        {"sync": {"mode": "one_step_off"}, "loop": {"staleness_bound": None, "pipeline_depth": 1}},
        r"sync.mode='one_step_off' generates one batch beside .* found loop.pipeline_depth=1",
    ),
    (
        {"engine": {"placement": "colocated", "replicas": 2}},
        r"engine.placement='colocated' is one replica, found engine.replicas=2",
    ),
    (
        {"engine": {"placement": "mixed"}},
        r"engine.placement='mixed' is one replica with the trainer and others, found engine.replicas=1",
    ),
    (
        {"engine": {"placement": "colocated"}, "sync": {"every_steps": 2}},
        r"engine.placement='colocated' takes every update, found sync.every_steps=2",
    ),
    (
        {
            "engine": {"placement": "mixed", "replicas": 2},
            "sync": {"mode": "one_step_off"},
            "loop": {"staleness_bound": None},
        },
        r"sync.mode='one_step_off' generates while the trainer trains, found engine.placement='mixed'",
    ),
    (
        {"trainer": {"offload": "optimizer"}},
        r"trainer.offload='optimizer' needs a colocated engine, found engine.placement='disaggregated'",
    ),
    (
        {"engine": {"placement": "colocated"}, "eval": {"pin": True}},
        r"eval.pin=true needs a trainer that keeps versions .* found engine.placement='colocated'",
    ),
]


@pytest.mark.parametrize(("mode", "turn_s"), [("keep", 20.0), ("wait", 30.0)])
def test_a_batch_may_wait_for_what_a_colocated_engine_must_end(
    tmp_path: Path, mode: str, turn_s: float
) -> None:
    waits = [
        loop_config(context(tmp_path, "", engine={"placement": p}, sync={"pause_mode": mode}).config)
        for p in ("disaggregated", "colocated")
    ]
    assert waits[1].step_timeout_s - waits[0].step_timeout_s == turn_s


@pytest.mark.parametrize(("sections", "message"), CONFLICTS)
def test_settings_that_contradict_the_mode_are_errors_that_name_both(
    tmp_path: Path, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        check_mode(context(tmp_path, "http://127.0.0.1:1", **sections).config)


@pytest.mark.parametrize(
    ("mode", "bound", "resolved"),
    [
        (None, 0, ("sync", 0)),
        (None, 3, ("async", 3)),
        ("sync", None, ("sync", 0)),
        ("one_step_off", None, ("one_step_off", 1)),
        ("one_step_off", 1, ("one_step_off", 1)),
        ("async", 1, ("async", 1)),
    ],
)
def test_mode_and_bound_fill_each_other_in(
    tmp_path: Path, mode: str | None, bound: int | None, resolved: tuple[str, int]
) -> None:
    sync = {} if mode is None else {"mode": mode}
    config = context(tmp_path, "", sync=sync, loop={"staleness_bound": bound}).config
    assert (config.sync.mode, config.loop.staleness_bound) == resolved
    assert validate(config.model_dump(mode="python")) == config
