"""reshard: executes a plan inside one process, between two meshes of any shape.

On CPU it is one table of strided copies over zero-copy views of the shards. The destination is a *pool*: one
slot per process, touched once, that the result arrays alias.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.exporting import export
from jaxrl_sync.sharding.kernels import CopyTable
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


def source_views(arrays: dict[str, Any], plan: Plan) -> dict[tuple[int, str], Any]:
    """(device, name) -> read-only view of each shard's memory; no copy. Blocks until the arrays are ready."""
    views = {}
    for name, array in arrays.items():
        placed = plan.source[name].placement.by_device
        for shard in jax.block_until_ready(array).addressable_shards:
            expected = placed.get(shard.device.id)
            if expected is None or shard.data.shape != expected.box.shape:
                raise MappingError(f"{name!r} is not laid out as the plan says on device {shard.device.id}")
            views[shard.device.id, name] = np.asarray(shard.data)
    return views


def reshard(params: Any, plan: Plan, out: Pool | None = None, threads: int = 2) -> Any:
    """The target tree of ``params`` on the target's devices, bit for bit what the conversion gives.

    ``params``: the trainer's tree, or the arrays that `Correspondence.export` made. ``out``: a pool from
    `make_pool` whose memory the result aliases (without copying it); no array of an earlier result may be in
    use by a running computation, their contents change. Without it a new pool is made. Blocks. Returns nested
    dictionaries by path. `MappingError` if the arrays are not laid out as planned.
    """
    if out is None:
        out = make_pool(plan)
    if out.plan_digest != plan.digest:
        raise MappingError(f"pool was made for plan {out.plan_digest}, not for {plan.digest}")
    views = source_views(_export(params, plan), plan)
    table = out.table(plan)
    table.execute(views, out.views, threads)
    return nested(out.arrays)


__all__ = ["CopyTable", "make_pool", "reshard", "source_views"]
