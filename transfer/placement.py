"""What the two ends of an edge agree on when its link opens, and which of its copies are placed or staged.

*Placed*: the bytes are written at their final position in the slot, by the sender (shm, verbs) or by the
receiver's own read (tcp). *Staged*: they travel packed, in chunks, and the receiver scatters them. The
border is one number, ``placed_run_bytes``: a copy whose contiguous runs in the slot are at least that long is
placed. Both sides cut the same edge at the same border, so nothing else is exchanged.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl_sync.sharding import Copy, Edge
from jaxrl_sync.transfer.errors import ProtocolError
from jaxrl_sync.transfer.transports.placing import contiguous_axes, in_target_order

Mode = Literal["placed", "staged", "mixed"]

ALL_PLACED = 0
ALL_STAGED = 1 << 62
"""Borders of transports that place everything (shm) or nothing (staging memory of an accelerator)."""

NAMES = ("shm", "verbs", "tcp")
FULL = "full"
"""The payload that moves every element. Other kinds are frames of their own and never placed."""


@dataclasses.dataclass(frozen=True)
class Terms:
    """How an edge travels. Fixed until its link closes; ``reason`` says why this transport.

    ``chunk_bytes`` bounds a chunk. ``payloads`` are the kinds that both sides know: the sender names the one
    that it chose in ``begin``, per version.
    """

    transport: str
    reason: str
    placed_run_bytes: int
    chunk_bytes: int
    payloads: tuple[str, ...] = (FULL,)

    def to_json(self) -> dict[str, Any]:
        """The form that travels in ``opened``."""
        return {**dataclasses.asdict(self), "payloads": list(self.payloads)}

    @classmethod
    def from_json(cls, value: object) -> Terms:
        """ProtocolError names what is missing or absurd."""
        if not isinstance(value, dict):
            raise ProtocolError(f"terms {str(value)[:200]!r}, expected an object")
        transport, reason, kinds = value.get("transport"), value.get("reason"), value.get("payloads")
        run, chunk = value.get("placed_run_bytes"), value.get("chunk_bytes")
        if transport not in NAMES or not isinstance(reason, str):
            raise ProtocolError(f"transport {transport!r} because of {reason!r}, expected one of {NAMES}")
        if type(run) is not int or not 0 <= run <= ALL_STAGED:
            raise ProtocolError(f"placed_run_bytes {run!r}, expected 0 to {ALL_STAGED}")
        if type(chunk) is not int or not 4096 <= chunk <= 64 << 20:
            raise ProtocolError(f"chunk_bytes {chunk!r}, expected 4096 to 64 MiB")
        if not isinstance(kinds, list) or FULL not in kinds or not all(isinstance(k, str) for k in kinds):
            raise ProtocolError(f"payloads {str(kinds)[:200]}, expected names, {FULL!r} among them")
        return cls(transport, reason, run, chunk, tuple(kinds))


@dataclasses.dataclass(frozen=True)
class Split:
    """An edge by how its copies travel; the copies' axes are in the order of the target's memory."""

    placed: Edge
    staged: Edge

    @property
    def mode(self) -> Mode:
        """In one word."""
        if not self.staged.copies:
            return "placed"
        return "mixed" if self.placed.copies else "staged"


def split(edge: Edge, placed_run_bytes: int) -> Split:
    """Cut an edge at the border of its link. Only the plan and the border count: both sides cut alike."""
    placed, staged = list[Copy](), list[Copy]()
    for copy in map(in_target_order, edge.copies):
        if not copy.num_elements:
            continue
        run_bytes = contiguous_axes(copy)[1] * copy.itemsize
        (placed if run_bytes >= placed_run_bytes else staged).append(copy)
    between = edge.source_process, edge.target_process
    return Split(Edge(*between, tuple(placed)), Edge(*between, tuple(staged)))
