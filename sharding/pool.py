"""Destination memory of a reshard: page-touched slots and the arrays over them, built once."""

from __future__ import annotations

import contextlib
import functools
import mmap
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from jaxrl_sync.sharding.kernels import CopyTable
from jaxrl_sync.sharding.layout import Layout, dtype_of
from jaxrl_sync.sharding.native import addresses, flat_bytes
from jaxrl_sync.sharding.numpy_copies import Targets
from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.shardings import given_shardings, local_devices, named_shardings
from jaxrl_sync.sharding.slots import SlotLayout

Key = tuple[int, str]


class Pool:
    """Memory for one copy of a plan's target on the devices of this process, and jax arrays that alias it."""

    def __init__(self, plan: Plan, target: Any = None) -> None:
        self.plan_digest = plan.digest
        self.views: dict[Key, Any] = {}
        self._ranges: list[tuple[int, int]] = []
        for process in sorted(set(plan.target.devices.values())):
            slot = SlotLayout.of(plan.target, process)
            memory = touched_memory(slot.total_bytes)
            self.views.update(slot.views(memory))
            first = int(memory.__array_interface__["data"][0])
            self._ranges.append((first, first + memory.nbytes))
        self.checked: dict[Any, tuple[int, ...]] = {}
        self.reads: dict[Any, tuple[tuple[int, int], ...]] = {}
        self._table: CopyTable | None = None
        self._fanout: CopyTable | None = None
        self._plan = plan
        self._shards: dict[Key, Any] | None = None
        devices = local_devices(plan.target)
        self._aliased = all(devices[d].platform == "cpu" for d in plan.target.devices)
        self.shardings = target_shardings(plan, target)
        self._write_constants(plan)

    def _write_constants(self, plan: Plan) -> None:
        values = {(-1, name): array for name, array in plan.constant_values.items()}
        for process in sorted(set(plan.target.devices.values())):
            constants = plan.for_rank(process, "target").constants
            if constants:
                CopyTable.direct(constants).execute(values, self.views)

    @functools.cached_property
    def addresses(self) -> npt.NDArray[np.uint64]:
        """Where the target shards lie, in order of the table's target keys."""
        return addresses([flat_bytes(self.views[k]) for k in self.table(self._plan).target_keys])

    @functools.cached_property
    def numpy_targets(self) -> Targets:
        """The strided views that the table writes without the C kernels, in order of its copies."""
        table = self.table(self._plan)
        return table.numpy_targets([flat_bytes(self.views[k]) for k in table.target_keys])

    @functools.cached_property
    def source_places(self) -> dict[str, list[tuple[int, int]]]:
        """Leaf name -> (device, place among the table's source keys) of the shards that the table reads."""
        places: dict[str, list[tuple[int, int]]] = {}
        for place, (device, name) in enumerate(self.table(self._plan).source_keys):
            places.setdefault(name, []).append((device, place))
        return places

    def table(self, plan: Plan) -> CopyTable:
        """The copy table of the whole plan, built once."""
        if self._table is None:
            processes = sorted(set(plan.target.devices.values()))
            ranks = [plan.for_rank(p, "target") for p in processes]
            self._table = CopyTable.direct([c for r in ranks for e in r.edges for c in e.copies])
            fanout = [c for r in ranks for c in r.fanout]
            self._fanout = CopyTable.direct(fanout) if fanout else None
        return self._table

    def fanout(self, plan: Plan) -> CopyTable | None:
        """The copies inside receiving nodes (policy "node"), to run after `table`; None if there are none."""
        self.table(plan)
        return self._fanout

    def holds(self, places: npt.NDArray[np.uint64]) -> npt.NDArray[np.bool_]:
        """Which of these addresses lie in the pool's own memory."""
        held = np.zeros(len(places), bool)
        for first, end in self._ranges:
            held |= (places >= first) & (places < end)
        return held

    @property
    def aliased(self) -> bool:
        """Whether `arrays` can be made before their memory is filled: its shards exist and alias it.

        Whoever deleted or donated an array of an earlier result took its shards along.
        """
        made = self._aliased and self._shards is not None
        return made and not any(x.is_deleted() for x in (self._shards or {}).values())

    def arrays(self) -> dict[str, Any]:
        """Path -> global array over the pool's memory: new array objects over shards that are made once.

        New ones because jax keeps the host copy that ``np.asarray`` makes of a sharded array: an old object
        would go on showing what the memory held then. On CPU the shards alias the memory; elsewhere they are
        copies.
        """
        if self._shards is None or not self.aliased:
            self._shards = shards_over(self._plan.target, self.views)
        return global_arrays(self._plan.target, self._shards, self.shardings)


def touched_memory(size: int) -> npt.NDArray[np.uint8]:
    """Private memory in huge pages where the kernel has them, touched: that is slower than any copy."""
    held = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them says EINVAL
            held.madvise(mmap.MADV_HUGEPAGE)
    memory = np.frombuffer(held, np.uint8)
    memory[:: mmap.PAGESIZE] = 0
    return memory


def target_shardings(plan: Plan, target: Any = None) -> dict[str, Any]:
    """The shardings of results by path: of the given target tree, or equal boxes over devices in order."""
    if target is None:
        made = named_shardings(plan.target, local_devices(plan.target))
        return {path: made[t.placement] for path, t in plan.target.items()}
    return given_shardings(plan.target, leaves_by_path(target, "target"))


def make_pool(plan: Plan, target: Any = None) -> Pool:
    """Allocates and touches a pool for `reshard(..., out=pool)`; takes seconds per gigabyte.

    ``target``: the tree of ``jax.ShapeDtypeStruct`` or arrays that the plan's target layout came from;
    results then have its very shardings. Without it they have equal boxes over a mesh of devices in order.
    """
    return Pool(plan, target)


def shards_over(layout: Layout, views: dict[Key, Any]) -> dict[Key, Any]:
    """(device, path) -> single-device array over the given memory; aliased, not copied, on CPU.

    Views must be 64-byte aligned (`SlotLayout` sees to it): jax silently copies others. All devices of the
    layout must be devices of this process.
    """
    devices = local_devices(layout)
    keys = [(s.device, path) for path, t in layout.items() for s in t.shards]
    data = [
        views[k].reshape(layout[k[1]].placement.by_device[k[0]].box.shape).view(dtype_of(layout[k[1]].dtype))
        for k in keys
    ]
    placed = jax.device_put(data, [SingleDeviceSharding(devices[d]) for d, _ in keys], may_alias=True)
    return dict(zip(keys, placed, strict=True))


def global_arrays(layout: Layout, shards: dict[Key, Any], shardings: dict[str, Any]) -> dict[str, Any]:
    """Path -> jax.Array of these shards."""
    return {
        path: jax.make_array_from_single_device_arrays(
            t.shape, shardings[path], [shards[s.device, path] for s in t.shards]
        )
        for path, t in layout.items()
    }
