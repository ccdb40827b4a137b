"""Copies whose rows alternate in a stream, and the blocks that a window of such a stream consists of.

Where rows of several copies lie side by side in one source shard (columns that go to different devices), a
stream of one copy after the other visits every page of the source once per copy. Row by row of all of them it
reads the source as one long run; only the writes are short, and they go out from a cache.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from jaxrl_sync.sharding.blocks import ELEMENT_BYTES, MAX_GANG, Block, cut_box
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import row_major
from jaxrl_sync.sharding.rank_plan import Copy

LONG_ROW_BYTES = 16 << 10
"""Rows from this length on gain nothing: to begin another one costs little beside reading it."""


@dataclasses.dataclass(frozen=True)
class Weave:
    """Copies of equal shape, item size and strides that share a stream; mostly one.

    The stream of one copy is its elements in row-major order of its shape. Of several it is their first rows,
    then their second rows: ``row`` elements of the innermost axes, contiguous on both sides.
    """

    copies: tuple[Copy, ...]
    row: int = 1

    @property
    def total_bytes(self) -> int:
        """Bytes of the stream."""
        return len(self.copies) * self.copies[0].total_bytes

    @property
    def unit_bytes(self) -> int:
        """A window may begin and end at multiples of it: an element, or one row of every copy."""
        count = len(self.copies)
        return self.copies[0].itemsize * (self.row * count if count > 1 else 1)

    @functools.cached_property
    def strides(self) -> tuple[int, ...]:
        """Elements of the stream from one index of a copy's shape to the next, per axis."""
        shape, count = self.copies[0].shape, len(self.copies)
        inner = row_major(shape)
        return tuple(n * count if n >= self.row else n for n in inner) if count > 1 else inner


def weave(copies: Sequence[Copy], limit_bytes: int) -> list[Weave]:
    """The copies in their order, but where rows of some lie between each other in the source, these together.

    At most MAX_GANG copies, with one row of each in ``limit_bytes``. Follows from its arguments alone: both
    sides of an edge weave alike.
    """
    groups: dict[object, list[Copy]] = {}
    for number, copy in enumerate(copies):
        row, reach = _row(copy)
        short = ELEMENT_BYTES < row * copy.itemsize < LONG_ROW_BYTES
        alike = (copy.source_device, copy.source_path, copy.itemsize, copy.shape, copy.source_strides)
        apart = short and row < reach and copy.num_elements
        groups.setdefault((*alike, copy.target_strides) if apart else number, []).append(copy)
    found = list[Weave]()
    for group in groups.values():
        row, reach = _row(group[0])
        most = min(MAX_GANG, limit_bytes // max(1, row * group[0].itemsize))
        mine = list[Copy]()
        for copy in sorted(group, key=lambda c: c.source_offset):
            if mine and (len(mine) >= most or copy.source_offset - mine[0].source_offset >= reach):
                found.append(_of(mine, row))
                mine = []
            mine.append(copy)
        found.append(_of(mine, row))
    return found


def _of(copies: Sequence[Copy], row: int) -> Weave:
    return Weave(tuple(copies), row if len(copies) > 1 else 1)


def _row(copy: Copy) -> tuple[int, int]:
    """(elements that are contiguous on both sides, smallest distance of two rows in the source or 0)."""
    row, outer = 1, len(copy.shape)
    while outer and (copy.shape[outer - 1] == 1 or copy.source_strides[outer - 1] == row):
        if copy.shape[outer - 1] != 1 and copy.target_strides[outer - 1] != row:
            break
        row *= copy.shape[outer - 1]
        outer -= 1
    axes = zip(copy.shape[:outer], copy.source_strides[:outer], strict=True)
    return row, min((abs(s) for n, s in axes if n != 1), default=0)


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Part of a copy as a block of single elements, with the position in the target of its first one."""

    copy: Copy
    block: Block
    row: int
    column: int


def pieces_of(
    woven: Weave, mode: str, keys: Sequence[tuple[int, int]], low: int, high: int, base: int
) -> list[list[Piece]]:
    """Bytes ``low:high`` of a stream: groups of one piece per copy, in the order of the stream.

    ``keys``: numbers of the source and target buffer of each copy; ``base``: where the stream starts in the
    window's buffer.
    """
    first, count, unit = woven.copies[0], len(woven.copies), woven.unit_bytes
    if low % unit or high % unit:
        raise MappingError(f"window cuts {unit} bytes of {first.target_path!r} at {low}:{high}")
    each = first.itemsize * count
    return [
        [
            _piece(copy, mode, keys[i], start, shape, base + i * woven.row * copy.itemsize, woven.strides)
            for i, copy in enumerate(woven.copies)
        ]
        for start, shape in cut_box(first.shape, low // each, high // each)
    ]


def _piece(
    copy: Copy,
    mode: str,
    keys: tuple[int, int],
    start: tuple[int, ...],
    shape: tuple[int, ...],
    base: int,
    strides: tuple[int, ...],
) -> Piece:
    size = copy.itemsize
    stream = tuple(n * size for n in strides)
    source = tuple(n * size for n in copy.source_strides)
    target = tuple(n * size for n in copy.target_strides)
    in_stream = base + _at(start, stream)
    a = in_stream if mode == "scatter" else copy.source_offset * size + _at(start, source)
    b = in_stream if mode == "pack" else copy.target_offset * size + _at(start, target)
    sides = (stream if mode == "scatter" else source, stream if mode == "pack" else target)
    row = copy.target_row + _at(start, copy.row_strides)
    column = copy.target_column + _at(start, copy.column_strides)
    return Piece(copy, Block(*keys, a, b, size, shape, *sides), row, column)


def _at(index: tuple[int, ...], strides: tuple[int, ...]) -> int:
    return sum(i * n for i, n in zip(index, strides, strict=True))
