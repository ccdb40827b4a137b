"""Meshes over parts of the eight virtual devices, and the ways of the tests to place and compare arrays."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import CopyTable, Plan
from jaxrl_sync.sharding.layout import dtype_of

P = PartitionSpec


def mesh(shape: tuple[int, ...], names: tuple[str, ...], first: int = 0) -> Mesh:
    """A mesh of Auto axes over the devices from number ``first`` on."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[first : first + count]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def abstract(shape: tuple[int, ...], dtype: Any, on: Mesh, *spec: Any) -> jax.ShapeDtypeStruct:
    """A shape with a NamedSharding."""
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(on, P(*spec)))


def random_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> Any:
    """Any bit pattern, NaNs and denormals included."""
    dtype = np.dtype(dtype)
    raw = rng.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return raw.view(dtype).reshape(shape)


def bits(array: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The bytes of an array, row-major."""
    return np.ascontiguousarray(np.asarray(array)).reshape(-1).view(np.uint8)


def moved_shards(made: Plan, host: Mapping[str, Any]) -> dict[tuple[int, str], Any]:
    """(device, target path) -> shard: a plan executed on shards of numpy arrays, also on uneven ones.

    jax has no array for shards of unequal sizes: the source's are cut from ``host`` (exported leaves, whole).
    """
    sources = {
        (s.device, path): np.ascontiguousarray(host[path][s.box.slices])
        for path, tensor in made.source.items()
        for s in tensor.shards
    }
    targets = {
        (s.device, path): np.zeros(s.box.shape, dtype_of(tensor.dtype))
        for path, tensor in made.target.items()
        for s in tensor.shards
    }
    constants = {(-1, name): values for name, values in made.constant_values.items()}
    rank = made.for_rank(0, "target")
    CopyTable.direct([c for e in rank.edges for c in e.copies]).execute(sources, targets)
    CopyTable.direct(rank.constants).execute(constants, targets)
    assert not rank.fanout
    return targets


def random_spec(
    rng: np.random.Generator, shape: tuple[int, ...], on: Mesh, uneven: bool = False
) -> PartitionSpec:
    """A random spec: each mesh axis on a dimension, two on one, or on none; divides unless ``uneven``."""
    spec: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for name in rng.permutation(on.axis_names):
        fits = [d for d, n in enumerate(left) if n and (uneven or n % on.shape[str(name)] == 0)]
        if fits and rng.random() < 0.75:
            d = int(rng.choice(fits))
            spec[d] = (*spec[d], str(name))
            left[d] = -(-left[d] // on.shape[str(name)])
    return P(*[s if s else None for s in spec])
