"""Abstract arrays made of fragments, and what the movement operations of a jaxpr do to them.

Every function here is exact for any shapes and touches no element. An array element that no fragment covers
does not exist: `Value`s always cover their whole shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.fragments import (
    MAX_FRAGMENTS,
    Axis,
    DimAxis,
    Fragment,
    Piece,
    TooManyFragments,
    by_dimension,
    coalesce,
    flatten,
    restrict,
)

Shape = tuple[int, ...]


class Value:
    """An array of known shape and dtype whose elements are elements of numbered sources."""

    def __init__(self, shape: Shape, dtype: np.dtype[Any], fragments: Sequence[Fragment]) -> None:
        self.shape, self.dtype, self.fragments = tuple(shape), dtype, tuple(fragments)

    @classmethod
    def whole(cls, source: int, shape: Shape, dtype: np.dtype[Any]) -> Value:
        """The source itself."""
        size = math.prod(shape)
        return cls(shape, dtype, (Fragment(source, 0, 0, _line(size)),) if size else ())

    @functools.cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """The fragments cut at the borders of the dimensions."""
        return tuple(p for f in self.fragments for p in by_dimension(f, self.shape))

    @property
    def sources(self) -> frozenset[int]:
        """The sources that occur."""
        return frozenset(f.source for f in self.fragments)

    def with_sources(self, dtype: np.dtype[Any], rename: Callable[[int], int]) -> Value:
        """The same arrangement of other sources, such as casts of these."""
        return Value(self.shape, dtype, [f._replace(source=rename(f.source)) for f in self.fragments])


def _line(size: int) -> tuple[Axis, ...]:
    return (Axis(size, 1, 1),) if size > 1 else ()


def from_pieces(shape: Shape, dtype: np.dtype[Any], pieces: Sequence[Piece]) -> Value:
    """The value of pieces that together cover the shape."""
    return Value(shape, dtype, [flatten(p, shape) for p in pieces])


def reshape(value: Value, shape: Shape) -> Value:
    """Other dimensions over the same row-major order: fragments stay as they are."""
    return value if shape == value.shape else Value(shape, value.dtype, value.fragments)


def _relabel(piece: Piece, dims: Sequence[int | None], rank: int) -> Piece:
    """Old dimension d becomes dims[d]; where it is None the index must be 0 and is dropped."""
    start = [0] * rank
    for d, new in enumerate(dims):
        if new is not None:
            start[new] = piece.start[d]
    axes = []
    for a in piece.axes:
        new = dims[a.dim]
        assert new is not None
        axes.append(a._replace(dim=new))
    return piece._replace(start=tuple(start), axes=tuple(axes))


def transpose(value: Value, permutation: Sequence[int]) -> Value:
    """Dimension i of the result is dimension permutation[i] of the operand."""
    shape = tuple(value.shape[p] for p in permutation)
    back = [list(permutation).index(d) for d in range(len(shape))]
    return from_pieces(shape, value.dtype, [_relabel(p, back, len(shape)) for p in value.pieces])


def broadcast_in_dim(value: Value, shape: Shape, dims: Sequence[int]) -> Value:
    """Operand dimension d becomes dims[d]; all others, and operand dimensions of size 1, repeat."""
    if math.prod(shape) == 0:
        return Value(shape, value.dtype, ())
    kept = {d: value.shape[i] for i, d in enumerate(dims)}
    repeat = [DimAxis(n, d, 1, 0) for d, n in enumerate(shape) if kept.get(d, 1) == 1 and n > 1]
    pieces = []
    for p in value.pieces:
        q = _relabel(p, list(dims), len(shape))
        pieces.append(q._replace(axes=(*q.axes, *repeat)))
    return from_pieces(shape, value.dtype, pieces)


def _shift(piece: Piece, dim: int, by: int) -> Piece:
    start = (*piece.start[:dim], piece.start[dim] + by, *piece.start[dim + 1 :])
    return piece._replace(start=start)


def _take_every(value: Value, dim: int, step: int) -> Value:
    """Indices 0, step, 2 step, ... of one dimension: the first column of that dimension seen as rows."""
    rows = -(-value.shape[dim] // step)
    longer = (*value.shape[:dim], rows * step, *value.shape[dim + 1 :])
    padded = from_pieces(longer, value.dtype, value.pieces)
    cut = reshape(padded, (*longer[:dim], rows, step, *longer[dim + 1 :]))
    shape = (*longer[:dim], rows, *longer[dim + 1 :])
    pieces = [q for p in cut.pieces for q in restrict(p, dim + 1, 0, 1)]
    dims = [*range(dim + 1), None, *range(dim + 1, len(shape))]
    return from_pieces(shape, value.dtype, [_relabel(p, dims, len(shape)) for p in pieces])


def slice_dim(value: Value, dim: int, low: int, high: int, step: int = 1) -> Value:
    """Indices low, low + step, ... below high of one dimension."""
    if (low, high, step) == (0, value.shape[dim], 1):
        return value
    shape = (*value.shape[:dim], max(0, high - low), *value.shape[dim + 1 :])
    pieces = [_shift(q, dim, -low) for p in value.pieces for q in restrict(p, dim, low, high)]
    part = from_pieces(shape, value.dtype, pieces)
    return part if step == 1 else _take_every(part, dim, step)


def slice_box(
    value: Value, low: Sequence[int], high: Sequence[int], step: Sequence[int] | None = None
) -> Value:
    """``value[low[0]:high[0]:step[0], ...]``."""
    for d, (a, b) in enumerate(zip(low, high, strict=True)):
        value = slice_dim(value, d, a, b, step[d] if step else 1)
    return value


def concatenate(values: Sequence[Value], dim: int) -> Value:
    """One after the other along one dimension."""
    total = sum(v.shape[dim] for v in values)
    shape = (*values[0].shape[:dim], total, *values[0].shape[dim + 1 :])
    pieces, at = [], 0
    for v in values:
        pieces += [_shift(p, dim, at) for p in v.pieces]
        at += v.shape[dim]
    return from_pieces(shape, values[0].dtype, pieces)


def stack(values: Sequence[Value], dim: int) -> Value:
    """Along a new dimension."""
    wide = [reshape(v, (*v.shape[:dim], 1, *v.shape[dim:])) for v in values]
    result = concatenate(wide, dim)
    return Value(result.shape, result.dtype, coalesce(result.fragments))


def reverse(value: Value, dims: Sequence[int]) -> Value:
    """Indices of these dimensions run backwards."""
    pieces = []
    for p in value.pieces:
        start = [
            n - 1 - i if d in dims else i for d, (i, n) in enumerate(zip(p.start, value.shape, strict=True))
        ]
        axes = []
        offset = p.offset
        for a in p.axes:
            if a.dim in dims:  # counted from its other end, so that strides stay positive
                start[a.dim] -= (a.size - 1) * a.stride
                offset += (a.size - 1) * a.step
                a = a._replace(step=-a.step)
            axes.append(a)
        pieces.append(Piece(p.source, offset, tuple(start), tuple(axes)))
    return from_pieces(value.shape, value.dtype, pieces)


def outside(value: Value, low: Sequence[int], high: Sequence[int]) -> list[Piece]:
    """The pieces of a value that lie outside of a box."""
    found, rest = [], list(value.pieces)
    for d, (a, b) in enumerate(zip(low, high, strict=True)):
        found += [q for p in rest for q in restrict(p, d, 0, a)]
        found += [q for p in rest for q in restrict(p, d, b, value.shape[d])]
        rest = [q for p in rest for q in restrict(p, d, a, b)]
    return found


def overwrite(value: Value, low: Sequence[int], update: Value) -> Value:
    """``value.at[low : low + update.shape].set(update)``."""
    high = [a + n for a, n in zip(low, update.shape, strict=True)]
    moved = []
    for p in update.pieces:
        moved.append(p._replace(start=tuple(i + a for i, a in zip(p.start, low, strict=True))))
    return from_pieces(value.shape, value.dtype, [*outside(value, low, high), *moved])


def pad(value: Value, fill: Value, config: Sequence[tuple[int, int, int]]) -> Value:
    """lax.pad: (before, after, between) per dimension; negative numbers cut. ``fill`` is a scalar."""
    for d, (before, after, between) in enumerate(config):
        if between:
            value = _spread(value, fill, d, between)
        parts = [value]
        for size, front in ((before, True), (after, False)):
            if size > 0:
                shape = (*value.shape[:d], size, *value.shape[d + 1 :])
                blank = broadcast_in_dim(fill, shape, ())
                parts = [blank, *parts] if front else [*parts, blank]
        value = concatenate(parts, d) if len(parts) > 1 else value
        n = value.shape[d]  # cut last: one side may take off more than was there, of what the other added
        value = slice_dim(value, d, max(0, -before), n - max(0, -after))
    return value


def _spread(value: Value, fill: Value, dim: int, between: int) -> Value:
    n, factor = value.shape[dim], between + 1
    if n < 2:
        return value
    long = (*value.shape[:dim], n * factor, *value.shape[dim + 1 :])
    blank = broadcast_in_dim(fill, (*value.shape[:dim], n, between, *value.shape[dim + 1 :]), ())
    one = reshape(value, (*value.shape[:dim], n, 1, *value.shape[dim + 1 :]))
    return slice_dim(reshape(concatenate([one, blank], dim + 1), long), dim, 0, long[dim] - between)


def select_boxes(mask: npt.NDArray[np.bool_]) -> list[tuple[Shape, Shape, bool]]:
    """A mask as disjoint boxes (low, high, value): recursive halving by runs along each dimension."""
    if mask.size == 0:
        return []
    if mask.all() or not mask.any():
        return [((0,) * mask.ndim, mask.shape, bool(mask.flat[0]))]
    rows = mask.reshape(mask.shape[0], -1)
    edges = np.flatnonzero((rows[1:] != rows[:-1]).any(axis=1)) + 1
    cuts = [0, *(int(e) for e in edges), mask.shape[0]]
    found: list[tuple[Shape, Shape, bool]] = []
    for a, b in zip(cuts[:-1], cuts[1:], strict=True):
        if mask.ndim == 1:
            found.append(((a,), (b,), bool(mask[a])))
        else:
            found += [((a, *low), (b, *high), bit) for low, high, bit in select_boxes(mask[a])]
        if len(found) > MAX_FRAGMENTS:
            raise TooManyFragments(f"a mask of more than {MAX_FRAGMENTS} boxes")
    return found


def select(boxes: Sequence[tuple[Shape, Shape, int]], cases: Sequence[Value]) -> Value:
    """The value that takes each box from the case of that number; the boxes cover the shape."""
    pieces = []
    for low, high, case in boxes:
        part: list[Piece] = list(cases[case].pieces)
        for d, (a, b) in enumerate(zip(low, high, strict=True)):
            part = [q for p in part for q in restrict(p, d, a, b)]
        pieces += part
    value = from_pieces(cases[0].shape, cases[0].dtype, pieces)
    return Value(value.shape, value.dtype, coalesce(value.fragments))
