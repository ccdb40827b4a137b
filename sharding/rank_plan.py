"""One process's share of a plan, spelled out: edges, and the strided copies of each."""

from __future__ import annotations

import dataclasses
import math

MAX_DIMS = 6
"""Most dimensions that one copy block has; a block with more is cut along its outer ones."""


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """One strided block moved from a source shard to a target shard.

    Element ``i`` of the block (an index of ``shape``) lies at ``source_offset + i . source_strides`` elements
    into the row-major source shard, and goes to ``target_offset + i . target_strides`` of the target shard.
    Packed on a wire, a block is its elements in row-major order of ``shape``. ``target_row + i .
    row_strides`` is the global row of the element in the target tensor (leading dimensions flattened) and
    ``target_column + i . column_strides`` its column (last dimension): the position the digests are keyed by.
    """

    source_device: int
    source_path: str
    target_device: int
    target_path: str
    itemsize: int
    shape: tuple[int, ...]
    source_offset: int
    source_strides: tuple[int, ...]
    target_offset: int
    target_strides: tuple[int, ...]
    target_row: int
    row_strides: tuple[int, ...]
    target_column: int
    column_strides: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Elements that it moves."""
        return math.prod(self.shape)

    @property
    def total_bytes(self) -> int:
        """Bytes that it moves."""
        return self.num_elements * self.itemsize


@dataclasses.dataclass(frozen=True)
class Edge:
    """All copies from one source process to one target process, in the order both sides agree on."""

    source_process: int
    target_process: int
    copies: tuple[Copy, ...]

    @property
    def total_bytes(self) -> int:
        """Bytes on this edge; a packed frame of it has exactly this length."""
        return sum(c.total_bytes for c in self.copies)


@dataclasses.dataclass(frozen=True)
class RankPlan:
    """What one process sends (side "source") or receives (side "target"), edges in order of the peer.

    ``constants`` (target side only) are elements that the conversion fixes, such as the zeros of a padded
    vocabulary: they never travel, the receiver writes them once into each slot. They are copies from the
    arrays of ``Plan.constant_values``, under the device number -1.
    """

    process: int
    side: str
    edges: tuple[Edge, ...]
    constants: tuple[Copy, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes over all edges."""
        return sum(e.total_bytes for e in self.edges)
