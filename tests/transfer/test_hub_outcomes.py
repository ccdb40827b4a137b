"""How rounds end and what mends them: every outcome on literal events, and words that come late or twice."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Round
from jaxrl_sync.transfer.version import Version

A1, A2 = Version("a", 1), Version("a", 2)
PUB = MemberKey("publisher", "trainer", 0)
MODEL = {"model": "policy"}
TTL_S = 10.0


def key(rank: int) -> MemberKey:
    return MemberKey("subscriber", "x", rank)


def advance(rank: int, to: Any, round_id: str = "e-1") -> machine.Advance:
    return machine.Advance(key(rank), "i", round_id, to, 5.0)


def fail(rank: int, round_id: str = "e-1") -> machine.Fail:
    return machine.Fail(key(rank), "i", round_id, "why")


def join(rank: int, incarnation: str = "i", installed: Version | None = None) -> machine.Register:
    return machine.Register(key(rank), 2, incarnation, MODEL, TTL_S, installed)


LOST0 = machine.Leave(key(0), "i")
START: tuple[machine.Event, ...] = (
    machine.Register(PUB, 1, "i", MODEL, 1e6),
    join(0),
    join(1),
    machine.Announce(PUB, "i", "policy", A1, 8, 0.0),
)
BEGUN = (advance(0, "begun"), advance(1, "begun"))
PREPARED = (advance(0, "prepared"), advance(1, "prepared"))


def run(*events: machine.Event, now: float = 0.0) -> HubState:
    state = HubState("e")
    for event in (*START, *events):
        state, _ = machine.step(state, event, now)
    return state


def first(state: HubState) -> Round:
    return state.rounds.get("e-1") or state.closed["e-1"]


@pytest.mark.parametrize(
    ("events", "outcome", "repair"),
    [
        ([*PREPARED, advance(0, "installed"), advance(1, "installed")], "committed", "none"),
        ([*BEGUN, fail(0)], "aborted", "reoffer"),
        ([*BEGUN, advance(0, "prepared"), fail(1)], "aborted", "reoffer"),
        ([*BEGUN, LOST0], "aborted", "wait_lease"),
        ([*BEGUN, join(0, "j")], "aborted", "anchor"),
        ([*BEGUN, machine.Leave(PUB, "i")], "failed", "reoffer"),
        ([*PREPARED, machine.Leave(PUB, "i")], "open", "none"),
        ([*PREPARED, fail(0)], "unknown", "wait_lease"),
        ([*PREPARED, fail(0), fail(1)], "aborted", "reoffer"),
        ([*PREPARED, fail(0), advance(1, "installed")], "partially_committed", "overwrite"),
        ([*PREPARED, advance(1, "installed"), fail(0)], "partially_committed", "overwrite"),
        ([*PREPARED, advance(1, "installed"), LOST0], "partially_committed", "wait_lease"),
        ([*PREPARED, LOST0], "unknown", "wait_lease"),
        ([*PREPARED, LOST0, advance(1, "installed")], "partially_committed", "overwrite"),
        ([*PREPARED, LOST0, join(0, installed=A1), advance(1, "installed")], "committed", "none"),
        ([*PREPARED, advance(0, "installed"), LOST0, advance(1, "installed")], "committed", "none"),
        ([*PREPARED, join(0, "j")], "unknown", "anchor"),
        ([*BEGUN, fail(0), advance(1, "installed")], "partially_committed", "overwrite"),
        ([machine.Announce(PUB, "i", "policy", A2, 8, 0.0)], "superseded", "none"),
        ([*BEGUN, machine.Announce(PUB, "i", "policy", A2, 8, 0.0)], "open", "none"),
    ],
)
def test_each_end_has_a_name_and_a_repair(events: Any, outcome: str, repair: str) -> None:
    entry = first(run(*events))
    assert (entry.state, entry.repair) == (outcome, repair), entry
    assert entry.state == "open" or entry.reason


def test_the_deadline_aborts_what_is_not_prepared_and_nothing_else() -> None:
    state = run(*BEGUN)
    state, _ = machine.step(state, machine.Tick(), 4.9)
    assert first(state).state == "open"
    state, _ = machine.step(state, machine.Tick(), 5.0)
    assert (first(state).state, first(state).repair) == ("aborted", "reoffer")
    prepared, _ = machine.step(run(*PREPARED), machine.Tick(), 9.0)
    assert first(prepared).state == "open"


def test_a_rank_that_gives_up_a_decided_round_does_not_undo_what_others_installed() -> None:
    state = run(*PREPARED, fail(0))
    again = [r for r in state.rounds.values() if r.engine == "x"]
    assert len(again) == 1 and again[0].version == A1  # offered again at once
    state, outcome = machine.step(state, advance(1, "installed"), 0.0)
    assert isinstance(outcome, machine.Done) and state.installed == {key(1): A1}
    assert again[0].id in state.rounds  # rank 0 still needs it
    for event in (advance(0, "installed", again[0].id), advance(1, "installed", again[0].id)):
        state, outcome = machine.step(state, event, 0.0)
    assert state.closed[again[0].id].state == "committed" and state.rounds == {}


def test_a_round_that_nobody_needs_any_more_is_withdrawn() -> None:
    state = run(*BEGUN, fail(0), advance(1, "installed"), advance(0, "installed"))
    assert first(state).state == "committed" and state.rounds == {}
    assert [r.state for r in state.closed.values()] == ["committed", "superseded"]


def test_every_phase_may_be_said_again_and_late() -> None:
    story = [*BEGUN, *PREPARED, advance(0, "installed"), advance(1, "installed")]
    expected = run(*story)
    for i, j in itertools.product(range(len(story)), range(len(story) + 1)):
        if j > i:
            state = run(*story[:j], story[i], *story[j:])  # event i a second time, at place j
            assert state == expected, (story[i], j)
    everything = run(*story, *reversed(story), *story)
    assert everything == expected


def test_phases_that_overtake_each_other_end_the_same() -> None:
    expected = run(*BEGUN, *PREPARED, advance(0, "installed"), advance(1, "installed"))
    swapped = run(
        advance(0, "prepared"), advance(0, "begun"), advance(1, "installed"), advance(0, "installed")
    )
    assert swapped.installed == expected.installed
    assert first(swapped).state == first(expected).state == "committed"


def test_a_late_word_of_an_older_round_does_not_bring_its_version_back() -> None:
    story = [*PREPARED, advance(0, "installed"), advance(1, "installed")]
    state = run(*story, machine.Announce(PUB, "i", "policy", A2, 8, 0.0))
    for rank in (0, 1):
        state, _ = machine.step(state, advance(rank, "installed", "e-2"), 0.0)
    assert state.installed == {key(0): A2, key(1): A2}
    again, outcome = machine.step(state, advance(0, "installed"), 0.0)
    assert isinstance(outcome, machine.Done) and again.installed == state.installed
    assert again.rounds == {}


def test_an_earlier_word_of_a_process_about_itself_renews_its_lease_only() -> None:
    def told(number: int, info: Any, installed: Version | None) -> machine.Register:
        return machine.Register(key(0), 2, "i", MODEL | info, TTL_S, installed, number)

    state = run(told(2, {"want": None}, A1))
    late, outcome = machine.step(state, told(1, {"want": {"lineage": "a", "number": 1}}, None), 3.0)
    assert isinstance(outcome, machine.Done)
    assert late.members[key(0)].info == {**MODEL, "want": None} and late.installed == {key(0): A1}
    assert late.members[key(0)].expires == 3.0 + TTL_S
    again, _ = machine.step(late, machine.Register(key(0), 2, "j", MODEL, TTL_S, None, 1), 3.0)
    assert again.members[key(0)].incarnation == "j" and again.installed == {}


def test_a_word_of_another_process_is_no_word_of_this_one() -> None:
    state = run(*PREPARED, join(0, "j"))
    _, outcome = machine.step(state, advance(0, "installed"), 0.0)
    assert isinstance(outcome, machine.Refused) and outcome.code == "replaced"
    late = machine.Advance(key(0), "j", "e-1", "installed", 5.0)
    _, outcome = machine.step(state, late, 0.0)
    assert isinstance(outcome, machine.Refused) and outcome.code == "round_over"


def test_a_refused_event_changes_nothing() -> None:
    state = run(*BEGUN)
    for event in (
        advance(0, "begun", "e-9"),
        machine.Advance(MemberKey("subscriber", "y", 0), "i", "e-1", "begun"),
        machine.Heartbeat(PUB, "other"),
        machine.Pin("policy", A2, "x"),
        machine.Advance(PUB, "i", "e-1", "begun"),
    ):
        after, outcome = machine.step(state, event, 0.0)
        assert isinstance(outcome, machine.Refused) and after == state


def test_the_end_of_a_lease_is_an_outcome_within_the_lease() -> None:
    state = run(*PREPARED)
    for rank in (0, 1):
        state, _ = machine.step(state, machine.Heartbeat(key(rank), "i"), 5.0)
    state, _ = machine.step(state, machine.Heartbeat(key(1), "i"), 12.0)
    state, outcome = machine.step(state, machine.Tick(), 15.0)
    assert isinstance(outcome, machine.Done)
    assert (first(state).state, first(state).repair) == ("unknown", "wait_lease")
    assert state.dead == {key(0): "i"}
    assert any("lease ran out" in line for line in outcome.log)
    back, _ = machine.step(state, join(0, installed=A1), 16.0)
    assert back.dead == {} and back.installed == {key(0): A1}
    done, _ = machine.step(back, advance(1, "installed"), 16.0)
    assert first(done).state == "committed" and done.rounds == {}
