"""An edge as flat buffers: its packed stream cut into sections of one element width.

Both sides cut alike, from the plan alone. Positions of a section are element numbers of its stream.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_sync.sharding import Copy
from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype

MAX_ELEMENTS = 1 << 26
"""Elements of a section that more copies are added to; a copy alone may have up to `LARGEST_COPY`."""

LARGEST_COPY = 1 << 31

Digests = dict[str, tuple[int, int]]


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
