"""Edges over TCP: several connections that each carry a fixed share of the edge's windows as one raw stream.

Nothing is packed where runs are long enough (256 bytes on average, with the C kernels): one loop in C without
the interpreter's lock gives the kernel the runs of the source shards and has it read into the slot, hundreds
of them per system call. Other windows go through a chunk that stays in the cache: packed before sending,
scattered after receiving, while the kernel's buffers keep the other side busy. Per round and connection there
is one header and no other word; the state digest is the check. The link's own connection carries none of
this, so it stays free for control.
"""

from __future__ import annotations

import concurrent.futures
import errno
import os
import socket
import struct
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_sync.sharding import Edge
from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.placement import Terms, split
from jaxrl_sync.transfer.transports.base import Moved, Shards, counted, remaining
from jaxrl_sync.transfer.transports.pinned import Pinned, pinned_stream
from jaxrl_sync.transfer.transports.windows import Direct, Place, Side, segments, windows
from jaxrl_sync.transfer.wire import Connection

TICK_S = 0.25
"""A blocked system call returns this often to look at the deadline."""

PIECE_BYTES = 4 << 20
"""So many bytes go without a look at the deadline where nothing blocks."""

VECTOR = 512
_AGAIN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


class _Lanes:
    """Connections with one thread each but the first, which the caller's thread drives."""

    def __init__(self, connections: Sequence[Connection], edge: Edge, terms: Terms, side: Side) -> None:
        parts, count = split(edge, terms.placed_run_bytes), len(connections)
        cut = [w for part in (parts.placed, parts.staged) for w in windows(part.copies, terms.chunk_bytes)]
        self.shares = [segments(cut[i::count], side) for i in range(count)]
        self.share_bytes = [sum(s.nbytes for s in share) for share in self.shares]
        self.connections = list(connections)
        self.side = side
        packed = [s.nbytes for share in self.shares for s in share if isinstance(s, Place)]
        self.staging = [memoryview(bytearray(max(packed, default=0))) for _ in self.connections]
        self.pinned = [pinned_stream(chunk) for chunk in self.staging]
        self._pool = concurrent.futures.ThreadPoolExecutor(count - 1, "lane") if count > 1 else None
        tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
        for connection in self.connections:
            connection.sock.setblocking(True)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)

    def moved(self, straight: str, staged: str) -> Moved:
        """Bytes that the socket calls take or put in place, and those that go through a chunk."""
        parts = [s for share in self.shares for s in share]
        chunks = sum(s.nbytes for s in parts if isinstance(s, Place) and s.table is not None)
        return counted({straight: sum(s.nbytes for s in parts) - chunks, staged: chunks})

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

        try:
            others = range(1, len(self.connections))
            futures = [self._pool.submit(lane, i) for i in others] if self._pool else []
        except RuntimeError as error:  # closed meanwhile: the pool takes no more work
            raise PeerLost(f"the edge to {self.connections[0].peer} was closed on this side") from error
        lane(0)
        concurrent.futures.wait(futures)
        if errors:
            raise errors[0]

    def move(self, lane: int, segment: Direct, shards: Pinned, piece: Callable[..., int]) -> None:
        """A direct segment, piece by piece, over a descriptor of our own: others may close the lane."""
        addresses, done = shards.places(segment.keys)[0], 0
        connection = self.connections[lane]
        try:
            fd = os.dup(connection.sock.fileno())
        except OSError as error:
            raise PeerLost(f"the connection to {connection.peer} was closed on this side") from error
        try:
            while done < segment.nbytes:
                done += piece(fd, segment, addresses, done)
        finally:
            os.close(fd)

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        if self._pool:
            self._pool.shutdown(wait=False, cancel_futures=True)


def _stream(connection: Connection, receive: bool, deadline: float, *where: Any) -> int:
    """One piece in C; ``where``: descriptor, segment, addresses, bytes done. PeerLost, DeadlineError."""
    fd, segment, addresses, done = where
    native = kernels()
    assert native is not None
    moved, code = native.stream_table(fd, receive, segment.rows, addresses, done, PIECE_BYTES)
    if code and code not in _AGAIN:
        doing = "receiving" if receive else "sending"
        raise PeerLost(f"{connection.peer} is gone while {doing}: {os.strerror(code)}")
    if done + moved < segment.nbytes:
        _check(connection, deadline)
    return int(moved)


def _check(connection: Connection, deadline: float) -> None:
    if time.monotonic() > deadline:
        raise DeadlineError(f"the round with {connection.peer} ended before all bytes were moved")


class TcpSender:
    """Sends the edge's windows. Owns the lanes."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], terms: Terms) -> None:
        self._lanes = _Lanes(lanes, edge, terms, "source")
        self.moved = self._lanes.moved("direct", "packed")

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float) -> None:
        """Send every window; returns when the kernel has taken all of them."""
        lanes, round_id = self._lanes, ready.get("round")
        pinned = sources if isinstance(sources, Pinned) else Pinned(dict(sources))

        def work(lane: int) -> None:
            header = {"kind": "stream", "round": round_id, "lane": lane}
            connection = lanes.connections[lane]
            connection.send_header(header, lanes.share_bytes[lane], remaining(deadline))
            for segment in lanes.shares[lane]:
                if isinstance(segment, Direct):
                    lanes.move(lane, segment, pinned, lambda *at: self._send_piece(lane, deadline, *at))
                else:
                    self._send_chunk(lane, segment, pinned, deadline)

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

    def _send_piece(self, lane: int, deadline: float, *where: Any) -> int:
        return _stream(self._lanes.connections[lane], False, deadline, *where)

    def _send_chunk(self, lane: int, place: Place, sources: Pinned, deadline: float) -> None:
        if place.table is None:
            views = place.views(sources)
        else:
            place.table.run(sources, self._lanes.pinned[lane])
            views = [self._lanes.staging[lane][: place.nbytes]]
        _send(self._lanes.connections[lane], views, deadline)

    def close(self) -> None:
        """Close the lanes; idempotent."""
        self._lanes.close()


class TcpReceiver:
    """Reads windows into the slot or scatters them there: only this process writes it. Owns the lanes."""

    name = "tcp"

    def __init__(self, edge: Edge, lanes: Sequence[Connection], terms: Terms) -> None:
        self._lanes = _Lanes(lanes, edge, terms, "target")
        self.moved = self._lanes.moved("read", "scattered")
        self._round = ""

    def ready(self, slot: Any) -> dict[str, Any]:
        """Nothing to say: the bytes come over the lanes."""
        return {}

    def expect(self, round_id: str) -> None:
        """A stream of any other round is refused."""
        self._round = round_id

    def receive(self, views: Shards, deadline: float) -> None:
        """Take every window. ProtocolError on a wrong round, before anything is written; PeerLost."""
        lanes = self._lanes
        slot = views if isinstance(views, Pinned) else Pinned(dict(views))

        def work(lane: int) -> None:
            self._check_header(lane, deadline, "stream", lanes.share_bytes[lane])
            connection = lanes.connections[lane]
            for segment in lanes.shares[lane]:
                if isinstance(segment, Direct):
                    lanes.move(lane, segment, slot, lambda *at: _stream(connection, True, deadline, *at))
                elif segment.table is None:
                    _receive(connection, segment.views(slot), deadline)
                else:
                    _receive(connection, [lanes.staging[lane][: segment.nbytes]], deadline)
                    segment.table.run(lanes.pinned[lane], slot)

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
        if views:
            _check(connection, deadline)


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
        if views:
            _check(connection, deadline)


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
