"""reshard: executes a plan inside one process, between two meshes of any shape.

On CPU (path "host") it is one table of strided copies over zero-copy views of the shards. The destination is
a *pool*: one slot per process, touched once, that the result arrays alias. On accelerators (path "device")
the bytes stay on devices; see `device_path`.
"""

from __future__ import annotations

import concurrent.futures
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, Literal, overload

import jax
import jax.core
import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.device_pool import DevicePool, device_pool
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.exporting import export
from jaxrl_sync.sharding.kernels import CopyTable
from jaxrl_sync.sharding.layout import dtype_of, is_packed
from jaxrl_sync.sharding.lending import lender
from jaxrl_sync.sharding.native import addresses, flat_bytes
from jaxrl_sync.sharding.paths import leaves_by_path, nearest, nested
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.pool import Pool
from jaxrl_sync.sharding.shardings import check_meshes, check_process, local_devices, other_memory

PATHS = ("host", "device")


def _export(params: Any, plan: Plan) -> dict[str, Any]:
    """The plan's source arrays: given as they are, or exported from the trainer's tree."""
    arrays = leaves_by_path(params, "reshard")
    for path, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise MappingError(f"reshard: {path!r} is a {type(array).__name__}, expected an array of jax")
        if isinstance(array, jax.core.Tracer):
            raise MappingError(
                f"reshard: {path!r} is traced: call reshard outside of jit and other transforms"
            )
        if array.is_deleted():
            raise MappingError(f"reshard: {path!r} was deleted or donated, its values are gone")
    if set(arrays) == set(plan.source) and all(
        str(np.dtype(arrays[p].dtype)) == plan.source[p].dtype for p in arrays
    ):
        return arrays
    corr = plan.correspondence
    for path in corr.params:
        if path not in arrays:
            raise MappingError(f"reshard: no parameter {path!r}{nearest(path, arrays)}")
    if all(leaf.kind == "param" and not leaf.casts for leaf in corr.exported):
        return {leaf.name: arrays[leaf.path] for leaf in corr.exported}
    return export(corr, params)


def source_views(
    arrays: dict[str, Any], plan: Plan, seen: dict[Any, tuple[int, ...]] | None = None
) -> dict[tuple[int, str], Any]:
    """(device, name) -> read-only view of each shard's memory. Blocks until the arrays are ready.

    No copy, but of shards whose memory is not in row-major order (``jax.experimental.layout``).

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
            views[device, name] = np.asarray(array.addressable_data(i), order="C")
    return views


def source_addresses(arrays: dict[str, Any], plan: Plan, pool: Pool) -> list[int]:
    """Where the source shards lie, in order of the pool's table, after the comparison with the plan.

    Like `source_views` without making an array per shard, for arrays that are all `_row_major`. The caller
    keeps ``arrays`` alive meanwhile.
    """
    jax.block_until_ready(list(arrays.values()))
    where = [0] * len(pool.table(plan).source_keys)
    for name, places in pool.source_places.items():
        array = arrays[name]
        key = (name, array.sharding, array.shape, array.dtype)
        reads = pool.reads.get(key)
        if reads is None:
            order = {device: i for i, device in enumerate(_devices(name, array, plan))}
            reads = pool.reads[key] = tuple((order[device], place) for device, place in places)
        for i, place in reads:
            where[place] = array.addressable_data(i).unsafe_buffer_pointer()
    return where


def _devices_of(arrays: dict[str, Any]) -> set[Any]:
    return {d for sharding in {a.sharding for a in arrays.values()} for d in sharding.device_set}


def _row_major(array: Any) -> bool:
    """Whether shards lie in memory as tables of copies expect them: jax allows any order of dimensions."""
    layout = array.format.layout
    return layout is None or layout.major_to_minor == tuple(range(array.ndim))


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


@overload
def make_pool(plan: Plan, target: Any = None, path: None = None) -> Pool | DevicePool: ...
@overload
def make_pool(plan: Plan, target: Any = None, *, path: Literal["host"]) -> Pool: ...
@overload
def make_pool(plan: Plan, target: Any = None, *, path: Literal["device"]) -> DevicePool: ...


def make_pool(plan: Plan, target: Any = None, path: str | None = None) -> Pool | DevicePool:
    """Memory for `reshard(..., out=pool)`, made once. On the host it is touched: seconds per gigabyte.

    ``target``: the tree of ``jax.ShapeDtypeStruct`` or arrays that the plan's target layout came from;
    results then have its very shardings. Without it they have equal boxes over a mesh of devices in order.
    ``path``: as for `reshard`; it is the pool that decides there.
    """
    if _path(plan, path, ()) == "device":
        return DevicePool(plan, target)
    return Pool(plan, target)


def _path(plan: Plan, asked: str | None, devices: Iterable[Any]) -> str:
    """ "host" if everything is on CPU and of whole bytes, else "device", unless asked otherwise."""
    if asked not in (None, *PATHS):
        raise MappingError(f'reshard: path must be "host", "device" or None, found {asked!r}')
    sides = plan.source, plan.target
    packed = next((p for side in sides for p, t in side.items() if is_packed(dtype_of(t.dtype))), None)
    if packed is not None and asked == "host":
        raise MappingError(
            f'reshard: {packed!r} has less than a byte per element, which jax packs in memory: path "host" '
            'can\'t address them, use path "device"'
        )
    if asked is not None:
        return asked
    platforms = {d.platform for d in (*devices, *local_devices(plan.target).values())}
    return "host" if packed is None and platforms == {"cpu"} else "device"


def reshard(
    params: Any, plan: Plan, out: Pool | DevicePool | None = None, threads: int = 2, donate: bool = False,
    path: str | None = None,
) -> Any:  # fmt: skip
    """The target tree of ``params`` on the target's devices, bit for bit what the conversion gives.

    ``params``: the trainer's tree, or the arrays that `Correspondence.export` made. ``out``: a pool from
    `make_pool`. A host pool is aliased by the result (without copying it): no array of an earlier result may
    be in use by a running computation, their contents change; a device pool donates the earlier result.
    Without ``out`` results are like any others, in memory that no live array holds; what they leave behind
    is used again by later calls with this plan. ``donate``: delete the source arrays as soon as they were
    read (never by ``jax.device_put(donate=True)``, which crashes between disjoint CPU devices). ``path``:
    "host" (CPU memory, ``threads`` copy), "device" (jitted gather and scatter), None: what fits the devices.
    On "host" it blocks until all is copied; on "device" results may still be on their way, as after any call
    of jax. Returns nested dictionaries by path. `MappingError` if the arrays are not laid out as planned, if
    a device of either side is not this process's, or if the meshes overlap partly: each has devices that the
    other lacks.
    """
    if not plan.kept.get("meshes"):
        check_process(plan.source)  # before an export, which would wait for the other processes
        local_devices(plan.target)
    arrays = _export(params, plan)
    if not plan.kept.get("meshes"):
        check_meshes(plan.source, plan.target, arrays)
        plan.kept["meshes"] = True
    _check_width(plan)
    if out is not None and out.plan_digest != plan.digest:
        raise MappingError(f"pool was made for plan {out.plan_digest}, not for {plan.digest}")
    chosen = _path(plan, path, _devices_of(arrays)) if out is None else _pool_path(out, path)
    if chosen == "device":
        return nested(_by_device(params, arrays, plan, out, donate))
    if isinstance(out, Pool):
        made = _copy_and_make(arrays, plan, out, threads)
    else:
        with lender(plan).take() as pool:
            _copy(arrays, plan, pool, threads)()
            made = lender(plan).lend(pool)
    if donate:
        for array in (*arrays.values(), *jax.tree.leaves(params)):
            array.delete()
    return nested(made)


_WIDE = ("int64", "uint64", "float64", "complex128")


def _check_width(plan: Plan) -> None:
    """Without 64-bit types jax would make other arrays over the memory, and round what it computes."""
    if "wide" not in plan.kept:
        tensors = [*plan.target.items(), *plan.source.items()]
        plan.kept["wide"] = next(((path, t.dtype) for path, t in tensors if t.dtype in _WIDE), None)
    if plan.kept["wide"] is not None and not jax.config.read("jax_enable_x64"):
        path, dtype = plan.kept["wide"]
        raise MappingError(
            f"reshard: {path!r} is {dtype}, but jax has no 64-bit types here: set jax_enable_x64"
        )


def _pool_path(pool: Pool | DevicePool, asked: str | None) -> str:
    own = "device" if isinstance(pool, DevicePool) else "host"
    if asked not in (None, own):
        raise MappingError(f'reshard: path {asked!r} with a pool made for path "{own}"')
    return own


def _copy_and_make(arrays: dict[str, Any], plan: Plan, pool: Pool, threads: int) -> dict[str, Any]:
    """Fills the pool and makes the arrays over it: at the same time, once their shards are there.

    Making them is all Python, and copying needs none of it.
    """
    copy = _copy(arrays, plan, pool, threads)
    if not pool.aliased:
        copy()
        return pool.arrays()
    with concurrent.futures.ThreadPoolExecutor(1) as helper:
        copying = helper.submit(copy)
        made = pool.arrays()
        copying.result()
    return made


def _copy(arrays: dict[str, Any], plan: Plan, pool: Pool, threads: int) -> Callable[[], None]:
    """The host path, ready to run: one table of strided copies, then the one inside nodes."""
    table, inside = pool.table(plan), pool.fanout(plan)
    plain = all(d.platform == "cpu" for d in _devices_of(arrays)) and all(map(_row_major, arrays.values()))
    if plain:
        where = source_addresses(arrays, plan, pool)
        _refuse_own(table, np.array(where, np.uint64), pool)
        if table.native:
            run = functools.partial(table.execute_at, np.array(where, np.uint64), pool.addresses, threads)
        else:
            run = functools.partial(table.execute_numpy_at, where, pool.numpy_targets, threads)
    else:
        views = source_views(arrays, plan, pool.checked)
        _refuse_own(table, addresses([flat_bytes(views[k]) for k in table.source_keys]), pool)
        run = functools.partial(table.execute, views, pool.views, threads)

    def copy() -> None:
        run()
        if inside is not None:
            inside.execute(pool.views, pool.views, threads)

    return copy


def _refuse_own(table: CopyTable, places: npt.NDArray[np.uint64], pool: Pool) -> None:
    held = pool.holds(places)
    if held.any():
        path = table.source_keys[int(held.argmax())][1]
        raise MappingError(
            f"reshard: {path!r} lies in the memory of the pool that it would be written to, as an earlier "
            "result does: give another pool, or none"
        )


def _by_device(
    params: Any, arrays: dict[str, Any], plan: Plan, out: Pool | DevicePool | None, donate: bool
) -> dict[str, Any]:
    for name, array in arrays.items():
        _devices(name, array, plan)
        if (kinds := other_memory(array.sharding)) is not None:
            raise MappingError(
                f'reshard: {name!r} lies in memory {kinds[0]!r}, path "device" reads {kinds[1]!r}: move it '
                'there by jax.device_put, or take path="host" on CPUs'
            )
    used = out if isinstance(out, DevicePool) else device_pool(plan)
    readers = Counter(map(id, arrays.values()))  # tied leaves are one array under several names

    def drop(name: str) -> None:
        readers[id(arrays[name])] -= 1
        if not readers[id(arrays[name])]:
            arrays[name].delete()

    made = (used.fresh if out is None else used.fill)(arrays, drop if donate else None)
    if donate:  # what was not read, or was exported into other buffers
        for array in (*arrays.values(), *jax.tree.leaves(params)):
            array.delete()
    return made


__all__ = ["DevicePool", "Pool", "make_pool", "reshard", "source_views"]
