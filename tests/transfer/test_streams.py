"""Windows of an edge over a socket: every way to read and write them, partial calls, broken peers."""

from __future__ import annotations

import contextlib
import errno
import gc
import select
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from jaxrl_sync.sharding import Copy, CopyTable, Edge
from jaxrl_sync.sharding import kernels as kernels_module
from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer import wire
from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.inbound import Inbound, take_all
from jaxrl_sync.transfer.placement import Terms, split
from jaxrl_sync.transfer.transports import tcp
from jaxrl_sync.transfer.transports.pinned import Pinned, Table
from jaxrl_sync.transfer.transports.windows import Direct, Place, segments, windows
from tests.transfer.models import until

Pair = tuple[socket.socket, socket.socket]


def block(source: str, target: str, shape: tuple[int, ...], order: tuple[int, ...], pad: int) -> Copy:
    """A block whose axes lie in another order in the source; rows of both shards are padded."""
    by_source = [0] * len(shape)
    stride = 1
    for axis in reversed(order):
        by_source[axis] = stride
        stride *= shape[axis]
    by_target = [0] * len(shape)
    stride = 1
    for axis in reversed(range(len(shape))):
        by_target[axis] = stride
        stride *= shape[axis] + (pad if axis == len(shape) - 1 else 0)
    zeros = (0,) * len(shape)
    return Copy(
        0, source, 1, target, 2, shape, 0, tuple(by_source), pad, tuple(by_target), 0, zeros, 0, zeros
    )


def column(number: int, rows: int, width: int, pad: int) -> Copy:
    """One of three blocks of columns that lie side by side in a source shard."""
    zeros = (0, 0)
    return Copy(
        0, f"wide{rows}", 1, f"g{rows}.{number}", 2, (rows, width), width * number, (width * 3, 1), pad,
        (width + pad, 1), 0, zeros, 0, zeros,
    )  # fmt: skip


EDGE = Edge(
    0,
    0,
    (
        block("rows", "a", (40, 300), (0, 1), 20),
        block("whole", "b", (64, 512), (0, 1), 0),
        block("crossed", "c", (48, 80), (1, 0), 3),
        block("small", "d", (7,), (0,), 0),
        block("empty", "e", (0, 4), (0, 1), 0),
        block("deep", "f", (3, 5, 200), (1, 0, 2), 8),
        *(column(i, 30, 400, 0) for i in range(3)),
        *(column(i, 50, 20, 6) for i in range(3)),
    ),
)


def shards(seed: int) -> tuple[Pinned, Pinned]:
    """Source shards with random bits, target shards with zeros."""
    rng = np.random.default_rng(seed)
    source = {(0, c.source_path): rng.integers(0, 1 << 16, 40_000, dtype=np.uint16) for c in EDGE.copies}
    return Pinned(source), Pinned({(1, c.target_path): np.zeros(60_000, np.uint16) for c in EDGE.copies})


@pytest.fixture
def lanes() -> Iterator[list[Pair]]:
    """Connected sockets with small buffers, so that calls move parts of what they are given."""
    made = [socket.socketpair() for _ in range(3)]
    for one in (s for pair in made for s in pair):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
    yield made
    for one in (s for pair in made for s in pair):
        one.close()


def ends(lanes: list[Pair], terms: Terms) -> tuple[tcp.TcpSender, tcp.TcpReceiver]:
    left = [wire.Connection(a, "sender") for a, _ in lanes]
    right = [wire.Connection(b, "receiver") for _, b in lanes]
    return tcp.TcpSender(EDGE, left, terms), tcp.TcpReceiver(EDGE, right, terms)


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("border", [0, 512, 4096, 1 << 30])
@pytest.mark.parametrize("chunk_bytes", [4096, 10_000, 1 << 20])
def test_every_byte_finds_its_place_by_every_way(
    lanes: list[Pair], monkeypatch: pytest.MonkeyPatch, native: bool, border: int, chunk_bytes: int
) -> None:
    if not native:
        monkeypatch.setattr(kernels_module, "kernels", lambda: None)
    monkeypatch.setattr(tcp, "PIECE_BYTES", 5001)
    sender, receiver = ends(lanes, Terms("tcp", "", border, chunk_bytes))
    for seed in range(2):
        source, target = shards(seed)
        thread = threading.Thread(target=sender.send, args=({"round": "r"}, source, time.monotonic() + 90))
        thread.start()
        receiver.expect("r")
        receiver.receive(target, time.monotonic() + 90)
        thread.join(90)
        expected = Pinned({key: np.zeros_like(value) for key, value in target.items()})
        CopyTable.direct(EDGE.copies).execute(source, expected)
        assert all(np.array_equal(target[key], expected[key]) for key in expected)
    direct = any(isinstance(s, Direct) for share in sender._lanes.shares for s in share)
    if chunk_bytes < 1 << 20:  # one window of all has a transpose in it
        assert direct == native


@pytest.mark.skipif(kernels() is None, reason="needs the C kernels")
@pytest.mark.parametrize("seed", range(6))
def test_runs_of_every_length_arrive_however_the_bytes_dribble_in(pair: Pair, seed: int) -> None:
    rng = np.random.default_rng(seed)
    shapes = [(int(rng.integers(1, 40)), int(rng.integers(1, n))) for n in (3, 90, 900, 5000, 5000)]
    pads = [int(rng.integers(0, 2)) * 16 for _ in shapes]  # without one, runs lie side by side
    copies = [
        block("s", str(i), shape, (0, 1), pad)
        for i, (shape, pad) in enumerate(zip(shapes, pads, strict=True))
    ]
    edge = Edge(0, 0, tuple(copies))
    source = Pinned({(0, "s"): rng.integers(0, 1 << 16, 250_000, dtype=np.uint16)})
    target, expected = (
        Pinned({(1, c.target_path): np.zeros(250_000, np.uint16) for c in copies}) for _ in "ab"
    )
    CopyTable.direct(edge.copies).execute(source, expected)
    stream = np.empty(edge.total_bytes, np.uint8)
    CopyTable.pack(edge.copies).execute(source, stream)
    (segment,) = segments(windows(edge.copies, 1 << 30), "target")
    assert isinstance(segment, Direct)

    def dribble() -> None:
        at = 0
        while at < stream.size:
            size = int(rng.integers(1, 200_000))
            pair[0].sendall(stream[at : at + size].data)
            at += size
            time.sleep(0.004 * int(rng.integers(0, 2)))

    pair[1].setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 2000))
    thread = threading.Thread(target=dribble)
    thread.start()
    done, native, limits = 0, kernels(), np.random.default_rng(seed)
    assert native is not None
    end = time.monotonic() + 90
    while done < segment.nbytes and time.monotonic() < end:
        limit = int(limits.integers(1, 300_000))
        moved, code = native.stream_table(
            pair[1].fileno(), True, segment.rows, target.places(segment.keys)[0], done, limit
        )
        assert code in (0, errno.EAGAIN) and moved <= limit
        done += moved
    thread.join(90)
    assert done == edge.total_bytes
    assert all(np.array_equal(target[key], expected[key]) for key in expected)


def test_both_sides_cut_alike_whatever_the_border() -> None:
    total = sum(c.total_bytes for c in EDGE.copies)
    for border in (0, 100, 1000, 10_000, 1 << 40):
        parts = split(EDGE, border)
        assert parts.placed.total_bytes + parts.staged.total_bytes == total
        assert parts.mode == {0: "placed", 1 << 40: "staged"}.get(border, "mixed")
        for part in (parts.placed, parts.staged):
            cut = windows(part.copies, 4097)
            assert sum(w.nbytes for w in cut) == part.total_bytes
            assert all(0 < w.nbytes <= 4097 and w.nbytes % 2 == 0 for w in cut)


def test_a_window_that_ends_where_a_copy_begins_holds_nothing_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the C kernels its runs were looked for: IndexError, and no link."""
    copies = [
        Copy(0, name, 1, name, size, (count,), 0, (1,), 0, (1,), 0, (0,), 0, (1,))
        for name, size, count in (("a", 1, 4094), ("b", 4, 2000))
    ]
    cut = windows(copies, 4096)
    assert [(len(w.weaves), w.offset, w.nbytes) for w in cut] == [(1, 0, 4094), (1, 0, 4096), (1, 4096, 3904)]
    monkeypatch.setattr(kernels_module, "kernels", lambda: None)
    found = [s for s in segments(cut, "target") if isinstance(s, Place)]
    target = Pinned({(1, "a"): np.zeros(4094, np.uint8), (1, "b"): np.zeros(2000, np.uint32)})
    assert [[v.nbytes for v in s.views(target)] for s in found] == [[4094], [4096], [3904]]


@pytest.mark.skipif(kernels() is None, reason="needs the C kernels")
def test_a_sender_reads_rows_of_all_columns_as_one_run() -> None:
    (sent,) = segments(windows([column(i, 30, 400, 0) for i in range(3)], 1 << 20), "source")
    (taken,) = segments(windows([column(i, 30, 400, 0) for i in range(3)], 1 << 20), "target")
    assert isinstance(sent, Direct) and isinstance(taken, Direct)
    assert (len(sent.keys), len(sent.rows), sent.rows[0, 4]) == (1, 1, sent.nbytes)
    assert (len(taken.keys), len(taken.rows), taken.nbytes) == (3, 3, sent.nbytes)


def test_little_is_on_its_way_within_a_host(lanes: list[Pair]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname())
        far = server.accept()[0]
    with near, far:
        terms = Terms("tcp", "", 0, 4096)
        kept = far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        tcp.TcpSender(EDGE, [wire.Connection(near, "receiver")], terms)
        tcp.TcpReceiver(EDGE, [wire.Connection(far, "sender")], terms)
        size = near.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        assert tcp.LOCAL_BUFFER_BYTES <= size <= 2 * tcp.LOCAL_BUFFER_BYTES  # the kernel counts its own share
        assert far.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF) == kept


def test_a_peer_that_closes_in_the_middle_is_named_on_both_sides(lanes: list[Pair]) -> None:
    sender, receiver = ends(lanes, Terms("tcp", "", 0, 4096))
    source, target = shards(0)
    failed: list[BaseException] = []

    def send() -> None:
        try:
            sender.send({"round": "r"}, source, time.monotonic() + 90)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=send)
    thread.start()
    assert select.select([lanes[1][1]], [], [], 60)[0]  # longer than its own timeout
    lanes[1][1].recv(100)  # it has begun, and can't end: nobody reads
    receiver.close()
    thread.join(90)
    assert isinstance(failed[0], PeerLost) and "sender" in str(failed[0])
    receiver.expect("r")
    with pytest.raises(PeerLost):
        receiver.receive(target, time.monotonic() + 5)


def test_an_error_keeps_no_memory_once_it_is_handled(lanes: list[Pair]) -> None:
    """In a cycle with its own traceback it held the slot until the collector ran."""
    _, receiver = ends(lanes, Terms("tcp", "", 0, 4096))
    receiver.expect("r")
    _, target = shards(0)
    slot = weakref.ref(target)
    gc.collect()
    gc.disable()
    try:
        for left, _ in lanes:
            left.close()
        with contextlib.suppress(PeerLost):
            receiver.receive(target, time.monotonic() + 5)
        del target
        until(lambda: slot() is None)  # the other lanes' threads are just letting go of it
    finally:
        gc.enable()


def test_edges_that_fail_side_by_side_leave_nothing_behind() -> None:
    class Link:
        def take(self, taking: Any) -> None:
            raise PeerLost("the sender is gone")

    class Round:
        """What is taken."""

    taking: Any = Round()
    memory, links = weakref.ref(taking), [cast(Inbound, Link()) for _ in range(3)]
    gc.collect()
    gc.disable()
    try:
        with ThreadPoolExecutor(2) as pool:
            for first in (0, 1):  # the caller's own edge fails, or those of the pool alone
                some: Any = links if not first else [SimpleNamespace(take=lambda taking: None), *links]
                with contextlib.suppress(PeerLost):
                    take_all(pool, some, taking)
        del taking
        assert memory() is None
    finally:
        gc.enable()


def test_who_waits_for_another_threads_turn_has_a_deadline_too(pair: Pair) -> None:
    connection = wire.Connection(pair[0], "peer")
    started = threading.Event()

    def send() -> None:
        started.set()
        with pytest.raises(PeerLost):
            connection.send({"kind": "large"}, bytes(64 << 20), timeout_s=60)  # nobody reads

    thread = threading.Thread(target=send)
    thread.start()
    assert started.wait(60) and pair[1].recv(1)
    with pytest.raises(DeadlineError, match="another thread"):
        connection.send({"kind": "small"}, timeout_s=0.1)
    connection.close()
    thread.join(90)
    assert not thread.is_alive()


@pytest.mark.parametrize("waits", ["sender", "receiver"])
def test_a_silent_peer_is_a_deadline(lanes: list[Pair], waits: str) -> None:
    sender, receiver = ends(lanes, Terms("tcp", "", 0, 4096))
    source, target = shards(0)
    with pytest.raises(DeadlineError):
        if waits == "sender":
            sender.send({"round": "r"}, source, time.monotonic() + 0.1)
        else:
            receiver.receive(target, time.monotonic() + 0.1)


def test_a_stream_of_another_length_is_refused(lanes: list[Pair]) -> None:
    sender, _ = ends(lanes, Terms("tcp", "", 0, 4096))
    right = [wire.Connection(b, "publisher") for _, b in lanes]
    receiver = tcp.TcpReceiver(Edge(0, 0, EDGE.copies[:1]), right, Terms("tcp", "", 0, 4096))
    source, target = shards(0)
    thread = threading.Thread(target=_refused, args=(receiver, target))
    thread.start()
    with pytest.raises(PeerLost):
        sender.send({"round": "r"}, source, time.monotonic() + 90)
    thread.join(90)
    assert not any(v.any() for v in target.values())


def _refused(receiver: tcp.TcpReceiver, target: Pinned) -> None:
    receiver.expect("r")
    with pytest.raises((ProtocolError, PeerLost)):
        receiver.receive(target, time.monotonic() + 90)


def test_tables_check_again_when_sizes_change() -> None:
    source, target = shards(0)
    table = Table(CopyTable.direct(EDGE.copies[:2]))
    table.run(source, target)
    short: Any = Pinned({key: value[:10] for key, value in source.items()})
    with pytest.raises(Exception, match="bytes, the copies need"):
        table.run(short, target)
