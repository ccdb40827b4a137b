"""An edge cut into parts: groups of whole target tensors, the unit in which a version arrives.

A tensor is *complete* in a slot once every part that holds copies of it has arrived. Relays forward complete
tensors while the rest is still on its way, and a receiver whose source died asks another one only for the
tensors that aren't complete.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from jaxrl_sync.sharding import Copy

Paths = tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Part:
    """Copies of whole target tensors; ``paths`` are their names."""

    paths: Paths
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        """Bytes that the part moves."""
        return sum(c.total_bytes for c in self.copies)


def _nothing(_: Paths) -> None:
    pass


@dataclasses.dataclass(frozen=True)
class Flow:
    """How one round flows: ``have`` are tensors that the receiver holds already and that aren't sent.

    ``gate(paths)`` blocks a sender until it may read these tensors; ``arrived(paths)`` is called for each
    part that is in place: by a receiver where it reads the bytes itself, by a sender where it writes them.
    Both may be called from several threads.
    """

    have: frozenset[str] = frozenset()
    gate: Callable[[Paths], None] = _nothing
    arrived: Callable[[Paths], None] = _nothing


WHOLE = Flow()


def cut(copies: Sequence[Copy], limit_bytes: float, have: frozenset[str] = frozenset()) -> list[Part]:
    """The parts, in the order of their tensors' first copies: each at least ``limit_bytes`` but the last.

    Tensors in ``have`` are left out. Follows from its arguments alone: both sides cut alike.
    """
    tensors: dict[str, list[Copy]] = {}
    for copy in copies:
        if copy.target_path not in have:
            tensors.setdefault(copy.target_path, []).append(copy)
    found: list[tuple[list[str], list[Copy]]] = []
    filled = limit_bytes
    for path, mine in tensors.items():
        if filled >= limit_bytes:
            found.append(([], []))
            filled = 0.0
        found[-1][0].append(path)
        found[-1][1].extend(mine)
        filled += sum(c.total_bytes for c in mine)
    return [Part(tuple(paths), tuple(group)) for paths, group in found]
