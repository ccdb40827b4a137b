"""The source's side of a correspondence: cast, compute and copy the leaves that travel."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.axis_types import auto_twin, no_mesh, writes_shardings
from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.interpret import NodeKey, evaluate
from jaxrl_sync.sharding.known import bind, bind_in_context
from jaxrl_sync.sharding.layout import Layout, Placement, Shard, TensorLayout, dtype_of
from jaxrl_sync.sharding.paths import leaves_by_path, nearest

if TYPE_CHECKING:
    from jaxrl_sync.sharding.correspondence import Correspondence, Leaf


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The traced conversion, and where in it the computed leaves (by name) are."""

    closed: ClosedJaxpr
    paths: tuple[str, ...]
    nodes: dict[str, NodeKey]

    @functools.cached_property
    def writes_shardings(self) -> bool:
        """Whether it is a program for Explicit axes; any other is run on Auto ones."""
        return writes_shardings(self.closed)


def _sharding_parent(leaf: Leaf, shapes: dict[str, tuple[int, ...]]) -> str | None:
    """The parameter whose sharding a computed leaf takes over: the first of its shape, else None."""
    return next((p for p in leaf.params if shapes[p] == leaf.shape), None)


def _largest(leaf: Leaf, shapes: dict[str, tuple[int, ...]], known: Any) -> str:
    """The parameter whose devices a computed leaf without a parent of its shape is spread over."""
    params = leaf.params or tuple(sorted(known))
    if not params:
        raise MappingError(
            f"computed leaf {leaf.name!r}: there is no parameter whose devices could compute it"
        )
    return max(params, key=lambda p: (math.prod(shapes[p]), p))


def _spread_dim(shape: tuple[int, ...], devices: int) -> int | None:
    """The first dimension that divides over the devices; None: replicate."""
    return next((d for d, n in enumerate(shape) if n >= devices and n % devices == 0), None)


def export_layout(corr: Correspondence, source: Layout) -> Layout:
    """See `Correspondence.export_layout_of`."""
    shapes = {path: shape for path, (shape, _) in corr.params.items()}
    tensors = {}
    for leaf in corr.exported:
        if leaf.kind == "param":
            if source[leaf.path].shape != leaf.shape:
                found = source[leaf.path].shape
                raise MappingError(f"{leaf.path!r} has shape {found} in the layout, {leaf.shape} when traced")
            placement = source[leaf.path].placement
        elif (parent := _sharding_parent(leaf, shapes)) is not None:
            placement = source[parent].placement
        else:
            placement = _spread(leaf, source[_largest(leaf, shapes, corr.params)].placement)
        tensors[leaf.name] = TensorLayout(leaf.dtype, placement)
    return Layout(tensors)


def _spread(leaf: Leaf, base: Placement) -> Placement:
    shards = sorted(base.shards, key=lambda s: s.device)
    dim = _spread_dim(leaf.shape, len(shards))
    whole = Box.whole(leaf.shape)
    made = []
    for i, shard in enumerate(shards):
        if dim is None:
            box = whole
        else:
            step = leaf.shape[dim] // len(shards)
            start = tuple(i * step if d == dim else 0 for d in range(len(leaf.shape)))
            stop = tuple((i + 1) * step if d == dim else n for d, n in enumerate(leaf.shape))
            box = Box(start, stop)
        made.append(Shard(shard.device, shard.process, box))
    return Placement(leaf.shape, tuple(made))


def export(corr: Correspondence, params: Any, into: dict[str, Any] | None = None) -> dict[str, Any]:
    """See `Correspondence.export`."""
    arrays = leaves_by_path(params, "export")
    for path, (shape, dtype) in corr.params.items():
        if path not in arrays:
            raise MappingError(f"export: no parameter {path!r}{nearest(path, arrays)}")
        found = arrays[path]
        if (tuple(found.shape), str(np.dtype(found.dtype))) != (shape, dtype):
            raise MappingError(
                f"export: {path!r} is {np.dtype(found.dtype)}{list(found.shape)}, traced {dtype}{list(shape)}"
            )
    exported: dict[str, Any] = {}
    for names, used in _groups(corr, arrays):
        inputs = {p: arrays[p] for p in used}
        old = {name: into[name] for name in names} if into is not None else {}
        key = (names, tuple(a.sharding for a in inputs.values()), bool(old))
        if key not in corr._export_cache:
            corr._export_cache[key] = _compiled(corr, names, inputs)
        try:
            exported.update(corr._export_cache[key](inputs, old))
        except (TypeError, ValueError, NotImplementedError) as error:  # found while jax lowers the program
            if isinstance(error, MappingError) or not (made := _computed(corr, names)):
                raise
            raise MappingError(
                f"computing {_brief(made)} on the source's devices: {_reason(error)}"
            ) from error
    return {leaf.name: exported[leaf.name] for leaf in corr.exported}


def _groups(corr: Correspondence, arrays: dict[str, Any]) -> list[tuple[tuple[str, ...], list[str]]]:
    """(leaf names, parameters they need) per set of devices: one jitted program runs on one set."""
    shapes = {path: shape for path, (shape, _) in corr.params.items()}
    groups: dict[Any, list[Leaf]] = {}
    inputs: dict[Any, set[str]] = {}
    for leaf in corr.exported:
        needed = leaf.params or (_largest(leaf, shapes, corr.params),)
        frozen = {frozenset(arrays[p].sharding.device_set) for p in needed}
        if len(frozen) != 1:
            raise MappingError(
                f"computed leaf {leaf.name!r} needs parameters from {len(frozen)} sets of devices"
            )
        where = frozen.pop()
        groups.setdefault(where, []).append(leaf)
        inputs.setdefault(where, set()).update(needed)
    return [(tuple(leaf.name for leaf in groups[where]), sorted(inputs[where])) for where in groups]


def _compiled(
    corr: Correspondence, names: tuple[str, ...], inputs: dict[str, Any]
) -> Callable[[dict[str, Any], dict[str, Any]], dict[str, Any]]:
    leaves = {leaf.name: leaf for leaf in corr.exported if leaf.name in set(names)}
    computed = [leaf for leaf in leaves.values() if leaf.kind == "computed"]
    if computed and corr.program is None:
        raise MappingError(
            f"leaf {computed[0].name!r} is computed ({computed[0].reason}); a correspondence that came as "
            "bytes has no program for it: bind(convert, source, target) gives it one"
        )
    shapes = {path: shape for path, (shape, _) in corr.params.items()}

    def build(given: dict[str, Any], _: dict[str, Any]) -> dict[str, Any]:
        nodes = _evaluate(corr, computed, given) if computed else {}
        result = {}
        for name, leaf in leaves.items():
            value = given[leaf.path] if leaf.kind == "param" else nodes[name]
            for dtype in leaf.casts:
                value = value.astype(dtype_of(dtype))
            result[name] = jax.numpy.copy(value)
        return result

    out = {name: _out_sharding(leaf, shapes, inputs) for name, leaf in leaves.items()}
    jitted = jax.jit(build, out_shardings=out, donate_argnums=1, keep_unused=True)
    if computed and corr.program.writes_shardings:
        return jitted

    def on_auto_axes(given: dict[str, Any], old: dict[str, Any]) -> dict[str, Any]:
        with no_mesh():
            made: dict[str, Any] = jitted({path: auto_twin(x) for path, x in given.items()}, old)
        return made

    return on_auto_axes


def _evaluate(corr: Correspondence, computed: list[Leaf], given: dict[str, Any]) -> dict[str, Any]:
    program: Program = corr.program
    args = [
        given[p] if p in given else jax.numpy.zeros(corr.params[p][0], dtype_of(corr.params[p][1]))
        for p in program.paths
    ]
    base = {leaf.name: program.nodes[leaf.name] for leaf in computed}
    run, axes = (bind_in_context, "Explicit") if program.writes_shardings else (bind, "Auto")

    def named(eqn: Any, operands: Sequence[Any]) -> list[Any]:
        try:
            return run(eqn, operands)
        except Exception as error:  # shapes and dtypes were right when it was traced: only shardings are new
            words = f"over the source's {axes} axes: {eqn.primitive.name}: {_reason(error)}"
            raise MappingError(f"computing {_brief(base)} {words}") from error

    _, found = evaluate(program.closed, args, set(base.values()), run=named)
    return {name: found[node] for name, node in base.items()}


def _reason(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _computed(corr: Correspondence, names: tuple[str, ...]) -> list[str]:
    return [leaf.name for leaf in corr.exported if leaf.kind == "computed" and leaf.name in names]


def _brief(names: Collection[str]) -> str:
    first, more = [*map(repr, names)][:3], len(names) - 3
    return ", ".join(first) + (f" and {more} more" if more > 0 else "")


def _out_sharding(leaf: Leaf, shapes: dict[str, tuple[int, ...]], inputs: dict[str, Any]) -> Any:
    if leaf.kind == "param":
        return inputs[leaf.path].sharding
    if (parent := _sharding_parent(leaf, shapes)) is not None:
        return inputs[parent].sharding
    sharding = inputs[_largest(leaf, shapes, inputs)].sharding
    devices = sorted(sharding.device_set, key=lambda d: d.id)
    dim = _spread_dim(leaf.shape, len(devices))
    spec = PartitionSpec(*(None,) * (dim or 0), "all") if dim is not None else PartitionSpec()
    return NamedSharding(Mesh(np.array(devices), ("all",)), spec)
