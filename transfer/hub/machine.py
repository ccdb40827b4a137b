"""The hub as a state machine: ``step(state, event, now) -> (state, outcome)`` and ``answer(state, query)``.

No I/O, no clock, no randomness. Events change the state; queries are predicates that a long poll asks again
after every change. After each event ``_settle`` brings the rounds up to date: it expires leases, ends rounds
whose members are gone, and offers the newest version to every engine that is whole and idle.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from jaxrl_sync.transfer.hub.state import (
    Announced,
    HubState,
    Member,
    MemberKey,
    RankState,
    Round,
    RoundState,
    version_json,
)
from jaxrl_sync.transfer.version import Version

KEPT_ANNOUNCED = 8
KEPT_CLOSED = 256


@dataclasses.dataclass(frozen=True)
class Register:
    """A process joins, or tells new ``info`` (same incarnation). Another incarnation replaces the old one."""

    key: MemberKey
    size: int
    incarnation: str
    info: dict[str, Any]
    ttl_s: float
    installed: Version | None = None


@dataclasses.dataclass(frozen=True)
class Heartbeat:
    """A lease is renewed."""

    key: MemberKey
    incarnation: str


@dataclasses.dataclass(frozen=True)
class Leave:
    """A process goes in order."""

    key: MemberKey
    incarnation: str


@dataclasses.dataclass(frozen=True)
class Announce:
    """A publisher rank holds ``version`` ready; it is published once every rank of its world said so."""

    key: MemberKey
    incarnation: str
    model: str
    version: Version
    nbytes: int
    at: float


@dataclasses.dataclass(frozen=True)
class Advance:
    """A subscriber rank reports progress of a round: begun, prepared or installed."""

    key: MemberKey
    incarnation: str
    round: str
    to: RankState
    timeout_s: float = 60.0


@dataclasses.dataclass(frozen=True)
class Fail:
    """A subscriber rank gives a round up."""

    key: MemberKey
    incarnation: str
    round: str
    reason: str


@dataclasses.dataclass(frozen=True)
class Tick:
    """Time passed."""


Event = Register | Heartbeat | Leave | Announce | Advance | Fail | Tick


@dataclasses.dataclass(frozen=True)
class Done:
    """The event was taken; ``log`` lines are for the operator."""

    log: tuple[str, ...] = ()
    reply: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Refused:
    """The event was not taken: a code for programs and a message for people."""

    code: str
    message: str


def step(state: HubState, event: Event, now: float) -> tuple[HubState, Done | Refused]:
    """Apply one event. The state returned is settled; a refused event changes nothing but the settling."""
    before = state
    state = _expire(state, now)
    state, outcome = _apply(state, event, now)
    state, log = _settle(state, now)
    if isinstance(outcome, Done):
        gone = tuple(
            f"{key} is gone: its lease ran out" for key in before.members if _expired(before, key, now)
        )
        outcome = dataclasses.replace(outcome, log=gone + outcome.log + log)
    return state, outcome


def _expired(state: HubState, key: MemberKey, now: float) -> bool:
    return state.members[key].expires <= now


def _expire(state: HubState, now: float) -> HubState:
    if not any(m.expires <= now for m in state.members.values()):
        return state
    members = {k: m for k, m in state.members.items() if m.expires > now}
    return dataclasses.replace(state, members=members)


def _apply(state: HubState, event: Event, now: float) -> tuple[HubState, Done | Refused]:
    match event:
        case Tick():
            return state, Done()
        case Register():
            return _register(state, event, now)
        case Heartbeat() | Leave() | Announce() | Advance() | Fail():
            member = state.members.get(event.key)
            if member is None:
                return state, Refused("unknown_member", f"{event.key} isn't registered here")
            if member.incarnation != event.incarnation:
                return state, Refused("replaced", f"{event.key} was replaced by another process")
    match event:
        case Heartbeat():
            fresh = dataclasses.replace(member, expires=now + member.ttl_s)
            return dataclasses.replace(state, members={**state.members, event.key: fresh}), Done()
        case Leave():
            members = {k: m for k, m in state.members.items() if k != event.key}
            return dataclasses.replace(state, members=members), Done((f"{event.key} left",))
        case Announce():
            return _announce(state, event, member)
        case Advance():
            return _advance(state, event, now)
        case Fail():
            return _fail(state, event)


def _register(state: HubState, event: Register, now: float) -> tuple[HubState, Done | Refused]:
    old = state.members.get(event.key)
    member = Member(event.key, event.size, event.incarnation, event.info, event.ttl_s, now + event.ttl_s)
    installed = dict(state.installed)
    installed.pop(event.key, None)
    if event.installed is not None:
        installed[event.key] = event.installed
    elif old is not None and old.incarnation == event.incarnation and event.key in state.installed:
        installed[event.key] = state.installed[event.key]
    log: tuple[str, ...] = ()
    if old is None or old.incarnation != event.incarnation:
        log = (f"{event.key} joined" + (", replacing another process" if old else ""),)
    state = dataclasses.replace(state, members={**state.members, event.key: member}, installed=installed)
    return state, Done(log)


def _announce(state: HubState, event: Announce, member: Member) -> tuple[HubState, Done | Refused]:
    newest = state.newest.get(event.model)
    if newest is not None and newest.version.follows(event.version):
        return state, Refused(
            "regress", f"version {event.version} of {event.model} comes after {newest.version} was published"
        )
    tag = (event.model, event.version)
    old = state.announced.get(tag)
    ranks = {event.key.rank: event.incarnation}
    if old is not None and old.world == event.key.name:
        ranks = {**old.ranks, **ranks}
    entry = Announced(event.model, event.version, event.key.name, member.size, ranks, event.nbytes, event.at)
    complete = len(ranks) == member.size and state.sources(entry) is not None
    entry = dataclasses.replace(entry, complete=complete)
    announced = {k: v for k, v in state.announced.items() if k != tag} | {tag: entry}
    mine = [k for k in announced if k[0] == event.model]
    for stale in mine[:-KEPT_ANNOUNCED]:
        del announced[stale]
    state = dataclasses.replace(state, announced=announced)
    if not complete:
        return state, Done(reply={"complete": False})
    state = dataclasses.replace(state, newest={**state.newest, event.model: entry})
    log = () if newest is not None and newest.version == event.version else (f"published {event.version}",)
    return state, Done(log, {"complete": True})


def _find(state: HubState, event: Advance | Fail) -> Round | Refused:
    entry = state.rounds.get(event.round)
    if entry is not None and entry.incarnations.get(event.key.rank) == event.incarnation:
        return entry
    closed = state.closed.get(event.round)
    if closed is None:
        return Refused("unknown_round", f"round {event.round} isn't known here")
    return Refused("round_over", f"round {event.round} ({closed.version}) is {closed.state}: {closed.reason}")


def _advance(state: HubState, event: Advance, now: float) -> tuple[HubState, Done | Refused]:
    entry = _find(state, event)
    if isinstance(entry, Refused):
        closed = state.closed.get(event.round)
        if event.to == "installed" and closed is not None and closed.state == "committed":
            return state, Done(reply={"committed": True})
        return state, entry
    order: tuple[RankState, ...] = ("offered", "begun", "prepared", "installed")
    rank = event.key.rank
    if order.index(event.to) > order.index(entry.ranks[rank]):
        entry = dataclasses.replace(entry, ranks={**entry.ranks, rank: event.to})
    if event.to == "begun" and entry.deadline is None and len(entry.ranks) > 1:
        # the ranks wait for each other; an engine of one rank keeps nobody waiting but itself
        entry = dataclasses.replace(entry, deadline=now + event.timeout_s)
    if entry.all_at_least(("prepared", "installed")):
        entry = dataclasses.replace(entry, deadline=None)  # how long a swap waits is the engine's affair
    state = dataclasses.replace(state, rounds={**state.rounds, entry.id: entry})
    log: tuple[str, ...] = ()
    if event.to == "installed":
        state = dataclasses.replace(state, installed={**state.installed, event.key: entry.version})
        if entry.all_at_least(("installed",)):
            state = _close(state, entry, "committed", "every rank installed it")
            log = (f"{entry.engine} installed {entry.version}",)
    return state, Done(log, {"committed": bool(log)})


def _fail(state: HubState, event: Fail) -> tuple[HubState, Done | Refused]:
    entry = _find(state, event)
    if isinstance(entry, Refused):
        return state, Done() if entry.code == "round_over" else entry
    reason = f"rank {event.key.rank}: {event.reason}"
    state = _close(state, entry, "aborted", reason)
    return state, Done((f"{entry.engine} gave up {entry.version}: {reason}",))


def _close(state: HubState, entry: Round, to: RoundState, reason: str) -> HubState:
    rounds = {k: r for k, r in state.rounds.items() if k != entry.id}
    closed = {**state.closed, entry.id: dataclasses.replace(entry, state=to, reason=reason)}
    for old in list(closed)[:-KEPT_CLOSED]:
        del closed[old]
    return dataclasses.replace(state, rounds=rounds, closed=closed)


def _settle(state: HubState, now: float) -> tuple[HubState, tuple[str, ...]]:
    log: list[str] = []
    for entry in list(state.rounds.values()):
        reason = _broken(state, entry, now)
        if reason:
            state = _close(state, entry, "aborted", reason)
            log.append(f"{entry.engine} gave up {entry.version}: {reason}")
    for model, newest in state.newest.items():
        if state.sources(newest) is None:
            continue
        for engine, ranks in state.engine_ranks(model).items():
            state = _offer(state, newest, engine, ranks)
    return state, tuple(log)


def _broken(state: HubState, entry: Round, now: float) -> str:
    if entry.deadline is not None and entry.deadline <= now:
        waiting = sorted(r for r, s in entry.ranks.items() if s in ("offered", "begun"))
        return f"the deadline passed, ranks {waiting} were not prepared"
    for rank, incarnation in entry.incarnations.items():
        member = state.members.get(MemberKey("subscriber", entry.engine, rank))
        if member is None or member.incarnation != incarnation:
            return f"rank {rank} of the engine is gone"
    if entry.all_at_least(("prepared", "installed")):
        return ""  # the weights have arrived; the publisher may go
    for rank, incarnation in entry.sources.items():
        member = state.members.get(MemberKey("publisher", entry.world, rank))
        if member is None or member.incarnation != incarnation:
            return f"rank {rank} of publisher {entry.world} is gone"
    return ""


def _offer(state: HubState, newest: Announced, engine: str, ranks: dict[int, Member]) -> HubState:
    size = next(iter(ranks.values())).size
    if sorted(ranks) != list(range(size)) or any(m.size != size for m in ranks.values()):
        return state  # the engine isn't whole yet
    for entry in state.rounds.values():
        if entry.engine == engine and entry.model == newest.model:
            if entry.begun or entry.version == newest.version:
                return state
            state = _close(state, entry, "superseded", f"by {newest.version}")
    if all(not accepts(state.installed.get(m.key), newest.version) for m in ranks.values()):
        return state
    entry = Round(
        id=f"{state.epoch[:8]}-{state.next_round}",
        model=newest.model,
        engine=engine,
        version=newest.version,
        ranks={r: "offered" for r in ranks},
        incarnations={r: m.incarnation for r, m in ranks.items()},
        sources=dict(newest.ranks),
        world=newest.world,
    )
    rounds = {**state.rounds, entry.id: entry}
    return dataclasses.replace(state, rounds=rounds, next_round=state.next_round + 1)


def accepts(installed: Version | None, offered: Version) -> bool:
    """The lineage rule: a later number of the same lineage, or any number of another lineage (an anchor)."""
    return installed is None or installed.lineage != offered.lineage or offered.follows(installed)


def watch(state: HubState, key: MemberKey, incarnation: str) -> dict[str, Any] | Refused:
    """What a subscriber rank needs to know: the publisher ranks of its model and the round it is offered."""
    member = state.members.get(key)
    if member is None:
        return Refused("unknown_member", f"{key} isn't registered here")
    if member.incarnation != incarnation:
        return Refused("replaced", f"{key} was replaced by another process")
    model = member.info.get("model")
    publishers = [
        m.public()
        for m in state.members.values()
        if m.key.role == "publisher" and m.info.get("model") == model
    ]
    offer = None
    for entry in state.rounds.values():
        if entry.engine == key.name and entry.model == model and key.rank in entry.ranks:
            offer = {"round": entry.id, "version": version_json(entry.version), "sources": entry.world}
    return {"publishers": sorted(publishers, key=lambda p: (p["name"], p["rank"])), "offer": offer}


def round_status(state: HubState, round_id: str) -> dict[str, Any] | Refused:
    """How a round stands: {"state", "reason", "prepared": whether every rank is}."""
    entry = state.rounds.get(round_id) or state.closed.get(round_id)
    if entry is None:
        return Refused("unknown_round", f"round {round_id} isn't known here")
    prepared = entry.all_at_least(("prepared", "installed"))
    return {"state": entry.state, "reason": entry.reason, "prepared": prepared}


def newest_version(state: HubState, model: str) -> dict[str, Any] | None:
    """The newest published version of a model, or None."""
    entry = state.newest.get(model)
    if entry is None:
        return None
    return {
        "model": model,
        "version": version_json(entry.version),
        "bytes": entry.nbytes,
        "published_at": entry.at,
        "available": state.sources(entry) is not None,
    }


def status(state: HubState) -> dict[str, Any]:
    """Everything an operator wants to see, as JSON."""
    engines: dict[str, Any] = {}
    for key, member in state.members.items():
        if key.role == "subscriber":
            entry = engines.setdefault(key.name, {"size": member.size, "ranks": {}})
            entry["ranks"][str(key.rank)] = version_json(state.installed.get(key))
    return {
        "epoch": state.epoch,
        "newest": {m: newest_version(state, m) for m in state.newest},
        "engines": engines,
        "members": [m.public() for m in state.members.values()],
        "rounds": [
            {
                "id": r.id,
                "engine": r.engine,
                "version": version_json(r.version),
                "ranks": {str(k): v for k, v in r.ranks.items()},
            }
            for r in state.rounds.values()
        ],
        "closed": [
            {
                "id": r.id,
                "engine": r.engine,
                "version": version_json(r.version),
                "state": r.state,
                "why": r.reason,
            }
            for r in list(state.closed.values())[-32:]
        ],
    }
