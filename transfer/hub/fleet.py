"""Who holds a version, and from whom an engine takes it: pure functions over the hub's state.

A holder is a world: the publisher's ranks, or an engine whose ranks each run a relay. An engine may serve
what it has installed, and also what it is still receiving, from the moment its own round has begun (its relay
waits for the parts that a reader asks for). Where a reader reads is decided when its round begins, so that
whoever is first becomes a source for those who come later, and nobody waits for an engine that is slow to
begin.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from jaxrl_sync.transfer.hub.state import Fanout, HubState, Member, MemberKey, Round, Tag, version_of, whole
from jaxrl_sync.transfer.version import Version

FAILURES_KEPT = 64
"""So many of the last rounds are asked for sources that failed an engine."""


class Source(NamedTuple):
    """A world that can serve: role publisher or relay, and its name."""

    role: str
    name: str


@dataclasses.dataclass(frozen=True)
class Holder:
    """A world that holds a version, or (``complete`` False) receives it. ``depth``: hops to a whole copy."""

    source: Source
    members: dict[int, Member]
    complete: bool
    reliable: bool
    site: str
    depth: int
    offloaded: bool = False


def holders(state: HubState, tag: Tag) -> list[Holder]:
    """Every live world that can serve a version, publishers first."""
    found = [
        h
        for w, ranks in state.worlds("publisher", tag.model).items()
        if (h := _publisher(state, tag, w, ranks))
    ]
    engines = state.engine_ranks(tag.model)
    for name, ranks in state.worlds("relay", tag.model).items():
        holder = _relay(state, tag, name, ranks, engines.get(name))
        if holder is not None:
            found.append(holder)
    return found


def _publisher(state: HubState, tag: Tag, name: str, ranks: dict[int, Member]) -> Holder | None:
    held = [state.holdings.get(m.key, {}).get(tag) for m in ranks.values()]
    if not whole(ranks) or any(h is None or h.state == "draining" for h in held):
        return None
    offloaded = any(h is not None and h.state == "offloaded" for h in held)
    reliable = all(m.reliable for m in ranks.values())
    return Holder(Source("publisher", name), ranks, True, reliable, ranks[0].site, 0, offloaded)


def _relay(
    state: HubState, tag: Tag, name: str, ranks: dict[int, Member], engine: dict[int, Member] | None
) -> Holder | None:
    if engine is None or not whole(ranks) or not whole(engine):
        return None
    if any(tag in state.holdings.get(m.key, {}) for m in ranks.values()):
        return None  # withdrawn
    reliable = all(m.reliable for m in engine.values())
    source, site = Source("relay", name), engine[0].site
    if all(state.installed.get(m.key) == tag.version for m in engine.values()):
        return Holder(source, ranks, True, reliable, site, 0)
    own = own_round(state, tag, name)
    if own is None:
        return None
    if not own.reading:
        return Holder(source, ranks, True, reliable, site, 0)
    return Holder(source, ranks, False, reliable, site, _depth(state, own))


def own_round(state: HubState, tag: Tag, engine: str) -> Round | None:
    """The begun round in which an engine takes a version."""
    for entry in state.rounds.values():
        if (entry.engine, entry.model, entry.version) == (engine, *tag) and entry.begun:
            return entry
    return None


def _depth(state: HubState, entry: Round) -> int:
    """How many hops lie between a reader and a whole copy; cycles can't arise, but the walk is bounded."""
    depth = 1
    while entry.role == "relay" and depth <= len(state.rounds):
        above = own_round(state, Tag(entry.model, entry.version), entry.world)
        if above is None or not above.reading:
            break
        entry, depth = above, depth + 1
    return depth


def readers(state: HubState, source: Source, tag: Tag | None = None) -> list[Round]:
    """Open rounds that still read from a source, of one version or of any."""
    return [
        r
        for r in state.rounds.values()
        if r.reading and (r.role, r.world) == source and (tag is None or (r.model, r.version) == tag)
    ]


def choose(state: HubState, tag: Tag, engine: str, ranks: dict[int, Member]) -> Holder | None:
    """From whom an engine takes a version; None while nobody can serve it.

    A source that failed this engine with this version comes last, its own site first. Then, ``star``: the
    publisher while it is there; ``chain`` and ``tree``: whoever has room for another reader, nearest to a
    whole copy. Among equals the one that serves fewest, reliable ones before others. The publisher counts
    whom it has served, not only whom it serves: with relays one copy (tree: ``degree``) leaves it.
    """
    follows_relays = all("relay" in m.info for m in ranks.values())
    found = [
        h
        for h in holders(state, tag)
        if h.source.role == "publisher" or (follows_relays and h.source.name != engine)
    ]
    fanout = state.fanouts.get(tag.model, Fanout())
    failed = _failures(state, tag, engine)
    return min(found, key=lambda h: _preference(state, tag, h, ranks[0].site, fanout, failed), default=None)


def _preference(
    state: HubState, tag: Tag, holder: Holder, site: str, fanout: Fanout, failed: dict[Source, int]
) -> tuple[Any, ...]:
    load = len(readers(state, holder.source))
    publisher = holder.source.role == "publisher"
    outside = holder.site != site
    if fanout.kind == "star":
        order: tuple[Any, ...] = (not publisher, holder.depth, load)
    else:
        served = load + (_served(state, tag, holder.source) if publisher else 0)
        over = served >= fanout.readers
        order = (over, over and publisher, holder.depth, load, publisher)
    return (failed.get(holder.source, 0), outside, *order, not holder.reliable, holder.source)


def _served(state: HubState, tag: Tag, source: Source) -> int:
    """Rounds of a version that have finished reading from a source."""
    over = [r for r in state.closed.values() if r.state in ("committed", "partially_committed", "unknown")]
    rounds = [r for r in state.rounds.values() if r.begun and not r.reading] + over
    return sum((r.role, r.world) == source and (r.model, r.version) == tag for r in rounds)


def _failures(state: HubState, tag: Tag, engine: str) -> dict[Source, int]:
    """How often each source failed an engine with a version, lately."""
    failed: dict[Source, int] = {}
    for entry in list(state.closed.values())[-FAILURES_KEPT:]:
        about = (entry.engine, entry.model, entry.version) == (engine, *tag)
        if about and entry.begun and entry.state in ("failed", "aborted"):
            source = Source(entry.role, entry.world)
            failed[source] = failed.get(source, 0) + 1
    return failed


def has_room(state: HubState, engine: str, ranks: dict[int, Member]) -> bool:
    """Whether a newer version overwrites nothing that others still read from this engine."""
    slots = min(m.slots for m in ranks.values())
    read = {r.version for r in readers(state, Source("relay", engine))}
    if slots == 1:
        return not read
    serving = {state.installed.get(m.key) for m in ranks.values()}
    return 1 + len(read - serving) < slots


def wanted(ranks: dict[int, Member]) -> Version | None:
    """The version that an engine asks for (evaluation), where all its ranks say the same."""
    first = ranks[0].info.get("want")
    if first is None or any(m.info.get("want") != first for m in ranks.values()):
        return None
    try:
        return version_of(first)
    except ValueError:
        return None


def is_last_reliable(state: HubState, tag: Tag, key: MemberKey) -> bool:
    """Whether nobody reliable but the world of ``key`` holds a whole copy of a version that is needed."""
    newest = state.newest.get(tag.model)
    if tag not in state.pins and (newest is None or newest.version != tag.version):
        return False
    mine = Source(key.role, key.name)
    found = [h for h in holders(state, tag) if h.complete and h.reliable]
    return any(h.source == mine for h in found) and all(h.source == mine for h in found)
