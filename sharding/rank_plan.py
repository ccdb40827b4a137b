"""One process's share of a plan, spelled out: edges, and the strided copies of each."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import TYPE_CHECKING

from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.fragments import row_major
from jaxrl_sync.sharding.layout import Placement
from jaxrl_sync.sharding.matching import reduce

if TYPE_CHECKING:
    from jaxrl_sync.sharding.planning import Instance, Plan
    from jaxrl_sync.sharding.templates import Template

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
    arrays of ``Plan.constant_values``, under the device number -1. ``fanout`` (target side, policy "node"):
    copies from one target shard to another inside the node, to be made after the edges have arrived.
    """

    process: int
    side: str
    edges: tuple[Edge, ...]
    constants: tuple[Copy, ...] = ()
    fanout: tuple[Copy, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes over all edges."""
        return sum(e.total_bytes for e in self.edges)


def materialise(plan: Plan, process: int, side: str, paths: Collection[str] | None = None) -> RankPlan:
    """See `Plan.for_rank`."""
    process_of = {**plan.source.devices, -1: -1}, plan.target.devices
    edges: dict[tuple[int, int], list[Copy]] = {}
    constants: list[Copy] = []
    fanout: list[Copy] = []
    chosen = None if paths is None else frozenset(paths)
    mine = [_moves_of(t, process, side, process_of) for t in plan.templates]
    for instance in plan.instances:
        if chosen is not None and instance.target_path not in chosen:
            continue
        template = plan.templates[instance.template]
        if side == "target":
            fanout += _fanout(template, instance, process, process_of[1])
        for move in mine[instance.template]:
            copy = _copy(template, instance, move)
            if copy.source_device < 0:
                constants.append(copy)
            else:
                key = process_of[0][copy.source_device], process_of[1][copy.target_device]
                edges.setdefault(key, []).append(copy)
    found = tuple(Edge(a, b, tuple(copies)) for (a, b), copies in sorted(edges.items()))
    return RankPlan(process, side, found, tuple(constants), tuple(fanout))


def _fanout(template: Template, instance: Instance, process: int, process_of: dict[int, int]) -> list[Copy]:
    """Copies between target shards of equal boxes: the same place in both."""
    found = []
    table = (template.fanout_from, template.fanout_to, template.fanout_move)
    for giver, taker, move in zip(*(column.tolist() for column in table), strict=True):
        if process_of[taker] == process:
            copy = _copy(template, instance, move)
            found.append(
                dataclasses.replace(
                    copy, source_device=giver, source_path=copy.target_path, source_offset=copy.target_offset,
                    source_strides=copy.target_strides, target_device=taker,
                )
            )  # fmt: skip
    return found


def _moves_of(
    template: Template, process: int, side: str, process_of: tuple[dict[int, int], dict[int, int]]
) -> list[int]:
    devices = template.source_device if side == "source" else template.target_device
    owners = process_of[0] if side == "source" else process_of[1]
    return [i for i, d in enumerate(devices.tolist()) if owners[d] == process]


def _copy(template: Template, instance: Instance, move: int) -> Copy:
    """One move of one instance, in elements local to the two shards."""
    source_device, target_device = int(template.source_device[move]), int(template.target_device[move])
    low, high = template.low[move].tolist(), template.high[move].tolist()
    block = template.block
    s_box, s_strides = _local(template.source, False, source_device)
    t_box, t_strides = _local(template.target, True, target_device)
    columns = template.target.shape[-1] if template.target.shape else 1
    rows = row_major(reduce(template.target, True).shape)
    s_at = [i + k - b for i, k, b in zip(block.source_start, instance.shift, s_box.start, strict=True)]
    t_index = list(block.target_start)
    shape, s_steps, t_steps, flat_steps = [], [], [], []
    for a, i, j in zip(block.links, low, high, strict=True):
        if a.source_dim >= 0:
            s_at[a.source_dim] += i * a.source_stride
        t_index[a.target_dim] += i * a.target_stride
        if j - i > 1:
            shape.append(j - i)
            s_steps.append(a.source_stride * s_strides[a.source_dim] if a.source_dim >= 0 else 0)
            t_steps.append(a.target_stride * t_strides[a.target_dim])
            flat_steps.append(a.target_stride * rows[a.target_dim])
    flat = sum(i * s for i, s in zip(t_index, rows, strict=True))
    t_offset = sum((i - b) * s for i, b, s in zip(t_index, t_box.start, t_strides, strict=True))
    return Copy(
        source_device, instance.leaf, target_device, instance.target_path, template.itemsize, tuple(shape),
        sum(i * s for i, s in zip(s_at, s_strides, strict=True)), tuple(s_steps), t_offset, tuple(t_steps),
        flat // columns, tuple(s // columns if s % columns == 0 else 0 for s in flat_steps),
        flat % columns, tuple(0 if s % columns == 0 else s for s in flat_steps),
    )  # fmt: skip


def local_strides(placement: Placement, keep_last: bool, device: int) -> tuple[int, ...]:
    """Strides, in elements, of one device's row-major shard in merged dimensions (see `matching.reduce`)."""
    return _local(placement, keep_last, device)[1]


@functools.lru_cache(maxsize=1 << 16)
def _local(placement: Placement, keep_last: bool, device: int) -> tuple[Box, tuple[int, ...]]:
    """The device's box in merged dimensions, and the strides of its row-major shard."""
    number = list(placement.by_box).index(placement.by_device[device].box)
    box = reduce(placement, keep_last).boxes[number]
    return box, row_major(box.shape)
