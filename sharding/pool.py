"""Destination memory of a reshard: page-touched slots and the arrays over them, built once."""

from __future__ import annotations

import functools
import mmap
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, SingleDeviceSharding

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.kernels import CopyTable
from jaxrl_sync.sharding.layout import Layout, dtype_of
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.slots import SlotLayout

Key = tuple[int, str]


class Pool:
    """Memory for one copy of a plan's target on the devices of this process, and jax arrays that alias it."""

    def __init__(self, plan: Plan) -> None:
        self.plan_digest = plan.digest
        self.views: dict[Key, Any] = {}
        for process in sorted(set(plan.target.devices.values())):
            slot = SlotLayout.of(plan.target, process)
            memory = np.frombuffer(mmap.mmap(-1, slot.total_bytes), np.uint8)
            memory[:: mmap.PAGESIZE] = 0  # first touch is far slower than any later copy
            self.views.update(slot.views(memory))
        self._tables: dict[str, CopyTable] = {}
        self._write_constants(plan)
        self._plan = plan

    def _write_constants(self, plan: Plan) -> None:
        values = {(-1, name): array for name, array in plan.constant_values.items()}
        for process in sorted(set(plan.target.devices.values())):
            constants = plan.for_rank(process, "target").constants
            if constants:
                CopyTable.direct(constants).execute(values, self.views)

    def table(self, plan: Plan) -> CopyTable:
        """The copy table of the whole plan, built once."""
        if plan.digest not in self._tables:
            processes = sorted(set(plan.target.devices.values()))
            edges = [e for p in processes for e in plan.for_rank(p, "target").edges]
            self._tables[plan.digest] = CopyTable.direct([c for e in edges for c in e.copies])
        return self._tables[plan.digest]

    @functools.cached_property
    def arrays(self) -> dict[str, Any]:
        """Path -> global array over the pool's memory. Built once; contents follow the memory."""
        return arrays_over(self._plan.target, self.views)


def make_pool(plan: Plan) -> Pool:
    """Allocates and touches a pool for `reshard(..., out=pool)`; takes seconds per gigabyte."""
    return Pool(plan)


def arrays_over(layout: Layout, views: dict[Key, Any]) -> dict[str, Any]:
    """Path -> jax.Array over the given shard memory, aliased on CPU (64-byte aligned views), not copied.

    All devices of the layout must be devices of this process.
    """
    devices = {d.id: d for d in jax.devices()}
    missing = [d for d in layout.devices if d not in devices]
    if missing:
        raise MappingError(f"devices {missing} of the target layout are not devices of this process")
    keys = [(s.device, path) for path, t in layout.items() for s in t.shards]
    data = [views[k].reshape(layout[k[1]].placement.by_device[k[0]].box.shape) for k in keys]
    shards = jax.device_put(
        [d.view(dtype_of(layout[k[1]].dtype)) for k, d in zip(keys, data, strict=True)],
        [SingleDeviceSharding(devices[k[0]]) for k in keys],
        may_alias=True,
    )
    by_path: dict[str, list[Any]] = {}
    for (_, path), shard in zip(keys, shards, strict=True):
        by_path.setdefault(path, []).append(shard)
    return {
        path: jax.make_array_from_single_device_arrays(
            t.shape, _sharding(layout, path, devices), by_path[path]
        )
        for path, t in layout.items()
    }


def _sharding(layout: Layout, path: str, devices: dict[int, Any]) -> NamedSharding:
    """A sharding with exactly the boxes of the layout: a mesh axis per split dimension, one for replicas."""
    placement = layout[path].placement
    boxes = list(placement.by_box)
    rank = len(placement.shape)
    edges = [sorted({(b.start[d], b.stop[d]) for b in boxes}) for d in range(rank)]
    grid = tuple(len(e) for e in edges)
    replicas = len(placement.shards) // len(boxes)
    mesh = np.empty((*grid, replicas), object)
    for box, shards in placement.by_box.items():
        at = tuple(e.index((a, b)) for e, a, b in zip(edges, box.start, box.stop, strict=True))
        for r, shard in enumerate(shards):
            mesh[(*at, r)] = devices[shard.device]
    if any(m is None for m in mesh.flat):
        raise MappingError(
            f"{path!r}: the boxes {list(map(str, boxes))} form no grid; jax has no sharding for it"
        )
    names = (*(f"d{d}" for d in range(rank)), "replica")
    spec = [f"d{d}" if n > 1 else None for d, n in enumerate(grid)]
    return NamedSharding(jax.sharding.Mesh(mesh, names), jax.sharding.PartitionSpec(*spec))
