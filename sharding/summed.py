"""Copies that are summed on the way: the digest of what an edge read, in the pass that copies it.

In C, a piece whose last axis is contiguous on both sides and within one row of the target tensor is summed
while it is in the cache. Other pieces (transposes, very short rows) are copied first and summed after.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.blocks import IntArray, gangs_of, table_of
from jaxrl_sync.sharding.digests import Digest, SumBlock, Sums
from jaxrl_sync.sharding.native import addresses, kernels
from jaxrl_sync.sharding.rank_plan import MAX_DIMS
from jaxrl_sync.sharding.weaves import Piece

SPLIT_BYTES = 1 << 20
"""Rows of one source that go to different targets are split alike, and run one after the other while the
pages that they share are at hand."""

ROW_BYTES = 128
"""Shortest rows that are copied and summed at once."""

Bytes = npt.NDArray[np.uint8]
Axis = tuple[int, int, int, int, int]
"""Size, source stride, target stride (bytes), row stride, column stride of one axis."""


@dataclasses.dataclass(frozen=True)
class _Rows:
    """One entry of the C table: axes outermost first, the last one contiguous; it starts at ``index``."""

    piece: Piece
    axes: tuple[Axis, ...]
    index: tuple[int, ...]

    def at(self, column: int) -> int:
        """How far the start lies from that of the piece, in the given column of an axis."""
        return sum(i * axis[column] for i, axis in zip(self.index, self.axes, strict=True))

    def row(self, groups: dict[str, int]) -> list[int]:
        """As `summed_entry` of cext/kernels.h."""
        copy, b = self.piece.copy, self.piece.block
        columns = [[axis[k] for axis in self.axes] + [0] * (MAX_DIMS - len(self.axes)) for k in range(5)]
        return [
            b.source, b.target, groups[copy.target_path], b.source_offset + self.at(1),
            b.target_offset + self.at(2), copy.itemsize, len(self.axes), self.piece.row + self.at(3),
            self.piece.column + self.at(4), *(n for column in columns for n in column),
        ]  # fmt: skip


@dataclasses.dataclass(frozen=True, eq=False)
class SummedTable:
    """Copies and the groups (target paths) that their sums go to; made once per copy table, for C."""

    _paths: tuple[str, ...]
    _rows: IntArray
    _rest: IntArray
    _rest_sums: Sums

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> SummedTable:
        """Buffers are numbered as in the pieces' blocks."""
        groups = {path: i for i, path in enumerate(dict.fromkeys(p.copy.target_path for p in pieces))}
        joined, rest = list[_Rows](), list[Piece]()
        for piece in pieces:
            axes = _axes(piece)
            if axes is None:
                rest.append(piece)
            else:
                joined += _split(_Rows(piece, axes, (0,) * len(axes)))
        joined.sort(key=lambda r: (r.piece.block.source, r.piece.block.source_offset + r.at(1)))
        rows = np.array([r.row(groups) for r in joined], np.int64).reshape(len(joined), 9 + 5 * MAX_DIMS)
        paths = tuple(groups)
        return cls(paths, rows, table_of(gangs_of([[p.block] for p in rest])), source_sums(rest, paths))

    def execute(
        self, source: Sequence[Bytes], target: Sequence[Bytes], threads: int, streaming: int
    ) -> dict[str, Digest]:
        """Copies, and returns the digest of what was read per target path."""
        native = kernels()
        assert native is not None
        sums = np.zeros((len(self._paths), 2), np.uint32)
        places = addresses(source), addresses(target)
        native.summed_table(self._rows, *places, sums, threads, streaming)
        native.copy_table(self._rest, *places, threads, streaming)
        self._rest_sums.add(source, sums, threads)
        return {path: (int(a), int(b)) for path, (a, b) in zip(self._paths, sums, strict=True)}


def source_sums(pieces: Sequence[Piece], paths: Sequence[str]) -> Sums:
    """Sums over the source side of pieces, numbered by target path."""
    groups = {path: i for i, path in enumerate(paths)}
    blocks: list[SumBlock] = [
        (p.block.source, groups[p.copy.target_path], p.block.source_offset, p.copy.itemsize, p.block.shape,
         p.block.source_strides, p.row, p.copy.row_strides, p.column, p.copy.column_strides)
        for p in pieces
    ]  # fmt: skip
    return Sums.of(blocks, paths)


def _axes(piece: Piece) -> tuple[Axis, ...] | None:
    """The axes in order of the target's memory, a contiguous one within a row last; None without one."""
    b, copy = piece.block, piece.copy
    columns = (b.shape, b.source_strides, b.target_strides, copy.row_strides, copy.column_strides)
    axes = [a for a in zip(*columns, strict=True) if a[0] != 1]
    long = [a for a in axes if a[1] == a[2] == copy.itemsize and a[3] == 0 and a[0] * a[1] >= ROW_BYTES]
    if not long or len(axes) > MAX_DIMS:
        return None
    outer = [a for a in axes if a is not long[0]]
    outer.sort(key=lambda a: (-abs(a[2]), -abs(a[1])))
    return (*outer, long[0])


def _split(rows: _Rows) -> list[_Rows]:
    """Cut along the outermost axis to about SPLIT_BYTES."""
    n, total = rows.axes[0][0], math.prod(a[0] for a in rows.axes) * rows.piece.copy.itemsize
    step = max(1, n * SPLIT_BYTES // total)
    if step >= n:
        return [rows]
    inner = rows.axes[1:]
    return [
        _Rows(
            rows.piece, ((min(step, n - i), *rows.axes[0][1:]), *inner), (rows.index[0] + i, *rows.index[1:])
        )
        for i in range(0, n, step)
    ]
