"""Strided copies in bytes: as few and as long as they can be, cut for threads, and put into one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.rank_plan import MAX_DIMS

SPLIT_BYTES = 4 << 20
"""Entries are cut to about this size, so that threads share the work evenly."""

MAX_GANG = 8
"""Most blocks that are copied together; as in cext/kernels.h."""

ELEMENT_BYTES = 16
"""Blocks whose runs are not longer are copied by element, in tiles, and never in gangs."""

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Block:
    """A strided copy in bytes: ``run`` contiguous bytes per index of ``shape``."""

    source: int
    target: int
    source_offset: int
    target_offset: int
    run: int
    shape: tuple[int, ...]
    source_strides: tuple[int, ...]
    target_strides: tuple[int, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes that it moves."""
        return math.prod(self.shape) * self.run


Gang = tuple[Block, ...]
"""Blocks of equal run and shape that are copied together, row by row; mostly one."""


def cut_box(shape: tuple[int, ...], low: int, high: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
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
        inside = cut_box(shape[1:], low - row * inner, min(high, first * inner) - row * inner)
        boxes += [((row, *s), (1, *n)) for s, n in inside]
    if first < last:
        boxes.append(((first, *(0,) * (len(shape) - 1)), (last - first, *shape[1:])))
    if last >= first and last * inner < high:
        inside = cut_box(shape[1:], 0, high - last * inner)
        boxes += [((last, *s), (1, *n)) for s, n in inside]
    return boxes


def gangs_of(
    groups: Sequence[Sequence[Block]], gather: bool = True, alone_bytes: int = SPLIT_BYTES
) -> list[Gang]:
    """All blocks, simplified, gathered into gangs and cut to about SPLIT_BYTES, or ``alone_bytes`` if alone.

    Without ``gather`` they keep their order, that of the stream if one side is one: each group is a gang.
    """
    simple = [gang for group in groups for gang in _merged(list(zip(*map(simplify, group), strict=True)))]
    gangs = _gather([b for gang in simple for b in gang]) if gather else simple
    return [piece for gang in gangs for piece in _split(gang, SPLIT_BYTES if len(gang) > 1 else alone_bytes)]


def _merged(gangs: list[Gang]) -> list[Gang]:
    """Gangs whose members' runs lie side by side on both sides are one block with a longer run."""
    found = list[Gang]()
    for gang in gangs:
        first = gang[0]
        if len(gang) > 1 and all(_continues(b, first, i * first.run) for i, b in enumerate(gang)):
            found += [(b,) for b in simplify(dataclasses.replace(first, run=first.run * len(gang)))]
        else:
            found.append(gang)
    return found


def _continues(block: Block, first: Block, by: int) -> bool:
    """Whether a block is the first one moved on by so many bytes."""
    source, target = first.source_offset + by, first.target_offset + by
    return block == dataclasses.replace(first, source_offset=source, target_offset=target)


def simplify(block: Block) -> list[Block]:
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


def _gather(blocks: Sequence[Block]) -> list[Gang]:
    """Blocks whose source rows lie between each other (or are the same ones) become gangs: one long read."""
    alike: dict[tuple[object, ...], list[Block]] = {}
    for b in blocks:
        alone = b.run <= ELEMENT_BYTES
        alike.setdefault((b if alone else None, b.source, b.run, b.shape, b.source_strides), []).append(b)
    gangs = list[Gang]()
    for group in alike.values():
        group.sort(key=lambda b: b.source_offset)
        reach = min((abs(s) for s in group[0].source_strides), default=1)
        gang = [group[0]]
        for b in group[1:]:
            if len(gang) == MAX_GANG or b.source_offset - gang[0].source_offset >= reach:
                gangs.append(tuple(gang))
                gang = []
            gang.append(b)
        gangs.append(tuple(gang))
    return gangs


def _split(gang: Gang, piece_bytes: int) -> list[Gang]:
    """Pieces of about ``piece_bytes``: along the outermost axis, or along the run where there is no axis."""
    block = gang[0]
    parts = -(-block.total_bytes * len(gang) // piece_bytes)
    if parts <= 1:
        return [gang]
    if not block.shape:
        step = -(-block.run // parts + 63) // 64 * 64
        return [
            tuple(
                dataclasses.replace(
                    b,
                    source_offset=b.source_offset + i,
                    target_offset=b.target_offset + i,
                    run=min(step, b.run - i),
                )
                for b in gang
            )
            for i in range(0, block.run, step)
        ]
    n = block.shape[0]
    step = max(1, -(-n // parts))
    cut = [
        tuple(
            dataclasses.replace(
                b,
                source_offset=b.source_offset + i * b.source_strides[0],
                target_offset=b.target_offset + i * b.target_strides[0],
                shape=(min(step, n - i), *b.shape[1:]),
            )
            for b in gang
        )
        for i in range(0, n, step)
    ]
    again = step == 1 and len(cut) > 1 and len(block.shape) > 1
    return [piece for part in cut for piece in (_split_inner(part, piece_bytes) if again else [part])]


def _split_inner(gang: Gang, piece_bytes: int) -> list[Gang]:
    """A piece of one row of the outermost axis, cut along the next axis if it is still too big."""
    if gang[0].total_bytes * len(gang) <= 2 * piece_bytes:
        return [gang]
    return _split(
        tuple(
            dataclasses.replace(
                b,
                shape=b.shape[1:],
                source_strides=b.source_strides[1:],
                target_strides=b.target_strides[1:],
            )
            for b in gang
        ),
        piece_bytes,
    )


def table_of(gangs: Sequence[Gang]) -> IntArray:
    """One row per block, as `copy_entry` of cext/kernels.h."""
    rows = np.zeros((sum(map(len, gangs)), 7 + 3 * MAX_DIMS), np.int64)
    pairs = ((b, len(gang) if i == 0 else 0) for gang in gangs for i, b in enumerate(gang))
    for row, (b, gang) in zip(rows, pairs, strict=True):
        d = len(b.shape)
        row[:7] = b.source, b.target, b.source_offset, b.target_offset, b.run, gang, d
        row[7 : 7 + d] = b.shape
        row[7 + MAX_DIMS : 7 + MAX_DIMS + d] = b.source_strides
        row[7 + 2 * MAX_DIMS : 7 + 2 * MAX_DIMS + d] = b.target_strides
    return rows


def extents(blocks: Sequence[Block], side: str, count: int) -> IntArray:
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
