"""Placed edges over shared memory: the sender copies straight into the receiver's slot, one copy in all."""

from __future__ import annotations

import time
from typing import Any

from jaxrl_sync.sharding import CopyTable, Edge, SlotLayout
from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.memory import ForeignMemory
from jaxrl_sync.transfer.transports.base import Moved, Shards, counted
from jaxrl_sync.transfer.transports.parts import WHOLE, Flow, Paths, cut
from jaxrl_sync.transfer.transports.pinned import Pinned, Table

PIECES = 4
"""A send looks at its deadline this often: each look costs the threads a meeting."""

MAX_PIECES = 64
"""A receiver that hands parts on while others arrive may ask for so many."""


class ShmSender:
    """Writes an edge into segments that the receiver made. Keeps them mapped between rounds."""

    name = "shm"
    pack_s = 0.0  # a copy to its final place is the transfer itself

    def __init__(self, edge: Edge, slot: SlotLayout, run_id: str, threads: int) -> None:
        self._edge = edge
        self._pieces = self._cut(PIECES, frozenset())
        self._made = {PIECES: self._pieces}
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

    def _cut(self, count: int, have: frozenset[str]) -> list[tuple[Paths, Table]]:
        parts = cut(self._edge.copies, self._edge.total_bytes / count, have)
        return [(part.paths, Table(CopyTable.direct(part.copies))) for part in parts]

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Copy the edge into the segment of ``ready`` and let go of segments that the receiver replaced."""
        segment = ready.get("segment")
        if not isinstance(segment, dict):
            raise TransferError(f"ready names the segment {str(segment)[:200]}, expected an object")
        live = ready.get("segments", [])
        if not isinstance(live, list):
            raise TransferError(f"ready names the segments {str(live)[:200]}, expected a list")
        self.map(segment)
        for name in [n for n in self._open if n not in live and n != segment["name"]]:
            self._forget(name)
        views = self._open[segment["name"]][1]
        pinned = sources if isinstance(sources, Pinned) else Pinned(dict(sources))
        self._pieces = self._pieces_of(ready.get("parts"), flow.have)
        for paths, piece in self._pieces:
            flow.gate(paths)
            self._copy(piece, pinned, views, deadline)
            flow.arrived(paths)

    def _pieces_of(self, wanted: object, have: frozenset[str]) -> list[tuple[Paths, Table]]:
        count = min(MAX_PIECES, max(PIECES, wanted)) if isinstance(wanted, int) else PIECES
        if have:
            return self._cut(count, have)
        if count not in self._made:
            self._made[count] = self._cut(count, have)
        return self._made[count]

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


class ShmReceiver:
    """The sender writes the slot; here is nothing to receive."""

    name = "shm"

    def __init__(self) -> None:
        self.moved: Moved = {}

    def ready(self, slot: Any) -> dict[str, Any]:
        """The segment of the slot."""
        return {"segment": slot.memory.describe()}

    def receive(self, views: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Nothing to do: the sender says what is in place, by parts and in the end by ``done``."""

    def close(self) -> None:
        """Nothing to close."""
