"""Axis-aligned boxes of integer indices: one half-open interval per dimension."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import numpy.typing as npt


class Box(NamedTuple):
    """The indices ``start[d] <= i_d < stop[d]``; a box without dimensions holds the one scalar element."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """The box of all indices of an array of this shape."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent per dimension; never negative."""
        return tuple(max(0, b - a) for a, b in zip(self.start, self.stop, strict=True))

    @property
    def volume(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def intersect(self, other: Box) -> Box:
        """The common box; of volume 0 where there is none."""
        start = tuple(map(max, self.start, other.start))
        return Box(start, tuple(map(max, start, map(min, self.stop, other.stop))))

    def contains(self, other: Box) -> bool:
        """Whether every element of ``other`` lies in this box."""
        return other.volume == 0 or self.intersect(other) == other

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index expression of numpy or jax."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop, strict=True)) + "]"


IntArray = npt.NDArray[np.int64]


def overlap_of(start: IntArray, stop: IntArray) -> tuple[int, int] | None:
    """Two indices of boxes that share an element, or None. ``start``, ``stop``: int64 [boxes, dims].

    Sweeps along the dimension with the most distinct edges, so that a grid of n boxes costs about n times
    the number of boxes in one of its layers. Empty boxes overlap nothing.
    """
    live = np.flatnonzero((stop > start).all(axis=1))
    if len(live) < 2:
        return None
    if start.shape[1] == 0:
        return int(live[0]), int(live[1])
    start, stop = start[live], stop[live]
    sweep = max(range(start.shape[1]), key=lambda d: len(np.unique(start[:, d])))
    order = np.argsort(start[:, sweep], kind="stable")
    start, stop, live = start[order], stop[order], live[order]
    until = np.searchsorted(start[:, sweep], stop[:, sweep], side="left")
    for i in range(len(live) - 1):
        rest = slice(i + 1, int(until[i]))
        hit = ((start[rest] < stop[i]) & (stop[rest] > start[i])).all(axis=1)
        if hit.any():
            return int(live[i]), int(live[i + 1 + int(np.argmax(hit))])
    return None
