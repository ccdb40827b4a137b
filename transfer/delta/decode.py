"""Jitted apply: deltas scattered into a shadow that XLA owns, each device into its own shards, in place.

Where the shadow is memory that jax arrays alias (slots on CPU), no donated jit can write it: there
`sparse.apply_into` does the same outside of jit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.transfer.delta import ffi, pallas_gpu, xla
from jaxrl_sync.transfer.delta.bits import (
    CHUNK_ELEMENTS,
    NO_POSITION,
    OVERWRITE,
    ULP,
    DeltaError,
    Kind,
    bits_of,
    chunks,
    from_bits,
    unsigned,
)
from jaxrl_sync.transfer.delta.encode import (
    Encoded,
    Implementation,
    Site,
    Tree,
    default_threads,
    implementation_for,
    sites_of,
)
from jaxrl_sync.transfer.delta.sparse import Coded, Delta


def apply_local(
    buffer: jax.Array,
    positions: jax.Array,
    values: jax.Array,
    count: jax.Array,
    implementation: Implementation,
    *,
    kind: Kind = OVERWRITE,
    window: tuple[int, int] | None = None,
    threads: int = 1,
    interpret: bool = False,
) -> jax.Array:
    """One device's buffer with ``count`` values written at row-major ``positions`` (relative to the window).

    Traceable; in place where the buffer is donated. The FFI form raises on positions that don't ascend or lie
    outside, and on an overflowed delta; the others drop what lies outside and all of an overflowed delta.
    """
    offset, elements = window or (0, buffer.size)
    if implementation == "ffi":
        return ffi.apply(buffer, positions, values, count, offset, elements, kind, threads)
    apply = pallas_gpu.apply if implementation == "pallas" else xla.apply
    extra = {"interpret": interpret} if implementation == "pallas" else {}
    if (offset, elements) == (0, buffer.size):
        return apply(buffer, positions, values, count, kind, **extra)
    flat = buffer.reshape(-1)
    part = apply(
        jax.lax.slice(flat, (offset,), (offset + elements,)), positions, values, count, kind, **extra
    )
    bits = jax.lax.dynamic_update_slice(bits_of(flat), bits_of(part), (offset,))
    return from_bits(bits, buffer.dtype).reshape(buffer.shape)


def decode_local(
    buffer: jax.Array,
    gaps: jax.Array,
    values: jax.Array,
    escapes: jax.Array,
    sizes: jax.Array,
    implementation: Implementation,
    *,
    kind: Kind = OVERWRITE,
    threads: int = 1,
) -> jax.Array:
    """`apply_local` straight from the codec's streams, padded to fixed room: decode and scatter in one
    function.

    ``gaps`` u8, ``values`` (bytes of ulp codes, or whole elements), ``escapes``; ``sizes`` u32[3]: count,
    bytes of gaps, escapes.
    """
    if implementation == "ffi":
        return ffi.apply_coded(buffer, gaps, values, escapes, sizes, kind, 0, buffer.size, threads)
    positions = xla.decode_gaps(gaps, sizes[1], values.size)
    if kind == ULP:
        values = xla.widen(values, escapes)
    return apply_local(buffer, positions, values, sizes[0], implementation, kind=kind)


class Applier:
    """Applies deltas of one target layout to a shadow tree. Keeps compiled functions; owns no device
    memory.
    """

    def __init__(
        self,
        target: Mapping[str, Any],
        *,
        kind: Kind = OVERWRITE,
        implementation: Implementation | None = None,
        threads: int | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
    ) -> None:
        self.sites = {site.path: site for site in sites_of(target)}
        self._kind = kind
        self._implementation: Implementation | None = implementation
        self._threads = threads
        self._chunk_elements = chunk_elements
        self._jitted = jax.jit(self._run, donate_argnums=0)

    def apply(self, shadow: Tree, deltas: Mapping[str, list[Encoded]]) -> dict[str, jax.Array]:
        """The shadow with the deltas of some or all tensors applied. **Donates** those tensors of the shadow.

        Returns the whole tree. Compiles once per set of shapes: levels of the ladder keep them few.
        """
        touched = {path: shadow[path] for path in deltas}
        return {**shadow, **self._jitted(touched, dict(deltas))}

    def _run(self, shadow: Tree, deltas: Mapping[str, list[Encoded]]) -> dict[str, jax.Array]:
        return {path: self._site_function(self.sites[path])(shadow[path], deltas[path]) for path in deltas}

    def _site_function(self, site: Site) -> Callable[..., jax.Array]:
        fixed = self._implementation
        chosen = implementation_for(site.sharding) if fixed is None else fixed
        threads = self._threads or default_threads(site.sharding)
        windows = chunks(site.elements, self._chunk_elements)

        def local(buffer: jax.Array, parts: list[Encoded]) -> jax.Array:
            for window, part in zip(windows, parts, strict=True):
                buffer = apply_local(
                    buffer, part.positions[0], part.new[0], part.count[0], chosen,
                    kind=self._kind, window=window, threads=threads,
                )  # fmt: skip
            return buffer

        return site.per_shard(local, 1, True)


def place(
    site: Site,
    shards: Mapping[int, Sequence[Delta]],
    capacity: Callable[[int], int],
    chunk_elements: int = CHUNK_ELEMENTS,
) -> list[Encoded]:
    """Host deltas as `Encoded` on the devices: what `Applier` takes from the wire.

    ``shards``: device id -> a delta per chunk, for this process's devices. ``capacity`` of a chunk's elements
    gives the static room; DeltaError if a delta doesn't fit. One transfer per device and array.
    """
    rows, count = site.sharding, 1
    if isinstance(site.sharding, NamedSharding):
        mesh = site.sharding.mesh
        rows = NamedSharding(mesh, PartitionSpec(site.axes))
        count = math.prod(mesh.shape[axis] for axis in site.axes)
    devices: set[Any] = set(site.sharding.addressable_devices)
    found = []
    for index, (_, elements) in enumerate(chunks(site.elements, chunk_elements)):
        room = capacity(elements)
        pieces = {d: _padded(site, shards[d.id][index], room) for d in devices}
        arrays = [
            jax.make_array_from_single_device_arrays(
                (count, *next(iter(pieces.values()))[k].shape[1:]),
                rows,
                [jax.device_put(piece[k], device) for device, piece in pieces.items()],
            )
            for k in range(3)
        ]
        found.append(Encoded(arrays[0], arrays[1], arrays[2], None))
    return found


def _padded(site: Site, delta: Delta, room: int) -> tuple[Any, Any, Any]:
    if delta.count > room or delta.new.dtype != unsigned(site.dtype):
        raise DeltaError(
            f"{site.path}: delta of {delta.count} {delta.new.dtype} for room of {room} {unsigned(site.dtype)}"
        )
    positions = np.full((1, room), NO_POSITION, np.uint32)
    values = np.zeros((1, room), delta.new.dtype)
    positions[0, : delta.count] = delta.positions
    values[0, : delta.count] = delta.new
    return np.array([delta.count], np.uint32), positions, values


def stack_coded(
    coded: Coded, rooms: tuple[int, int, int]
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """(gaps, values, escapes, sizes) padded to ``rooms``, as `decode_local` takes them. DeltaError if too
    large.
    """
    streams = (coded.gaps, coded.values, coded.escapes)
    if any(s.size > room for s, room in zip(streams, rooms, strict=True)):
        raise DeltaError(f"streams of {[s.size for s in streams]} entries for rooms of {list(rooms)}")
    padded = [np.pad(s, (0, room - s.size)) for s, room in zip(streams, rooms, strict=True)]
    sizes = np.array([coded.count, coded.gaps.size, coded.escapes.size], np.uint32)
    return jnp.asarray(padded[0]), jnp.asarray(padded[1]), jnp.asarray(padded[2]), jnp.asarray(sizes)
