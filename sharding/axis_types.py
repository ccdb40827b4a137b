"""Meshes with Explicit axes, which make shardings a part of jax's types: what to compute on instead.

`trace` sees shapes without shardings, so the program that it finds says nothing about where its values lie.
On Explicit axes jax refuses such a program wherever it can't tell (``a @ b``, contracted over sharded
dimensions); on Auto axes over the same devices the compiler decides, and the same bits come out.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding


def is_explicit(sharding: Any) -> bool:
    """Whether a sharding is over a mesh of which an axis is Explicit."""
    return isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types


def auto_twin(array: jax.Array) -> jax.Array:
    """The same buffers over a mesh of Auto axes, without a copy; any other array as it is."""
    if not is_explicit(array.sharding):
        return array
    shards = [s.data for s in array.addressable_shards]
    twin = _auto_sharding(array.sharding)
    return jax.make_array_from_single_device_arrays(array.shape, twin, shards, dtype=array.dtype)


@functools.lru_cache(maxsize=4096)
def _auto_sharding(sharding: Any) -> NamedSharding:
    mesh = Mesh(sharding.mesh.devices, sharding.mesh.axis_names)
    return NamedSharding(mesh, sharding.spec, memory_kind=sharding.memory_kind)


def writes_shardings(closed: ClosedJaxpr) -> bool:
    """Whether a program itself names shardings over Explicit axes (``out_sharding=``, ``reshard``).

    Such a program was written for them and is run on them as it is.
    """
    return _writes(closed.jaxpr, set())


def _writes(jaxpr: Jaxpr, seen: set[int]) -> bool:
    if id(jaxpr) in seen:
        return False
    seen.add(id(jaxpr))
    return any(_names(value, seen) for eqn in jaxpr.eqns for value in eqn.params.values())


def _names(value: Any, seen: set[int]) -> bool:
    if isinstance(value, ClosedJaxpr | Jaxpr):
        return _writes(value.jaxpr if isinstance(value, ClosedJaxpr) else value, seen)
    if isinstance(value, tuple | list):
        return any(_names(v, seen) for v in value)
    return is_explicit(value)


@contextlib.contextmanager
def no_mesh() -> Iterator[None]:
    """No mesh is set inside, whatever the caller has set: that of Explicit axes would not fit the twins."""
    with jax.sharding.use_abstract_mesh(AbstractMesh((), ())):
        yield
