"""Copy tables and digests against loops over elements, in C and in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding import CopyTable, MappingError, digests, kernels, numpy_copies
from jaxrl_sync.sharding.blocks import Block
from jaxrl_sync.sharding.native import kernels as built
from jaxrl_sync.sharding.rank_plan import Copy

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@pytest.fixture(params=["c", "numpy"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "c" and built() is None:
        pytest.skip("the C kernels are not built here")
    if request.param == "numpy":
        none: Callable[[], None] = lambda: None  # noqa: E731
        monkeypatch.setattr(kernels, "kernels", none)
        monkeypatch.setattr(digests, "kernels", none)
    return str(request.param)


def _layout(rng: np.random.Generator, shape: tuple[int, ...]) -> tuple[int, tuple[int, ...], int]:
    strides, unit = [0] * len(shape), 1
    for d in rng.permutation(len(shape)):
        strides[d] = unit * int(rng.choice([1, 1, 2]))
        unit = strides[d] * shape[d]
    offset = int(rng.integers(0, 5))
    for d, n in enumerate(shape):
        if rng.random() < 0.3:
            offset, strides[d] = offset + strides[d] * (n - 1), -strides[d]
    return offset, tuple(strides), unit + 8


def random_copy(rng: np.random.Generator, number: int) -> tuple[Copy, int, int]:
    """A copy with any strides, and the elements that its two buffers need."""
    shape = tuple(int(n) for n in rng.integers(1, 6, int(rng.integers(0, 8))))
    source, target = _layout(rng, shape), _layout(rng, shape)
    rows, columns = (tuple(int(n) for n in rng.integers(0, 9, len(shape))) for _ in range(2))
    copy = Copy(0, f"s{number}", 1, f"t{number}", int(rng.choice([1, 2, 4, 8])), shape, source[0], source[1],
                target[0], target[1], 3, rows, 5, columns)  # fmt: skip
    return copy, source[2], target[2]


def _slow(copy: Copy, source: Bytes, size: int) -> Bytes:
    out = np.zeros(size * copy.itemsize, np.uint8)
    to, by = out.view(f"u{copy.itemsize}"), source.view(f"u{copy.itemsize}")
    for index in np.ndindex(*copy.shape):
        t = copy.target_offset + sum(i * s for i, s in zip(index, copy.target_strides, strict=True))
        to[t] = by[copy.source_offset + sum(i * s for i, s in zip(index, copy.source_strides, strict=True))]
    return out


@pytest.mark.parametrize("seed", range(6))
def test_direct_pack_scatter_and_windows_move_every_element(backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = [random_copy(rng, i) for i in range(6)]
    copies = [c for c, _, _ in made]
    sources = {(0, c.source_path): rng.integers(0, 256, n * c.itemsize, dtype=np.uint8) for c, n, _ in made}
    want = {(1, c.target_path): _slow(c, sources[0, c.source_path], n) for c, _, n in made}

    def blank() -> dict[tuple[int, str], Bytes]:
        return {k: np.zeros_like(v) for k, v in want.items()}

    direct = blank()
    CopyTable.direct(copies).execute(sources, direct, threads=2)
    packing = CopyTable.pack(copies)
    stream = np.zeros(packing.total_bytes, np.uint8)
    packing.execute(sources, stream)
    scattered, windowed, at = blank(), blank(), 0
    CopyTable.scatter(copies).execute(stream, scattered)
    for pack, scatter in zip(packing.windows(72), CopyTable.scatter(copies).windows(72), strict=True):
        chunk = np.zeros(pack.total_bytes, np.uint8)
        pack.execute(sources, chunk)
        assert (chunk == stream[at : at + pack.total_bytes]).all()
        scatter.execute(chunk, windowed)
        at += pack.total_bytes
    assert at == packing.total_bytes
    for key, expected in want.items():
        for found in (direct, scattered, windowed):
            assert (found[key] == expected).all()
    sent = digests.copies_digest(copies, sources, "source", threads=2)
    assert sent == digests.copies_digest(copies, direct, "target")


def test_both_backends_give_the_same_sums() -> None:
    if built() is None:
        pytest.skip("the C kernels are not built here")
    rng = np.random.default_rng(0)
    made = [random_copy(rng, i) for i in range(40)]
    copies = [c for c, _, _ in made]
    sources = {(0, c.source_path): rng.integers(0, 256, n * c.itemsize, dtype=np.uint8) for c, n, _ in made}
    in_c = digests.copies_digest(copies, sources, "source")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digests, "kernels", lambda: None)
        assert digests.copies_digest(copies, sources, "source") == in_c


def test_large_rows_take_the_streaming_path_whatever_their_alignment(backend: str) -> None:
    rng = np.random.default_rng(1)
    source = rng.integers(0, 256, 9_000_000 + 64, dtype=np.uint8)
    for shift in (0, 1, 33):
        copy = Copy(
            0, "s", 1, "t", 1, (1800, 5000), shift, (5000, 1), 7 * shift, (5003, 1), 0, (1, 0), 0, (0, 1)
        )
        target = np.zeros(1800 * 5003 + 300, np.uint8)
        CopyTable.direct([copy]).execute({(0, "s"): source}, {(1, "t"): target}, threads=2)
        rows = np.lib.stride_tricks.as_strided(target[7 * shift :], (1800, 5000), (5003, 1))
        assert (rows == source[shift : shift + 9_000_000].reshape(1800, 5000)).all()


def test_wrong_buffers_are_refused_before_anything_is_written(backend: str) -> None:
    copy = Copy(0, "s", 1, "t", 2, (4,), 0, (1,), 0, (1,), 0, (0,), 0, (1,))
    table = CopyTable.direct([copy])
    good, target = np.arange(4, dtype=np.uint16), np.zeros(4, np.uint16)
    with pytest.raises(MappingError, match="no source buffer for 's' on device 0"):
        table.execute({}, {(1, "t"): target})
    with pytest.raises(MappingError, match="has 6 bytes, the copies need 8"):
        table.execute({(0, "s"): good}, {(1, "t"): target[:3]})
    target.flags.writeable = False
    with pytest.raises(MappingError, match="read-only"):
        table.execute({(0, "s"): good}, {(1, "t"): target})
    with pytest.raises(MappingError, match="before the start"):
        CopyTable.direct([Copy(0, "s", 1, "t", 2, (4,), 0, (-1,), 0, (1,), 0, (0,), 0, (1,))])
    assert not target.any()


def test_a_corrupt_table_raises_instead_of_crashing() -> None:
    native = built()
    if native is None:
        pytest.skip("the C kernels are not built here")
    pointers = np.zeros(1, np.uint64)
    row = np.zeros(25, np.int64)
    with pytest.raises(ValueError, match="whole number of rows"):
        native.copy_table(row[:5], pointers, pointers, 1, 0)
    row[5], row[6] = 1, 99
    with pytest.raises(ValueError, match="99 dimensions"):
        native.copy_table(row, pointers, pointers, 1, 0)
    row[6], row[0] = 0, 3
    with pytest.raises(ValueError, match="source 3 of 1"):
        native.copy_table(row, pointers, pointers, 1, 0)


@pytest.mark.parametrize("run", [4, 12])
def test_a_table_without_elements_copies_nothing_and_a_negative_run_is_named(run: int) -> None:
    native = built()
    if native is None:
        pytest.skip("the C kernels are not built here")
    source, target = np.ones(4096, np.uint8), np.zeros(4096, np.uint8)
    row = np.zeros(25, np.int64)
    row[4], row[5], row[6], row[7:10] = run, 1, 3, (0, 4, 4)
    row[13:16] = row[19:22] = 256, 64, 16
    at, to = (np.array([b.ctypes.data], np.uint64) for b in (source, target))
    native.copy_table(row, at, to, 1, 0)
    assert not target.any()
    with pytest.raises(ValueError, match="size 0 in dimension 0, expected at least 1"):
        native.stream_table(0, False, row, at, 0, 10)
    row[4] = -1
    with pytest.raises(ValueError, match="run of -1 bytes, expected at least 0"):
        native.copy_table(row, at, to, 1, 0)


def test_numpy_takes_large_copies_first_and_small_ones_together() -> None:
    def block(run: int, at: int) -> Block:
        return Block(0, 0, at, at, run, (), (), ())

    small = [(block(100, 100 * i),) for i in range(50)]
    gangs = [*small, (block(3 << 20, 5000),), (block(2 << 20, 1 << 23), block(2 << 20, 1 << 24))]
    batches = numpy_copies.batches_of(gangs)
    assert [len(batch) for batch in batches] == [2, 1, 50]
    source = np.random.default_rng(0).integers(0, 256, 1 << 25, dtype=np.uint8)
    target = np.zeros_like(source)
    where = [source.ctypes.data]
    targets = numpy_copies.targets_of(batches, [target])
    numpy_copies.execute(batches, lambda side: side.view_at(where), targets, threads=3)
    for gang in gangs:
        for b in gang:
            part = slice(b.source_offset, b.source_offset + b.run)
            assert np.array_equal(target[part], source[part])
    assert int(np.count_nonzero(target)) <= sum(b.run for gang in gangs for b in gang)


def test_a_copy_that_fails_on_one_thread_fails_the_call() -> None:
    batches = numpy_copies.batches_of([(Block(0, 0, 0, 0, 2 << 20, (), (), ()),)] * 4)
    targets = numpy_copies.targets_of(batches, [np.zeros(2 << 20, np.uint8)])

    def fails(side: numpy_copies.Side) -> Any:
        raise ValueError(f"no buffer {side.buffer}")

    with pytest.raises(ValueError, match="no buffer 0"):
        numpy_copies.execute(batches, fails, targets, threads=2)
