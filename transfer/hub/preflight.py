"""Before the first byte: do the members of a model fit each other? A pure comparison of what they told.

Compared are worlds (are all ranks there), manifests (the layouts that publishers hold and engines want, by
tensor), what each engine planned with, plan digests, and memory. A link compares plan digests once more when
it opens and refuses; here an operator, or a launcher, sees every difference at once and by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.manifest import Manifest
from jaxrl_sync.transfer.hub.state import HubState, Member, whole
from jaxrl_sync.transfer.payload.settings import receiver_room_bytes, sender_room_bytes

SHOWN_TENSORS = 20

BOUNDS = ("step_bytes", "frame_bytes")
"""Of these a process may keep so many, where versions change that much; often it keeps far less."""

AT_MOST = "memory at most"
"""Where memory is short only if all of these are kept."""


@dataclasses.dataclass(frozen=True)
class Difference:
    """``who`` differs in ``what``: the value found and the value expected."""

    who: str
    what: str
    found: str
    expected: str

    def __str__(self) -> str:
        return f"{self.who}: {self.what} is {self.found}, expected {self.expected}"


def compare(state: HubState, model: str, blobs: Mapping[str, bytes]) -> dict[str, Any]:
    """{"ok", "differences": [{"who", "what", "found", "expected"}], "unknown": [who hasn't planned yet],
    "publishers", "engines": [names of the worlds that were compared]}."""
    publishers, engines = state.worlds("publisher", model), state.engine_ranks(model)
    found = [*_incomplete("publisher", publishers), *_incomplete("engine", engines)]
    if not publishers:
        found.append(Difference(f"model {model!r}", "publishers", "none", "a trainer that publishes it"))
    found += _sources(publishers, blobs)
    digests = {str(m.info.get("source_digest")) for ranks in publishers.values() for m in ranks.values()}
    unknown: list[str] = []
    plans: dict[tuple[str, str, str], tuple[str, str]] = {}
    for name, ranks in sorted(engines.items()):
        planned = {r: m for r, m in sorted(ranks.items()) if m.info.get("correspondence")}
        unknown += [str(m.key) for r, m in ranks.items() if r not in planned]
        found += _engine(name, planned, digests, plans, blobs)
    memory = [
        *(_memory(m, _of_publisher(m, engines)) for ranks in publishers.values() for m in ranks.values()),
        *(_memory(m, _of_engine(m, publishers)) for ranks in engines.values() for m in ranks.values()),
    ]
    found += [d for d in memory if d is not None]
    rows = [dataclasses.asdict(d) for d in found]
    worlds = {"publishers": sorted(publishers), "engines": sorted(engines)}
    return {"ok": not found and not unknown, "differences": rows, "unknown": unknown, **worlds}


def _incomplete(what: str, worlds: Mapping[str, dict[int, Member]]) -> Iterable[Difference]:
    for name, ranks in sorted(worlds.items()):
        if not whole(ranks):
            sizes = sorted({m.size for m in ranks.values()})
            yield Difference(f"{what} {name}", "ranks registered", str(sorted(ranks)), f"all of {sizes}")


def _sources(publishers: Mapping[str, dict[int, Member]], blobs: Mapping[str, bytes]) -> Iterable[Difference]:
    """Ranks of one world hold one layout; worlds may shard otherwise, but hold the same tensors."""
    first: Member | None = None
    for _, ranks in sorted(publishers.items()):
        lead = ranks[min(ranks)]
        for member in ranks.values():
            yield from _layouts(lead, member, "source", blobs, shards=True)
        if first is not None:
            yield from _layouts(first, lead, "source", blobs, shards=False)
        first = first or lead


def _layouts(
    expected: Member, found: Member, field: str, blobs: Mapping[str, bytes], shards: bool
) -> Iterable[Difference]:
    mine, theirs = str(expected.info.get(field)), str(found.info.get(field))
    if mine == theirs:
        return
    what = f"{field} layout"
    if mine not in blobs or theirs not in blobs:
        yield Difference(str(found.key), what, theirs[:12], f"{mine[:12]} as {expected.key} has")
        return
    try:
        lines = Manifest.parse(blobs[mine]).differences(Manifest.parse(blobs[theirs]))
    except MappingError as error:
        yield Difference(str(found.key), what, f"unreadable: {error}", f"one as {expected.key} has")
        return
    lines = [line for line in lines if shards or " with other shards" not in line]
    for line in lines[:SHOWN_TENSORS]:
        yield Difference(str(found.key), what, line, f"as {expected.key} has it")
    if len(lines) > SHOWN_TENSORS:
        yield Difference(str(found.key), what, f"{len(lines) - SHOWN_TENSORS} more tensors differ", "equal")


def _engine(
    name: str,
    planned: dict[int, Member],
    sources: set[str],
    plans: dict[tuple[str, str, str], tuple[str, str]],
    blobs: Mapping[str, bytes],
) -> Iterable[Difference]:
    """All ranks of an engine, and all engines that want the same of the same, have one plan."""
    lead = next(iter(planned.values()), None)
    for member in planned.values():
        assert lead is not None
        info, who = member.info, str(member.key)
        yield from _layouts(lead, member, "target", blobs, shards=True)
        if info.get("correspondence") != lead.info.get("correspondence"):
            mine, theirs = str(lead.info["correspondence"])[:12], str(info["correspondence"])[:12]
            yield Difference(who, "conversion (its correspondence)", theirs, f"{mine} as {lead.key} has")
        source = info.get("source_digest")
        if source is not None and sources and str(source) not in sources:
            has = " or ".join(sorted(s[:12] for s in sources))
            yield Difference(who, "source layout that it planned with", str(source)[:12], f"{has}")
        if info.get("plan") is None:
            continue
        about = str(info.get("target")), str(info["correspondence"]), str(source)
        plan, owner = plans.setdefault(about, (str(info["plan"]), who))
        if plan != info["plan"]:
            yield Difference(who, "plan digest", str(info["plan"])[:12], f"{plan[:12]} as {owner} has")


def _memory(member: Member, others: Mapping[str, int]) -> Difference | None:
    """What a process needs beside what it was told that it has; ``others``: what its edges take."""
    info = member.info
    parts = {f: info.get(f) for f in ("slot_bytes", "ring_bytes", "export_bytes") if info.get(f) is not None}
    parts |= {name: n for name, n in others.items() if n}
    free = info.get("free_bytes")
    if not isinstance(free, int) or not all(isinstance(v, int) for v in parts.values()):
        return None
    needed = sum(v for v in parts.values() if isinstance(v, int))
    if needed <= free:
        return None
    sure = sum(v for f, v in parts.items() if isinstance(v, int) and f not in BOUNDS)
    names = " + ".join(f"{v} {f.removesuffix('_bytes')}" for f, v in parts.items())
    what = "memory" if sure > free else AT_MOST
    return Difference(str(member.key), what, f"{free} bytes free", f"{needed} ({names})")


def _of_publisher(member: Member, engines: Mapping[str, dict[int, Member]]) -> dict[str, int]:
    """What the edges from a publisher rank take there, once for equal replicas: rings per link, and where it
    compares on the host a baseline each, with the steps that it may keep beside it."""
    source, rank = member.info.get("source_digest"), member.key.rank
    edges: dict[tuple[str, int], int] = {}
    rings = 0
    for ranks in engines.values():
        for number, engine in ranks.items():
            if engine.info.get("source_digest") == source:
                rings += _by_rank(engine, "rings").get(rank, 0)
                edges[str(engine.info.get("plan")), number] = _by_rank(engine, "edges").get(rank, 0)
    if member.info.get("baselines") != "host":
        return {"ring_bytes": rings}
    kept = [n for n in edges.values() if n]
    return {
        "ring_bytes": rings,
        "baseline_bytes": sum(kept),
        "step_bytes": sum(sender_room_bytes(n) for n in kept),
    }


def _of_engine(member: Member, publishers: Mapping[str, dict[int, Member]]) -> dict[str, int]:
    """What the edges to an engine rank take there: rings, the changes that it may keep of frames, and of a
    relay the frames themselves, which it may hand on: those of each slot."""
    members = [m for ranks in publishers.values() for m in ranks.values()]
    frames = any(m.info.get("baselines") for m in members)
    edges = [n for n in _by_rank(member, "edges").values() if n] if frames else []
    kept = sum(receiver_room_bytes(n) for n in edges)
    rings, size, handed = sum(_by_rank(member, "rings").values()), member.info.get("slot_bytes"), 0
    if edges and member.info.get("relay") is True and isinstance(size, int):
        handed = member.slots * receiver_room_bytes(size // member.slots)
    return {"ring_bytes": rings, "step_bytes": kept, "frame_bytes": handed}


def _by_rank(member: Member, field: str) -> dict[int, int]:
    """Bytes by source rank that an engine rank told; nothing where it told nonsense."""
    told = member.info.get(field)
    if not isinstance(told, dict):
        return {}
    good = {
        k: v for k, v in told.items() if str(k).isdecimal() and len(str(k)) < 8 and type(v) is int and v >= 0
    }
    return {int(k): v for k, v in good.items()}
