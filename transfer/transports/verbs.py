"""Edges over RDMA verbs, placed or staged, over one or more rails with several queue pairs each.

Placed: the receiver's slots are registered; the sender packs chunks into its registered arena and writes
them to their final place. Each queue pair ends its share with one immediate (8 bits of round, 24 of how many
chunks it wrote), which arrives after them; the receiver counts. Staged: chunk i is written to place i modulo
the ring's size in the receiver's ring, with an immediate behind it that names the round and the chunk; the
receiver scatters it into the slot and answers with an immediate, after which the place is free. Nothing
depends on the order in which queue pairs deliver. Chunks go to the queue pair that would be through with them
first.

The arena is packed, not the export's own memory registered: exports are new arrays with every version, and
a registration of an address that was freed and used again would send old pages.
"""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxrl_sync.sharding import CopyTable, Edge, SlotLayout
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.slots import Slot
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.transports.placing import choose_placement, chunks, count_chunks
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, Memory, Ticket, touched
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.handshake import Remote, check_offer, integer, remote_of
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.opened import SlotClosed
from jaxrl_sync.transfer.verbs.rail import Rows, pick
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection

MAX_CHUNKS = 1 << 24
SENDS = 256
_WRITTEN, _ANSWERED = 1, 2
_INDEX = MAX_CHUNKS - 1

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
        if settings.placement not in ("auto", offer["placement"]):
            raise TransferError(
                f"{connection.peer} asks for a {offer['placement']} edge ({offer.get('reason')}), but "
                f"sync.verbs.placement is {settings.placement!r} here"
            )
        self._slot, self._threads = slot, threads
        self.chunk_bytes, self.ring = offer["chunk_bytes"], offer["ring"]
        if self._placed:
            for described in offer["slots"]:
                self._check_slot(described, len(offer["rails"]), connection.peer)
            made = list(chunks(edge, slot, self.chunk_bytes))
            self.tables, self.rows = [c.table for c in made], [c.rows for c in made]
        else:
            self.tables = CopyTable.pack(edge.copies).windows(self.chunk_bytes)
        _check_count(len(self.tables))
        pairs, receives = len(offer["rails"][0]["pairs"]), 1 if self._placed else self.ring
        self.endpoint = Endpoint(settings, connection.peer, pairs=pairs, sends=SENDS, receives=receives)
        try:
            self.endpoint.connect(offer)
            arena = touched(self.ring * self.chunk_bytes)
            self.arena: Memory = self.endpoint.register(arena, remote_write=False)
            if not self._placed:
                self.remote = remote_of(offer["memory"], len(offer["rails"]), "the peer's ring")
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

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Write every chunk; returns when all are in place (placed) or taken (staged).

        CompletionError, PeerLost, DeadlineError.
        """
        tag = integer(ready, "tag", 0, 255)
        if self._placed:
            rails, peer = len(self.endpoint.rails), self.endpoint.peer
            _SendPlaced(self, tag, self._check_slot(ready.get("slot"), rails, peer)).run(sources, deadline)
        else:
            _SendStaged(self, tag, self.remote).run(sources, deadline)

    def pack(self, index: int, place: int, sources: Shards) -> int:
        """Chunk ``index`` into a place of the arena; its bytes."""
        table, start = self.tables[index], place * self.chunk_bytes
        table.execute(sources, self.arena.buffer[start : start + table.total_bytes], self._threads)
        return table.total_bytes

    def close(self) -> None:
        """Destroy queue pairs and registration; idempotent."""
        self.endpoint.close()


class _SendPlaced:
    """One round of a placed edge."""

    def __init__(self, sender: VerbsSender, tag: int, slot: Remote) -> None:
        self._sender, self._tag, self._slot = sender, tag, slot
        self._endpoint = sender.endpoint
        self._flying: dict[Ticket, int] = {}  # -> place in the arena

    def run(self, sources: Shards, deadline: float) -> None:
        sender, endpoint = self._sender, self._endpoint
        free = list(range(sender.ring))
        share = {lane.pair.token: 0 for lane in endpoint.lanes}
        for index in range(len(sender.tables)):
            while not free:
                free += self._settle(deadline, f"writing chunk {index} of {len(sender.tables)}")
            place = free.pop()
            lane = endpoint.lightest(sender.pack(index, place, sources))
            rows = _moved(sender.rows[index], place * sender.chunk_bytes)
            ticket = endpoint.write(lane, sender.arena, rows, self._slot, deadline)
            self._flying[ticket] = place
            share[lane.pair.token] += 1
        for lane in endpoint.lanes:
            self._flying[endpoint.say(lane, self._tag << 24 | share[lane.pair.token], deadline)] = -1
        while self._flying:
            self._settle(deadline, f"writing the last {len(self._flying)} chunks")

    def _settle(self, deadline: float, what: str) -> list[int]:
        """Places in the arena that are free again."""
        found = []
        for record in self._endpoint.events(deadline, what):
            place = self._flying.pop((int(record["token"]), int(record["seq"])), -1)
            if place >= 0:
                found.append(place)
        return found


class _SendStaged:
    """One round of a staged edge."""

    def __init__(self, sender: VerbsSender, tag: int, ring: Remote) -> None:
        self._sender, self._tag, self._remote = sender, tag, ring
        self._endpoint = sender.endpoint
        self._flying: dict[Ticket, int] = {}  # -> chunk
        self._open_ends: dict[int, int] = {}  # chunk -> what is still to come: our completion, the answer

    def run(self, sources: Shards, deadline: float) -> None:
        sender, endpoint = self._sender, self._endpoint
        for index in range(len(sender.tables)):
            while index - sender.ring in self._open_ends:
                self._settle(deadline)
            place = index % sender.ring
            nbytes = sender.pack(index, place, sources)
            at = place * sender.chunk_bytes
            rows = np.array([[at, at, nbytes]], np.uint64)  # the same place in both rings
            lane = endpoint.lightest(nbytes)
            ticket = endpoint.write(lane, sender.arena, rows, self._remote, deadline, self._tag << 24 | index)
            self._flying[ticket] = index
            self._open_ends[index] = _WRITTEN | _ANSWERED
        while self._open_ends:
            self._settle(deadline)

    def _settle(self, deadline: float) -> None:
        """Take completions; a chunk is over when both its ends are."""
        what = f"sending chunk {min(self._open_ends)} of {len(self._sender.tables)}"
        for record in self._endpoint.events(deadline, what):
            if record["receive"]:
                index, end = _chunk_of(int(record["imm"]), self._tag, self._endpoint.peer), _ANSWERED
            else:
                found = self._flying.pop((int(record["token"]), int(record["seq"])), None)
                if found is None:
                    continue  # part of a chunk
                index, end = found, _WRITTEN
            if not self._open_ends.get(index, 0) & end:
                raise ProtocolError(f"{self._endpoint.peer} answered chunk {index}, which isn't on its way")
            self._open_ends[index] &= ~end
            if not self._open_ends[index]:
                del self._open_ends[index]


class VerbsReceiver:
    """The slots that the sender writes, or a ring out of which chunks are scattered. Owns the endpoint."""

    name = "verbs"

    def __init__(
        self, edge: Edge, settings: VerbsSettings, connection: Connection, slots: Sequence[Slot]
    ) -> None:
        """Open devices, register slots (the first time) or a ring. VerbsError."""
        self._settings = settings
        placement, why = choose_placement(edge, settings)
        self._placed = placement == "placed"
        self._windows = [] if self._placed else CopyTable.scatter(edge.copies).windows(settings.chunk_bytes)
        self._count = count_chunks(edge, settings.chunk_bytes) if self._placed else len(self._windows)
        _check_count(self._count)
        self._ring = max(1, min(settings.ring, self._count))
        pairs = max(1, min(settings.queue_pairs, self._count))
        receives = 2 if self._placed else self._ring
        sends = 8 if self._placed else 2 * self._ring + 8
        self._endpoint = Endpoint(settings, connection.peer, pairs=pairs, sends=sends, receives=receives)
        self._tag = 0
        self.reason = f"{self._endpoint.reason}; {why}"
        self._endpoint.watch = watch_connection(connection)
        try:
            self._offer: dict[str, Any] = {
                "placement": placement,
                "reason": why,
                "chunk_bytes": settings.chunk_bytes,
                "ring": self._ring,
            }
            if self._placed:
                self._offer["slots"] = []
                for slot in slots:
                    with contextlib.suppress(SlotClosed):  # replaced right now: `ready` registers the new one
                        self._offer["slots"].append(self._registered(slot).describe())
            else:
                buffer = touched(self._ring * settings.chunk_bytes)
                self._memory = self._endpoint.register(buffer, remote_write=True)
                self._offer["memory"] = self._memory.describe()
        except BaseException:
            self._endpoint.close()
            raise

    def _registered(self, slot: Slot) -> Memory:
        """A slot on every rail: registered the first time, for all edges that write it."""
        regions = []
        for rail in self._endpoint.rails:
            assert rail.device is not None
            regions.append(rail.device.register_slot(slot.memory, self._settings.max_region_bytes))
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
        return {"tag": self._tag, "slot": self._registered(slot).describe()}

    def receive(self, views: Shards, deadline: float) -> None:
        """Wait until every byte is in the slot. CompletionError, PeerLost, ProtocolError, DeadlineError."""
        if self._placed:
            self._count_placed(deadline)
        else:
            self._scatter(views, deadline)

    def _count_placed(self, deadline: float) -> None:
        """One immediate of each queue pair, together as many chunks as the edge has."""
        endpoint = self._endpoint
        shares: dict[int, int] = {}
        while len(shares) < len(endpoint.lanes):
            what = (
                f"waiting for {len(endpoint.lanes) - len(shares)} of {len(endpoint.lanes)} queue pairs to end"
            )
            for record in endpoint.events(deadline, what):
                if not record["receive"]:
                    continue  # a probe
                token, share = int(record["token"]), _chunk_of(int(record["imm"]), self._tag, endpoint.peer)
                if token in shares:
                    raise ProtocolError(f"{endpoint.peer} ended queue pair 0x{record['qp_num']:06x} twice")
                shares[token] = share
        if sum(shares.values()) != self._count:
            raise ProtocolError(
                f"{endpoint.peer} wrote {sum(shares.values())} chunks, expected {self._count}"
            )

    def _scatter(self, views: Shards, deadline: float) -> None:
        """Take every chunk out of the ring, in whatever order they come."""
        endpoint, missing = self._endpoint, set(range(len(self._windows)))
        while missing:
            what = f"receiving chunk {min(missing)} of {len(self._windows)}"
            for record in endpoint.events(deadline, what):
                if not record["receive"]:
                    continue  # our own answers
                imm = int(record["imm"])
                index = _chunk_of(imm, self._tag, endpoint.peer)
                if index not in missing:
                    raise ProtocolError(f"{endpoint.peer} sent chunk {index} of {len(self._windows)} again")
                window, start = self._windows[index], index % self._ring * self._settings.chunk_bytes
                window.execute(self._memory.buffer[start : start + window.total_bytes], views)
                missing.remove(index)
                endpoint.say(endpoint.lane(int(record["token"])), imm, deadline)

    def retire(self, slot: Any) -> None:
        """Nothing to do: the registration goes with the slot's memory, whoever asked for it."""

    def close(self) -> None:
        """Destroy queue pairs and the ring; the slots' registrations stay with them. Idempotent."""
        self._endpoint.close()


def _moved(rows: Rows, at: int) -> Rows:
    """The rows of a chunk that is packed at ``at`` in the arena."""
    moved = rows.copy()
    moved[:, 0] += np.uint64(at)
    return moved


def _check_count(count: int) -> None:
    if count >= MAX_CHUNKS:
        raise TransferError(
            f"the edge has {count} chunks, expected fewer than {MAX_CHUNKS}: larger chunk_bytes"
        )


def _chunk_of(imm: int, tag: int, peer: str) -> int:
    if imm >> 24 != tag:
        raise ProtocolError(f"{peer} sent an immediate of round tag {imm >> 24}, expected {tag}")
    return imm & _INDEX
