"""Edges over RDMA verbs, placed or staged, over one or more rails with several queue pairs each.

Placed: the receiver's slots are registered; the sender packs chunks into its registered arena and writes
them to their final place. Each queue pair ends its share with one immediate that says how many chunks it
wrote, which arrives after them; the receiver counts. Staged: chunk i is written to place i modulo the ring's
size in the receiver's ring, with an immediate behind it that names the chunk; the receiver scatters it into
the slot and answers with the same immediate, after which the place is free. Frames of other payloads take the
ring on both kinds of edges. Chunks go to the queue pair that would be through with them first.

The arena is packed, not the export's own memory registered: exports are new arrays with every version, and
a registration of an address that was freed and used again would send old pages.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from jaxrl_sync.sharding import CopyTable, Edge, SlotLayout
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.memory import PrivateMemory, SharedMemory
from jaxrl_sync.transfer.transports.base import Shards, counted
from jaxrl_sync.transfer.transports.parts import WHOLE, Flow
from jaxrl_sync.transfer.transports.placing import choose_placement, chunks, count_chunks
from jaxrl_sync.transfer.transports.rounds import (
    PlacedSend,
    Ring,
    RingSend,
    check_count,
    count_placed,
    take_chunks,
)
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, Memory, touched
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.handshake import Remote, check_offer, integer, remote_of
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.opened import SlotClosed, open_device
from jaxrl_sync.transfer.verbs.rail import Rows, pick
from jaxrl_sync.transfer.verbs.regions import DeviceMemory
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection

SENDS = 256

logger = logging.getLogger("jaxrl_sync.transfer")


def has_port(settings: VerbsSettings) -> bool:
    """Whether this side could take part in an edge over verbs; nothing is opened to find out."""
    try:
        backend(settings.backend)
        pick(settings)
    except VerbsError as error:
        logger.debug("no verbs here: %s", error)
        return False
    return True


def watch_connection(connection: Connection) -> Callable[[], None]:
    """Looks whether the link's connection is still there: PeerLost if not. Takes nothing from it."""

    def look() -> None:
        try:
            seen = connection.closed or connection.sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return
        except OSError as error:
            raise PeerLost(f"{connection.peer} is gone: {error}") from error
        if seen is True or not seen:
            raise PeerLost(f"the connection to {connection.peer} was closed during a transfer over verbs")

    return look


class HasMemory(Protocol):
    """A slot as far as a receiver looks at it."""

    @property
    def memory(self) -> SharedMemory | PrivateMemory | DeviceMemory:
        """Where it lies."""
        ...


class VerbsSender:
    """Packs into its arena and writes to the receiver's slot or ring. Owns the endpoint."""

    name = "verbs"

    def __init__(
        self,
        edge: Edge,
        settings: VerbsSettings,
        other: object,
        connection: Connection,
        slot: SlotLayout,
        threads: int = 1,
    ) -> None:
        """Open devices, connect to what the receiver described. VerbsError, ProtocolError, TransferError."""
        offer = check_offer(other)
        self._placed = offer["placement"] == "placed"
        self.moved = counted({"packed": edge.total_bytes})
        self.pack_s = 0.0
        if settings.placement not in ("auto", offer["placement"]):
            raise TransferError(
                f"{connection.peer} asks for a {offer['placement']} edge ({offer.get('reason')}), but "
                f"sync.verbs.placement is {settings.placement!r} here"
            )
        self._slot, self._threads, self._rows = slot, threads, list[Rows]()
        self._paths = tuple(sorted({c.target_path for c in edge.copies}))
        rails, pairs = len(offer["rails"]), len(offer["rails"][0]["pairs"])
        if self._placed:
            for described in offer["slots"]:
                self._check_slot(described, rails, connection.peer)
            made = list(chunks(edge, slot, offer["chunk_bytes"]))
            self._tables, self._rows = [c.table for c in made], [c.rows for c in made]
        else:
            self._tables = CopyTable.pack(edge.copies).windows(offer["chunk_bytes"])
        check_count(len(self._tables))
        self._ring = remote_of(offer["memory"], rails, "the peer's ring")
        self.endpoint = Endpoint(settings, connection.peer, pairs=pairs, sends=SENDS, receives=offer["ring"])
        try:
            self.endpoint.connect(offer)
            memory = self.endpoint.register(touched(offer["ring"] * offer["chunk_bytes"]), remote_write=False)
            self._arena = Ring(memory, offer["ring"], offer["chunk_bytes"])
        except BaseException:
            self.endpoint.close()
            raise
        self.reason = f"{self.endpoint.reason}; {offer.get('reason')}"
        self.endpoint.watch = watch_connection(connection)

    def _check_slot(self, described: object, rails: int, peer: str) -> Remote:
        """The slot that the receiver has ready. ProtocolError where it can't be what the plan says."""
        found = remote_of(described, rails, "the peer's slot")
        if found.nbytes != self._slot.total_bytes:
            raise ProtocolError(
                f"the slot of {peer} has {found.nbytes} bytes, the plan writes {self._slot.total_bytes}"
            )
        return found

    def describe(self) -> dict[str, Any]:
        """What the receiver connects to."""
        return self.endpoint.describe()

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Write every chunk; returns when all are in place (placed) or taken (staged).

        Chunks don't end where tensors do: nothing is left out, and all must have arrived here before the
        first leaves. CompletionError, PeerLost, DeadlineError.
        """
        flow.gate(self._paths)
        self.pack_s = 0.0

        def pack(index: int, place: memoryview) -> None:
            start = time.monotonic()
            self._tables[index].execute(sources, place, self._threads)
            self.pack_s += time.monotonic() - start

        tag, endpoint = integer(ready, "tag", 0, 255), self.endpoint
        sizes = [table.total_bytes for table in self._tables]
        if self._placed:
            slot = self._check_slot(ready.get("slot"), len(endpoint.rails), endpoint.peer)
            PlacedSend(endpoint, self._arena, slot, tag).run(sizes, self._rows, pack, deadline)
        else:
            RingSend(endpoint, self._arena, self._ring, tag).run(sizes, pack, deadline)

    def send_frame(self, ready: dict[str, Any], data: bytearray, deadline: float) -> None:
        """A frame of another payload, through the ring; returns when the receiver took all of it."""
        sizes, step, frame = (
            frame_sizes(len(data), self._arena.chunk_bytes),
            self._arena.chunk_bytes,
            memoryview(data),
        )

        def pack(index: int, place: memoryview) -> None:
            place[:] = frame[index * step : index * step + sizes[index]]

        RingSend(self.endpoint, self._arena, self._ring, integer(ready, "tag", 0, 255)).run(
            sizes, pack, deadline
        )

    def close(self) -> None:
        """Destroy queue pairs and registration; idempotent."""
        self.endpoint.close()


class VerbsReceiver:
    """The slots that the sender writes, and a ring out of which chunks are taken. Owns the endpoint."""

    name = "verbs"

    def __init__(
        self, edge: Edge, settings: VerbsSettings, connection: Connection, slots: Sequence[HasMemory]
    ) -> None:
        """Open devices, register the ring and, placed, the slots (the first time). VerbsError.

        Where the slots lie in a GPU's memory that can't be registered, the edge is staged, and ``receive``
        wants views of host memory. TransferError where it is to be placed nevertheless.
        """
        self._settings = settings
        placement, why = choose_placement(edge, settings, _obstacle(settings, slots))
        self._placed = placement == "placed"
        self.moved = counted({} if self._placed else {"scattered": edge.total_bytes})
        self._windows = [] if self._placed else CopyTable.scatter(edge.copies).windows(settings.chunk_bytes)
        self._count = count_chunks(edge, settings.chunk_bytes) if self._placed else len(self._windows)
        check_count(self._count)
        places = max(1, min(settings.ring, self._count))
        pairs = max(1, min(settings.queue_pairs, self._count))
        self._endpoint = Endpoint(
            settings, connection.peer, pairs=pairs, sends=2 * places + 8, receives=places
        )
        self._tag = 0
        self._filling: Memory | None = None
        self.reason = f"{self._endpoint.reason}; {why}"
        self._endpoint.watch = watch_connection(connection)
        try:
            memory = self._endpoint.register(touched(places * settings.chunk_bytes), remote_write=True)
            self._ring = Ring(memory, places, settings.chunk_bytes)
            self._offer: dict[str, Any] = {
                "placement": placement,
                "reason": why,
                "chunk_bytes": settings.chunk_bytes,
                "ring": places,
                "memory": memory.describe(),
                "slots": [],
            }
            for slot in slots if self._placed else ():
                with contextlib.suppress(SlotClosed):  # replaced right now: `ready` registers the new one
                    self._offer["slots"].append(self._registered(slot).describe())
        except BaseException:
            self._endpoint.close()
            raise

    def _registered(self, slot: HasMemory) -> Memory:
        """A slot on every rail: registered the first time, for all edges that write it."""
        regions = []
        for rail in self._endpoint.rails:
            regions.append(rail.open_device().register_slot(slot.memory, self._settings.max_region_bytes))
        return Memory(slot.memory.data, regions)

    def describe(self) -> dict[str, Any]:
        """What the sender connects to and writes to."""
        return {**self._endpoint.describe(), **self._offer}

    def connect(self, other: object) -> None:
        """Connect to the sender. VerbsError, ProtocolError."""
        self._endpoint.connect(other)

    def ready(self, slot: Any) -> dict[str, Any]:
        """The tag of the round's immediates (one of another round isn't taken for one of this); the slot."""
        self._tag = (self._tag + 1) % 256
        if not self._placed:
            return {"tag": self._tag}
        self._filling = self._registered(slot)
        return {"tag": self._tag, "slot": self._filling.describe()}

    def receive(self, views: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Wait until every byte is in the slot. CompletionError, PeerLost, ProtocolError, DeadlineError."""
        if self._placed:
            count_placed(self._endpoint, self._tag, self._count, deadline)
            if self._filling is not None:
                self._filling.flush()
            return

        def scatter(index: int, place: memoryview) -> None:
            self._windows[index].execute(place, views)

        sizes = [window.total_bytes for window in self._windows]
        take_chunks(self._endpoint, self._ring, self._tag, sizes, scatter, deadline)

    def receive_frame(self, data: bytearray, deadline: float) -> None:
        """Fill ``data`` with a frame of another payload. Errors as of ``receive``."""
        sizes, step, frame = (
            frame_sizes(len(data), self._ring.chunk_bytes),
            self._ring.chunk_bytes,
            memoryview(data),
        )

        def copy(index: int, place: memoryview) -> None:
            frame[index * step : index * step + sizes[index]] = place

        take_chunks(self._endpoint, self._ring, self._tag, sizes, copy, deadline)

    def close(self) -> None:
        """Destroy queue pairs and the ring; the slots' registrations stay with them. Idempotent."""
        self._endpoint.close()


def _obstacle(settings: VerbsSettings, slots: Sequence[HasMemory]) -> str:
    """Why the memory of these slots can't be registered with the chosen ports; empty where it can."""
    regions = [slot.memory.region for slot in slots if isinstance(slot.memory, DeviceMemory)]
    for chosen in pick(settings) if regions else ():
        device = open_device(settings.backend, chosen.port.device)
        try:
            for refusal in filter(None, map(device.refusal, regions)):
                return refusal
        finally:
            device.give_back()
    return ""


def frame_sizes(nbytes: int, chunk_bytes: int) -> list[int]:
    """Bytes of each chunk of a frame."""
    sizes = [min(chunk_bytes, nbytes - start) for start in range(0, nbytes, chunk_bytes)]
    check_count(len(sizes))
    return sizes
