"""Copies whose rows alternate in a stream: which ones, every window of them, and the C loop over sockets."""

from __future__ import annotations

import random
import socket

import numpy as np
import numpy.typing as npt
import pytest

from jaxrl_sync.sharding import Copy, CopyTable, MappingError, copies_digest
from jaxrl_sync.sharding import kernels as kernels_module
from jaxrl_sync.sharding.native import addresses, flat_bytes, kernels
from jaxrl_sync.sharding.weaves import Weave, weave

native = kernels()
Shards = dict[tuple[int, str], npt.NDArray[np.uint8]]
ROWS, WIDTH = 12, 40


def column(number: int, of: int, pad: int = 0, rows: int = ROWS) -> Copy:
    """Columns ``number`` of ``of`` of one source shard, to a shard of its own with padded rows."""
    source, target = (WIDTH * of, 1), (WIDTH + pad, 1)
    shape, first = (rows, WIDTH), WIDTH * number
    return Copy(0, "s", number, "t", 1, shape, first, source, pad, target, 0, (1, 0), first, (0, 1))


def of_shape(shape: tuple[int, ...], source: tuple[int, ...], target: tuple[int, ...], offset: int) -> Copy:
    """A copy of its own source shard."""
    zeros = (0,) * len(shape)
    return Copy(0, "s", offset, "t", 1, shape, offset, source, 0, target, 0, zeros, 0, zeros)


def buffers(of: int) -> tuple[Shards, Shards]:
    rng = np.random.default_rng(0)
    source = {(0, "s"): rng.integers(0, 256, ROWS * WIDTH * of, dtype=np.uint8)}
    return source, {(i, "t"): np.zeros(ROWS * (WIDTH + 3) + 3, np.uint8) for i in range(of)}


@pytest.fixture(params=["numpy", *(["native"] if native else [])])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "numpy":
        monkeypatch.setattr(kernels_module, "kernels", lambda: None)
    return str(request.param)


def test_columns_of_one_shard_are_woven_in_the_order_of_the_source() -> None:
    copies = [column(i, 4) for i in (2, 0, 3, 1)]
    (found,) = weave(copies, 1 << 20)
    assert [c.target_device for c in found.copies] == [0, 1, 2, 3]
    assert (found.row, found.unit_bytes, found.total_bytes) == (WIDTH, 4 * WIDTH, 4 * ROWS * WIDTH)


@pytest.mark.parametrize(
    ("limit_bytes", "sizes"),
    [(1 << 20, [8, 2]), (4 * WIDTH, [4, 4, 2]), (4 * WIDTH - 1, [3, 3, 3, 1]), (WIDTH - 1, [1] * 10)],
)
def test_a_weave_has_few_copies_and_short_rows(limit_bytes: int, sizes: list[int]) -> None:
    found = weave([column(i, 10) for i in range(10)], limit_bytes)
    assert [len(w.copies) for w in found] == sizes
    assert all(w.unit_bytes <= limit_bytes for w in found if len(w.copies) > 1)


@pytest.mark.parametrize(
    "pair",
    [
        [of_shape((8, 4), (8, 1), (4, 1), at) for at in (0, 4)],  # 4 bytes: as elements
        [of_shape((8, 40_000), (80_000, 1), (40_000, 1), at) for at in (0, 40_000)],  # long rows
        [of_shape((8, 40), (40, 1), (50, 1), at) for at in (0, 320)],  # the source is one run
        [of_shape((8, 40), (100, 1), (50, 1), at) for at in (0, 800)],  # other rows
        [of_shape((40, 8), (1, 100), (8, 1), at) for at in (0, 40)],  # transposed
        [of_shape((8, 40), (100, 1), (50, 1), 0), of_shape((8, 50), (100, 1), (50, 1), 40)],
    ],
)
def test_others_stay_alone(pair: list[Copy]) -> None:
    assert weave(pair, 1 << 20) == [Weave((pair[0],)), Weave((pair[1],))]


def test_a_stream_of_woven_copies_is_the_source_row_by_row(path: str) -> None:
    source, target = buffers(4)
    woven = weave([column(i, 4, pad=3) for i in range(4)], 1 << 20)
    stream = np.zeros(woven[0].total_bytes, np.uint8)
    table = CopyTable.pack(woven)
    table.execute(source, stream)
    assert np.array_equal(stream, source[0, "s"])
    assert len(table.rows) == 1  # read as one run
    CopyTable.scatter(woven).execute(stream, target)
    for i in range(4):
        rows = target[i, "t"][3:].reshape(ROWS, WIDTH + 3)
        assert np.array_equal(
            rows[:, :WIDTH], source[0, "s"].reshape(ROWS, -1)[:, WIDTH * i : WIDTH * (i + 1)]
        )
        assert not rows[:, WIDTH:].any() and not target[i, "t"][:3].any()


def test_what_is_woven_is_summed_like_what_is_not(path: str) -> None:
    source, _ = buffers(4)
    copies = [column(i, 4) for i in range(4)]
    sums: dict[str, tuple[int, int]] = {}
    stream = np.zeros(4 * ROWS * WIDTH, np.uint8)
    CopyTable.pack(weave(copies, 1 << 20)).execute(source, stream, sums=sums)
    assert sums == copies_digest(copies, source, "source")
    assert np.array_equal(stream, source[0, "s"])


def test_rows_that_are_apart_in_the_source_alternate_too(path: str) -> None:
    source, _ = buffers(4)
    woven = weave([column(i, 4) for i in (0, 3)], 1 << 20)
    stream = np.zeros(2 * ROWS * WIDTH, np.uint8)
    CopyTable.pack(woven).execute(source, stream)
    rows = source[0, "s"].reshape(ROWS, 4, WIDTH)
    assert np.array_equal(stream, rows[:, [0, 3]].reshape(-1))


@pytest.mark.parametrize("chunk_bytes", [4 * WIDTH, 500, 1000, 1 << 20])
def test_windows_of_woven_copies_bring_every_byte(path: str, chunk_bytes: int) -> None:
    copies = [column(i, 4, pad=3) for i in range(4)]
    source, target = buffers(4)
    _, expected = buffers(4)
    CopyTable.direct(copies).execute(source, expected)
    packs, scatters = (
        make(weave(copies, chunk_bytes)).windows(chunk_bytes) for make in (CopyTable.pack, CopyTable.scatter)
    )
    for pack, scatter in zip(packs, scatters, strict=True):
        assert pack.total_bytes == scatter.total_bytes <= chunk_bytes
        stream = np.zeros(pack.total_bytes, np.uint8)
        pack.execute(source, stream)
        scatter.execute(stream, target)
    assert all(np.array_equal(target[key], expected[key]) for key in target)


def test_deep_copies_are_woven_over_all_their_outer_axes(path: str) -> None:
    shape, zeros = (3, 5, 2, 30), (0,) * 4
    copies = [
        Copy(0, "s", i, "t", 2, shape, 60 * i, (5 * 180, 180, 30, 1), 0, (350, 70, 30, 1), 0, zeros, 0, zeros)
        for i in range(3)
    ]
    rng = np.random.default_rng(1)
    source = {(0, "s"): rng.integers(0, 1 << 16, 3 * 5 * 180, dtype=np.uint16)}
    (woven,) = weave(copies, 1 << 20)
    assert woven.row == 60
    stream = np.zeros(woven.total_bytes, np.uint8)
    CopyTable.pack([woven]).execute(source, stream)
    assert np.array_equal(stream.view(np.uint16), source[0, "s"])
    target, expected = ({(i, "t"): np.zeros(3 * 350, np.uint16) for i in range(3)} for _ in "ab")
    CopyTable.direct(copies).execute(source, expected)
    CopyTable.scatter([woven]).execute(stream, target)
    assert all(np.array_equal(target[key], expected[key]) for key in target)


def test_a_window_that_cuts_a_row_is_refused() -> None:
    woven = weave([column(i, 4) for i in range(4)], 1 << 20)
    with pytest.raises(MappingError, match="cuts 160 bytes of 't' at 0:40"):
        CopyTable.pack(woven, 0, 40)
    with pytest.raises(MappingError, match="windows of 100 bytes, expected 160"):
        CopyTable.pack(woven).windows(100)


@pytest.mark.skipif(native is None, reason="the C kernels aren't built")
@pytest.mark.parametrize("receive", [False, True])
def test_the_loop_over_a_socket_goes_on_at_any_byte_of_a_weave(receive: bool) -> None:
    assert native is not None
    apart = Weave(tuple(column(i, 6, pad=3) for i in (0, 1, 3)), WIDTH)
    alone = column(5, 6, pad=3)
    source, target = buffers(6)
    _, expected = buffers(6)
    stream = np.zeros(apart.total_bytes + alone.total_bytes, np.uint8)
    CopyTable.pack([apart, alone]).execute(source, stream)
    table = (CopyTable.scatter if receive else CopyTable.pack)([apart, alone])
    keys = table.target_keys if receive else table.source_keys
    at = addresses([flat_bytes((target if receive else source)[k]) for k in keys])
    draw, done = random.Random(2), 0
    a, b = socket.socketpair()
    with a, b:
        while done < table.total_bytes:
            limit = min(draw.randrange(1, 300), table.total_bytes - done)
            if receive:
                a.sendall(stream[done : done + limit].tobytes())
            moved, code = native.stream_table(
                (b if receive else a).fileno(), receive, table.rows, at, done, limit
            )
            assert (moved, code) == (limit, 0)
            if not receive:
                assert b.recv(limit, socket.MSG_WAITALL) == stream[done : done + limit].tobytes()
            done += limit
    if receive:
        CopyTable.scatter([apart, alone]).execute(stream, expected)
        assert all(np.array_equal(target[key], expected[key]) for key in target)
        assert target[3, "t"].any()


@pytest.mark.skipif(native is None, reason="the C kernels aren't built")
def test_a_stream_of_a_gang_that_does_not_fit_its_table_is_refused() -> None:
    assert native is not None
    table = CopyTable.scatter([Weave(tuple(column(i, 3) for i in (0, 2)), WIDTH)])
    at, rows = np.zeros(2, np.uint64), table.rows.copy()
    assert rows[0, 5] == 2
    rows[0, 5] = 3
    with pytest.raises(ValueError, match="leads a gang of 3"):
        native.stream_table(0, True, rows, at, 0, 10)
