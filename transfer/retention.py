"""Which of the versions that a publisher holds stay, are copied to host memory, or go. Pure decisions.

The newest ``keep`` versions stay in their export buffers. A version that somebody pinned stays as long as it
is pinned: it gets a copy in host memory, so that its export buffers are free for later versions; when such
copies would exceed their limit, the next publish waits until a pin is released. Nothing else is kept. Only
versions that are superseded and not pinned go, so a needed last copy is never dropped.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence

from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass(frozen=True)
class Stock:
    """One held version: what a copy of it takes, whether it has one, whether its export buffers are there."""

    version: Version
    nbytes: int
    copied: bool = False
    exported: bool = True


@dataclasses.dataclass(frozen=True)
class Decision:
    """What becomes of the held versions, each oldest first.

    ``copy``: pinned ones that fit and have no copy in host memory yet. ``shed``: their copy is there and they
    are not among the newest, so their export buffers go. ``retire``: they go. ``wait``: they ought to leave
    their export buffers and can't; a publish that found one waits.
    """

    copy: tuple[Version, ...] = ()
    shed: tuple[Version, ...] = ()
    retire: tuple[Version, ...] = ()
    wait: tuple[Version, ...] = ()


def decide(
    held: Sequence[Stock], pinned: Collection[Version], keep: int, limit_bytes: int | None = None
) -> Decision:
    """What to do with ``held`` (in order of publishing) when copies may take ``limit_bytes`` in all."""
    if keep < 1:
        raise ValueError(f"keep={keep}, expected at least 1: the newest version is always needed")
    newest = {s.version for s in held[-keep:]}
    kept = [s for s in held if s.version in newest or s.version in pinned]
    used = sum(s.nbytes for s in kept if s.copied)
    copy: list[Version] = []
    for stock in kept:
        fits = limit_bytes is None or used + stock.nbytes <= limit_bytes
        if stock.version in pinned and not stock.copied and fits:
            used += stock.nbytes
            copy.append(stock.version)
    old = [s for s in kept if s.version not in newest]
    return Decision(
        copy=tuple(copy),
        shed=tuple(s.version for s in old if s.copied and s.exported),
        retire=tuple(s.version for s in held if s not in kept),
        wait=tuple(s.version for s in old if not s.copied),
    )
