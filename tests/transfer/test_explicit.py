"""A publish from a trainer mesh to an engine mesh, both of Explicit axes, with computed tensors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.transfer import Version
from tests.transfer.models import Rig, same_bits, take


def mesh(shape: tuple[int, ...], names: tuple[str, ...], first: int, kind: AxisType) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(kind,) * len(names), devices=devices)


def adapted(t: dict[str, Any]) -> dict[str, Any]:
    return {"w": (t["w"] + t["a"] @ t["b"]).astype(jnp.bfloat16), "plain": t["w"].T}


def params_on(grid: Mesh, seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"w": ((8, 6), ("x", "y")), "a": ((8, 2), ("x", "y")), "b": ((2, 6), ("y", None))}
    return {
        k: jax.device_put(
            rng.standard_normal(shape).astype(np.float32), NamedSharding(grid, PartitionSpec(*spec))
        )
        for k, (shape, spec) in shapes.items()
    }


def test_versions_with_computed_tensors_arrive_bit_for_bit(rig: Rig) -> None:
    trainer = mesh((2, 2), ("x", "y"), 0, AxisType.Explicit)
    alike = mesh((2, 2), ("x", "y"), 0, AxisType.Auto)
    engine = NamedSharding(mesh((2,), ("tp",), 4, AxisType.Explicit), PartitionSpec("tp"))
    target = {
        "w": jax.ShapeDtypeStruct((8, 6), "bfloat16", sharding=engine),
        "plain": jax.ShapeDtypeStruct((6, 8), "float32", sharding=engine),
    }
    publisher = rig.publisher(params_on(trainer, 0), convert=adapted)
    subscriber = rig.subscriber(target=target, convert=adapted)
    for number in range(3):
        publisher.publish(params_on(trainer, number), Version("a", number))
        version, tree = take(subscriber)
        assert version == Version("a", number)
        assert same_bits(tree, jax.jit(adapted)(params_on(alike, number)))
