"""The hub as a state machine: ``step(state, event, now) -> (state, outcome)``.

No I/O, no clock, no randomness. Events (``hub.events``) change the state; queries (``hub.views``) are
predicates that a long poll asks again after every change. After each event `_settle` brings the rounds up to
date: it expires leases, ends rounds whose members are gone, and offers a version to every engine that is
whole, idle and in need of one. Who holds what and who reads from whom is decided in ``hub.fleet``, how rounds
end in ``hub.outcomes``.
"""

from __future__ import annotations

import dataclasses

from jaxrl_sync.transfer.hub import fleet, outcomes, views
from jaxrl_sync.transfer.hub.events import (
    Advance,
    Announce,
    Done,
    Event,
    Fail,
    Heartbeat,
    Held,
    Hold,
    Leave,
    Pin,
    Refused,
    Register,
    Tick,
    Unpin,
    Unpublish,
)
from jaxrl_sync.transfer.hub.state import (
    Holding,
    HubState,
    Member,
    MemberKey,
    Published,
    RankState,
    Repair,
    Round,
    RoundState,
    Tag,
    version_json,
    whole,
)
from jaxrl_sync.transfer.hub.views import (
    accepts,
    newest_version,
    offer_json,
    round_status,
    status,
    unknown,
    watch,
)

__all__ = [
    "Advance",
    "Announce",
    "Done",
    "Event",
    "Fail",
    "Heartbeat",
    "Hold",
    "Leave",
    "Pin",
    "Refused",
    "Register",
    "Tick",
    "Unpin",
    "Unpublish",
    "accepts",
    "newest_version",
    "round_status",
    "status",
    "step",
    "watch",
]

MAX_PINS = 4096
"""Versions that may be pinned, and owners that one version's pin may have."""
KEPT_HELD = 8
"""Versions that a publisher is believed to hold which never says what it holds."""
KEPT_DEAD = 64
KEPT_REPLACED = 8
"""Incarnations of one member that are known to be replaced: one that stood still may come back late."""
_ORDER: tuple[RankState, ...] = ("offered", "begun", "prepared", "installed")


def step(state: HubState, event: Event, now: float) -> tuple[HubState, Done | Refused]:
    """Apply one event. The state returned is settled; a refused event changes nothing but the settling."""
    state, gone = _expire(state, now)
    if gone:  # no event meets a round whose members have just left the directory
        state, ended = _end_broken(state, now)
        gone += ended
    state, outcome = _apply(state, event, now)
    if isinstance(event, Heartbeat) and not gone:
        return state, outcome  # by far the most frequent one; deadlines are left to the next tick
    state, log = _settle(state, now)
    if isinstance(outcome, Done):
        outcome = dataclasses.replace(outcome, log=gone + outcome.log + log)
    return state, outcome


def _expire(state: HubState, now: float) -> tuple[HubState, tuple[str, ...]]:
    gone = [m for m in state.members.values() if m.expires <= now]
    if not gone:
        return state, ()
    dead = {**state.dead, **{m.key: m.incarnation for m in gone}}
    state = _forgotten(_without(state, [m.key for m in gone]), list(dead)[:-KEPT_DEAD])
    state = dataclasses.replace(state, dead=dict(list(dead.items())[-KEPT_DEAD:]))
    return state, tuple(f"{m.key} is gone: its lease ran out" for m in gone)


def _without(state: HubState, keys: list[MemberKey]) -> HubState:
    """The state without some members and what they held."""
    return dataclasses.replace(
        state,
        members={k: m for k, m in state.members.items() if k not in keys},
        holdings={k: h for k, h in state.holdings.items() if k not in keys},
        installed={k: v for k, v in state.installed.items() if k not in keys},
    )


def _forgotten(state: HubState, keys: list[MemberKey]) -> HubState:
    """The state without what guards against late words of some processes: none can come any more."""
    counted = {k: n for k, n in state.installed_in.items() if k not in keys}
    told = {k: n for k, n in state.told.items() if k not in keys}
    return dataclasses.replace(state, installed_in=counted, told=told)


def _apply(state: HubState, event: Event, now: float) -> tuple[HubState, Done | Refused]:
    match event:
        case Tick():
            return state, Done()
        case Register():
            return _register(state, event, now)
        case Pin():
            return _pin(state, event)
        case Unpin():
            return _unpin(state, event)
    refused = unknown(state, event.key, event.incarnation)
    if refused is not None:
        return state, refused
    member = state.members[event.key]
    match event:
        case Heartbeat():
            fresh = dataclasses.replace(member, expires=now + member.ttl_s)
            return dataclasses.replace(state, members={**state.members, event.key: fresh}), Done()
        case Leave():
            return _forgotten(_without(state, [event.key]), [event.key]), Done((f"{event.key} left",))
        case Announce():
            return _announce(state, event)
        case Hold():
            return _hold(state, event.key, event.model, event.held, event.sequence), Done()
        case Unpublish():
            return _unpublish(state, event)
        case Advance():
            return _advance(state, event, now)
        case Fail():
            return _fail(state, event)


def _register(state: HubState, event: Register, now: float) -> tuple[HubState, Done | Refused]:
    key, old = event.key, state.members.get(event.key)
    if event.incarnation in state.replaced.get(key, ()):
        return state, Refused("replaced", f"{key} was replaced by another process")
    expires, sequence = now + event.ttl_s, event.sequence
    member = Member(key, event.size, event.incarnation, event.info, event.ttl_s, expires, sequence)
    same = old is not None and old.incarnation == event.incarnation
    if old is not None and same and 0 < sequence < old.sequence:
        member = dataclasses.replace(old, expires=max(old.expires, expires))
        return dataclasses.replace(state, members={**state.members, key: member}), Done()
    log: tuple[str, ...] = ()
    if not same:
        log = (f"{key} joined" + (", replacing another process" if old else ""),)
        before = old.incarnation if old else state.dead.get(key, event.incarnation)
        state = _without(state, [key])
        if before != event.incarnation:
            state = _replaced(state, key, before)
        if state.dead.get(key) != event.incarnation:  # another process: nothing late of it can come
            state = _forgotten(state, [key])
        state = dataclasses.replace(state, dead={k: i for k, i in state.dead.items() if k != key})
    state = dataclasses.replace(state, members={**state.members, key: member})
    if event.installed is not None:
        state = dataclasses.replace(state, installed={**state.installed, key: event.installed})
        state = outcomes.resolve(state, key, event.incarnation, event.installed)
    return state, Done(log, {"joined": not same})


def _replaced(state: HubState, key: MemberKey, incarnation: str) -> HubState:
    """Note that a process was replaced: it may hear late that its lease ran out, and register again."""
    known = (*state.replaced.get(key, ()), incarnation)[-KEPT_REPLACED:]
    others = {k: r for k, r in state.replaced.items() if k != key}
    return dataclasses.replace(state, replaced={**dict(list(others.items())[-KEPT_DEAD:]), key: known})


# What is published, and who holds it.


def _announce(state: HubState, event: Announce) -> tuple[HubState, Done | Refused]:
    newest, tag = state.newest.get(event.model), Tag(event.model, event.version)
    if newest is not None and newest.version.follows(event.version):
        return state, Refused(
            "regress", f"version {event.version} of {event.model} comes after {newest.version} was published"
        )
    if event.fanout is not None:
        state = dataclasses.replace(state, fanouts={**state.fanouts, event.model: event.fanout})
    held = event.held
    if held is None:
        before = [t.version for t in state.holdings.get(event.key, {}) if t.model == event.model]
        held = dict.fromkeys([*before, event.version][-KEPT_HELD:], Holding())
    elif event.version not in held:
        held = {**held, event.version: Holding()}
    state = _hold(state, event.key, event.model, held, event.sequence)
    pinned = {"pinned": [version_json(v) for v in views.pinned(state, event.model)]}
    world = fleet.Source("publisher", event.key.name)
    if all(h.source != world for h in fleet.holders(state, tag)):
        return state, Done(reply={"complete": False, **pinned})
    again = newest is not None and newest.version == event.version and newest.told
    entry = Published(event.model, event.version, world.name, event.nbytes, event.at)
    state = dataclasses.replace(state, newest={**state.newest, event.model: entry})
    return state, Done(() if again else (f"published {event.version}",), {"complete": True, **pinned})


def _hold(state: HubState, key: MemberKey, model: str, held: Held, sequence: int) -> HubState:
    """Note what a publisher rank holds, unless it has said something later already."""
    if 0 < sequence <= state.told.get(key, 0):
        return state
    old = state.holdings.get(key, {})
    fresh = {t: h for t, h in old.items() if t.model != model}
    for version, holding in held.items():
        tag = Tag(model, version)
        withdrawn = tag in old and old[tag].state == "draining"
        fresh[tag] = old[tag] if withdrawn else holding
    told = {**state.told, key: sequence} if sequence else state.told
    return dataclasses.replace(state, holdings={**state.holdings, key: fresh}, told=told)


def _unpublish(state: HubState, event: Unpublish) -> tuple[HubState, Done | Refused]:
    """No new readers from here on; the reply says who still reads. A needed last copy stays."""
    key, tag = event.key, Tag(event.model, event.version)
    source = fleet.Source(key.role, key.name)
    last = fleet.is_last_reliable(state, tag, key)
    log: tuple[str, ...] = ()
    if not last or event.force:
        held = {**state.holdings.get(key, {}), tag: Holding("draining")}
        log = (f"{key} withdraws {event.version}, the last reliable copy",) if last else ()
        state = dataclasses.replace(state, holdings={**state.holdings, key: held})
    names = sorted({r.engine for r in fleet.readers(state, source, tag)})
    drained = not names and (event.force or not last)
    return state, Done(log, {"drained": drained, "readers": names, "last_reliable": last})


def _pin(state: HubState, event: Pin) -> tuple[HubState, Done | Refused]:
    tag = Tag(event.model, event.version)
    if not event.again and not any(h.complete for h in fleet.holders(state, tag)):
        return state, Refused("unavailable", f"nobody holds version {event.version} of {event.model}")
    owners = {**state.pins.get(tag, {}), event.by: event.owner}
    pins = {**state.pins, tag: owners}
    if max(len(pins), len(owners)) > MAX_PINS:
        return state, Refused("too_many", f"{MAX_PINS} pins are held, no more are taken")
    return dataclasses.replace(state, pins=pins), Done((f"{event.by} pins {event.version}",))


def _unpin(state: HubState, event: Unpin) -> tuple[HubState, Done | Refused]:
    tag = Tag(event.model, event.version)
    left = {by: owner for by, owner in state.pins.get(tag, {}).items() if by != event.by}
    pins = {k: v for k, v in state.pins.items() if k != tag} | ({tag: left} if left else {})
    return dataclasses.replace(state, pins=pins), Done()


# Rounds.


def _find(state: HubState, event: Advance | Fail) -> Round | Refused:
    entry = state.rounds.get(event.round) or state.closed.get(event.round)
    if entry is None or entry.engine != event.key.name:
        return Refused("unknown_round", f"round {event.round} isn't known here")
    if entry.incarnations.get(event.key.rank) != event.incarnation:
        return Refused("round_over", f"round {event.round} ({entry.version}) is another process's")
    return entry


def _over(entry: Round) -> Refused:
    return Refused("round_over", f"round {entry.id} ({entry.version}) is {entry.state}: {entry.reason}")


def _advance(state: HubState, event: Advance, now: float) -> tuple[HubState, Done | Refused]:
    entry, rank = _find(state, event), event.key.rank
    if isinstance(entry, Refused):
        return state, entry
    if event.to == "installed":
        return _installed(state, event, entry)
    if entry.state != "open":
        return state, _over(entry)
    if not entry.begun:
        bound = _bind(state, entry)
        if bound is None:
            state = outcomes.close(state, entry, "failed", "nobody serves it any more", "reoffer")
            return state, _over(state.closed[entry.id])
        entry = bound
    if event.parts is not None:
        entry = dataclasses.replace(entry, parts={**entry.parts, rank: event.parts})
    if _ORDER.index(event.to) > _ORDER.index(entry.ranks[rank]):
        entry = dataclasses.replace(entry, ranks={**entry.ranks, rank: event.to})
    entry = _timed(entry, event.timeout_s, now)
    state = dataclasses.replace(state, rounds={**state.rounds, entry.id: entry})
    return _voided(state, event, entry), Done(reply={"committed": False, "offer": offer_json(state, entry)})


def _bind(state: HubState, entry: Round) -> Round | None:
    """The round with the source that it will read from, as things stand when its first rank begins."""
    ranks = state.engine_ranks(entry.model).get(entry.engine, {})
    holder = fleet.choose(state, Tag(entry.model, entry.version), entry.engine, ranks)
    if holder is None:
        return None
    sources = {rank: m.incarnation for rank, m in holder.members.items()}
    return dataclasses.replace(entry, role=holder.source.role, world=holder.source.name, sources=sources)


def _timed(entry: Round, timeout_s: float, now: float) -> Round:
    """The ranks wait for each other, and a relay keeps a slot for its reader: until a deadline.

    An engine of one rank that reads from the publisher keeps nobody waiting but itself; and once all are
    prepared, how long a swap waits is the engine's affair.
    """
    if entry.all_at_least(("prepared", "installed")):
        return dataclasses.replace(entry, deadline=None, decided=True)
    if entry.deadline is None and (len(entry.ranks) > 1 or entry.role == "relay"):
        return dataclasses.replace(entry, deadline=now + timeout_s)
    return entry


def _voided(state: HubState, event: Advance, entry: Round) -> HubState:
    """An engine with one slot writes over what it serves: from now on it has nothing."""
    member = state.members[event.key]
    if member.slots > 1 or state.installed.get(event.key) in (None, entry.version):
        return state
    kept = {k: v for k, v in state.installed.items() if k != event.key}
    return dataclasses.replace(state, installed=kept)


def _installed(state: HubState, event: Advance, entry: Round) -> tuple[HubState, Done | Refused]:
    before = entry.state
    state = outcomes.installed(state, event.key, entry)
    entry = state.rounds.get(entry.id) or state.closed[entry.id]
    committed = entry.state == "committed"
    log = (f"{entry.engine} installed {entry.version}",) if committed and before != "committed" else ()
    return state, Done(log, {"committed": committed})


def _fail(state: HubState, event: Fail) -> tuple[HubState, Done | Refused]:
    entry, rank = _find(state, event), event.key.rank
    if isinstance(entry, Refused):
        return state, Done() if entry.code == "round_over" else entry
    if entry.ranks[rank] == "installed":
        return state, Done()
    if entry.state != "open":
        return outcomes.gave_up(state, event.key, entry), Done()
    reason = f"rank {rank}: {event.reason}"
    decided = entry.decided
    entry = dataclasses.replace(entry, ranks={**entry.ranks, rank: "gave_up"})
    if decided:
        state = outcomes.departed(state, entry, reason)
    else:
        state = outcomes.close(state, entry, "aborted", reason, "reoffer")
    return state, Done((f"{entry.engine} gave up {entry.version}: {reason}",))


# After every event.


def _settle(state: HubState, now: float) -> tuple[HubState, tuple[str, ...]]:
    state, log = _end_broken(state, now)
    state = _release_pins(_derive(state))
    models = {m.info.get("model") for m in state.members.values() if m.key.role == "subscriber"}
    taking = {(r.model, r.engine): r for r in state.rounds.values()}
    for model in sorted(m for m in models if isinstance(m, str)):
        for engine, ranks in state.engine_ranks(model).items():
            if whole(ranks):
                state = _offer(state, model, engine, ranks, taking.get((model, engine)))
    return state, log


def _end_broken(state: HubState, now: float) -> tuple[HubState, tuple[str, ...]]:
    log: list[str] = []
    for entry in list(state.rounds.values()):
        if entry.id not in state.rounds:
            continue  # it read from one that ended before it
        found = _broken(state, entry, now)
        if found is not None:
            to, reason, repair = found
            state = outcomes.close(state, entry, to, reason, repair)
            log.append(f"{entry.engine} ended {entry.version} ({to}): {reason}")
    return state, tuple(log)


def _broken(state: HubState, entry: Round, now: float) -> tuple[RoundState, str, Repair] | None:
    if entry.deadline is not None and entry.deadline <= now:
        waiting = sorted(r for r, s in entry.ranks.items() if s in ("offered", "begun"))
        return "aborted", f"the deadline passed, ranks {waiting} were not prepared", "reoffer"
    for rank, incarnation in entry.incarnations.items():
        member = state.members.get(MemberKey("subscriber", entry.engine, rank))
        if (member is None or member.incarnation != incarnation) and entry.ranks[rank] != "installed":
            return _rank_lost(entry, rank, member is not None)
    if entry.all_at_least(("prepared", "installed")):
        return None  # the weights have arrived; the source may go
    for rank, incarnation in entry.sources.items():
        member = state.members.get(MemberKey(entry.role, entry.world, rank))
        if member is None or member.incarnation != incarnation:
            return "failed", f"rank {rank} of {entry.role} {entry.world} is gone", "reoffer"
    return None


def _rank_lost(entry: Round, rank: int, replaced: bool) -> tuple[RoundState, str, Repair]:
    reason = f"rank {rank} of the engine " + ("was replaced by another process" if replaced else "is gone")
    if not entry.decided:
        return "aborted", reason, "anchor" if replaced else "wait_lease"
    lost = dataclasses.replace(entry, ranks={**entry.ranks, rank: "gave_up"}) if replaced else entry
    to, _ = outcomes.judge(lost)
    return to, reason, "anchor" if replaced else "wait_lease"


def _derive(state: HubState) -> HubState:
    """After a restart without a publisher: what engines serve is published, if it is of one lineage.

    It never goes back: where the last engine that served it is gone, joiners wait for a later one.
    """
    for model in {m.info.get("model") for m in state.members.values() if m.key.role == "relay"}:
        known = state.newest.get(model) if isinstance(model, str) else None
        if not isinstance(model, str) or (known is not None and known.told):
            continue
        served = [v for k, v in state.installed.items() if state.members[k].info.get("model") == model]
        versions = {v for v in served if any(h.complete for h in fleet.holders(state, Tag(model, v)))}
        if len({v.lineage for v in served}) == 1 and versions:
            best = max(versions, key=lambda v: v.number)
            if known is not None and known.version.follows(best):
                continue
            entry = Published(model, best, "", 0, 0.0, told=False)
            state = dataclasses.replace(state, newest={**state.newest, model: entry})
    return state


def _release_pins(state: HubState) -> HubState:
    """Pins end with the lease of their owner."""
    ended = [
        (tag, by)
        for tag, owners in state.pins.items()
        for by, owner in owners.items()
        if owner is not None and not _lives(state, *owner)
    ]
    for tag, by in ended:
        state, _ = _unpin(state, Unpin(tag.model, tag.version, by))
    return state


def _lives(state: HubState, key: MemberKey, incarnation: str) -> bool:
    member = state.members.get(key)
    return member is not None and member.incarnation == incarnation


def _offer(
    state: HubState, model: str, engine: str, ranks: dict[int, Member], entry: Round | None
) -> HubState:
    """Offer an engine what it needs, unless the round that it is offered, or takes part in, will do."""
    newest = state.newest.get(model)
    version = fleet.wanted(ranks) or (newest.version if newest is not None else None)
    have = [state.installed.get(m.key) for m in ranks.values()]
    needed = version is not None and any(accepts(v, version) for v in have)
    if entry is not None:
        if entry.begun or (needed and entry.version == version):
            return state
        why = f"by {version}" if needed else "every rank has it"
        state = outcomes.close(state, entry, "superseded", why, "none")
    if version is None or not needed or not fleet.has_room(state, engine, ranks):
        return state
    if newest is not None and not newest.told and any(v and v.lineage != version.lineage for v in have):
        return state  # which of two lineages is the later one, engines can't tell
    return _propose(state, Tag(model, version), engine, ranks)


def _propose(state: HubState, tag: Tag, engine: str, ranks: dict[int, Member]) -> HubState:
    holder = fleet.propose(state, tag, engine, ranks)
    if holder is None:
        return state
    entry = Round(
        id=f"{state.epoch[:8]}-{state.next_round}",
        number=state.next_round,
        model=tag.model,
        engine=engine,
        version=tag.version,
        ranks=dict.fromkeys(ranks, "offered"),
        incarnations={r: m.incarnation for r, m in ranks.items()},
        sources={r: m.incarnation for r, m in holder.members.items()},
        world=holder.source.name,
        role=holder.source.role,
    )
    rounds = {**state.rounds, entry.id: entry}
    return dataclasses.replace(state, rounds=rounds, next_round=state.next_round + 1)
