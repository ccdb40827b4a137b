"""Meshes over parts of the eight virtual devices, and the ways of the tests to place and compare arrays."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

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


def random_spec(rng: np.random.Generator, shape: tuple[int, ...], on: Mesh) -> PartitionSpec:
    """A random spec that divides the shape: each mesh axis on a dimension, two on one, or on none."""
    spec: list[tuple[str, ...]] = [() for _ in shape]
    left = list(shape)
    for name in rng.permutation(on.axis_names):
        fits = [d for d, n in enumerate(left) if n and n % on.shape[str(name)] == 0]
        if fits and rng.random() < 0.75:
            d = int(rng.choice(fits))
            spec[d] = (*spec[d], str(name))
            left[d] //= on.shape[str(name)]
    return P(*[s if s else None for s in spec])
