"""How rounds end, what mends each end, and the facts that come afterwards. Pure functions.

| outcome | what is known | repair |
| --- | --- | --- |
| committed | every rank installed the version | none |
| aborted | a rank gave up or the deadline passed; nobody installed it | reoffer; anchor for a new process |
| failed | the source died or its own round ended | reoffer, from another source where there is one |
| partially_committed | some ranks installed it, others will not | overwrite: all ranks take it again |
| unknown | all were prepared, then one is silent: it may have swapped | wait_lease: it tells when back |
| superseded | a later version took its place before anybody began | none |

A rank's word that it has installed a version is a fact whatever the round's state: it corrects the outcome.
An engine that writes in place (one slot) is repaired by overwrite after any failure.
"""

from __future__ import annotations

import dataclasses

from jaxrl_sync.transfer.hub import fleet
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Repair, Round, RoundState, Tag
from jaxrl_sync.transfer.version import Version

KEPT_CLOSED = 256
RESOLVED_BACK = 32
"""So many of the last rounds can be resolved by what a rank says when it registers again."""


def close(state: HubState, entry: Round, to: RoundState, reason: str, repair: Repair) -> HubState:
    """End a round, and with it those that read from what it was bringing (they are offered again)."""
    state = _shut(state, entry, to, reason, repair)
    if to in ("committed", "superseded"):
        return state
    waiting = [entry]
    while waiting:
        ended = waiting.pop()
        source = fleet.Source("relay", ended.engine)
        for reader in fleet.readers(state, source, Tag(ended.model, ended.version)):
            if _still_serves(state, ended):
                continue
            why = f"its source {ended.engine} no longer receives {ended.version}: {reason}"
            state = _shut(state, reader, "failed", why, "reoffer")
            waiting.append(reader)
    return state


def _still_serves(state: HubState, ended: Round) -> bool:
    keys = [MemberKey("subscriber", ended.engine, rank) for rank in ended.ranks]
    return all(state.installed.get(key) == ended.version for key in keys)


def _shut(state: HubState, entry: Round, to: RoundState, reason: str, repair: Repair) -> HubState:
    if to in ("aborted", "failed") and repair == "reoffer" and entry.begun and _in_place(state, entry):
        repair = "overwrite"
    rounds = {k: r for k, r in state.rounds.items() if k != entry.id}
    over = dataclasses.replace(entry, state=to, reason=reason, repair=repair, deadline=None)
    closed = {**state.closed, entry.id: over}
    for old in list(closed)[:-KEPT_CLOSED]:
        del closed[old]
    return dataclasses.replace(state, rounds=rounds, closed=closed)


def _in_place(state: HubState, entry: Round) -> bool:
    members = [state.members.get(MemberKey("subscriber", entry.engine, rank)) for rank in entry.ranks]
    return any(m is not None and m.slots == 1 for m in members)


def departed(state: HubState, entry: Round, reason: str) -> HubState:
    """A rank left a round of which every rank was prepared: the others may have swapped already."""
    if len(entry.ranks) == 1:
        return close(state, entry, "aborted", reason, "reoffer")
    to, repair = judge(entry)
    return close(state, entry, to, reason, repair)


def judge(entry: Round) -> tuple[RoundState, Repair]:
    """The outcome that the ranks' states amount to, for a round that was decided and isn't wholly over."""
    states = set(entry.ranks.values())
    if states == {"installed"}:
        return "committed", "none"
    if "installed" in states:
        return "partially_committed", "overwrite"
    if states == {"gave_up"}:
        return "aborted", "reoffer"
    return ("unknown", "wait_lease") if entry.decided else ("aborted", "reoffer")


def installed(state: HubState, key: MemberKey, entry: Round) -> HubState:
    """A rank serves what a round, open or over, brought it. Repeated and late words change nothing."""
    if entry.ranks[key.rank] == "installed" or state.installed_in.get(key, 0) > entry.number:
        return state
    entry = dataclasses.replace(entry, ranks={**entry.ranks, key.rank: "installed"})
    relay = MemberKey("relay", key.name, key.rank)  # what it withdrew was another copy
    state = dataclasses.replace(
        state,
        installed={**state.installed, key: entry.version},
        installed_in={**state.installed_in, key: entry.number},
        holdings={k: h for k, h in state.holdings.items() if k != relay},
    )
    if entry.state != "open":
        return _amend(state, entry)
    if entry.all_at_least(("installed",)):
        return close(state, entry, "committed", "every rank installed it", "none")
    return dataclasses.replace(state, rounds={**state.rounds, entry.id: entry})


def gave_up(state: HubState, key: MemberKey, entry: Round) -> HubState:
    """A rank of a round that is over won't install it."""
    if entry.ranks[key.rank] in ("installed", "gave_up"):
        return state
    entry = dataclasses.replace(entry, ranks={**entry.ranks, key.rank: "gave_up"})
    if entry.state == "unknown":
        return _amend(state, entry)
    return dataclasses.replace(state, closed={**state.closed, entry.id: entry})


def _amend(state: HubState, entry: Round) -> HubState:
    to, repair = judge(entry)
    reason = entry.reason
    if to != entry.state:
        reason = f"{reason}; then {'every rank' if to == 'committed' else 'others'} said how it ended"
    entry = dataclasses.replace(entry, state=to, repair=repair, reason=reason)
    return dataclasses.replace(state, closed={**state.closed, entry.id: entry})


def resolve(state: HubState, key: MemberKey, incarnation: str, version: Version) -> HubState:
    """A rank is back and says what it serves: that may be how an unknown round ended."""
    for entry in list(state.closed.values())[-RESOLVED_BACK:]:
        same = key.role == "subscriber" and entry.engine == key.name
        if not same or entry.incarnations.get(key.rank) != incarnation or entry.state == "superseded":
            continue
        if entry.version == version and entry.ranks[key.rank] == "prepared":
            state = installed(state, key, entry)
    return state
