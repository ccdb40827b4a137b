"""The subscriber's and the ticket's decisions as pure functions, and the hub's on random schedules."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.transfer import receiving
from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.state import HubState, MemberKey
from jaxrl_sync.transfer.outcome import RankOutcome, Ticket, conclude, open_ranks, settle
from jaxrl_sync.transfer.receiving import Offer, ReceiverState
from jaxrl_sync.transfer.version import Version

A1, A2, B0 = (
    Offer(f"e-{i}", v, "trainer") for i, v in enumerate([Version("a", 1), Version("a", 2), Version("b", 0)])
)


def installed(offer: Offer, slots: int = 2) -> ReceiverState:
    state = receiving.begin(receiving.see(ReceiverState(slots), offer), offer)
    return receiving.swap(receiving.prepared(state), offer)


def test_two_slots_take_turns() -> None:
    state = installed(A1)
    assert (state.serving, state.installed) == (0, Version("a", 1))
    state = receiving.begin(receiving.see(state, A2), A2)
    assert state.filling is not None and state.filling.slot == 1
    state = receiving.swap(receiving.prepared(state), A2)
    assert (state.serving, state.free) == (1, [0])


@pytest.mark.invariant(8)
def test_older_numbers_are_ignored_and_lineages_are_anchors() -> None:
    state = installed(A2)
    assert receiving.wanted(receiving.see(state, A1)) is None
    assert receiving.wanted(receiving.see(state, B0)) == B0


@pytest.mark.invariant(32)
def test_a_failed_round_leaves_the_serving_version_and_quarantines_when_unconfirmed() -> None:
    state = receiving.begin(receiving.see(installed(A1), A2), A2)
    confirmed = receiving.fail(state, unconfirmed=False)
    assert (confirmed.serving, confirmed.installed, confirmed.free) == (0, Version("a", 1), [1])
    assert receiving.wanted(confirmed) is None  # not the same round again
    doubtful = receiving.fail(state, unconfirmed=True)
    assert doubtful.free == [] and doubtful.quarantined == {1}
    with pytest.raises(TransferError, match="1 quarantined"):
        receiving.begin(doubtful, dataclasses.replace(A2, round="e-9"))
    assert receiving.released(doubtful, 1).free == [1]


def test_only_what_is_prepared_is_swapped_in() -> None:
    state = receiving.begin(ReceiverState(2), A1)
    with pytest.raises(TransferError, match="isn't prepared"):
        receiving.swap(state, A1)
    with pytest.raises(TransferError, match="being received"):
        receiving.begin(state, A2)
    state = receiving.prepared(state)
    with pytest.raises(TransferError, match="isn't prepared"):
        receiving.swap(state, A2)


def test_the_installed_version_moves_nothing() -> None:
    again = dataclasses.replace(A1, round="e-7")
    state = receiving.begin(receiving.see(installed(A1), again), again)
    assert state.filling is not None and state.filling.slot is None
    state = receiving.swap(receiving.prepared(state), again)
    assert (state.serving, state.filling) == (0, None)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([], "committed"),
        (["installed", "installed"], "committed"),
        (["installed", "failed"], "partially_committed"),
        (["installed", "unknown"], "partially_committed"),
        (["unknown", "failed"], "unknown"),
        (["superseded", "superseded"], "superseded"),
        (["aborted", "superseded"], "aborted"),
        (["failed", "aborted"], "failed"),
    ],
)
def test_outcome_of_a_publish(states: list[str], expected: str) -> None:
    ledger = {(f"e{i}", 0): RankOutcome(s, seconds={"wire": float(i)}) for i, s in enumerate(states)}  # type: ignore[arg-type]
    outcome = conclude(Version("a", 1), ledger, {"export": 0.5})
    assert outcome.state == expected
    assert outcome.seconds["export"] == 0.5


def test_an_engine_counts_only_when_all_its_ranks_installed() -> None:
    ledger = {("e", 0): RankOutcome("installed"), ("e", 1): RankOutcome("failed")}
    assert conclude(Version("a", 1), ledger, {}).state == "partially_committed"


def test_installed_is_final_and_a_failed_rank_may_come_back() -> None:
    key = ("e", 0)
    ledger = settle({key: RankOutcome()}, key, RankOutcome("failed"))
    ledger = settle(ledger, key, RankOutcome("superseded"))
    assert ledger[key].state == "failed"
    ledger = settle(ledger, key, RankOutcome("installed"))
    ledger = settle(ledger, key, RankOutcome("failed"))
    assert ledger[key].state == "installed" and open_ranks(ledger) == []


@pytest.mark.invariant(18)
def test_a_ticket_names_who_is_missing() -> None:
    ticket = Ticket(Version("a", 3), [("e", 0), ("f", 1)], 0.0)
    ticket.settle(("e", 0), RankOutcome("installed"))
    with pytest.raises(DeadlineError, match=r"a:3 is still open after 0\.05 s at f\.1$"):
        ticket.wait(0.05)
    ticket.settle(("f", 1), RankOutcome("superseded"))
    assert ticket.done and ticket.wait(1).state == "partially_committed"


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["publish", "join", "die", "begin", "prepare", "install", "fail", "tick", "resume"]),
        st.integers(0, 1),
        st.integers(0, 1),
    ),
    max_size=60,
)


@given(EVENTS)
@settings(max_examples=200, deadline=None)
@pytest.mark.invariant(7)
def test_random_schedules_never_split_an_engine_or_go_back(events: list[tuple[str, int, int]]) -> None:
    """Two engines of two ranks, one publisher, in any order of events, with incarnations that come and go."""
    state, now, number, lineage = HubState("e"), 0.0, 0, 0
    lives: dict[MemberKey, int] = {}
    publisher = MemberKey("publisher", "trainer", 0)
    held: dict[MemberKey, Version] = {}

    def apply(event: machine.Event) -> bool:
        nonlocal state
        state, outcome = machine.step(state, event, now)
        return isinstance(outcome, machine.Done)

    def join(key: MemberKey, size: int) -> None:
        lives[key] = lives.get(key, 0) + 1
        held.pop(key, None)
        assert apply(machine.Register(key, size, str(lives[key]), {"model": "policy"}, 5.0))

    join(publisher, 1)
    for kind, engine, rank in events:
        key = MemberKey("subscriber", f"x{engine}", rank)
        life = str(lives.get(key, 0))
        now += 0.3
        mine = next((r for r in state.rounds.values() if r.engine == key.name), None)
        round_id = mine.id if mine else "none"
        match kind:
            case "publish" | "resume":
                lineage += kind == "resume"
                number = 0 if kind == "resume" else number + 1
                apply(machine.Register(publisher, 1, str(lives[publisher]), {"model": "policy"}, 5.0))
                version = Version(f"l{lineage}", number)
                apply(machine.Announce(publisher, str(lives[publisher]), "policy", version, 1, now))
            case "join":
                join(key, 2)
            case "die":
                apply(machine.Leave(key, life))
            case "fail":
                apply(machine.Fail(key, life, round_id, "x"))
            case "tick":
                now += 2.0
                apply(machine.Tick())
            case _:
                to = {"begin": "begun", "prepare": "prepared", "install": "installed"}[kind]
                if to == "installed" and (mine is None or not mine.all_at_least(("prepared", "installed"))):
                    continue  # a subscriber swaps only what the whole engine has prepared
                taken = apply(machine.Advance(key, life, round_id, to, 1.5))  # type: ignore[arg-type]
                if taken and to == "installed" and mine is not None:
                    before = held.get(key)
                    assert before is None or machine.accepts(before, mine.version) or before == mine.version
                    held[key] = mine.version
        for entry in state.rounds.values():
            assert len([r for r in state.rounds.values() if r.engine == entry.engine]) == 1
            assert set(entry.ranks) == {0, 1}
        newest = state.newest.get("policy")
        assert newest is None or newest.version.lineage == f"l{lineage}"
