"""From source shards to sections: where in the streams of an edge the changed elements of its shards go.

A copy is an affine box: element ``i`` of it lies at ``offset + i . strides`` of the shard. Where the strides
nest (each one is larger than all that the smaller ones span), a position of the shard has one ``i`` at most,
found by a division per axis. Strides of zero give a position several places, negative ones are counted from
the other end, and a box whose strides don't nest is cut until they do. Work grows with the changed elements.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Copy
from jaxrl_sync.transfer.codec.bits import Bits, Positions
from jaxrl_sync.transfer.payload.entries import Entries, joined
from jaxrl_sync.transfer.payload.sections import Section

Key = tuple[int, str]
"""(device, path) of a source shard."""

Local = tuple[npt.NDArray[Any], Bits, Bits]
"""Changes of one shard: ascending element numbers (u32, u64 where the shard is larger), new and old bits."""

Changes = Mapping[Key, Local]

Axis = tuple[int, int, int]
"""Stride in the shard (above 0), size, step in the stream of the section."""


@dataclasses.dataclass(frozen=True, eq=False)
class Box:
    """Elements of one copy, ``first`` to ``last`` of the shard; the first one is at ``start`` of the stream.

    ``axes`` nest, the largest stride first. ``repeats``: how far behind the first place of an element its
    others are. ``ascending``: the order of the shard is that of the stream.
    """

    first: int
    last: int
    start: int
    axes: tuple[Axis, ...]
    repeats: npt.NDArray[np.int64] | None
    ascending: bool

    def places(self, positions: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.intp] | None]:
        """Places in the stream of those positions (from ``first`` to ``last``) that are in the box.

        With the indices of these positions, None for all of them; by ``repeats`` one may come more than once.
        """
        kind = positions.dtype.type
        wrap = 1 << positions.dtype.itemsize * 8
        rest = positions - kind(self.first)
        places = np.full(positions.size, self.start, positions.dtype)
        inside: npt.NDArray[np.bool_] | None = None
        for stride, size, step in self.axes:
            index = rest if stride == 1 else rest // kind(stride)
            rest = rest[:0] if stride == 1 else rest - index * kind(stride)
            places += index if step == 1 else index * kind(step % wrap)  # modulo the width: negative, too
            if index.size and int(index.max()) >= size:
                inside = index < size if inside is None else inside & (index < size)
        if rest.any():
            inside = rest == 0 if inside is None else inside & (rest == 0)
        chosen = None if inside is None else np.flatnonzero(inside)
        if chosen is not None:
            places = places[chosen]
        if self.repeats is not None:
            chosen = np.arange(positions.size) if chosen is None else chosen
            chosen = np.repeat(chosen, self.repeats.size)
            places = (places.astype(np.int64)[:, None] + self.repeats).reshape(-1)
        return places, chosen


def boxes_of(copy: Copy, start: int) -> list[Box]:
    """The boxes of a copy whose elements begin at ``start`` of a stream."""
    first, axes, repeats = copy.source_offset, list[Axis](), np.zeros(1, np.int64)
    step = 1
    for size, stride in zip(reversed(copy.shape), reversed(copy.source_strides), strict=True):
        if size > 1 and stride == 0:
            repeats = (np.arange(size)[:, None] * step + repeats).reshape(-1)
        elif size > 1 and stride > 0:
            axes.append((stride, size, step))
        elif size > 1:
            first, start = first + stride * (size - 1), start + step * (size - 1)
            axes.append((-stride, size, -step))
        step *= size
    return [
        _box(at, begin, _merged(nested), repeats if repeats.size > 1 else None)
        for at, begin, nested in _nested(first, start, sorted(axes, reverse=True))
    ]


def _box(first: int, start: int, axes: tuple[Axis, ...], repeats: npt.NDArray[np.int64] | None) -> Box:
    last = first + sum((size - 1) * stride for stride, size, _ in axes)
    steps = [step for _, _, step in axes]
    ascending = all(s > 0 for s in steps) and all(a > b for a, b in itertools.pairwise(steps))
    return Box(first, last, start, axes, repeats, ascending and repeats is None)


def _merged(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Neighbouring axes that are one run, in the shard and in the stream, as one."""
    found: list[Axis] = []
    for stride, size, step in axes:
        if found and found[-1][0] == size * stride and found[-1][2] == size * step:
            found[-1] = (stride, found[-1][1] * size, step)
        else:
            found.append((stride, size, step))
    return tuple(found)


def _nested(first: int, start: int, axes: list[Axis]) -> list[tuple[int, int, list[Axis]]]:
    """(first, start, axes) of parts whose axes nest: the shortest axis among those that don't is cut."""
    for number, (stride, _, _) in enumerate(axes):
        if sum((size - 1) * s for s, size, _ in axes[number + 1 :]) < stride:
            continue
        cut = min(range(number, len(axes)), key=lambda d: axes[d][1])
        away, size, step = axes[cut]
        rest = axes[:cut] + axes[cut + 1 :]
        return [part for i in range(size) for part in _nested(first + i * away, start + i * step, rest)]
    return [(first, start, axes)]


@dataclasses.dataclass(frozen=True, eq=False)
class _Shard:
    """What copies of a section read of one shard: their boxes, and the numbers of the copies."""

    boxes: list[Box]
    copies: list[int]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]


class Inverse:
    """The way from changed elements of shards to entries of one section."""

    def __init__(self, section: Section) -> None:
        self.section = section
        found: dict[Key, tuple[list[Box], list[int]]] = {}
        self._sorted: list[bool] = []
        """Per copy: whether its entries come in the order of the stream."""
        start = 0
        for number, copy in enumerate(section.copies):
            boxes = boxes_of(copy, start)
            shard = found.setdefault((copy.source_device, copy.source_path), ([], []))
            shard[0].extend(boxes)
            shard[1].extend([number] * len(boxes))
            self._sorted.append(len(boxes) == 1 and boxes[0].ascending)
            start += copy.num_elements
        self._shards = {key: _shard(boxes, copies) for key, (boxes, copies) in found.items()}

    @property
    def keys(self) -> frozenset[Key]:
        """The shards that the section reads."""
        return frozenset(self._shards)

    def entries(self, changes: Changes) -> Entries:
        """The entries of the section; ``changes`` has every shard that it reads."""
        found: dict[int, list[Entries]] = {}
        for key, shard in self._shards.items():
            positions, new, old = changes[key]
            low = np.searchsorted(positions, shard.first.astype(positions.dtype))
            high = np.searchsorted(positions, shard.last.astype(positions.dtype), "right")
            for number in np.flatnonzero(high > low).tolist():
                part = slice(int(low[number]), int(high[number]))
                places, chosen = shard.boxes[number].places(positions[part])
                bits = (new[part], old[part]) if chosen is None else (new[part][chosen], old[part][chosen])
                found.setdefault(shard.copies[number], []).append((places.astype(np.uint32), *bits))
        return joined([self._in_order(copy, found[copy]) for copy in sorted(found)], self.section)

    def _in_order(self, copy: int, parts: list[Entries]) -> Entries:
        if self._sorted[copy]:
            return parts[0]
        places, new, old = joined(parts, self.section)
        order = _order(places)
        return places[order], new[order], old[order]


def _order(places: Positions) -> npt.NDArray[np.intp]:
    """As ``np.argsort`` of u32, by halves: numpy sorts 16 bits by their digits, four times as fast."""
    low = np.argsort(places.astype(np.uint16), kind="stable")
    high = (places >> np.uint32(16)).astype(np.uint16)
    return low[np.argsort(high[low], kind="stable")]


def _shard(boxes: list[Box], copies: list[int]) -> _Shard:
    first, last = (np.array([getattr(b, name) for b in boxes], np.int64) for name in ("first", "last"))
    return _Shard(boxes, copies, first, last)
