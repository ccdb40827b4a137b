"""Placed edges over shared memory: the sender copies straight into the receiver's slot, one copy in all."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from jaxrl_sync.sharding import Copy, CopyTable, Edge, SlotLayout
from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.memory import ForeignMemory
from jaxrl_sync.transfer.transports.base import Moved, Shards, counted
from jaxrl_sync.transfer.transports.pinned import Pinned, Table

PIECES = 4
"""A send looks at its deadline this often: each look costs the threads a meeting."""


class ShmSender:
    """Writes an edge into segments that the receiver made. Keeps them mapped between rounds."""

    name = "shm"

    def __init__(self, edge: Edge, slot: SlotLayout, run_id: str, threads: int) -> None:
        self._pieces = [Table(CopyTable.direct(copies)) for copies in _pieces(edge.copies)]
        self.moved = counted({"copied": edge.total_bytes})
        self._slot = slot
        self._run_id = run_id
        self._threads = threads
        self._open: dict[str, tuple[ForeignMemory, Pinned]] = {}

    def map(self, segment: dict[str, Any]) -> ForeignMemory:
        """Open a segment as ``SharedMemory.describe`` says, or find it open. TransferError."""
        name, nonce, nbytes = segment.get("name"), segment.get("nonce"), segment.get("nbytes")
        wanted = self._slot.total_bytes
        if not isinstance(name, str) or not isinstance(nonce, str) or nbytes != wanted:
            raise TransferError(f"segment {name!r} of {nbytes!r} bytes, expected {wanted}")
        if name not in self._open:
            memory = ForeignMemory(name, nonce, wanted, self._run_id)
            self._open[name] = memory, Pinned(self._slot.views(memory.data))
        return self._open[name][0]

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Copy the edge into the segment of ``ready`` and let go of segments that the receiver replaced."""
        segment = ready.get("segment")
        if not isinstance(segment, dict):
            raise TransferError(f"ready names the segment {segment!r}, expected an object")
        self.map(segment)
        live = ready.get("segments", [])
        for name in [n for n in self._open if n not in live and n != segment["name"]]:
            self._forget(name)
        views = self._open[segment["name"]][1]
        pinned = sources if isinstance(sources, Pinned) else Pinned(dict(sources))
        for piece in self._pieces:
            self._copy(piece, pinned, views, deadline)

    def _copy(self, piece: Table, sources: Pinned, views: Pinned, deadline: float) -> None:
        """One piece; a sender that stood still past its round's end goes no further."""
        if time.monotonic() > deadline:
            raise DeadlineError("the round ended before all bytes were copied into shared memory")
        piece.run(sources, views, self._threads)

    def _forget(self, name: str) -> None:
        memory, views = self._open.pop(name)
        del views
        memory.close()

    def close(self) -> None:
        """Unmap everything; idempotent."""
        for name in list(self._open):
            self._forget(name)


def _pieces(copies: Sequence[Copy]) -> list[list[Copy]]:
    """The copies in about PIECES groups of equal bytes."""
    limit = sum(c.total_bytes for c in copies) / PIECES
    groups: list[list[Copy]] = []
    filled = limit
    for copy in copies:
        if filled >= limit:
            groups.append([])
            filled = 0.0
        groups[-1].append(copy)
        filled += copy.total_bytes
    return groups


class ShmReceiver:
    """The sender writes the slot; here is nothing to receive."""

    name = "shm"

    def __init__(self) -> None:
        self.moved: Moved = {}

    def ready(self, slot: Any) -> dict[str, Any]:
        """The segment of the slot."""
        return {"segment": slot.memory.describe()}

    def receive(self, views: Shards, deadline: float) -> None:
        """Nothing to do: the sender's ``done`` says that all is in place."""

    def close(self) -> None:
        """Nothing to close."""
