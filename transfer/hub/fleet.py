"""Who holds a version, and from whom an engine takes it: pure functions over the hub's state.

A holder is a world: the publisher's ranks, or an engine whose ranks each run a relay. An engine may serve
what it has installed, and also what it is still receiving, from the moment its own round has begun (its relay
waits for the parts that a reader asks for). Where a reader reads is decided when its round begins, so that
whoever is first becomes a source for those who come later, and nobody waits for an engine that is slow to
begin.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
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
    found = publishers(state, tag)
    engines, begun = state.engine_ranks(tag.model), _begun(state, tag)
    depths = _depths(begun)
    for name, ranks in state.worlds("relay", tag.model).items():
        holder = _relay(state, tag, name, ranks, engines.get(name), begun.get(name), depths.get(name, 0))
        if holder is not None:
            found.append(holder)
    return found


def publishers(state: HubState, tag: Tag) -> list[Holder]:
    """Every live publisher world that holds a version."""
    worlds = state.worlds("publisher", tag.model)
    return [h for w, ranks in worlds.items() if (h := _publisher(state, tag, w, ranks))]


def _publisher(state: HubState, tag: Tag, name: str, ranks: dict[int, Member]) -> Holder | None:
    held = [state.holdings.get(m.key, {}).get(tag) for m in ranks.values()]
    if not whole(ranks) or any(h is None or h.state == "draining" for h in held):
        return None
    offloaded = any(h is not None and h.state == "offloaded" for h in held)
    reliable = all(m.reliable for m in ranks.values())
    return Holder(Source("publisher", name), ranks, True, reliable, ranks[0].site, 0, offloaded)


def _relay(
    state: HubState,
    tag: Tag,
    name: str,
    ranks: dict[int, Member],
    engine: dict[int, Member] | None,
    own: Round | None,
    depth: int,
) -> Holder | None:
    if engine is None or not whole(ranks) or not whole(engine):
        return None
    if any(tag in state.holdings.get(m.key, {}) for m in ranks.values()):
        return None  # withdrawn
    reliable = all(m.reliable for m in engine.values())
    source, site = Source("relay", name), engine[0].site
    if all(state.installed.get(m.key) == tag.version for m in engine.values()):
        return Holder(source, ranks, True, reliable, site, 0)
    if own is None:
        return None
    return Holder(source, ranks, not own.reading, reliable, site, depth)


def own_round(state: HubState, tag: Tag, engine: str) -> Round | None:
    """The begun round in which an engine takes a version."""
    return _begun(state, tag).get(engine)


def _begun(state: HubState, tag: Tag) -> dict[str, Round]:
    """The begun rounds of a version by engine."""
    return {r.engine: r for r in state.rounds.values() if (r.model, r.version) == tag and r.begun}


def _depths(begun: dict[str, Round]) -> dict[str, int]:
    """How many hops lie between each engine that is reading and a whole copy; cycles can't arise."""
    depths: dict[str, int] = {}
    for name in begun:
        path: list[str] = []
        while name not in depths and name not in path and (entry := begun.get(name)) and entry.reading:
            path.append(name)
            if entry.role != "relay":
                break
            name = entry.world
        depth = depths.get(name, 0) if not path or path[-1] != name else 0
        for below in reversed(path):
            depths[below] = depth = depth + 1
    return depths


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
    weigh = _Weights(
        state.fanouts.get(tag.model, Fanout()),
        ranks[0].site,
        collections.Counter(Source(r.role, r.world) for r in state.rounds.values() if r.reading),
        _served(state, tag),
        _failures(state, tag, engine),
    )
    return min(found, key=weigh, default=None)


def propose(state: HubState, tag: Tag, engine: str, ranks: dict[int, Member]) -> Holder | None:
    """A source until the round begins: a publisher, as the best one isn't known yet, else as `choose`."""
    return next(iter(publishers(state, tag)), None) or choose(state, tag, engine, ranks)


@dataclasses.dataclass(frozen=True)
class _Weights:
    """What one choice goes by; the holder with the least value is taken."""

    fanout: Fanout
    site: str
    loads: Mapping[Source, int]
    served: Mapping[Source, int]
    failed: Mapping[Source, int]

    def __call__(self, holder: Holder) -> tuple[Any, ...]:
        source = holder.source
        load, publisher = self.loads.get(source, 0), source.role == "publisher"
        if self.fanout.kind == "star":
            order: tuple[Any, ...] = (not publisher, holder.depth, load)
        else:
            over = load + (self.served.get(source, 0) if publisher else 0) >= self.fanout.readers
            order = (over, over and publisher, holder.depth, load, publisher)
        outside = holder.site != self.site
        return (self.failed.get(source, 0), outside, *order, not holder.reliable, source)


def _served(state: HubState, tag: Tag) -> Mapping[Source, int]:
    """Rounds of a version that have finished reading, by source."""
    over = [r for r in state.closed.values() if r.state in ("committed", "partially_committed", "unknown")]
    rounds = [r for r in state.rounds.values() if r.begun and not r.reading] + over
    return collections.Counter(Source(r.role, r.world) for r in rounds if (r.model, r.version) == tag)


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
    """Whether nobody reliable but the world of ``key`` holds a whole copy of a version that is needed.

    Of a pinned one only publishers count: an engine that has it overwrites it with a later version.
    """
    newest, pinned = state.newest.get(tag.model), tag in state.pins
    if not pinned and (newest is None or newest.version != tag.version):
        return False
    mine = Source(key.role, key.name)
    whole_ones = [h for h in holders(state, tag) if h.complete and h.reliable]
    found = [h for h in whole_ones if h.source.role == "publisher" or not pinned]
    return any(h.source == mine for h in found) and all(h.source == mine for h in found)
