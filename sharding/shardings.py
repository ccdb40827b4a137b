"""jax shardings with exactly the boxes of a layout, over one mesh per set of devices.

A layout knows devices and boxes, not the mesh they came from. Arrays that one jitted function takes must
agree on the order of devices, so placements on the same devices are written over one mesh: devices in order
of their number, as a grid of prime factors.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout, Placement
from jaxrl_sync.sharding.paths import leaves_by_path, nearest


def _primes(n: int) -> list[int]:
    found, p = [], 2
    while n > 1:
        while n % p == 0:
            found.append(p)
            n //= p
        p += 1
    return found


def _spec(placement: Placement, order: Sequence[int], grid: tuple[int, ...]) -> PartitionSpec | None:
    """The spec of a placement over a grid of its devices, or None if its boxes don't follow the grid."""
    names: list[tuple[str, ...] | None] = []
    for d in range(len(placement.shape)):
        starts = [placement.by_device[device].box.start[d] for device in order]
        edges = sorted({(s.box.start[d], s.box.stop[d]) for s in placement.shards})
        if len({b - a for a, b in edges}) > 1:
            return None  # uneven: jax has no such array
        block = np.array([[e[0] for e in edges].index(s) for s in starts]).reshape(grid)
        weights = []
        for axis in range(len(grid)):
            step = np.diff(block, axis=axis)
            if step.size and (step != step.flat[0]).any():
                return None
            if step.size and step.flat[0]:
                weights.append((int(step.flat[0]), axis))
        weights.sort(reverse=True)
        expected = 1
        for weight, axis in reversed(weights):
            if weight != expected:
                return None
            expected *= grid[axis]
        if expected != len(edges):
            return None
        names.append(tuple(f"a{axis}" for _, axis in weights) or None)
    return PartitionSpec(*names)


def placed(shapes: Any, mesh: Mesh, specs: Any) -> Any:
    """The tree of ``jax.ShapeDtypeStruct`` with a ``NamedSharding`` over ``mesh`` per leaf of ``shapes``.

    ``specs``: one ``PartitionSpec`` for all leaves, or a tree of them like ``shapes``. What jax itself would
    only say of a spec is said of the tensor: an axis that the mesh lacks or that stands there twice, more
    entries than dimensions, a missing spec are a `MappingError` that names it.
    """
    named = leaves_by_path(shapes, "placed")
    if isinstance(specs, PartitionSpec):
        given = dict.fromkeys(named, specs)
    else:
        given = leaves_by_path(specs, "placed: specs", lambda x: isinstance(x, PartitionSpec))
    for path in sorted(named.keys() ^ given.keys()):
        lacks = "specs lack" if path in named else "shapes lack"
        raise MappingError(f"placed: {lacks} {path!r}{nearest(path, given if path in named else named)}")
    leaves = [_placed(path, leaf, mesh, given[path]) for path, leaf in named.items()]
    return jax.tree.unflatten(jax.tree.structure(shapes), leaves)


def _placed(path: str, leaf: Any, mesh: Mesh, spec: PartitionSpec) -> jax.ShapeDtypeStruct:
    axes = [a for entry in spec for a in ((entry,) if isinstance(entry, str) else entry or ())]
    wrong = ""
    if unknown := [a for a in axes if a not in mesh.axis_names]:
        wrong = f"names axis {unknown[0]!r}; the mesh has {', '.join(map(repr, mesh.axis_names))}"
    elif twice := [a for a in axes if axes.count(a) > 1]:
        wrong = f"names axis {twice[0]!r} twice"
    elif len(spec) > len(leaf.shape):
        wrong = f"has {len(spec)} entries, the tensor rank {len(leaf.shape)}"
    if wrong:
        raise MappingError(f"placed: {path!r} {tuple(leaf.shape)}: {spec} {wrong}")
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))


def named_shardings(layout: Layout, devices: dict[int, Any]) -> dict[Placement, NamedSharding]:
    """A sharding for every placement of the layout; ``devices``: number -> jax device.

    Boxes that no mesh of the devices in order of their number can express are a `MappingError`; then give
    the target tree to `make_pool`.
    """
    groups: dict[tuple[int, ...], dict[Placement, str]] = {}
    for path, tensor in layout.items():
        order = tuple(sorted(tensor.placement.by_device))
        groups.setdefault(order, {}).setdefault(tensor.placement, path)
    found: dict[Placement, NamedSharding] = {}
    for order, placements in groups.items():
        found |= _group(order, placements, devices)
    return found


def _group(
    order: tuple[int, ...], placements: dict[Placement, str], devices: dict[int, Any]
) -> dict[Placement, NamedSharding]:
    failed = ""
    for grid in sorted(set(itertools.permutations(_primes(len(order))))):
        specs = {}
        for placement, path in placements.items():
            spec = _spec(placement, order, grid)
            if spec is None:
                failed = path
                break
            specs[placement] = spec
        else:
            table = np.empty(len(order), object)
            table[:] = [devices[d] for d in order]
            names = tuple(f"a{i}" for i in range(len(grid)))
            mesh = Mesh(table.reshape(grid), names, axis_types=(AxisType.Auto,) * len(grid))
            return {p: NamedSharding(mesh, s) for p, s in specs.items()}
    raise MappingError(
        f"{failed!r}: no mesh of devices {list(order)} in this order has its boxes; "
        "give make_pool the target tree"
    )


def other_memory(sharding: Any) -> tuple[str, str] | None:
    """(memory kind that a sharding names, its devices' own), or None where it is their own."""
    kind, own = sharding.memory_kind, next(iter(sharding.device_set)).default_memory().kind
    return None if kind in (None, own) else (kind, own)


def given_shardings(layout: Layout, leaves: dict[str, Any]) -> dict[str, Any]:
    """Path -> sharding of a target tree's leaf, after a check that they have the layout's boxes."""
    if Layout.of(leaves) != layout:
        raise MappingError("the target tree is not laid out as the plan's target")
    for path, leaf in leaves.items():
        if (kinds := other_memory(leaf.sharding)) is not None:
            raise MappingError(
                f"target {path!r} asks for memory {kinds[0]!r}, results are made in {kinds[1]!r}: leave the "
                "kind out, and move them by jax.device_put"
            )
    return {path: leaf.sharding for path, leaf in leaves.items()}


def local_devices(layout: Layout) -> dict[int, Any]:
    """Number -> device of this process; a layout with others is a `MappingError`."""
    devices = {d.id: d for d in jax.local_devices()}
    missing = [d for d in layout.devices if d not in devices]
    if missing:
        raise MappingError(
            f"devices {missing} of the target layout are not devices of this process: reshard moves inside "
            "of one; between several, each sends and receives its edges of the plan (Plan.for_rank)"
        )
    return devices


def check_process(source: Layout) -> None:
    """Raises `MappingError` if a process of a jax world is to read shards that another one holds."""
    others = sorted(d for d, process in source.devices.items() if process != jax.process_index())
    if others:
        raise MappingError(
            f"reshard: devices {others} of the source layout are not devices of this process: reshard moves "
            "inside of one; between several, each sends and receives its edges of the plan (Plan.for_rank)"
        )


def check_meshes(source: Layout, target: Layout, arrays: Mapping[str, Any]) -> None:
    """Raises `MappingError` if, in one jax world, each of two meshes has devices that the other has not.

    The same devices (colocated), disjoint ones, and one mesh inside the other are fine. ``arrays``: the
    source leaves, for the names of mesh axes. Device numbers of different worlds say nothing, so it is not
    for `plan` to check.
    """
    ours, theirs = set(source.devices), set(target.devices)
    both, only_ours, only_theirs = (sorted(s) for s in (ours & theirs, ours - theirs, theirs - ours))
    if not (both and only_ours and only_theirs):
        return
    name, path = next(iter(source), ""), next(iter(target), "")
    mesh = getattr(getattr(arrays.get(name), "sharding", None), "mesh", None)
    axes = ", ".join(f"{k}={n}" for k, n in mesh.shape.items()) if mesh is not None else "unnamed"
    raise MappingError(
        f"reshard: source mesh ({axes}; devices {sorted(ours)}; tensor {name!r}) and target mesh (devices "
        f"{sorted(theirs)}; tensor {path!r}) overlap partly: {both} belong to both, {only_ours} to the "
        f"source alone, {only_theirs} to the target alone, so that the sides can run neither in turns nor "
        "apart; use the same devices, disjoint ones, or one mesh inside the other"
    )
