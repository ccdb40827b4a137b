"""Edges over TCP: several connections that each carry a fixed share of the edge's windows as one raw stream.

Nothing is copied in user space where runs are long: the sender gives the kernel the source shards themselves,
and the receiver has it read placed windows straight into the slot. Other windows go through a chunk that
stays in the cache: packed before sending, scattered after receiving, while the kernel's buffers keep the
other side busy. Per round and connection there is one header and no other word; the state digest is the
check. The link's own connection carries none of this, so it stays free for control.
"""

from __future__ import annotations

import concurrent.futures
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.placement import Terms, split
from jaxrl_sync.transfer.transports.base import Shards, remaining
from jaxrl_sync.transfer.transports.pinned import Pinned, pinned_stream
from jaxrl_sync.transfer.transports.windows import Place, Side, windows
from jaxrl_sync.transfer.wire import Connection

TICK_S = 0.25
"""A blocked system call returns this often to look at the deadline."""

VECTOR = 512


class _Lanes:
    """Connections with one thread each but the first, which the caller's thread drives."""

    def __init__(self, connections: Sequence[Connection], places: list[Place]) -> None:
        self.windows = places
        self.connections = list(connections)
        largest = max((p.nbytes for p in places if p.table is not None), default=0)
        self.staging = [memoryview(bytearray(largest)) for _ in self.connections]
        self.pinned = [pinned_stream(chunk) for chunk in self.staging]
        workers = len(self.connections) - 1
        self._pool = concurrent.futures.ThreadPoolExecutor(workers, "lane") if workers else None
        tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
        for connection in self.connections:
            connection.sock.setblocking(True)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def share(self, lane: int) -> range:
        """The windows of one lane."""
        return range(lane, len(self.windows), len(self.connections))

    def share_bytes(self, lane: int) -> int:
        """Their bytes."""
        return sum(self.windows[i].nbytes for i in self.share(lane))

    def run(self, work: Callable[[int], None]) -> None:
        """``work(lane)``, lanes side by side; the first error of any lane is raised.

        When a lane fails, all of them are closed, so that the others end too.
        """
        errors: list[BaseException] = []

        def lane(index: int) -> None:
            try:
                work(index)
            except BaseException as error:
                errors.append(error)
                for connection in self.connections:
                    connection.close()

        futures = [self._pool.submit(lane, i) for i in range(1, len(self.connections))] if self._pool else []
        lane(0)
        concurrent.futures.wait(futures)
        if errors:
            raise errors[0]

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _places(edge: Edge, terms: Terms, side: Side) -> list[Place]:
    """Placed windows first, then staged ones; the same on both sides."""
    parts = split(edge, terms.placed_run_bytes)
    cut = [w for part in (parts.placed, parts.staged) for w in windows(part.copies, terms.chunk_bytes)]
    return [Place(window, side) for window in cut]


class TcpSender:
    """Sends the edge's windows. Owns the lanes."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], terms: Terms) -> None:
        self._lanes = _Lanes(lanes, _places(edge, terms, "source"))

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Send every window; returns when the kernel has taken all of them."""
        lanes, round_id = self._lanes, ready.get("round")
        pinned = sources if isinstance(sources, Pinned) else Pinned(dict(sources))

        def work(lane: int) -> None:
            header = {"kind": "stream", "round": round_id, "lane": lane}
            connection = lanes.connections[lane]
            connection.send_header(header, lanes.share_bytes(lane), remaining(deadline))
            for index in lanes.share(lane):
                self._send_chunk(lane, index, pinned, deadline)

        lanes.run(work)

    def send_frame(self, ready: dict[str, Any], data: bytearray, deadline: float) -> None:
        """Send a frame in equal shares, one per lane; returns when the kernel has taken all of it."""
        lanes, round_id = self._lanes, ready.get("round")

        def work(lane: int) -> None:
            share = _share_of_frame(memoryview(data), lane, len(lanes.connections))
            header = {"kind": "frame", "round": round_id, "lane": lane}
            lanes.connections[lane].send_header(header, share.nbytes, remaining(deadline))
            _send(lanes.connections[lane], [share] if share.nbytes else [], deadline)

        lanes.run(work)

    def _send_chunk(self, lane: int, index: int, sources: Pinned, deadline: float) -> None:
        lanes, place = self._lanes, self._lanes.windows[index]
        if place.table is None:
            views = place.views(sources)
        else:
            packed = lanes.staging[lane][: place.nbytes]
            place.table.run(sources, lanes.pinned[lane])
            views = [packed]
        _send(lanes.connections[lane], views, deadline)

    def close(self) -> None:
        """Close the lanes; idempotent."""
        self._lanes.close()


class TcpReceiver:
    """Reads windows into the slot or scatters them there: only this process writes it. Owns the lanes."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], terms: Terms) -> None:
        self._lanes = _Lanes(lanes, _places(edge, terms, "target"))
        self._round = ""
        self._views: dict[int, list[list[memoryview] | None]] = {}
        self._slot = 0

    def ready(self, slot: Any) -> dict[str, Any]:
        """Nothing to say: the bytes come over the lanes. Views of a slot are made the first time."""
        self._slot = slot.generation
        if slot.generation not in self._views:
            kept = list(self._views)[-7:]
            self._views = {g: self._views[g] for g in kept}
            self._views[slot.generation] = [
                p.views(slot.views) if p.table is None else None for p in self._lanes.windows
            ]
        return {}

    def expect(self, round_id: str) -> None:
        """A stream of any other round is refused."""
        self._round = round_id

    def receive(self, views: Shards, deadline: float) -> None:
        """Take every window. ProtocolError on a wrong round, before anything is written; PeerLost."""
        lanes, placed = self._lanes, self._views[self._slot]
        slot = views if isinstance(views, Pinned) else Pinned(dict(views))

        def work(lane: int) -> None:
            self._check_header(lane, deadline, "stream", lanes.share_bytes(lane))
            connection = lanes.connections[lane]
            for index in lanes.share(lane):
                place, into = lanes.windows[index], placed[index]
                if place.table is None:
                    assert into is not None
                    _receive(connection, into, deadline)
                else:
                    packed = lanes.staging[lane][: place.nbytes]
                    _receive(connection, [packed], deadline)
                    place.table.run(lanes.pinned[lane], slot)

        lanes.run(work)

    def receive_frame(self, data: bytearray, deadline: float) -> None:
        """Fill ``data`` with a frame. ProtocolError on a wrong round or share; PeerLost, DeadlineError."""
        lanes = self._lanes

        def work(lane: int) -> None:
            share = _share_of_frame(memoryview(data), lane, len(lanes.connections))
            self._check_header(lane, deadline, "frame", share.nbytes)
            _receive(lanes.connections[lane], [share] if share.nbytes else [], deadline)

        lanes.run(work)

    def _check_header(self, lane: int, deadline: float, kind: str, expected: int) -> None:
        connection = self._lanes.connections[lane]
        header, nbytes = connection.recv_header(remaining(deadline))
        found = header.get("kind"), header.get("round"), header.get("lane"), nbytes
        if found != (kind, self._round, lane, expected):
            raise ProtocolError(
                f"{connection.peer} sent {found}, expected lane {lane} of {self._round}, {expected} bytes"
            )

    def close(self) -> None:
        """Close the lanes; idempotent."""
        self._lanes.close()
        self._views = {}


def _share_of_frame(data: memoryview, lane: int, lanes: int) -> memoryview:
    """Lane i of n carries bytes i/n to (i+1)/n of a frame."""
    return data[len(data) * lane // lanes : len(data) * (lane + 1) // lanes]


def _send(connection: Connection, views: list[memoryview], deadline: float) -> None:
    """All bytes of the views. PeerLost, DeadlineError."""
    while views:
        try:
            done = connection.sock.sendmsg(views[:VECTOR])
        except BlockingIOError:
            done = 0
        except OSError as error:
            raise PeerLost(f"{connection.peer} is gone while sending: {error}") from error
        views = _after(views, done)
        if views and time.monotonic() > deadline:
            raise DeadlineError(f"sending to {connection.peer}: not all sent before the deadline")


def _receive(connection: Connection, views: list[memoryview], deadline: float) -> None:
    """Fill the views. PeerLost, DeadlineError."""
    while views:
        try:
            done = connection.sock.recvmsg_into(views[:VECTOR], 0, socket.MSG_WAITALL)[0]
        except BlockingIOError:
            done = -1
        except OSError as error:
            raise PeerLost(f"{connection.peer} is gone while receiving: {error}") from error
        if done == 0:
            raise PeerLost(f"{connection.peer} closed a connection in the middle of a version")
        views = _after(views, max(0, done))
        if views and time.monotonic() > deadline:
            raise DeadlineError(f"receiving from {connection.peer}: not all there before the deadline")


def _after(views: list[memoryview], done: int) -> list[memoryview]:
    """What is left of the views after ``done`` bytes."""
    first = 0
    while first < len(views) and done >= views[first].nbytes:
        done -= views[first].nbytes
        first += 1
    rest = views[first:]
    if done:
        rest[0] = rest[0][done:]
    return rest
