"""What rounds brought: per edge, and summed up over all edges of a rank."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer.payload.shadow import Applied
from jaxrl_sync.transfer.placement import FULL
from jaxrl_sync.transfer.receiving import Offer, Prepared
from jaxrl_sync.transfer.transports.base import Moved


@dataclasses.dataclass(frozen=True)
class Brought:
    """What the last round of an edge brought: payload kind, bytes that travelled, what a frame did.

    ``resumed`` bytes were there from an interrupted round and did not travel.
    """

    payload: str
    nbytes: int
    applied: Applied | None = None
    apply_s: float = 0.0
    moved: Moved = dataclasses.field(default_factory=dict)
    resumed: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """By phase: what the sender told of this edge, and our verify."""


def applied_together(frames: Sequence[tuple[int, Applied]]) -> Applied:
    """What several frames of one round did; each with the bytes of its edge. Their digests stay apart."""
    total = sum(nbytes for nbytes, _ in frames)
    density = sum(nbytes * applied.density for nbytes, applied in frames) / max(1, total)
    names = {coding for _, applied in frames for coding in applied.codings}
    paths = frozenset[str]().union(*(applied.paths for _, applied in frames))
    return Applied(None, density, tuple(sorted(names)), paths)


def written(brought: Sequence[Brought]) -> frozenset[str] | None:
    """The tensors that rounds wrote in the slot; None where an edge came whole: it may be all of them."""
    applied = [b.applied for b in brought]
    known = [a.paths for a in applied if a is not None]
    return frozenset[str]().union(*known) if len(known) == len(applied) else None


class Brings(Protocol):
    """A link that brought an edge."""

    peer: str
    edge: Edge
    brought: Brought

    @property
    def transport(self) -> str:
        """shm, verbs or tcp."""
        ...


def prepared_by(offer: Offer, links: Sequence[Brings], wire_s: float, verify_s: float) -> Prepared:
    """The report of a round over these links, all of which brought their edge; ``prepare_s`` is 0."""
    brought = [link.brought for link in links]
    elements = [max(1, link.edge.total_bytes) for link in links]
    shares = [1.0 if b.applied is None else b.applied.density for b in brought]
    density = sum(s * n for s, n in zip(shares, elements, strict=True)) / max(1, sum(elements))
    names = {c for b in brought if b.applied is not None for c in b.applied.codings}
    apply_s = max((b.apply_s for b in brought), default=0.0)
    return Prepared(
        offer.version,
        sum(b.nbytes for b in brought),
        wire_s,
        verify_s,
        0.0,
        "+".join(sorted({link.transport for link in links})) or "none",
        "+".join(sorted({b.payload for b in brought})) or FULL,
        ", ".join(sorted(names)),
        density,
        {k: sum(b.moved.get(k, 0) for b in brought) for k in sorted({k for b in brought for k in b.moved})},
        offer.source,
        sum(b.resumed for b in brought),
        {"wire": wire_s - apply_s, "verify": verify_s, "apply": apply_s},
        tuple(edge_row(link) for link in links),
    )


def with_fill(report: Prepared, nbytes: int, seconds: float) -> Prepared:
    """The report of a round whose slot was then put on devices: of ``moved`` the key ``devices``."""
    moved = {**report.moved, "devices": nbytes}
    return dataclasses.replace(report, moved=moved, seconds={**report.seconds, "fill": seconds})


def edge_row(link: Brings) -> dict[str, Any]:
    """What one edge took, as the hub's trace wants it (`jaxrl_sync.transfer.hub.trace`).

    ``wire`` is the sender's time from begin to done, of which ``pack`` went into chunks; ``apply`` is the
    decoding and applying of a frame.
    """
    brought, size = link.brought, link.edge.total_bytes
    applied = brought.applied
    sizes = {"wire": brought.nbytes, "verify": size, "pack": brought.moved.get("packed", 0)}
    if applied is not None:
        sizes |= {"encode": brought.nbytes, "apply": brought.nbytes, "pack": 0}
    return {
        "source": link.peer,
        "transport": link.transport,
        "payload": brought.payload,
        "coding": ", ".join(applied.codings) if applied is not None else "",
        "seconds": {**brought.seconds, "apply": brought.apply_s},
        "bytes": sizes,
    }


def seconds_of(told: object) -> dict[str, float]:
    """Seconds by phase that a peer says something took; nothing where it says nonsense."""
    if not isinstance(told, dict) or len(told) > 16:
        return {}
    return {str(k)[:16]: float(v) for k, v in told.items() if isinstance(v, (int, float)) and 0 <= v < 1e9}


def moved_of(told: object) -> Moved:
    """What the sender says that it did; nothing where it says nonsense."""
    if not isinstance(told, dict) or len(told) > 8:
        return {}
    return {str(k)[:16]: v for k, v in told.items() if type(v) is int and v >= 0}
