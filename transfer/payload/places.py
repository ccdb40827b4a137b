"""Where the entries of a section lie: their elements of the slot, and the global positions that digests use.

In C where built; the numpy form gives the same numbers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Copy
from jaxrl_sync.sharding.digests import entry_sums
from jaxrl_sync.sharding.rank_plan import MAX_DIMS
from jaxrl_sync.transfer.codec import native, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions
from jaxrl_sync.transfer.payload.sections import Digests, Section

KINDS: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")

Index = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, eq=False)
class Located:
    """Entries of one section: the copies they are in, where each copy's entries start, rows and columns."""

    copies: Index
    starts: Index
    index: Index
    rows: Index
    columns: Index


class Places:
    """Where the entries of one section lie. ``origin(copy)``: element of the slot where its shard starts."""

    def __init__(self, section: Section, origin: Callable[[Copy], int] | None = None) -> None:
        self.section = section
        self._groups = list(dict.fromkeys(c.target_path for c in section.copies))
        self._group = np.array([self._groups.index(c.target_path) for c in section.copies], np.int64)
        sizes = np.array([c.num_elements for c in section.copies], np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        depth = max(1, *(len(c.shape) for c in section.copies))
        table = [_rows(c, depth, origin(c) if origin else 0) for c in section.copies]
        self._base = np.array([t[0] for t in table], np.int64).reshape(-1, 3)
        self._inner = np.array([t[1] for t in table], np.int64).reshape(-1, depth)
        self._steps = np.array([t[2] for t in table], np.int64).reshape(-1, depth, 3)
        self._entries = self._table(sizes) if depth <= MAX_DIMS else None

    def _table(self, sizes: Index) -> Index:
        """The rows that C reads: see cext/places.h."""
        depth = self._inner.shape[1]
        rows = np.zeros((sizes.size, 7 + 4 * MAX_DIMS), np.int64)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3] = self._bounds[:-1], sizes, self._group, depth
        rows[:, 4:7] = self._base
        rows[:, 7 : 7 + depth] = self._inner
        for k in range(3):
            at = 7 + (k + 1) * MAX_DIMS
            rows[:, at : at + depth] = self._steps[:, :, k]
        return rows

    def paths(self, positions: Positions | None) -> frozenset[str]:
        """The target's tensors in which these entries lie, None: all of the section."""
        if positions is None:
            return frozenset(self._groups)
        copies = np.flatnonzero(np.diff(np.searchsorted(positions, self._bounds)))
        return frozenset(self._groups[i] for i in np.unique(self._group[copies]).tolist())

    def locate(self, positions: Positions) -> Located:
        """Each entry's element of the slot, its global row and its global column."""
        cuts = np.searchsorted(positions, self._bounds)
        counts = np.diff(cuts)
        copies = np.flatnonzero(counts)
        counts = counts[copies]
        rest = positions.astype(np.int64) - np.repeat(self._bounds[copies], counts)
        at = [np.repeat(self._base[copies, k], counts) for k in range(3)]
        for d in range(self._inner.shape[1]):
            inner = np.repeat(self._inner[copies, d], counts)
            whole = rest // inner
            rest -= whole * inner
            for k in range(3):
                at[k] += whole * np.repeat(self._steps[copies, d, k], counts)
        return Located(copies, cuts[copies], *at)

    def apply(
        self, positions: Positions, codes: Bits, kind: values.Kind, memory: Bits
    ) -> tuple[Index, Bits, Digests]:
        """Write entries into ``memory`` (the slot as elements): where, new bits, change of the digests."""
        if self._entries is None or (coders := native.coders()) is None:
            return self.apply_numpy(positions, codes, kind, memory)
        codes = native.aligned(codes)
        index, new = np.empty(positions.size, np.int64), np.empty_like(codes)
        sums = np.zeros((len(self._groups), 2), np.uint32)
        kind_number, size = KINDS.index(kind), codes.dtype.itemsize
        coders.places_apply(
            self._entries, positions, codes, memory, None, index, new, sums, size, kind_number, 1
        )
        return index, new, self._named(sums)

    def apply_numpy(
        self, positions: Positions, codes: Bits, kind: values.Kind, memory: Bits
    ) -> tuple[Index, Bits, Digests]:
        """`apply` in numpy."""
        where = self.locate(positions)
        old = memory[where.index]
        new = values.bits_from(codes, old, kind)
        memory[where.index] = new
        return where.index, new, self._change_numpy(where, new, old)

    def change_of_digests(self, positions: Positions, new: Bits, old: Bits, threads: int = 1) -> Digests:
        """What the digests of the tensors change by when ``old`` bits become ``new`` ones."""
        if self._entries is None or (coders := native.coders()) is None:
            return self._change_numpy(self.locate(positions), new, old)
        sums = np.zeros((len(self._groups), 2), np.uint32)
        size = new.dtype.itemsize
        coders.places_apply(self._entries, positions, new, None, old, None, None, sums, size, 0, threads)
        return self._named(sums)

    def _named(self, sums: npt.NDArray[np.uint32]) -> Digests:
        pairs = zip(self._groups, sums.tolist(), strict=True)
        return {path: (a, b) for path, (a, b) in pairs if a or b}

    def _change_numpy(self, where: Located, new: Bits, old: Bits) -> Digests:
        if not where.copies.size:
            return {}
        starts = where.starts.tolist()
        changes = entry_sums(new, where.rows, where.columns, starts)
        changes -= entry_sums(old, where.rows, where.columns, starts)
        sums = np.zeros((len(self._groups), 2), np.uint32)
        np.add.at(sums, self._group[where.copies], changes)
        return self._named(sums)


def _rows(copy: Copy, depth: int, origin: int) -> tuple[list[int], list[int], list[list[int]]]:
    """(bases, inner sizes, strides) of one copy; leading axes of size one fill up to ``depth``."""
    inner, size = [], 1
    for n in reversed(copy.shape):
        inner.append(size)
        size *= n
    fill = depth - len(copy.shape)
    steps = [list(t) for t in zip(copy.target_strides, copy.row_strides, copy.column_strides, strict=True)]
    base = [origin + copy.target_offset, copy.target_row, copy.target_column]
    return base, [size] * fill + inner[::-1], [[0, 0, 0]] * fill + steps


def slot_origin(offset: Callable[[int, str], int]) -> Callable[[Copy], int]:
    """``origin`` for a slot whose ``offset(device, path)`` is in bytes (a multiple of 64)."""
    return lambda copy: offset(copy.target_device, copy.target_path) // copy.itemsize
