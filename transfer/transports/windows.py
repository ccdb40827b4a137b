"""A packed edge cut into windows, and where a window's bytes lie: in few long runs, or only in a copy table.

The packed edge is its copies' elements, one copy after the other, each in row-major order of its shape.
Windows end at borders of elements and follow from plan and size alone, so both sides cut alike.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Copy, CopyTable
from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.transfer.transports.pinned import Table

Key = tuple[int, str]
Side = Literal["source", "target"]
Starts = npt.NDArray[np.int64]

DIRECT_RUN_BYTES = 16 << 10
"""Shorter runs cost more as entries of a system call's vector than a copy through a chunk in the cache."""


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """``nbytes`` of the packed edge, from ``offset`` bytes into the stream of ``copies`` on."""

    copies: tuple[Copy, ...]
    offset: int
    nbytes: int


def windows(copies: Sequence[Copy], limit_bytes: int) -> list[Window]:
    """Windows of at most ``limit_bytes`` each, in order."""
    starts = list(itertools.accumulate((c.total_bytes for c in copies), initial=0))
    found, low = list[Window](), 0
    while low < starts[-1]:
        high = min(low + limit_bytes, starts[-1])
        last = bisect.bisect_left(starts, high)
        high -= (high - starts[last - 1]) % copies[last - 1].itemsize
        first = bisect.bisect_right(starts, low) - 1
        found.append(Window(tuple(copies[first:last]), low - starts[first], high - low))
        low = high
    return found


class Place:
    """Where a window lies among the shards of one side: views of long runs, or a copy table."""

    def __init__(self, window: Window, side: Side) -> None:
        self.nbytes = window.nbytes
        self.runs = _runs(window, side)
        self.table = None
        if self.runs is None:
            make = CopyTable.pack if side == "source" else CopyTable.scatter
            self.table = Table(make(window.copies, window.offset, window.nbytes))

    def views(self, shards: Mapping[Key, Any]) -> list[memoryview]:
        """The runs in the shards, in order. Only where ``runs`` is there."""
        assert self.runs is not None
        flat: dict[Key, memoryview] = {}
        found = []
        for key, starts, lengths in self.runs:
            if key not in flat:
                flat[key] = flat_bytes(shards[key]).data
            whole = flat[key]
            found += [whole[a : a + n] for a, n in zip(starts.tolist(), lengths.tolist(), strict=True)]
        return found


_Runs = list[tuple[Key, Starts, Starts]]


def _runs(window: Window, side: Side) -> _Runs | None:
    """(shard, offsets, lengths) of the window's runs in bytes; None where one copy has only short ones."""
    found: _Runs = []
    at = -window.offset
    for copy in window.copies:
        low, high = max(0, -at), min(copy.total_bytes, window.nbytes - at)
        at += copy.total_bytes
        strides = copy.source_strides if side == "source" else copy.target_strides
        outer, run = _contiguous(copy.shape, strides)
        run_bytes = run * copy.itemsize
        if run_bytes < min(DIRECT_RUN_BYTES, copy.total_bytes):
            return None
        offset = copy.source_offset if side == "source" else copy.target_offset
        starts = _starts(copy.shape[:outer], strides[:outer], offset) * copy.itemsize
        first, last = low // run_bytes, -(-high // run_bytes)
        starts = starts[first:last]
        lengths = np.full(last - first, run_bytes, np.int64)
        cut = low - first * run_bytes
        starts[0] += cut
        lengths[0] -= cut
        lengths[-1] -= last * run_bytes - high
        key = copy.source_device, copy.source_path
        if side == "target":
            key = copy.target_device, copy.target_path
        found.append((key, starts, lengths))
    return found


def _contiguous(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """(axes outside of a run, elements of a run)."""
    outer, run = len(shape), 1
    while outer and (shape[outer - 1] == 1 or strides[outer - 1] == run):
        run *= shape[outer - 1]
        outer -= 1
    return outer, run


def _starts(shape: tuple[int, ...], strides: tuple[int, ...], offset: int) -> Starts:
    found = np.array([offset], np.int64)
    for n, stride in zip(shape, strides, strict=True):
        found = (found[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return found
