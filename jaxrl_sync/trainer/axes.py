"""Logical axes and the one table that maps them to the mesh axes dp, fsdp and tp."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.presets.qwen3 import TRAINER_AXES, DecoderConfig, trainer_shapes
from jaxrl_sync.trainer.config import MeshConfig, TrainerConfigError

Tree = dict[str, Any]
MeshAxes = str | tuple[str, ...] | None

RULES: dict[str, MeshAxes] = {
    "layer": None,
    "embed": "fsdp",
    "heads": "tp",
    "kv_heads": "tp",
    "head_dim": None,
    "ff": "tp",
    "vocab": "tp",
    "norm": None,
    "rank": None,
    "batch": ("dp", "fsdp"),
    "seq": None,
    "features": None,
}


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh dp x fsdp x tp over ``devices`` (default: all of the world), processes in order along dp."""
    devices = jax.devices() if devices is None else devices
    if len(devices) != config.num_devices:
        raise TrainerConfigError(
            f"mesh dp={config.dp} x fsdp={config.fsdp} x tp={config.tp} needs {config.num_devices} devices, "
            f"found {len(devices)}"
        )
    grid = np.array(devices, dtype=object).reshape(config.dp, config.fsdp, config.tp)
    return Mesh(grid, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)


def spec(axes: tuple[str, ...], rules: dict[str, MeshAxes] = RULES) -> PartitionSpec:
    """The partition spec of a tensor with these logical axes; an error if two land on one mesh axis."""
    owner: dict[str, str] = {}
    for axis in axes:
        if axis not in rules:
            raise TrainerConfigError(
                f"logical axis {axis!r} is not in the table, expected one of {sorted(rules)}"
            )
        mesh_axes = rules[axis]
        for mesh_axis in (mesh_axes,) if isinstance(mesh_axes, str) else mesh_axes or ():
            if mesh_axis in owner:
                raise TrainerConfigError(
                    f"logical axes {owner[mesh_axis]!r} and {axis!r} of {axes} both land on "
                    f"mesh axis {mesh_axis!r}"
                )
            owner[mesh_axis] = axis
    return PartitionSpec(*(rules[a] for a in axes))


def rules_for(
    axes: tuple[str, ...], shape: tuple[int, ...], mesh: Mesh, rules: dict[str, MeshAxes] = RULES
) -> dict[str, MeshAxes]:
    """``rules``, but key and value heads that tp is a multiple of are whole on every device of tp.

    Each device then has the one head that its query heads share, as engines with more devices than such
    heads have.
    """
    heads = [size for axis, size in zip(axes, shape, strict=True) if axis == "kv_heads"]
    shared = rules["kv_heads"] == "tp" and any(
        n < mesh.shape["tp"] and mesh.shape["tp"] % n == 0 for n in heads
    )
    return {**rules, "kv_heads": None} if shared else rules


def check_divides(name: str, shape: tuple[int, ...], partition: PartitionSpec, mesh: Mesh) -> None:
    """Raise unless every dimension of ``shape`` divides by the mesh axes it is cut over."""
    for dim, (size, entry) in enumerate(zip(shape, partition, strict=True)):
        names = (entry,) if isinstance(entry, str) else tuple(entry or ())
        pieces = int(np.prod([mesh.shape[n] for n in names], dtype=int))
        if size % pieces:
            raise TrainerConfigError(
                f"{name}: dimension {dim} of {shape} has {size} elements, expected a multiple of "
                f"{pieces} (mesh axes {', '.join(names)})"
            )


def param_shardings(model: DecoderConfig, mesh: Mesh, rules: dict[str, MeshAxes] = RULES) -> Tree:
    """The trainer tree with a ``NamedSharding`` per tensor."""

    def place(path: Any, shape: jax.ShapeDtypeStruct) -> NamedSharding:
        name = "/".join(str(key.key) for key in path)
        axes = TRAINER_AXES[name]
        partition = spec(axes, rules_for(axes, shape.shape, mesh, rules))
        check_divides(name, shape.shape, partition, mesh)
        return NamedSharding(mesh, partition)

    tree: Tree = jax.tree_util.tree_map_with_path(place, trainer_shapes(model))
    return tree


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of every ``[rows, seq_len]`` field of a micro-batch."""
    return NamedSharding(mesh, spec(("batch", "seq")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of scalars and counters."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, axes: tuple[str, ...], mesh: Mesh, gathered: tuple[str, ...] = ()) -> jax.Array:
    """Fix the sharding of an intermediate; logical axes in ``gathered`` are made whole on every device."""
    rules = rules_for(axes, x.shape, mesh, {**RULES, **dict.fromkeys(gathered, None)})
    fixed: jax.Array = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec(axes, rules)))
    return fixed
