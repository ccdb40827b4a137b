"""The jitted programs of the device path: gather shards into a buffer per edge, scatter buffers into shards.

A program is fixed by a *shape*: which blocks of which arrays, but not where they start and not on which
devices. All devices whose work has the same shape run one program together (a `shard_map` without any
communication), so what is compiled follows the number of tensor classes, not tensors times devices.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.device_words import View, from_words, opaque, read, to_words, write
from jaxrl_sync.sharding.layout import dtype_of

Aval = tuple[tuple[int, ...], str]
"""Shape and dtype name of one device's shard."""

Devices = tuple[Any, ...]

_AXIS = "device"
_PROGRAMS = 4096


@dataclasses.dataclass(frozen=True)
class PackShape:
    """``arrays``: the source shards; ``edges``: per outgoing buffer the blocks (array number, view) in it."""

    arrays: tuple[Aval, ...]
    edges: tuple[tuple[tuple[int, View], ...], ...]


@dataclasses.dataclass(frozen=True)
class Write:
    """One block of a target shard, and whence it comes.

    ``array``: the target shard; ``to``: the block in it. From buffer number ``buffer`` at word ``offset``, or
    (``constant`` >= 0) from a block ``of`` of that constant.
    """

    array: int
    to: View
    buffer: int
    offset: int
    constant: int = -1
    of: View | None = None


@dataclasses.dataclass(frozen=True)
class ScatterShape:
    """``arrays``: the target shards; ``buffers``: words of each incoming one; ``constants``: of each, flat.

    ``donated``: shards are given and written over, else made anew.
    """

    arrays: tuple[Aval, ...]
    buffers: tuple[int, ...]
    constants: tuple[Aval, ...]
    writes: tuple[Write, ...]
    donated: bool


@functools.lru_cache(maxsize=_PROGRAMS)
def mesh_of(devices: Devices) -> Mesh:
    """The devices of one group in a row."""
    return Mesh(np.array(devices), (_AXIS,), axis_types=(AxisType.Auto,))


def _spec(shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec(_AXIS) if shape else PartitionSpec()


def together(devices: Devices, shape: tuple[int, ...], shards: Sequence[Any]) -> Any:
    """One array over a group, of one shard per device; nothing is copied. Scalars lie as if replicated."""
    whole = (len(devices) * shape[0], *shape[1:]) if shape else ()
    sharding = NamedSharding(mesh_of(devices), _spec(shape))
    return jax.make_array_from_single_device_arrays(whole, sharding, list(shards))


def apart(array: Any) -> dict[Any, Any]:
    """Device -> its shard."""
    return {s.device: s.data for s in array.addressable_shards}


def _mapped(
    body: Callable[..., Any], devices: Devices, inputs: Sequence[tuple[int, ...]], outputs: Sequence[Any],
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:  # fmt: skip
    made = jax.shard_map(
        body,
        mesh=mesh_of(devices),
        in_specs=tuple(_spec(shape) for shape in inputs),
        out_specs=tuple(_spec(shape) for shape in outputs),
        check_vma=False,
    )
    jitted = jax.jit(made, donate_argnums=donate)

    def alone(*arrays: Any) -> Any:
        with jax.set_mesh(mesh_of(devices)):  # the caller may have set that of the source, or of the target
            return jitted(*arrays)

    return alone


def _hidden(words: jax.Array, starts: jax.Array, devices: Devices) -> jax.Array:
    """The words; where they could be lost on the way, hidden from the compiler (`opaque`)."""
    at_risk = words.dtype.itemsize < 4 and devices[0].platform == "cpu"
    return opaque(words, starts) if at_risk else words


@functools.lru_cache(maxsize=_PROGRAMS)
def pack(shape: PackShape, devices: Devices) -> Callable[..., Any]:
    """(starts int32 [devices * n], *arrays) -> one buffer of words per edge."""

    def body(starts: jax.Array, *arrays: jax.Array) -> tuple[jax.Array, ...]:
        words = [_hidden(to_words(x), starts, devices) for x in arrays]
        at, buffers = 0, []
        for edge in shape.edges:
            parts = []
            for number, view in edge:
                parts.append(read(words[number], view, [starts[at + i] for i in range(view.num_starts)]))
                at += view.num_starts
            buffers.append(jnp.concatenate(parts))
        return tuple(buffers)

    inputs = [(1,), *(s for s, _ in shape.arrays)]
    return _mapped(body, devices, inputs, [(1,)] * len(shape.edges))


@functools.lru_cache(maxsize=_PROGRAMS)
def scatter(shape: ScatterShape, devices: Devices) -> Callable[..., Any]:
    """(starts, *buffers, *constants, *arrays if donated) -> the target shards."""
    num_buffers, num_constants = len(shape.buffers), len(shape.constants)

    def body(starts: jax.Array, *given: jax.Array) -> tuple[jax.Array, ...]:
        buffers, rest = given[:num_buffers], given[num_buffers:]
        constants, arrays = [to_words(c) for c in rest[:num_constants]], rest[num_constants:]
        at, made = 0, []
        for number, (size, dtype) in enumerate(shape.arrays):
            old = arrays[number] if shape.donated else jnp.zeros(size, dtype_of(dtype))
            flat = _hidden(to_words(old), starts, devices) if shape.donated else to_words(old)
            for w in (w for w in shape.writes if w.array == number):
                if w.of is None:
                    block = jax.lax.slice(buffers[w.buffer], (w.offset,), (w.offset + w.to.num_words,))
                else:
                    block = read(
                        constants[w.constant], w.of, [starts[at + i] for i in range(w.of.num_starts)]
                    )
                    at += w.of.num_starts
                flat = write(flat, w.to, [starts[at + i] for i in range(w.to.num_starts)], block)
                at += w.to.num_starts
            made.append(from_words(_hidden(flat, starts, devices), size, dtype_of(dtype)))
        return tuple(made)

    shapes = [s for s, _ in shape.arrays]
    inputs = [(1,), *[(1,)] * (num_buffers + num_constants), *(shapes if shape.donated else ())]
    first = 1 + num_buffers + num_constants
    donate = tuple(range(first, first + len(shapes))) if shape.donated else ()
    return _mapped(body, devices, inputs, shapes, donate)
