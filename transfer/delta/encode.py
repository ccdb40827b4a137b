"""Jitted encoders of one target layout: each device compares its own shards, nothing is gathered.

One jitted function per level of the ladder and layout. Behind it stand three implementations with equal bits:
the C kernel through FFI on CPU, Pallas kernels on GPU, plain XLA anywhere.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jaxrl_sync.transfer.delta import ffi, pallas_gpu, xla
from jaxrl_sync.transfer.delta.bits import CHUNK_ELEMENTS, DeltaError, chunks, unsigned
from jaxrl_sync.transfer.delta.buckets import Ladder
from jaxrl_sync.transfer.delta.sparse import Delta

Implementation = Literal["ffi", "pallas", "xla"]
Tree = Mapping[str, jax.Array]

ALONE = 4
"""Up to so many tensors that need a higher level than the rest are encoded again by programs of their own."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Changes of one chunk of every shard of a tensor, on the devices; the leading dimension counts shards.

    ``count`` u32[shards] is true also where it exceeds the capacity; ``positions`` u32[shards, capacity] are
    local to shard and chunk, NO_POSITION past the count; ``new`` and ``old`` the unsigned bits there, 0 past
    the count.
    """

    count: jax.Array
    positions: jax.Array
    new: jax.Array
    old: jax.Array | None


def implementation_for(sharding: Sharding) -> Implementation:
    """The fastest implementation on a sharding's devices."""
    devices: set[Any] = set(sharding.device_set)
    platform = str(devices.pop().platform)
    if platform == "cpu":
        return "ffi" if ffi.available() else "xla"
    return "pallas" if platform in ("gpu", "cuda", "rocm") else "xla"


def default_threads(sharding: Sharding) -> int:
    """Threads for the C kernel on one shard: the cores shared among this process's shards."""
    return max(1, (os.cpu_count() or 1) // len(sharding.addressable_devices))


def encode_local(
    old: jax.Array,
    new: jax.Array,
    capacity: int,
    implementation: Implementation,
    *,
    keep_old: bool = False,
    window: tuple[int, int] | None = None,
    threads: int = 1,
    interpret: bool = False,
) -> list[jax.Array]:
    """(count, positions, new bits[, old bits]) of one device's buffers, or of a window (offset, elements) of
    them.

    Traceable. Any shape and any dtype of 1, 2 or 4 bytes; positions are row-major.
    """
    offset, elements = window or (0, new.size)
    if implementation == "ffi":
        return ffi.encode(old, new, capacity, offset, elements, keep_old, threads)
    if (offset, elements) != (0, new.size):
        old = jax.lax.slice(old.reshape(-1), (offset,), (offset + elements,))
        new = jax.lax.slice(new.reshape(-1), (offset,), (offset + elements,))
    if implementation == "pallas":
        return pallas_gpu.encode(old, new, capacity, keep_old, interpret)
    return xla.encode(old, new, capacity, keep_old)


def encode_mask_local(
    words: jax.Array,
    new: jax.Array,
    capacity: int,
    implementation: Implementation,
    *,
    window: tuple[int, int] | None = None,
    threads: int = 1,
    interpret: bool = False,
) -> list[jax.Array]:
    """(count, positions, new bits) from the change mask of one device's buffer; a window starts at a whole
    word.
    """
    offset, elements = window or (0, new.size)
    words = jax.lax.slice(words, (offset // 32,), (offset // 32 + -(-elements // 32),))
    if implementation == "ffi":
        return ffi.encode_mask(words, new, capacity, offset, elements, threads)
    if (offset, elements) != (0, new.size):
        new = jax.lax.slice(new.reshape(-1), (offset,), (offset + elements,))
    if implementation == "pallas":
        return pallas_gpu.encode_mask(words, new, capacity, interpret)
    return xla.encode_mask(words, new, capacity)


@dataclasses.dataclass(frozen=True)
class Site:
    """One tensor of the target layout, and how its shards are laid out."""

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    sharding: Sharding

    @classmethod
    def of(cls, path: str, leaf: Any) -> Site:
        """From an array or a ShapeDtypeStruct with a NamedSharding or SingleDeviceSharding. DeltaError
        else.
        """
        sharding = leaf.sharding
        if not isinstance(sharding, NamedSharding | SingleDeviceSharding):
            raise DeltaError(f"{path}: sharding is {sharding}, expected a NamedSharding or one device")
        unsigned(leaf.dtype)
        return cls(path, tuple(leaf.shape), np.dtype(leaf.dtype), sharding)

    @property
    def elements(self) -> int:
        """Elements of one shard."""
        return int(np.prod(self.sharding.shard_shape(self.shape), dtype=np.int64))

    @property
    def axes(self) -> tuple[str, ...]:
        """Mesh axes that cut the tensor; over the others it is replicated."""
        if not isinstance(self.sharding, NamedSharding):
            return ()
        used = {a for part in self.sharding.spec for a in (part if isinstance(part, tuple) else (part,)) if a}
        return tuple(a for a in self.sharding.mesh.axis_names if a in used)

    def per_shard(self, function: Callable[..., Any], arguments: int, results: Any) -> Callable[..., Any]:
        """``function`` of local arrays over the mesh: ``arguments`` like the tensor, then arrays with a
        leading
        dimension of shards; ``results`` is a tree of True (like the tensor) and False (leading dimension)."""
        if not isinstance(self.sharding, NamedSharding):
            return function
        rows = PartitionSpec(self.axes) if self.axes else PartitionSpec()
        sharding = self.sharding
        specs = jax.tree.map(lambda like: sharding.spec if like else rows, results)

        def over_mesh(*args: Any) -> Any:
            inputs = tuple(sharding.spec if i < arguments else rows for i in range(len(args)))
            mapped = jax.shard_map(
                function, mesh=sharding.mesh, in_specs=inputs, out_specs=specs, check_vma=False
            )
            return mapped(*args)

        return over_mesh


def sites_of(tree: Mapping[str, Any]) -> tuple[Site, ...]:
    """The tensors of a flat tree (path -> array or ShapeDtypeStruct with sharding), in its order."""
    return tuple(Site.of(path, leaf) for path, leaf in tree.items())


class Encoder:
    """Encoders of one target layout. Keeps compiled functions and the level; owns no device memory.

    ``encode(base, new)`` blocks until the counts are known; positions and values stay on the devices.
    """

    def __init__(
        self,
        target: Mapping[str, Any],
        *,
        ladder: Ladder | None = None,
        keep_old: bool = False,
        implementation: Implementation | None = None,
        threads: int | None = None,
        chunk_elements: int = CHUNK_ELEMENTS,
        interpret: bool = False,
    ) -> None:
        """``interpret``: Pallas kernels run on a CPU, slowly."""
        self.sites = {site.path: site for site in sites_of(target)}
        self.ladder = ladder or Ladder()
        self.level = 0
        self._keep_old = keep_old
        self._implementation: Implementation | None = implementation
        self._threads = threads
        self._chunk_elements = chunk_elements
        self._interpret = interpret
        self._compiled: dict[tuple[tuple[str, ...], int, bool], Callable[..., Any]] = {}

    def encode(self, base: Tree, new: Tree) -> dict[str, list[Encoded] | None]:
        """The changes of every tensor, chunk by chunk; None: too dense, send it whole.

        Neither tree is donated. Tensors that overflow the level are encoded again on their own level.
        """
        return self.start(base, new)()

    def start(self, base: Tree, new: Tree) -> Callable[[], dict[str, list[Encoded] | None]]:
        """Start `encode` and return at once; the function that comes back waits for the counts."""
        return self._climb(lambda paths, level: self.at_level(level, paths)(base, new))

    def encode_mask(self, masks: Tree, new: Tree) -> dict[str, list[Encoded] | None]:
        """The same from masks made by `masks.cast_with_mask` (u32[shards, words]); old bits are not kept."""
        return self.start_mask(masks, new)()

    def start_mask(self, masks: Tree, new: Tree) -> Callable[[], dict[str, list[Encoded] | None]]:
        """Start `encode_mask`, as `start` does `encode`."""
        return self._climb(lambda paths, level: self.at_level(level, paths, masked=True)(masks, new))

    def _climb(
        self, run: Callable[[tuple[str, ...], int], Any]
    ) -> Callable[[], dict[str, list[Encoded] | None]]:
        first, most = run(tuple(self.sites), self.level)

        def finish() -> dict[str, list[Encoded] | None]:
            counts = {path: [int(np.asarray(c)) for c in parts] for path, parts in most.items()}
            levels = {path: self._level_of(path, parts) for path, parts in counts.items()}
            found: dict[str, list[Encoded] | None] = {
                p: None if levels[p] is None else first[p] for p in first
            }
            found.update(self._again(run, levels))
            elements = {path: site.elements for path, site in self.sites.items()}
            totals = {path: sum(parts) for path, parts in counts.items()}
            self.level = self.ladder.next_level(elements, totals)
            return found

        return finish

    def _again(
        self, run: Callable[[tuple[str, ...], int], Any], levels: Mapping[str, int | None]
    ) -> dict[str, list[Encoded]]:
        """Tensors that need a higher level. A few have a program each; for many there is that of all tensors,
        because one for every set of them would be compiled over and over."""
        found: dict[str, list[Encoded]] = {}
        needed = {path: level for path, level in levels.items() if level is not None and level > self.level}
        for level in sorted(set(needed.values())):
            paths = [path for path in needed if needed[path] == level]
            if len(paths) > ALONE:
                whole = run(tuple(self.sites), level)[0]
                found.update({path: whole[path] for path in paths})
            else:
                found.update({path: run((path,), level)[0][path] for path in paths})
        return found

    def _level_of(self, path: str, parts: list[int]) -> int | None:
        level = 0
        for (_, elements), count in zip(self._chunks(path), parts, strict=True):
            needed = self.ladder.level_for(elements, count)
            if needed is None:
                return None
            level = max(level, needed)
        return level

    def _chunks(self, path: str) -> list[tuple[int, int]]:
        return chunks(self.sites[path].elements, self._chunk_elements)

    def at_level(
        self, level: int, paths: tuple[str, ...] | None = None, masked: bool = False
    ) -> Callable[[Tree, Tree], Any]:
        """The jitted function (base or masks, new) -> ({path: [Encoded per chunk]}, {path: [u32 per chunk]}).

        The latter are the largest true counts of any shard, the same on every process, so that all processes
        choose the same level. Compiled once per level.
        """
        key = (paths or tuple(self.sites), level, masked)
        if key not in self._compiled:
            parts = {path: self._site_function(self.sites[path], level, masked) for path in key[0]}

            def run(first: Tree, new: Tree) -> Any:
                found = {path: function(first[path], new[path]) for path, function in parts.items()}
                return found, {path: [jnp.max(p.count) for p in some] for path, some in found.items()}

            jitted = jax.jit(run)
            self._compiled[key] = lambda first, new: jitted(
                {path: first[path] for path in key[0]}, {path: new[path] for path in key[0]}
            )
        return self._compiled[key]

    def _site_function(self, site: Site, level: int, masked: bool) -> Callable[..., list[Encoded]]:
        fixed = self._implementation
        chosen = implementation_for(site.sharding) if fixed is None else fixed
        threads = self._threads or default_threads(site.sharding)
        windows = self._chunks(site.path)
        keep_old = self._keep_old and not masked

        def local(first: jax.Array, new: jax.Array) -> list[Encoded]:
            found = []
            for window in windows:
                capacity = self.ladder.capacity(window[1], level)
                if masked:
                    parts = encode_mask_local(
                        first[0], new, capacity, chosen,
                        window=window, threads=threads, interpret=self._interpret,
                    )  # fmt: skip
                else:
                    parts = encode_local(
                        first, new, capacity, chosen, keep_old=keep_old,
                        window=window, threads=threads, interpret=self._interpret,
                    )  # fmt: skip
                rows = [part[None] for part in parts]
                found.append(Encoded(rows[0], rows[1], rows[2], rows[3] if keep_old else None))
            return found

        rows = [Encoded(False, False, False, False if keep_old else None) for _ in windows]  # type: ignore[arg-type]
        if not masked:
            return site.per_shard(local, 2, rows)
        swapped = site.per_shard(lambda new, first: local(first, new), 1, rows)
        return lambda first, new: swapped(new, first)


def collect(
    site: Site, parts: list[Encoded], chunk_elements: int = CHUNK_ELEMENTS
) -> Iterator[tuple[int, list[Delta]]]:
    """(device id, delta per chunk) of every shard on this process's devices, replicas included; on CPU
    without a copy.
    """
    rows: dict[int, list[Delta]] = {}
    for (_, elements), part in zip(chunks(site.elements, chunk_elements), parts, strict=True):
        arrays = (part.count, part.positions, part.new, part.old)
        local = [functools.partial(_shard_of, array) for array in arrays if array is not None]
        for shard in part.count.addressable_shards:
            count, positions, new, *old = (find(shard.device) for find in local)
            n = int(count)
            if n > positions.size:
                raise DeltaError(f"{site.path}: {n} changes overflow the capacity of {positions.size}")
            kept = old[0][:n] if old else None
            rows.setdefault(shard.device.id, []).append(Delta(elements, positions[:n], new[:n], kept))
    yield from rows.items()


def _shard_of(array: jax.Array, device: Any) -> Any:
    for shard in array.addressable_shards:
        if shard.device == device:
            return np.asarray(shard.data)[0]
    raise DeltaError(f"no shard on {device}")
