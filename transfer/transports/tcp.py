"""Edges over TCP: several connections that each carry a fixed share of the edge's windows as one raw stream.

Nothing is packed where runs are long enough (256 bytes on average, with the C kernels): one loop in C without
the interpreter's lock gives the kernel the runs of the source shards and has it read into the slot, hundreds
of them per system call. Rows that go to several devices travel woven, so that the sender reads its memory
once, in order. Other windows go through a chunk that stays in the cache: packed before sending, scattered
after receiving, while the kernel's buffers keep the other side busy. Per round and connection there
is one header and no other word; the state digest is the check. Windows follow one another part by part, so
that the receiver knows which tensors are complete. The link's own connection carries none of
this, so it stays free for control.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import errno
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_sync.sharding import Edge
from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.placement import Terms, split
from jaxrl_sync.transfer.transports.base import Moved, Shards, counted, raise_first, remaining
from jaxrl_sync.transfer.transports.parts import WHOLE, Flow, Part, cut
from jaxrl_sync.transfer.transports.pinned import Pinned, pinned_stream
from jaxrl_sync.transfer.transports.windows import Direct, Place, Side, Window, segments, windows
from jaxrl_sync.transfer.wire import Connection

TICK_S = 0.25
"""A blocked system call returns this often to look at the deadline."""

LINGER_S = 0.5
"""Of a sender that died, what has arrived on other lanes is still taken: the next round needn't bring it."""

PIECE_BYTES = 4 << 20
"""So many bytes go without a look at the deadline where nothing blocks."""

LOCAL_BUFFER_BYTES = 128 << 10
"""What a lane may have on its way to a process of the same host: so much stays in the cache between the two
copies; the megabytes that the kernel would allow go through memory once more. No link there needs more."""

PARTS = 32
CHUNKS_PER_PART = 4
"""An edge has at most so many parts, and a part at least so many chunks on each lane."""

VECTOR = 512
_AGAIN = (errno.EAGAIN, errno.EWOULDBLOCK, errno.EINTR)


@dataclasses.dataclass(frozen=True, eq=False)
class _Cut:
    """What the lanes carry, in order: ``shares[lane][part]`` are segments."""

    parts: list[Part]
    shares: list[list[list[Direct | Place]]]

    def flat(self, lane: int) -> list[Direct | Place]:
        """All segments of one lane."""
        return [s for part in self.shares[lane] for s in part]

    def nbytes(self, lane: int) -> int:
        """Bytes that one lane carries."""
        return sum(s.nbytes for s in self.flat(lane))


class _Lanes:
    """Connections with one thread each but the first, which the caller's thread drives."""

    def __init__(self, connections: Sequence[Connection], edge: Edge, terms: Terms, side: Side) -> None:
        count = len(connections)
        self._edge, self._terms = edge, terms
        self.connections = list(connections)
        self.side: Side = side
        self.staging = [memoryview(bytearray()) for _ in self.connections]
        self.pinned = [pinned_stream(chunk) for chunk in self.staging]
        self._pool = concurrent.futures.ThreadPoolExecutor(count - 1, "lane") if count > 1 else None
        tick = struct.pack("@ll", 0, int(TICK_S * 1e6))
        for connection in self.connections:
            connection.sock.setblocking(True)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, tick)
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, tick)
            if side == "source" and _is_local(connection.sock):
                connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, LOCAL_BUFFER_BYTES)
        self._whole = self._make(frozenset())

    @property
    def shares(self) -> list[list[Direct | Place]]:
        """The segments of each lane when everything is sent."""
        return [self._whole.flat(lane) for lane in range(len(self.connections))]

    def cut(self, have: frozenset[str]) -> _Cut:
        """The edge without the tensors in ``have``. Made once for the whole edge, else anew."""
        return self._make(have) if have else self._whole

    def _make(self, have: frozenset[str]) -> _Cut:
        """Windows go to the lanes in turn, through all parts, so that each carries as much as the others."""
        count, chunk_bytes = len(self.connections), self._terms.chunk_bytes
        least = max(self._edge.total_bytes / PARTS, CHUNKS_PER_PART * chunk_bytes * count)
        parts, turn = cut(self._edge.copies, least, have), itertools.count()
        shares: list[list[list[Direct | Place]]] = [[] for _ in range(count)]
        for part in parts:
            edge = Edge(self._edge.source_process, self._edge.target_process, part.copies)
            halves = split(edge, self._terms.placed_run_bytes)
            mine: list[list[Window]] = [[] for _ in range(count)]
            for half in (halves.placed, halves.staged):
                for window in windows(half.copies, chunk_bytes):
                    mine[next(turn) % count].append(window)
            for share, cut_of_lane in zip(shares, mine, strict=True):
                share.append(segments(cut_of_lane, self.side))
        made = _Cut(parts, shares)
        for lane in range(count):
            packed = [s.nbytes for s in made.flat(lane) if isinstance(s, Place)]
            if max(packed, default=0) > self.staging[lane].nbytes:
                self.staging[lane] = memoryview(bytearray(max(packed)))
                self.pinned[lane] = pinned_stream(self.staging[lane])
        return made

    def moved(self, straight: str, staged: str) -> Moved:
        """Bytes that the socket calls take or put in place, and those that go through a chunk."""
        parts = [s for share in self.shares for s in share]
        chunks = sum(s.nbytes for s in parts if isinstance(s, Place) and s.table is not None)
        return counted({straight: sum(s.nbytes for s in parts) - chunks, staged: chunks})

    def run(self, work: Callable[[int], None], linger_s: float = 0.0) -> None:
        """``work(lane)``, lanes side by side; the first error of any lane is raised.

        When a lane fails, all of them are closed, so that the others end too; after ``linger_s`` at most, in
        which they may come to their own end.
        """
        errors: list[BaseException] = []
        ended = [threading.Event() for _ in self.connections]

        def lane(index: int) -> None:
            try:
                work(index)
            except BaseException as error:
                errors.append(error)
                ended[index].set()
                end = time.monotonic() + linger_s
                for other in ended:
                    other.wait(max(0.0, end - time.monotonic()))
                for connection in self.connections:
                    connection.close()
            finally:
                ended[index].set()

        futures = list[concurrent.futures.Future[None]]()
        try:
            for index in range(1, len(self.connections)):
                assert self._pool is not None
                futures.append(self._pool.submit(lane, index))
        except RuntimeError as error:
            closed = self.connections[0].closed  # then the pool takes no more work
            for connection in self.connections:
                connection.close()
            concurrent.futures.wait(futures)
            peer = self.connections[0].peer
            if closed:
                raise PeerLost(f"the edge to {peer} was closed on this side") from error
            raise TransferError(f"no thread for a connection of the edge to {peer}: {error}") from error
        lane(0)
        concurrent.futures.wait(futures)
        raise_first(errors)

    def move(self, lane: int, segment: Direct, shards: Pinned, piece: Callable[..., int]) -> None:
        """A direct segment, piece by piece, over a descriptor of our own: others may close the lane."""
        addresses, done = shards.places(segment.keys)[0], 0
        fd = self.connections[lane].duplicate()
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


def _is_local(sock: socket.socket) -> bool:
    """Whether both ends have the same address, so that no wire is between them."""
    if sock.family not in (socket.AF_INET, socket.AF_INET6):
        return False
    try:
        return bool(sock.getsockname()[0] == sock.getpeername()[0])
    except OSError:
        return False  # its peer is gone: the first use says so


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
        self.pack_s = 0.0
        self._packing = threading.Lock()

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Send every window, each part as soon as its gate opens; returns when the kernel has all of them."""
        lanes, round_id, cut_of_round = self._lanes, ready.get("round"), self._lanes.cut(flow.have)
        pinned = sources if isinstance(sources, Pinned) else Pinned(dict(sources))
        self.pack_s = 0.0

        def work(lane: int) -> None:
            header = {"kind": "stream", "round": round_id, "lane": lane}
            connection = lanes.connections[lane]
            connection.send_header(header, cut_of_round.nbytes(lane), remaining(deadline))
            for part, share in zip(cut_of_round.parts, cut_of_round.shares[lane], strict=True):
                flow.gate(part.paths)
                for segment in share:
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
            start = time.monotonic()
            place.table.run(sources, self._lanes.pinned[lane])
            with self._packing:
                self.pack_s += time.monotonic() - start
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

    def receive(self, views: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Take every window. ProtocolError on a wrong round, before anything is written; PeerLost."""
        lanes, cut_of_round = self._lanes, self._lanes.cut(flow.have)
        slot = views if isinstance(views, Pinned) else Pinned(dict(views))
        lock, missing = threading.Lock(), [len(lanes.connections)] * len(cut_of_round.parts)

        def through(number: int) -> None:
            """One lane has its share of a part: the last one completes it."""
            with lock:
                missing[number] -= 1
                whole = not missing[number]
            if whole:
                flow.arrived(cut_of_round.parts[number].paths)

        def work(lane: int) -> None:
            self._check_header(lane, deadline, "stream", cut_of_round.nbytes(lane))
            for number, share in enumerate(cut_of_round.shares[lane]):
                for segment in share:
                    self._take(lane, segment, slot, deadline)
                through(number)

        lanes.run(work, LINGER_S)

    def _take(self, lane: int, segment: Direct | Place, slot: Pinned, deadline: float) -> None:
        lanes, connection = self._lanes, self._lanes.connections[lane]
        if isinstance(segment, Direct):
            lanes.move(lane, segment, slot, lambda *at: _stream(connection, True, deadline, *at))
        elif segment.table is None:
            _receive(connection, segment.views(slot), deadline)
        else:
            _receive(connection, [lanes.staging[lane][: segment.nbytes]], deadline)
            segment.table.run(lanes.pinned[lane], slot)

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
