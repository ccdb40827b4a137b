"""An edge as flat buffers: its packed stream cut into sections of one element width, and where entries lie.

Both sides cut alike, from the plan alone. Positions of a section are element numbers of its stream; `Places`
turns them into elements of the receiver's slot and into the global rows and columns that key the digests.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Copy
from jaxrl_sync.sharding.digests import entry_sums
from jaxrl_sync.transfer.codec.bits import Bits, Positions, bits_dtype

MAX_ELEMENTS = 1 << 26
"""Elements of a section that more copies are added to; one copy alone may have up to `LARGEST_COPY`."""

LARGEST_COPY = 1 << 31

Digests = dict[str, tuple[int, int]]
Index = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True)
class Section:
    """Consecutive copies of one element width; ``offset_bytes`` in the packed edge."""

    itemsize: int
    elements: int
    offset_bytes: int
    copies: tuple[Copy, ...]

    @property
    def key(self) -> tuple[int, int]:
        """What a frame must say of it: (elements, bytes per element)."""
        return self.elements, self.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole section."""
        return self.elements * self.itemsize


def sections_of(copies: Sequence[Copy]) -> tuple[Section, ...]:
    """The sections of an edge, in the order of its packed stream."""
    groups: list[list[Copy]] = []
    filled = 0
    for copy in (part for c in copies if c.num_elements for part in _parts(c)):
        same = groups and groups[-1][0].itemsize == copy.itemsize
        if not same or filled + copy.num_elements > MAX_ELEMENTS:
            groups.append([])
            filled = 0
        groups[-1].append(copy)
        filled += copy.num_elements
    found, at = [], 0
    for group in groups:
        elements = sum(c.num_elements for c in group)
        found.append(Section(group[0].itemsize, elements, at, tuple(group)))
        at += elements * group[0].itemsize
    return tuple(found)


def _parts(copy: Copy) -> list[Copy]:
    """A copy of too many elements in halves along its outermost axis: the stream stays the same."""
    if copy.num_elements <= LARGEST_COPY:
        return [copy]
    half = copy.shape[0] // 2
    rest = dataclasses.replace(
        copy,
        shape=(copy.shape[0] - half, *copy.shape[1:]),
        source_offset=copy.source_offset + half * copy.source_strides[0],
        target_offset=copy.target_offset + half * copy.target_strides[0],
        target_row=copy.target_row + half * copy.row_strides[0],
        target_column=copy.target_column + half * copy.column_strides[0],
    )
    first = dataclasses.replace(copy, shape=(half, *copy.shape[1:]))
    return [*_parts(first), *_parts(rest)]


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
        self.paths = [c.target_path for c in section.copies]
        sizes = np.array([c.num_elements for c in section.copies], np.int64)
        self._bounds = np.concatenate([[0], np.cumsum(sizes)])
        depth = max(1, *(len(c.shape) for c in section.copies))
        table = [_rows(c, depth, origin(c) if origin else 0) for c in section.copies]
        self._base = np.array([t[0] for t in table], np.int64).reshape(-1, 3)
        self._inner = np.array([t[1] for t in table], np.int64).reshape(-1, depth)
        self._steps = np.array([t[2] for t in table], np.int64).reshape(-1, depth, 3)

    def locate(self, positions: Positions | None) -> Located:
        """Each entry's element of the slot, its global row and its global column; None: every element."""
        found = np.arange(self.section.elements, dtype=np.int64) if positions is None else positions
        cuts = np.searchsorted(found, self._bounds)
        counts = np.diff(cuts)
        copies = np.flatnonzero(counts)
        counts = counts[copies]
        rest = found.astype(np.int64) - np.repeat(self._bounds[copies], counts)
        at = [np.repeat(self._base[copies, k], counts) for k in range(3)]
        for d in range(self._inner.shape[1]):
            inner = np.repeat(self._inner[copies, d], counts)
            whole = rest // inner
            rest -= whole * inner
            for k in range(3):
                at[k] += whole * np.repeat(self._steps[copies, d, k], counts)
        return Located(copies, cuts[copies], *at)

    def change_of_digests(self, where: Located, new: Bits, old: Bits) -> Digests:
        """What the digests of the tensors change by when ``old`` bits become ``new`` ones."""
        if not where.copies.size:
            return {}
        sums = entry_sums(new, where.rows, where.columns, where.starts)  # type: ignore[arg-type]
        sums -= entry_sums(old, where.rows, where.columns, where.starts)  # type: ignore[arg-type]
        total: Digests = {}
        for copy, (a, b) in zip(where.copies.tolist(), sums.tolist(), strict=True):
            x, y = total.get(self.paths[copy], (0, 0))
            total[self.paths[copy]] = ((x + a) & 0xFFFFFFFF, (y + b) & 0xFFFFFFFF)
        return total


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


def bits_of_memory(memory: Any, itemsize: int) -> Bits:
    """Slot memory as elements of one width."""
    flat: Bits = np.frombuffer(memory, np.uint8)
    return flat[: flat.size // itemsize * itemsize].view(bits_dtype(itemsize))


def subtract_digests(after: Digests, before: Digests) -> Digests:
    """What the digests changed by, modulo 2^32; both have the same tensors."""
    return {
        path: ((a - before[path][0]) & 0xFFFFFFFF, (b - before[path][1]) & 0xFFFFFFFF)
        for path, (a, b) in after.items()
    }
