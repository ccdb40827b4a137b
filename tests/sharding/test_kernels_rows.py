"""Long rows: gangs, lanes, streaming stores and sums in the copy pass, against numpy slices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding import CopyTable, digests, kernels
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.native import kernels as built
from jaxrl_sync.sharding.rank_plan import Copy
from tests.sharding.test_kernels import backend as backend
from tests.sharding.test_kernels import random_copy

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
Buffers = dict[tuple[int, str], Bytes]


def cut_rows(itemsize: int, rows: int, columns: int, parts: int, replicas: int, shift: int) -> list[Copy]:
    """A row-major matrix cut by columns into ``parts``, each sent to ``replicas`` targets; see `expected`."""
    edges = [columns * i // parts for i in range(parts + 1)]
    return [
        Copy(0, "w", 1 + p * replicas + r, "w", itemsize, (rows, high - low), shift + low, (columns, 1),
             shift, (high - low, 1), 0, (1, 0), low, (0, 1))
        for p, (low, high) in enumerate(zip(edges, edges[1:], strict=False))
        for r in range(replicas)
    ]  # fmt: skip


def buffers_of(copies: list[Copy], rng: np.random.Generator, skew: int) -> tuple[Buffers, Buffers]:
    """Sources of random bytes and targets of zeros, ``skew`` bytes past a multiple of 64."""
    sizes = [(c.target_offset + c.num_elements) * c.itemsize for c in copies]
    c = copies[0]
    span = (c.source_offset + (c.shape[0] - 1) * c.source_strides[0] + c.source_strides[0]) * c.itemsize

    def skewed(size: int) -> Bytes:
        memory = np.zeros(size + 128, np.uint8)
        start = -memory.__array_interface__["data"][0] % 64 + skew
        return memory[start : start + size]

    source = skewed(span)
    source[:] = rng.integers(0, 256, span, dtype=np.uint8)
    return {(0, "w"): source}, {(c.target_device, "w"): skewed(n) for c, n in zip(copies, sizes, strict=True)}


def expected(copy: Copy, source: Bytes) -> Bytes:
    size, (rows, columns) = copy.itemsize, copy.shape
    first = copy.source_offset * size
    grid = np.lib.stride_tricks.as_strided(
        source[first:], (rows, columns * size), (copy.source_strides[0] * size, 1)
    )
    return np.concatenate([np.zeros(copy.target_offset * size, np.uint8), grid.ravel()])


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "parts", "replicas", "shift", "skew"),
    [
        (1, 4096, 1, 1, 0, 0),
        (1, 70_001, 1, 3, 0, 0),
        (3, 999, 2, 1, 1, 0),
        (4, 1024, 4, 1, 0, 0),
        (7, 2400, 3, 2, 3, 1),
        (64, 640, 5, 1, 0, 32),
        (33, 5000, 9, 1, 0, 0),
        (257, 96, 2, 2, 0, 8),
    ],
)
def test_columns_of_a_matrix_arrive_and_are_summed_on_the_way(
    backend: str, monkeypatch: pytest.MonkeyPatch, threads: int, itemsize: int, rows: int, columns: int,
    parts: int, replicas: int, shift: int, skew: int,
) -> None:  # fmt: skip
    monkeypatch.setattr(kernels, "STREAMING_BYTES", 0 if threads % 2 else 1 << 30)
    copies = cut_rows(itemsize, rows, columns, parts, replicas, shift)
    sources, targets = buffers_of(copies, np.random.default_rng(rows), skew)
    table = CopyTable.direct(copies)
    found: dict[str, digests.Digest] = {}
    for sums in (None, found):
        for t in targets.values():
            t[:] = 0
        table.execute(sources, targets, threads, sums=sums)
        for c in copies:
            assert np.array_equal(targets[c.target_device, "w"], expected(c, sources[0, "w"]))
    assert found == digests.copies_digest(tuple(copies), sources, "source", threads)
    assert found == digests.copies_digest(copies, targets, "target")


@pytest.mark.parametrize("seed", range(4))
def test_sums_on_the_way_are_those_of_a_second_pass_whatever_the_strides(backend: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    made = [random_copy(rng, i) for i in range(8)]
    copies = tuple(c for c, _, _ in made)
    sources = {(0, c.source_path): rng.integers(0, 256, n * c.itemsize, dtype=np.uint8) for c, n, _ in made}
    want = {(1, c.target_path): np.zeros(n * c.itemsize, np.uint8) for c, _, n in made}
    CopyTable.direct(copies).execute(sources, want)
    targets = {k: np.zeros_like(v) for k, v in want.items()}
    sent = digests.copies_digest(copies, sources, "source")
    whole: dict[str, digests.Digest] = {}
    CopyTable.direct(copies).execute(sources, targets, 2, sums=whole)
    assert whole == sent
    packed, received = dict[str, digests.Digest](), dict[str, digests.Digest]()
    landed = {k: np.zeros_like(v) for k, v in want.items()}
    for pack, scatter in zip(
        CopyTable.pack(copies).windows(72), CopyTable.scatter(copies).windows(72), strict=True
    ):
        chunk = np.zeros(pack.total_bytes, np.uint8)
        pack.execute(sources, chunk, sums=packed)
        scatter.execute(chunk, landed, sums=received)
    assert packed == sent and received == sent
    for key, bits in want.items():
        assert np.array_equal(targets[key], bits) and np.array_equal(landed[key], bits)


def test_a_changed_bit_is_in_the_sums_of_the_copy_pass(backend: str) -> None:
    copies = tuple(cut_rows(2, 40, 512, 2, 1, 0))
    sources, targets = buffers_of(list(copies), np.random.default_rng(0), 0)
    table, before, after = CopyTable.direct(copies), dict[str, digests.Digest](), dict[str, digests.Digest]()
    table.execute(sources, targets, sums=before)
    sources[0, "w"][12_345] ^= 4
    table.execute(sources, targets, sums=after)
    assert before["w"][0] != after["w"][0] and before["w"][1] != after["w"][1]


def test_copies_of_nothing_and_tables_without_copies(backend: str) -> None:
    empty = CopyTable.direct([])
    found: dict[str, digests.Digest] = {}
    empty.execute({}, {}, threads=4, sums=found)
    assert empty.total_bytes == 0 and found == {}
    none = Copy(0, "s", 1, "t", 2, (0, 4), 0, (4, 1), 0, (4, 1), 0, (1, 0), 0, (0, 1))
    CopyTable.direct([none]).execute({}, {}, sums=found)
    assert (
        found == {"t": (0, 0)} == digests.copies_digest([none], {(0, "s"): np.zeros(0, np.uint8)}, "source")
    )


def test_the_table_of_a_digest_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    copies = tuple(cut_rows(2, 8, 64, 2, 1, 0))
    sources, _ = buffers_of(list(copies), np.random.default_rng(0), 0)
    first = digests.copies_digest(copies, sources, "source")
    monkeypatch.setattr(digests.CopySums, "of", lambda *_: pytest.fail("made again"))
    assert digests.copies_digest(copies, sources, "source") == first
    with pytest.raises(MappingError, match="no source buffer for 'w' on device 0"):
        digests.copies_digest(copies, {}, "source")
    with pytest.raises(MappingError, match="has 10 bytes, the copies need 1024"):
        digests.copies_digest(copies, {(0, "w"): sources[0, "w"][:10]}, "source")


def test_gangs_that_do_not_fit_their_table_are_refused() -> None:
    native = built()
    if native is None:
        pytest.skip("the C kernels are not built here")
    rows = CopyTable.direct(cut_rows(2, 40, 512, 2, 1, 0))._rows
    places = np.zeros(8, np.uint64)
    assert rows[:, 5].tolist() == [2, 0]
    for column, value, what in (
        (5, 3, "leads a gang of 3"),
        (5, 0, "leads a gang of 0"),
        (5, 9, "gang of 9"),
    ):
        bad = rows.copy()
        bad[0, column] = value
        with pytest.raises(ValueError, match=what):
            native.copy_table(bad, places, places, 1, 0)
    bad = rows.copy()
    bad[1, 4] = 17
    with pytest.raises(ValueError, match="entry 1 differs from the leader"):
        native.copy_table(bad, places, places, 1, 0)
