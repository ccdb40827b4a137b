"""Fragments: affine maps between flat indices of a source and flat indices of an array, over atomic axes.

A fragment says that array element ``start + sum(i_a * stride_a)`` is source element
``offset + sum(i_a * step_a)`` for every index ``i`` with ``0 <= i_a < size_a``. Both sides are row-major flat
indices, so a reshape changes nothing, and a fragment is split only where an operation or a shard needs whole
dimensions. This is the algebra of strided layouts (mixed radices); no element is ever looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from jaxrl_sync.sharding.errors import MappingError

MAX_FRAGMENTS = 1 << 14
"""A tensor that needs more is not rearranged but scrambled: one gather on the source mesh (a computed leaf)
costs less than so many copies, and planning them would take minutes."""


class TooManyFragments(MappingError):
    """The rearrangement does not decompose into few enough affine pieces."""


class Axis(NamedTuple):
    """``size`` steps of ``stride`` elements in the array and of ``step`` elements in the source."""

    size: int
    stride: int
    step: int


class Fragment(NamedTuple):
    """See the module. ``source`` numbers the source tensor; strides are positive and descend."""

    source: int
    offset: int
    start: int
    axes: tuple[Axis, ...]

    @property
    def num_elements(self) -> int:
        """Elements that it maps."""
        return math.prod(a.size for a in self.axes)


class DimAxis(NamedTuple):
    """An axis within one dimension: ``stride`` counts indices of that dimension."""

    size: int
    dim: int
    stride: int
    step: int


class Piece(NamedTuple):
    """A fragment whose axes each lie within one dimension of the array, which begins at ``start``."""

    source: int
    offset: int
    start: tuple[int, ...]
    axes: tuple[DimAxis, ...]


Flat = tuple[int, int, tuple[tuple[int, int, int], ...]]
"""(start, offset, axes) with axes of (size, stride, step); the side to be cut comes first."""


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Strides of a row-major array, in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)


def _oriented(start: int, offset: int, axes: Iterable[tuple[int, int, int]]) -> Flat:
    """Strides made positive and put in descending order, axes of size 1 dropped."""
    kept = []
    for n, stride, step in axes:
        if n == 1:
            continue
        if stride < 0:
            start, offset, stride, step = start + (n - 1) * stride, offset + (n - 1) * step, -stride, -step
        kept.append((n, stride, step))
    kept.sort(key=lambda a: -a[1])
    return start, offset, tuple(kept)


def normal(source: int, offset: int, start: int, axes: Iterable[tuple[int, int, int]]) -> Fragment:
    """Strides positive and descending, axes of size 1 dropped, nested axes merged."""
    start, offset, kept = _oriented(start, offset, axes)
    merged: list[tuple[int, int, int]] = []
    for n, stride, step in kept:
        if merged and merged[-1][1] == n * stride and merged[-1][2] == n * step:
            merged[-1] = (merged[-1][0] * n, stride, step)
        else:
            merged.append((n, stride, step))
    return Fragment(source, offset, start, tuple(Axis(*a) for a in merged))


def split_rows(flat: Flat, row: int) -> list[Flat]:
    """Cuts so that in every piece the axes whose stride is no multiple of ``row`` stay within one row.

    Rows are ``row`` consecutive indices of the first side. Exact for any sizes and strides; periodic
    structure is kept as an axis: where strides divide, the number of pieces does not grow with the rows.
    """
    done: list[Flat] = []
    todo = [flat]
    while todo:
        start, offset, axes = todo.pop()
        inner = [a for a in axes if a[1] % row]
        low = start + sum(min(0, (n - 1) * s) for n, s, _ in inner)
        high = start + sum(max(0, (n - 1) * s) for n, s, _ in inner)
        if low // row == high // row:
            done.append((start, offset, axes))
        else:
            todo += _cut_axis(start, offset, axes, max(inner, key=lambda a: (abs(a[1]), a[0])), row)
        if len(done) + len(todo) > MAX_FRAGMENTS:
            raise TooManyFragments(f"more than {MAX_FRAGMENTS} affine pieces in rows of {row} elements")
    return done


def _cut_axis(
    start: int, offset: int, axes: tuple[tuple[int, int, int], ...], axis: tuple[int, int, int], row: int
) -> list[Flat]:
    n, s, t = axis
    others = list(axes)
    others.remove(axis)
    if s < 0:
        start, offset, s, t = start + (n - 1) * s, offset + (n - 1) * t, -s, -t
    inner = [a for a in others if a[1] % row]
    low = start + sum(min(0, (m - 1) * k) for m, k, _ in inner)
    width = sum(abs((m - 1) * k) for m, k, _ in inner)

    def piece(first: int, *new: tuple[int, int, int]) -> Flat:
        kept = tuple(a for a in new if a[0] > 1)
        return start + first * s, offset + first * t, (*others, *kept)

    period = row // math.gcd(s, row)
    rows = (low + (n - 1) * s + width) // row - low // row + 1
    if row % s == 0:
        groups = []
        head = 0 if low % row < s else min(n, -(-(row - low % row) // s))
        if head:
            groups.append((0, head, 1))
        repeats, tail = divmod(n - head, period)
        if repeats:
            groups.append((head, period, repeats))
        if tail:
            groups.append((n - tail, tail, 1))
    elif rows < min(period, n):
        groups, at = [], 0
        while at < n:
            count = min(n - at, -(-(row - (low + at * s) % row) // s))
            groups.append((at, count, 1))
            at += count
    else:
        return [piece(r, (-(-(n - r) // period), s * period, t * period)) for r in range(min(period, n))]
    found = []
    for first, count, repeats in groups:
        again = (repeats, period * s, period * t)
        fits = min(count, max(0, (row - 1 - width - (low + first * s) % row) // s + 1))
        if fits:
            found.append(piece(first, (fits, s, t), again))
        found += [piece(i, again) for i in range(first + fits, first + count)]
    return found


def by_dimension(fragment: Fragment, shape: Sequence[int]) -> list[Piece]:
    """The fragment as pieces whose axes each lie within one dimension of an array of this shape."""
    strides = row_major(shape)
    flats: list[Flat] = [(fragment.start, fragment.offset, fragment.axes)]
    size = math.prod(shape)
    for row in sorted({s for s in strides if 1 < s < size}, reverse=True):
        flats = [f for flat in flats for f in split_rows(flat, row)]
    pieces = []
    for start, offset, axes in flats:
        start, offset, kept = _oriented(start, offset, axes)
        placed: list[DimAxis] = []
        for n, stride, step in kept:
            dim = next(d for d, s in enumerate(strides) if stride % s == 0 and shape[d] > 1)
            axis = DimAxis(n, dim, stride // strides[dim], step)
            above = placed[-1] if placed else None
            if above and above.dim == dim and (above.stride, above.step) == (n * axis.stride, n * step):
                placed[-1] = axis._replace(size=n * above.size)
            else:
                placed.append(axis)
        first = tuple(start // s % n for s, n in zip(strides, shape, strict=True))
        pieces.append(Piece(fragment.source, offset, first, tuple(placed)))
    return pieces


def flatten(piece: Piece, shape: Sequence[int]) -> Fragment:
    """The fragment of a piece in an array of this shape."""
    strides = row_major(shape)
    start = sum(i * s for i, s in zip(piece.start, strides, strict=True))
    axes = ((a.size, a.stride * strides[a.dim], a.step) for a in piece.axes)
    return normal(piece.source, piece.offset, start, axes)


def index_ranges(
    axes: Sequence[tuple[int, int]], start: int, low: int, high: int
) -> list[tuple[tuple[int, int], ...]]:
    """Disjoint boxes of the indices with ``low <= start + sum(i_a * stride_a) < high``.

    ``axes``: (size, stride > 0), largest stride first. A box is one (from, to) per axis.
    """
    if high <= low:
        return []
    width = sum((n - 1) * s for n, s in axes)
    if start >= high or start + width < low:
        return []
    if low <= start and start + width < high:
        return [tuple((0, n) for n, _ in axes)]
    (n, s), rest = axes[0], axes[1:]
    width -= (n - 1) * s
    first = max(0, -(-(low - start - width) // s))  # below it nothing is inside
    last = min(n, (high - 1 - start) // s + 1)  # from it on nothing is inside
    inside = max(first, -(-(low - start) // s))
    outside = max(inside, min(last, (high - 1 - width - start) // s + 1))
    inside = min(inside, last)
    outside = min(outside, last)
    found = []
    for i in (*range(first, inside), *range(outside, last)):
        found += [((i, i + 1), *box) for box in index_ranges(rest, start + i * s, low, high)]
    if inside < outside:
        found.append(((inside, outside), *((0, m) for m, _ in rest)))
    return found


def restrict(piece: Piece, dim: int, low: int, high: int) -> list[Piece]:
    """The part of a piece with ``low <= index < high`` in one dimension; indices stay as they were."""
    order = sorted((i for i, a in enumerate(piece.axes) if a.dim == dim), key=lambda i: -piece.axes[i].stride)
    found = []
    axes = [(piece.axes[i].size, piece.axes[i].stride) for i in order]
    for box in index_ranges(axes, piece.start[dim], low, high):
        start, offset, new = piece.start[dim], piece.offset, list(piece.axes)
        for i, (a, b) in zip(order, box, strict=True):
            axis = piece.axes[i]
            start, offset = start + a * axis.stride, offset + a * axis.step
            new[i] = axis._replace(size=b - a)
        starts = (*piece.start[:dim], start, *piece.start[dim + 1 :])
        found.append(Piece(piece.source, offset, starts, tuple(x for x in new if x.size > 1)))
    return found


def coalesce(fragments: Iterable[Fragment]) -> tuple[Fragment, ...]:
    """Fragments in order of their start, equal ones at equal distances merged into one where that nests."""
    todo = sorted(fragments, key=lambda f: (f.source, f.axes, f.start))
    while True:
        merged: list[Fragment] = []
        at = 0
        while at < len(todo):
            run = _run_length(todo, at)
            first = todo[at]
            if run > 1:
                axis = (run, todo[at + 1].start - first.start, todo[at + 1].offset - first.offset)
                merged.append(normal(first.source, first.offset, first.start, (*first.axes, axis)))
            else:
                merged.append(first)
            at += run
        if len(merged) == len(todo):
            return tuple(sorted(merged, key=lambda f: (f.start, f.source, f.axes)))
        todo = sorted(merged, key=lambda f: (f.source, f.axes, f.start))


def _run_length(fragments: list[Fragment], at: int) -> int:
    """How many fragments from ``at`` on form one more axis that nests with the ones they have."""
    first = fragments[at]
    if at + 1 == len(fragments) or fragments[at + 1][:1] + fragments[at + 1][3:] != first[:1] + first[3:]:
        return 1
    stride, step = fragments[at + 1].start - first.start, fragments[at + 1].offset - first.offset
    below = sum((a.size - 1) * a.stride for a in first.axes if a.stride < stride)
    above = min((a.stride for a in first.axes if a.stride >= stride), default=None)
    if stride <= below:
        return 1
    run = 1
    while at + run < len(fragments):
        f = fragments[at + run]
        fits = above is None or run * stride + below < above
        same = f.source == first.source and f.axes == first.axes
        if not (fits and same and f.start - first.start == run * stride):
            break
        if f.offset - first.offset != run * step:
            break
        run += 1
    return run
