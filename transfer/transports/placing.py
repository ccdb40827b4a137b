"""Where the bytes of an edge end up in the receiver's slot, as contiguous runs, and chunks of such runs.

A copy's elements are taken in the order in which they lie in the target: what is packed in that order is
written with few long writes, whatever the order in the source.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import CopyTable, Edge, SlotLayout
from jaxrl_sync.sharding.rank_plan import Copy
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

Rows = npt.NDArray[np.uint64]


@dataclasses.dataclass(frozen=True, eq=False)
class Chunk:
    """What is packed and written at once: ``rows`` are (offset in the chunk, offset in the slot, bytes)."""

    table: CopyTable
    rows: Rows

    @property
    def total_bytes(self) -> int:
        """Bytes of the chunk."""
        return self.table.total_bytes


def in_target_order(copy: Copy) -> Copy:
    """The same copy with its axes in the order of the target's memory, axes of one element left out."""
    axes = [d for d, n in enumerate(copy.shape) if n != 1]
    axes.sort(key=lambda d: -abs(copy.target_strides[d]))

    def pick(values: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(values[d] for d in axes)

    return dataclasses.replace(
        copy,
        shape=pick(copy.shape),
        source_strides=pick(copy.source_strides),
        target_strides=pick(copy.target_strides),
        row_strides=pick(copy.row_strides),
        column_strides=pick(copy.column_strides),
    )


def contiguous_axes(copy: Copy) -> tuple[int, int]:
    """(axes outside of a contiguous run, elements of a run) of a copy in target order."""
    run, outer = 1, len(copy.shape)
    while outer and copy.target_strides[outer - 1] == run:
        run *= copy.shape[outer - 1]
        outer -= 1
    return outer, run


def count_runs(edge: Edge) -> int:
    """Contiguous runs in the target, copy by copy."""
    total = 0
    for copy in map(in_target_order, edge.copies):
        total += copy.num_elements // contiguous_axes(copy)[1] if copy.num_elements else 0
    return total


def choose_placement(
    edge: Edge, settings: VerbsSettings, obstacle: str = ""
) -> tuple[Literal["placed", "staged"], str]:
    """How the edge moves, and why in words. ``obstacle``: why nothing can be written to the slot itself.

    TransferError where the settings place it nevertheless.
    """
    if obstacle:
        if settings.placement == "placed":
            raise TransferError(f"sync.verbs.placement is 'placed', but {obstacle}: 'auto' would stage")
        return "staged", f"staged through host memory: {obstacle}"
    runs = count_runs(edge)
    mean = edge.total_bytes // max(1, runs)
    have = f"{runs} contiguous runs of {mean} bytes on average"
    if settings.placement != "auto":
        return settings.placement, f"{settings.placement} as configured; {have}"
    if mean >= settings.min_run_bytes:
        return "placed", f"placed: {have}, at least {settings.min_run_bytes}"
    return "staged", f"staged: {have}, expected {settings.min_run_bytes} to place them"


def count_chunks(edge: Edge, chunk_bytes: int) -> int:
    """How many chunks `chunks` gives."""
    return len(_borders([c for c in edge.copies if c.num_elements], chunk_bytes)) - 1


def chunks(edge: Edge, slot: SlotLayout, chunk_bytes: int) -> Iterator[Chunk]:
    """The edge cut into chunks of at most ``chunk_bytes``, in an order that only the sender must know."""
    copies = [in_target_order(c) for c in edge.copies if c.num_elements]
    starts = list(itertools.accumulate((c.total_bytes for c in copies), initial=0))
    targets: dict[int, npt.NDArray[np.int64]] = {}
    for low, high in itertools.pairwise(_borders(copies, chunk_bytes)):
        first, last = bisect.bisect_right(starts, low) - 1, bisect.bisect_left(starts, high)
        targets = {
            i: targets[i] if i in targets else _run_starts(copies[i], slot) for i in range(first, last)
        }
        parts = [
            _rows(copies[i], targets[i], starts[i], max(low, starts[i]), min(high, starts[i + 1]), low)
            for i in range(first, last)
        ]
        table = CopyTable.pack(copies[first:last], low - starts[first], high - low)
        yield Chunk(table, _merged(np.concatenate(parts)))


def _borders(copies: Sequence[Copy], chunk_bytes: int) -> list[int]:
    """Where chunks start and end in the packed edge: at borders of elements."""
    starts = list(itertools.accumulate((c.total_bytes for c in copies), initial=0))
    borders = [0]
    while borders[-1] < starts[-1]:
        end = min(borders[-1] + chunk_bytes, starts[-1])
        at = bisect.bisect_left(starts, end) - 1
        borders.append(end - (end - starts[at]) % copies[at].itemsize)
    return borders


def _run_starts(copy: Copy, slot: SlotLayout) -> npt.NDArray[np.int64]:
    """Byte offset in the slot of every run of a copy, in order."""
    outer, _ = contiguous_axes(copy)
    found = np.array([copy.target_offset], np.int64)
    for n, stride in zip(copy.shape[:outer], copy.target_strides[:outer], strict=True):
        found = (found[:, None] + np.arange(n, dtype=np.int64) * stride).reshape(-1)
    return found * copy.itemsize + slot.offset(copy.target_device, copy.target_path)


def _rows(
    copy: Copy, starts: npt.NDArray[np.int64], begin: int, low: int, high: int, chunk: int
) -> npt.NDArray[np.int64]:
    """Rows of bytes ``low:high`` of the packed edge, all within ``copy``, which begins at ``begin``."""
    run = contiguous_axes(copy)[1] * copy.itemsize
    first, last = (low - begin) // run, -(-(high - begin) // run)
    rows = np.zeros((last - first, 3), np.int64)
    rows[:, 1], rows[:, 2] = starts[first:last], run
    cut = low - begin - first * run
    rows[0, 1:] += cut, -cut
    rows[-1, 2] -= last * run - (high - begin)
    rows[:, 0] = low - chunk + np.cumsum(rows[:, 2]) - rows[:, 2]
    return rows


def _merged(rows: npt.NDArray[np.int64]) -> Rows:
    """Rows that continue one another in the slot as one."""
    fresh = np.ones(len(rows), bool)
    fresh[1:] = rows[1:, 1] != rows[:-1, 1] + rows[:-1, 2]
    merged = rows[fresh]
    merged[:, 2] = np.add.reduceat(rows[:, 2], np.flatnonzero(fresh))
    return merged.astype(np.uint64)
