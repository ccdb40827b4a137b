"""reshard: executes a plan inside one process, between two meshes of any shape.

On CPU it is one table of strided copies over zero-copy views of the shards. The destination is a *pool*: one
slot per process, touched once, that the result arrays alias.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.exporting import export
from jaxrl_sync.sharding.paths import leaves_by_path, nested
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.pool import Pool
from jaxrl_sync.sharding.pool import make_pool as make_pool


def _export(params: Any, plan: Plan) -> dict[str, Any]:
    """The plan's source arrays: given as they are, or exported from the trainer's tree."""
    arrays = leaves_by_path(params, "reshard")
    if set(arrays) == set(plan.source) and all(
        str(np.dtype(arrays[p].dtype)) == plan.source[p].dtype for p in arrays
    ):
        return arrays
    corr = plan.correspondence
    if all(leaf.kind == "param" and not leaf.casts for leaf in corr.exported):
        return {leaf.name: arrays[leaf.path] for leaf in corr.exported}
    return export(corr, params)


def source_views(
    arrays: dict[str, Any], plan: Plan, seen: dict[Any, tuple[int, ...]] | None = None
) -> dict[tuple[int, str], Any]:
    """(device, name) -> read-only view of each shard's memory; no copy. Blocks until the arrays are ready.

    ``seen``: kept by the caller between calls, so that an array's layout is compared with the plan once per
    sharding and not once per call.
    """
    jax.block_until_ready(list(arrays.values()))
    seen = {} if seen is None else seen
    views = {}
    for name, array in arrays.items():
        key = (name, array.sharding, array.shape, array.dtype)
        devices = seen.get(key)
        if devices is None:
            devices = seen[key] = _devices(name, array, plan)
        for i, device in enumerate(devices):
            views[device, name] = np.asarray(array.addressable_data(i))
    return views


def source_addresses(arrays: dict[str, Any], plan: Plan, pool: Pool) -> npt.NDArray[np.uint64]:
    """Where the source shards lie, in order of the pool's table, after the comparison with the plan.

    Like `source_views` without making an array per shard. The caller keeps ``arrays`` alive meanwhile.
    """
    jax.block_until_ready(list(arrays.values()))
    where = np.zeros(len(pool.table(plan).source_keys), np.uint64)
    for name, places in pool.source_places.items():
        array = arrays[name]
        key = (name, array.sharding, array.shape, array.dtype)
        devices = pool.checked.get(key)
        if devices is None:
            devices = pool.checked[key] = _devices(name, array, plan)
        order = {device: i for i, device in enumerate(devices)}
        for device, place in places:
            where[place] = array.addressable_data(order[device]).unsafe_buffer_pointer()
    return where


def _devices_of(arrays: dict[str, Any]) -> set[Any]:
    return {d for sharding in {a.sharding for a in arrays.values()} for d in sharding.device_set}


def _devices(name: str, array: Any, plan: Plan) -> tuple[int, ...]:
    """The devices of an array's shards in their order, after the comparison with the plan."""
    if str(np.dtype(array.dtype)) != plan.source[name].dtype:
        raise MappingError(f"{name!r} is {np.dtype(array.dtype)}, the plan says {plan.source[name].dtype}")
    placed = plan.source[name].placement.by_device
    shards = array.addressable_shards
    for shard in shards:
        expected = placed.get(shard.device.id)
        if expected is None or _box(shard.index, array.shape) != expected.box:
            raise MappingError(f"{name!r} is not laid out as the plan says on device {shard.device.id}")
    return tuple(s.device.id for s in shards)


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    edges = [s.indices(n) for s, n in zip(index, shape, strict=True)]
    return Box(tuple(e[0] for e in edges), tuple(e[1] for e in edges))


def reshard(params: Any, plan: Plan, out: Pool | None = None, threads: int = 2, donate: bool = False) -> Any:
    """The target tree of ``params`` on the target's devices, bit for bit what the conversion gives.

    ``params``: the trainer's tree, or the arrays that `Correspondence.export` made. ``out``: a pool from
    `make_pool` whose memory the result aliases (without copying it); no array of an earlier result may be in
    use by a running computation, their contents change. Without it a new pool is made. ``donate``: delete the
    source arrays afterwards (never by ``jax.device_put(donate=True)``, which crashes between disjoint CPU
    devices). Blocks. Returns nested dictionaries by path. `MappingError` if the arrays are not laid out as
    planned.
    """
    if out is None:
        out = make_pool(plan)
    if out.plan_digest != plan.digest:
        raise MappingError(f"pool was made for plan {out.plan_digest}, not for {plan.digest}")
    arrays = _export(params, plan)
    if out.table(plan).native and all(d.platform == "cpu" for d in _devices_of(arrays)):
        where = source_addresses(arrays, plan, out)
        out.table(plan).execute_at(where, out.addresses, threads)
    else:
        out.table(plan).execute(source_views(arrays, plan, out.checked), out.views, threads)
    if (inside := out.fanout(plan)) is not None:
        inside.execute(out.views, out.views, threads)
    if donate:
        for array in (*arrays.values(), *jax.tree.leaves(params)):
            array.delete()
    return nested(out.arrays())


__all__ = ["make_pool", "reshard", "source_views"]
