"""Copy tables: many strided copies between flat buffers as one call, in C where built and in numpy where not.

A table is made once from the copies of an edge and executed for every version; only addresses change.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.digests import copies_digest as copies_digest
from jaxrl_sync.sharding.digests import state_digest as state_digest
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.native import addresses as addresses_of
from jaxrl_sync.sharding.native import flat_bytes, kernels
from jaxrl_sync.sharding.rank_plan import MAX_DIMS, Copy

Key = tuple[int, str]
STREAM: Key = (-1, "stream")
"""Key of the packed side: all copies' elements one after the other, in order."""

SPLIT_BYTES = 4 << 20
"""Entries are cut to about this size, so that threads share the work evenly."""

STREAMING_BYTES = 8 << 20
"""From this size on a table bypasses the caches when it writes: the result would not stay in them anyway."""

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A strided copy in bytes: ``run`` contiguous bytes per index of ``shape``."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    run: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]


def _simplify(block: _Block) -> list[_Block]:
    """Drops axes of size 1, writes in memory order, merges axes, and cuts what has more than MAX_DIMS."""
    axes = [
        (n, s, t)
        for n, s, t in zip(block.shape, block.source_strides, block.target_strides, strict=True)
        if n != 1
    ]
    axes.sort(key=lambda a: (-abs(a[2]), -abs(a[1])))
    run, merged = block.run, list[tuple[int, int, int]]()
    for n, s, t in reversed(axes):
        if not merged and s == t == run:
            run *= n
        elif merged and s == merged[-1][0] * merged[-1][1] and t == merged[-1][0] * merged[-1][2]:
            merged[-1] = (merged[-1][0] * n, *merged[-1][1:])
        else:
            merged.append((n, s, t))
    merged.reverse()
    blocks = [(block.source_offset, block.target_offset)]
    while len(merged) > MAX_DIMS:
        n, s, t = merged.pop(0)
        blocks = [(a + i * s, b + i * t) for a, b in blocks for i in range(n)]
    shape, ss, ts = (tuple(a[k] for a in merged) for k in range(3))
    return [dataclasses.replace(block, source_offset=a, target_offset=b, run=run, shape=shape,
                                source_strides=ss, target_strides=ts) for a, b in blocks]  # fmt: skip


def _split(block: _Block) -> list[_Block]:
    """Pieces of about SPLIT_BYTES: along the outermost axis, or along the run where there is no axis."""
    total = math.prod(block.shape) * block.run
    parts = -(-total // SPLIT_BYTES)
    if parts <= 1:
        return [block]
    if not block.shape:
        step = -(-block.run // parts + 63) // 64 * 64
        return [
            dataclasses.replace(
                block,
                source_offset=block.source_offset + i,
                target_offset=block.target_offset + i,
                run=min(step, block.run - i),
            )
            for i in range(0, block.run, step)
        ]
    n = block.shape[0]
    step = max(1, -(-n // parts))
    cut = [
        dataclasses.replace(
            block,
            source_offset=block.source_offset + i * block.source_strides[0],
            target_offset=block.target_offset + i * block.target_strides[0],
            shape=(min(step, n - i), *block.shape[1:]),
        )
        for i in range(0, n, step)
    ]
    return [c for b in cut for c in (_split(b) if step == 1 and len(cut) > 1 and _too_big(b) else [b])]


def _too_big(block: _Block) -> bool:
    return math.prod(block.shape) * block.run > 2 * SPLIT_BYTES and bool(block.shape[1:])


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def _cut(shape: tuple[int, ...], low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(start, shape) of the boxes that hold elements ``low <= i < high`` in row-major order, in order."""
    if low >= high:
        return []
    if not shape:
        return [((), ())]
    inner = math.prod(shape[1:])
    first, last = -(-low // inner), high // inner
    boxes = []
    if low < first * inner:
        row = low // inner
        inside = _cut(shape[1:], low - row * inner, min(high, first * inner) - row * inner)
        boxes += [((row, *s), (1, *n)) for s, n in inside]
    if first < last:
        boxes.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last >= first and last * inner < high:
        inside = _cut(shape[1:], 0, high - last * inner)
        boxes += [((last, *s), (1, *n)) for s, n in inside]
    return boxes


@dataclasses.dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies from source buffers to target buffers, each buffer known by its (device, path).

    Made by `direct` (shard to shard), `pack` (shards to one stream) or `scatter` (one stream to shards).
    The table holds no buffer. ``total_bytes`` are moved per execution.
    """

    source_keys: tuple[Key, ...]
    target_keys: tuple[Key, ...]
    total_bytes: int
    _copies: tuple[Copy, ...]
    _mode: str
    _blocks: tuple[_Block, ...]
    _rows: IntArray
    _source_extent: IntArray
    _target_extent: IntArray

    @classmethod
    def direct(cls, copies: Sequence[Copy]) -> CopyTable:
        """Each copy from its source shard to its place in the target shard."""
        return cls._make(copies, "direct", 0, None)

    @classmethod
    def pack(cls, copies: Sequence[Copy], offset: int = 0, length: int | None = None) -> CopyTable:
        """From the source shards to a stream: the copies' elements one after the other.

        With ``offset`` and ``length`` (bytes, both at element borders) only that window of the stream,
        written from the start of the buffer.
        """
        return cls._make(copies, "pack", offset, length)

    @classmethod
    def scatter(cls, copies: Sequence[Copy], offset: int = 0, length: int | None = None) -> CopyTable:
        """From such a stream, or a window of it, to the target shards."""
        return cls._make(copies, "scatter", offset, length)

    @classmethod
    def _make(cls, copies: Sequence[Copy], mode: str, offset: int, length: int | None) -> CopyTable:
        sources: dict[Key, int] = {}
        targets: dict[Key, int] = {}
        blocks: list[_Block] = []
        total = sum(c.total_bytes for c in copies)
        end = total if length is None else offset + length
        if not 0 <= offset <= end <= total:
            raise MappingError(f"window {offset}:{end} is outside of a stream of {total} bytes")
        at = 0
        for copy in copies:
            low, high = max(offset, at), min(end, at + copy.total_bytes)
            if low < high:
                s = STREAM if mode == "scatter" else (copy.source_device, copy.source_path)
                t = STREAM if mode == "pack" else (copy.target_device, copy.target_path)
                keys = sources.setdefault(s, len(sources)), targets.setdefault(t, len(targets))
                blocks += _blocks(copy, mode, keys, low - at, high - at, at - offset)
            at += copy.total_bytes
        blocks = [c for b in blocks for a in _simplify(b) for c in _split(a)]
        rows = _table(blocks)
        return cls(
            tuple(sources), tuple(targets), end - offset, tuple(copies), mode, tuple(blocks), rows,
            _extents(blocks, "source", len(sources)), _extents(blocks, "target", len(targets)),
        )  # fmt: skip

    def windows(self, chunk_bytes: int) -> list[CopyTable]:
        """This pack or scatter table cut into windows of at most ``chunk_bytes`` (at least 64).

        Windows end at element borders, the same ones on both sides; ``total_bytes`` of each says its length.
        """
        borders, starts, at = [0], [0], 0
        for copy in self._copies:
            starts.append(starts[-1] + copy.total_bytes)
        total = starts[-1]
        while borders[-1] < total:
            end = min(borders[-1] + max(64, chunk_bytes), total)
            while starts[at + 1] < end:
                at += 1
            borders.append(end - (end - starts[at]) % self._copies[at].itemsize)
        return [self._make(self._copies, self._mode, a, b - a) for a, b in itertools.pairwise(borders)]

    def execute(self, sources: Any, targets: Any, threads: int = 1) -> None:
        """Runs all copies. Blocks; releases the GIL where the C kernels are built.

        ``sources``, ``targets``: mapping of (device, path) to a C-contiguous array over the whole shard; the
        packed side is one buffer. The caller keeps readers and writers of these buffers away meanwhile.
        A missing, short or read-only buffer is a `MappingError` before anything is written.
        """
        source = _resolve(self.source_keys, sources, self._source_extent, "source")
        target = _resolve(self.target_keys, targets, self._target_extent, "target")
        for key, buffer in zip(self.target_keys, target, strict=True):
            if not buffer.flags.writeable:
                raise MappingError(f"target buffer {key} is read-only")
        native = kernels()
        if native is None:
            self.execute_numpy(source, target)
            return
        streaming = int(self.total_bytes >= STREAMING_BYTES)
        native.copy_table(self._rows, addresses_of(source), addresses_of(target), threads, streaming)

    @property
    def rows(self) -> IntArray:
        """The entries as the C kernels read them (``copy_entry`` of cext/kernels.h); not to be changed."""
        return self._rows

    @property
    def native(self) -> bool:
        """Whether the C kernels are there, so that `execute_at` works."""
        return kernels() is not None

    def execute_at(
        self, sources: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64], threads: int = 1
    ) -> None:
        """`execute` for callers who have checked every buffer themselves: addresses in order of the keys.

        Needs the C kernels. The caller keeps the memory alive; a wrong address corrupts or ends the process.
        """
        native = kernels()
        if native is None or (len(sources), len(targets)) != (len(self.source_keys), len(self.target_keys)):
            raise MappingError("execute_at needs the C kernels and one address per key")
        streaming = int(self.total_bytes >= STREAMING_BYTES)
        native.copy_table(self._rows, sources, targets, threads, streaming)

    def execute_numpy(
        self, source: Sequence[npt.NDArray[np.uint8]], target: Sequence[npt.NDArray[np.uint8]]
    ) -> None:
        """The same in numpy; buffers in order of `source_keys` and `target_keys`."""
        for b in self._blocks:
            unit = math.gcd(b.run, 8, b.source_offset, b.target_offset, *b.source_strides, *b.target_strides)
            dtype, shape = np.dtype(f"u{unit}"), (*b.shape, b.run // unit)
            to = np.ndarray(shape, dtype, target[b.target], b.target_offset, (*b.target_strides, unit))
            np.copyto(
                to, np.ndarray(shape, dtype, source[b.source], b.source_offset, (*b.source_strides, unit))
            )


def _blocks(copy: Copy, mode: str, keys: tuple[int, int], low: int, high: int, base: int) -> list[_Block]:
    """Bytes ``low:high`` of one copy as blocks; ``base``: where the copy starts in the window's buffer."""
    size = copy.itemsize
    if low % size or high % size:
        raise MappingError(f"window cuts an element of {copy.target_path!r} ({size} bytes) at {low}:{high}")
    stream = tuple(n * size for n in _row_major(copy.shape))
    source = tuple(n * size for n in copy.source_strides)
    target = tuple(n * size for n in copy.target_strides)
    found = []
    for start, shape in _cut(copy.shape, low // size, high // size):
        in_stream = base + sum(i * n for i, n in zip(start, stream, strict=True))
        in_source = copy.source_offset * size + sum(i * n for i, n in zip(start, source, strict=True))
        in_target = copy.target_offset * size + sum(i * n for i, n in zip(start, target, strict=True))
        a = (in_stream, stream) if mode == "scatter" else (in_source, source)
        b = (in_stream, stream) if mode == "pack" else (in_target, target)
        found.append(_Block(*keys, a[0], b[0], size, shape, a[1], b[1]))
    return found


def _table(blocks: Sequence[_Block]) -> IntArray:
    rows = np.zeros((len(blocks), 6 + 3 * MAX_DIMS), np.int64)
    for row, b in zip(rows, blocks, strict=True):
        d = len(b.shape)
        row[:6] = b.source, b.target, b.source_offset, b.target_offset, b.run, d
        row[6 : 6 + d] = b.shape
        row[6 + MAX_DIMS : 6 + MAX_DIMS + d] = b.source_strides
        row[6 + 2 * MAX_DIMS : 6 + 2 * MAX_DIMS + d] = b.target_strides
    return rows


def _extents(blocks: Sequence[_Block], side: str, count: int) -> IntArray:
    """Bytes that each buffer must have; a block that starts before its buffer is an error."""
    need = np.zeros(count, np.int64)
    for b in blocks:
        if side == "source":
            index, offset, strides = b.source, b.source_offset, b.source_strides
        else:
            index, offset, strides = b.target, b.target_offset, b.target_strides
        reach = [(n - 1) * s for n, s in zip(b.shape, strides, strict=True)]
        if offset + sum(min(0, r) for r in reach) < 0:
            raise MappingError(f"a copy reaches before the start of its {side} buffer")
        need[index] = max(need[index], offset + sum(max(0, r) for r in reach) + b.run)
    return need


def _resolve(keys: Sequence[Key], buffers: Any, need: IntArray, side: str) -> list[npt.NDArray[np.uint8]]:
    found = []
    for key, size in zip(keys, need, strict=True):
        if isinstance(buffers, Mapping):
            if key not in buffers:
                raise MappingError(f"no {side} buffer for {key[1]!r} on device {key[0]}")
            flat = flat_bytes(buffers[key])
        else:
            flat = flat_bytes(buffers)
        if flat.nbytes < size:
            raise MappingError(f"{side} buffer {key} has {flat.nbytes} bytes, the copies need {size}")
        found.append(flat)
    return found
