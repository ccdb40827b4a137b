"""Which part of a fragment lies where: the pairs of source and target boxes that share elements of it.

All sets live in the fragment's *axis space* (one index per axis). The preimage of a source box and that of a
target box are boxes there, so what one device sends to another is an intersection of boxes, and coverage and
disjointness are statements about boxes; no element is ever counted one by one.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.box import Box, overlap_of
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import Flat, Fragment, index_ranges, row_major, split_rows
from jaxrl_sync.sharding.layout import Placement

IntArray = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Reduced:
    """A placement with every dimension that no device splits merged into the one before it.

    ``full[d]``: all devices hold all of dimension d. ``boxes``: the distinct boxes, in the merged dimensions.
    """

    shape: tuple[int, ...]
    boxes: tuple[Box, ...]
    full: tuple[bool, ...]


@functools.lru_cache(maxsize=4096)
def reduce(placement: Placement, keep_last: bool) -> Reduced:
    """``keep_last``: the last dimension stays on its own (digests are keyed by it)."""
    shape, boxes = placement.shape, list(placement.by_box)
    whole = [all(b.start[d] == 0 and b.stop[d] == n for b in boxes) for d, n in enumerate(shape)]
    groups: list[list[int]] = []
    for d in range(len(shape)):
        if groups and whole[d] and not (keep_last and d == len(shape) - 1):
            groups[-1].append(d)
        else:
            groups.append([d])
    sizes = tuple(math.prod(shape[d] for d in g) for g in groups)

    def merged(box: Box) -> Box:
        inner = [math.prod(shape[d] for d in g[1:]) for g in groups]
        start = tuple(box.start[g[0]] * n for g, n in zip(groups, inner, strict=True))
        return Box(start, tuple(box.stop[g[0]] * n for g, n in zip(groups, inner, strict=True)))

    return Reduced(sizes, tuple(map(merged, boxes)), tuple(whole[g[0]] for g in groups))


@dataclasses.dataclass(frozen=True)
class Link:
    """An axis between both sides: dimension and stride (indices of that dimension) on each.

    ``source_dim`` is -1 for an axis along which the source repeats; ``source_stride`` may be negative.
    """

    size: int
    target_dim: int
    target_stride: int
    source_dim: int
    source_stride: int


@dataclasses.dataclass(frozen=True)
class Block:
    """A fragment whose axes each lie within one merged dimension on both sides.

    Index i is target element ``target_start[d] + sum over axes of d (i * target_stride)``, and so on.
    """

    links: tuple[Link, ...]
    target_start: tuple[int, ...]
    source_start: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements that it maps."""
        return math.prod(a.size for a in self.links)


def blocks_of(fragment: Fragment, target: Reduced, source: Reduced) -> list[Block]:
    """The fragment cut at the borders of the merged dimensions of both sides, and no further."""
    flats: list[Flat] = [(fragment.start, fragment.offset, fragment.axes)]
    rows_t, rows_s = row_major(target.shape), row_major(source.shape)
    for row in _borders(target.shape):
        flats = [f for flat in flats for f in split_rows(flat, row)]
    flats = [(offset, start, tuple((n, t, s) for n, s, t in axes)) for start, offset, axes in flats]
    for row in _borders(source.shape):
        flats = [f for flat in flats for f in split_rows(flat, row)]
    return sorted(
        (_block(f, target.shape, rows_t, source.shape, rows_s) for f in flats),
        key=lambda b: (b.target_start, b.source_start, len(b.links)),
    )


def _borders(shape: Sequence[int]) -> list[int]:
    size = math.prod(shape)
    return sorted({s for s in row_major(shape) if 1 < s < size}, reverse=True)


def _block(
    flat: Flat, t_shape: Sequence[int], rows_t: Sequence[int], s_shape: Sequence[int], rows_s: Sequence[int]
) -> Block:
    offset, start, axes = flat
    links = []
    for n, step, stride in axes:
        if n == 1:
            continue
        if stride < 0:
            start, offset, stride, step = start + (n - 1) * stride, offset + (n - 1) * step, -stride, -step
        t = next(d for d, s in enumerate(rows_t) if stride % s == 0 and t_shape[d] > 1)
        if step:
            e = next(d for d, s in enumerate(rows_s) if step % s == 0 and s_shape[d] > 1)
            links.append(Link(n, t, stride // rows_t[t], e, step // rows_s[e]))
        else:
            links.append(Link(n, t, stride // rows_t[t], -1, 0))
    links.sort(key=lambda a: (a.target_dim, -a.target_stride))
    merged: list[Link] = []
    for a in links:
        b = merged[-1] if merged else None
        if (
            b
            and (b.target_dim, b.source_dim) == (a.target_dim, a.source_dim)
            and (b.target_stride == a.size * a.target_stride and b.source_stride == a.size * a.source_stride)
        ):
            merged[-1] = dataclasses.replace(a, size=a.size * b.size)
        else:
            merged.append(a)
    first_t = tuple(start // s % n for s, n in zip(rows_t, t_shape, strict=True))
    first_s = tuple(offset // s % n for s, n in zip(rows_s, s_shape, strict=True))
    return Block(tuple(merged), first_t, first_s)


def volumes(low: IntArray, high: IntArray) -> IntArray:
    """Elements of boxes [boxes, axes]."""
    return np.asarray(np.prod(np.maximum(high - low, 0), axis=1, dtype=np.int64))


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """Boxes in axis space, [boxes, axes], and the number of the device box that each belongs to."""

    owner: IntArray
    low: IntArray
    high: IntArray

    @property
    def volumes(self) -> IntArray:
        """Elements of each."""
        return volumes(self.low, self.high)


def preimages(block: Block, boxes: Sequence[Box], side: str) -> Parts:
    """The axis-space boxes of every device box of one side."""
    axes = len(block.links)
    start = block.target_start if side == "target" else block.source_start
    by_dim: dict[int, list[int]] = {}
    for i, a in enumerate(block.links):
        by_dim.setdefault(a.target_dim if side == "target" else a.source_dim, []).append(i)
    cache: dict[tuple[int, int, int], list[dict[int, tuple[int, int]]]] = {}

    def along(d: int, low: int, high: int) -> list[dict[int, tuple[int, int]]]:
        key = (d, low, high)
        if key not in cache:
            cache[key] = _along(block, by_dim.get(d, []), side, start[d], low, high)
        return cache[key]

    owner, lows, highs = [], [], []
    for number, box in enumerate(boxes):
        options = [along(d, a, b) for d, (a, b) in enumerate(zip(box.start, box.stop, strict=True))]
        for choice in itertools.product(*options):
            low, high = [0] * axes, [a.size for a in block.links]
            for ranges in choice:
                for i, (first, last) in ranges.items():
                    low[i], high[i] = first, last
            owner.append(number)
            lows.append(low)
            highs.append(high)
    shape = (len(owner), axes)
    return Parts(
        np.array(owner, np.int64),
        np.array(lows, np.int64).reshape(shape),
        np.array(highs, np.int64).reshape(shape),
    )


def _along(
    block: Block, numbers: list[int], side: str, start: int, low: int, high: int
) -> list[dict[int, tuple[int, int]]]:
    """Axis ranges, by axis number, that keep one dimension's index in low:high."""
    axes = []
    for i in numbers:
        a = block.links[i]
        stride = a.target_stride if side == "target" else a.source_stride
        if stride < 0:
            start += (a.size - 1) * stride
        axes.append((i, a.size, abs(stride), stride < 0))
    axes.sort(key=lambda a: -a[2])
    found = []
    for box in index_ranges([(n, s) for _, n, s, _ in axes], start, low, high):
        ranges = {}
        for (i, n, _, flipped), (first, last) in zip(axes, box, strict=True):
            ranges[i] = (n - last, n - first) if flipped else (first, last)
        found.append(ranges)
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Pairs:
    """What of a block goes from which source box to which target box: axis-space boxes, [pairs, axes]."""

    source: IntArray
    target: IntArray
    low: IntArray
    high: IntArray


def match(block: Block, target: Reduced, source: Reduced, name: str) -> Pairs:
    """All pairs of boxes that share elements of the block, with the proof that they cover it exactly once.

    The preimages of the target boxes must be disjoint and fill the axis space, and so must those of the
    source boxes: then their intersections are disjoint and fill every target box. Checked by volumes and by
    a sweep over boxes; a failure is a `MappingError` with ``name``.
    """
    want, have = preimages(block, target.boxes, "target"), preimages(block, source.boxes, "source")
    for parts, side in ((want, "target"), (have, "source")):
        if (hit := overlap_of(parts.low, parts.high)) is not None:
            raise MappingError(f"{name!r}: {side} boxes overlap partly (boxes {hit[0]} and {hit[1]})")
        if (held := int(parts.volumes.sum())) != block.num_elements:
            raise MappingError(f"{name!r}: {side} devices hold {held} of {block.num_elements} elements")
    low = np.maximum(want.low[:, None], have.low[None])
    high = np.minimum(want.high[:, None], have.high[None])
    t, s = np.nonzero((low < high).all(axis=2))
    pairs = Pairs(have.owner[s], want.owner[t], low[t, s], high[t, s])
    moved = np.prod(pairs.high - pairs.low, axis=1, dtype=np.int64).sum()
    if moved != block.num_elements:
        raise MappingError(f"{name!r}: pairs move {moved} of {block.num_elements} elements")
    return pairs
