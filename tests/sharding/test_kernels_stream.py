"""The C loop between copy tables and sockets: it resumes at any byte, both ways, and checks its table."""

from __future__ import annotations

import random
import socket

import numpy as np
import pytest

from jaxrl_sync.sharding import Copy, CopyTable
from jaxrl_sync.sharding.native import addresses, flat_bytes, kernels

native = kernels()
pytestmark = pytest.mark.skipif(native is None, reason="the C kernels aren't built")

COPIES = (
    Copy(0, "rows", 1, "a", 2, (40, 300), 0, (300, 1), 20, (320, 1), 0, (0, 0), 0, (0, 0)),
    Copy(0, "crossed", 1, "b", 2, (48, 80), 0, (1, 48), 3, (83, 1), 0, (0, 0), 0, (0, 0)),
    Copy(0, "deep", 1, "c", 4, (3, 5, 20), 1, (100, 20, 1), 8, (140, 28, 1), 0, (0,) * 3, 0, (0,) * 3),
    Copy(0, "back", 1, "a", 2, (6, 10), 5, (10, 1), 19_950, (-40, 1), 0, (0, 0), 0, (0, 0)),
)
SHARDS = ("rows", "crossed", "deep", "back")


def buffers() -> tuple[dict[tuple[int, str], np.ndarray], dict[tuple[int, str], np.ndarray]]:
    rng = np.random.default_rng(0)
    source = {(0, name): rng.integers(0, 256, 30_000, dtype=np.uint8) for name in SHARDS}
    return source, {(1, name): np.zeros(60_000, np.uint8) for name in "abc"}


def test_a_send_starts_at_any_byte_and_moves_what_it_may() -> None:
    assert native is not None
    source, _ = buffers()
    table = CopyTable.pack(COPIES)
    packed = np.zeros(table.total_bytes, np.uint8)
    table.execute(source, packed)
    at = addresses([flat_bytes(source[k]) for k in table.source_keys])
    draw = random.Random(0)
    a, b = socket.socketpair()
    with a, b:
        a.setblocking(False)
        for _ in range(300):
            skip, limit = draw.randrange(table.total_bytes), draw.randrange(1, 3000)
            moved, code = native.stream_table(a.fileno(), False, table.rows, at, skip, limit)
            assert code == 0 and moved == min(limit, table.total_bytes - skip)
            assert b.recv(moved, socket.MSG_WAITALL) == packed[skip : skip + moved].tobytes()


def test_a_receive_in_pieces_of_any_size_fills_what_a_scatter_fills() -> None:
    assert native is not None
    source, expected = buffers()
    copies = COPIES[:3]
    packed = np.zeros(CopyTable.pack(copies).total_bytes, np.uint8)
    CopyTable.pack(copies).execute(source, packed)
    table = CopyTable.scatter(copies)
    table.execute(packed, expected)
    _, target = buffers()
    at = addresses([flat_bytes(target[k]) for k in table.target_keys])
    draw, done = random.Random(1), 0
    a, b = socket.socketpair()
    with a, b:
        b.setblocking(False)
        while done < table.total_bytes:
            piece = draw.randrange(1, 3000)
            a.sendall(packed[done : done + piece].tobytes())
            moved, code = native.stream_table(b.fileno(), True, table.rows, at, done, piece)
            assert code == 0 and moved == min(piece, table.total_bytes - done)
            done += moved
        assert native.stream_table(b.fileno(), True, table.rows, at, 0, 10)[1] != 0  # nothing there
        a.close()
        assert native.stream_table(b.fileno(), True, table.rows, at, 0, 10) == (0, 104)  # ECONNRESET: the end
    assert all(np.array_equal(target[key], expected[key]) for key in target)


def test_tables_that_point_outside_are_refused() -> None:
    assert native is not None
    table = CopyTable.pack(COPIES[:1])
    at = np.zeros(1, np.uint64)
    wrong, deep = table.rows.copy(), table.rows.copy()
    wrong[0, 0], deep[0, -3 * native.MAX_DIMS - 1] = 7, 100
    for rows, skip, limit in ((wrong, 0, 10), (deep, 0, 10), (table.rows, -1, 10), (table.rows, 0, -1)):
        with pytest.raises(ValueError, match="at least 0|buffer 7 of 1|100 dimensions"):
            native.stream_table(0, False, rows, at, skip, limit)
    with pytest.raises(ValueError, match="whole number of rows"):
        native.stream_table(0, False, table.rows.reshape(-1)[:5].copy(), at, 0, 10)
