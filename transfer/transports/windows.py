"""A packed edge cut into windows, and where a window's bytes lie: in few long runs, or only in a copy table.

The packed edge is its copies' elements, one copy after the other, each in row-major order of its shape, but
copies whose rows lie between each other in the source are woven, row by row. Windows end at borders of an
element (or of a row of each) and follow from plan and size alone, so both sides cut alike.
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
from jaxrl_sync.sharding.rank_plan import MAX_DIMS
from jaxrl_sync.sharding.weaves import Weave, weave
from jaxrl_sync.transfer.transports.pinned import Table

Key = tuple[int, str]
Side = Literal["source", "target"]
Starts = npt.NDArray[np.int64]

STREAM_RUN_BYTES = 256
"""Shorter runs (on average) cost more as entries of a system call's vector than a pass through a chunk."""

VIEW_RUN_BYTES = 16 << 10
"""The same where the vector is made in Python."""


@dataclasses.dataclass(frozen=True, eq=False)
class Window:
    """``nbytes`` of the packed edge, from ``offset`` bytes into the stream of ``weaves`` on."""

    weaves: tuple[Weave, ...]
    offset: int
    nbytes: int


def windows(copies: Sequence[Copy], limit_bytes: int) -> list[Window]:
    """Windows of at most ``limit_bytes`` each, in order."""
    weaves = weave(copies, limit_bytes)
    starts = list(itertools.accumulate((w.total_bytes for w in weaves), initial=0))
    found, low = list[Window](), 0
    while low < starts[-1]:
        high = min(low + limit_bytes, starts[-1])
        at = bisect.bisect_left(starts, high) - 1
        high -= (high - starts[at]) % weaves[at].unit_bytes
        first, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
        found.append(Window(tuple(weaves[first:last]), low - starts[first], high - low))
        low = high
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Direct:
    """Windows whose runs the kernel's socket calls take from the shards, or put there, in one loop in C."""

    keys: tuple[Key, ...]
    rows: npt.NDArray[np.int64]
    nbytes: int


def segments(cut: Sequence[Window], side: Side) -> list[Direct | Place]:
    """What one connection does, in order: as long stretches in C as can be, other windows one by one."""
    found: list[Direct | Place] = []
    for direct, group in itertools.groupby(((w, _table(w, side)) for w in cut), lambda x: _is_direct(x[1])):
        pairs = list(group)
        if direct:
            found.append(_joined([table for _, table in pairs], side))
        else:
            found += [Place(window, table, side) for window, table in pairs]
    return found


def _table(window: Window, side: Side) -> CopyTable:
    make = CopyTable.pack if side == "source" else CopyTable.scatter
    return make(window.weaves, window.offset, window.nbytes)


def _is_direct(table: CopyTable) -> bool:
    """Whether the C loop is there and runs are long enough for it."""
    first = table.rows.shape[1] - 3 * MAX_DIMS  # shape, source strides, target strides close a row
    runs = int(np.prod(np.maximum(1, table.rows[:, first : first + MAX_DIMS]), axis=1).sum())
    return table.native and table.total_bytes >= runs * STREAM_RUN_BYTES


def _joined(tables: list[CopyTable], side: Side) -> Direct:
    """One table of many, over all their shards."""
    column = 0 if side == "source" else 1
    keys: dict[Key, int] = {}
    parts = []
    for table in tables:
        mine = table.source_keys if side == "source" else table.target_keys
        rows = table.rows.copy()
        rows[:, column] = np.array([keys.setdefault(k, len(keys)) for k in mine])[rows[:, column]]
        parts.append(rows)
    return Direct(tuple(keys), np.concatenate(parts), sum(t.total_bytes for t in tables))


class Place:
    """Where one window lies among the shards of one side: views of long runs, or a copy table."""

    def __init__(self, window: Window, table: CopyTable, side: Side) -> None:
        self.nbytes = window.nbytes
        self.runs = _runs(window, side)
        self.table = Table(table) if self.runs is None else None

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
    """(shard, offsets, lengths) of the window's runs in bytes; None where one copy has only short ones.

    Woven copies have.
    """
    found: _Runs = []
    at = -window.offset
    if any(len(woven.copies) > 1 for woven in window.weaves):
        return None
    for copy in (woven.copies[0] for woven in window.weaves):
        low, high = max(0, -at), min(copy.total_bytes, window.nbytes - at)
        at += copy.total_bytes
        strides = copy.source_strides if side == "source" else copy.target_strides
        outer, run = _contiguous(copy.shape, strides)
        run_bytes = run * copy.itemsize
        if run_bytes < min(VIEW_RUN_BYTES, copy.total_bytes):
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
