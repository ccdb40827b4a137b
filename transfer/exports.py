"""Export buffers: a version's tensors in wire dtype, in buffers that no later train step can overwrite."""

from __future__ import annotations

import dataclasses
import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sync.sharding import Correspondence
from jaxrl_sync.transfer.lazy import LazyShards
from jaxrl_sync.transfer.transports.pinned import Pinned
from jaxrl_sync.transfer.version import Version

Shards = Pinned
Exported = dict[str, jax.Array]
Spare = dict[str, Exported]
"""Export buffers that nobody needs, by kind: a later export takes them over."""


@functools.lru_cache(maxsize=8)
def _copier(shardings: tuple[Any, ...]) -> Any:
    return jax.jit(lambda xs: [jnp.copy(x) for x in xs], out_shardings=list(shardings))


def begin_export(correspondence: Correspondence, tree: Any, into: Exported | None = None) -> Exported:
    """The exported leaves in buffers of their own; ``tree`` may be donated once they are computed.

    ``into``: an older export whose buffers are taken over, except those of which somebody has an array.
    """
    exported: Exported = correspondence.export(tree, into)
    return exported


def export(correspondence: Correspondence, tree: Any, into: Exported | None = None) -> Exported:
    """`begin_export`; blocks until all is computed."""
    exported: Exported = jax.block_until_ready(begin_export(correspondence, tree, into))
    return exported


def export_kind(correspondence: Correspondence) -> str:
    """Correspondences of one kind share export buffers: they move the same leaves in the same dtypes.

    Computed leaves are told apart by the whole map: their names alone don't say what they hold.
    """
    if any(leaf.kind == "computed" for leaf in correspondence.leaves):
        return correspondence.digest
    return ";".join(f"{x.name}={x.path}:{','.join(x.casts)}" for x in correspondence.exported)


def snapshot(tree: Any) -> Any:
    """A copy of the whole tree in its own dtype, for receivers that aren't known yet; blocks until done."""
    leaves, structure = jax.tree.flatten(tree)
    copier = _copier(tuple(x.sharding for x in leaves))  # sharded alike: one program exports both
    copies = jax.tree.unflatten(structure, copier(leaves) if leaves else [])
    jax.block_until_ready(copies)
    return copies


def shards_of(exported: dict[str, jax.Array]) -> Shards:
    """(device, path) -> the shard's elements on the host; on CPU a view, without a copy."""
    return LazyShards.of_host(exported)


def copy_of(shards: Shards) -> Shards:
    """The same in memory of its own: no device buffer stays alive for it."""
    return Pinned({key: array.copy() for key, array in shards.items()})


@dataclasses.dataclass(frozen=True)
class _HostLeaf:
    """One array of a snapshot on the host: its shards in the order of its addressable devices."""

    shape: tuple[int, ...]
    sharding: Any
    shards: tuple[tuple[Any, np.ndarray[Any, Any]], ...]

    @classmethod
    def of(cls, array: jax.Array) -> _HostLeaf:
        shards = tuple((s.device, np.array(s.data, copy=True)) for s in array.addressable_shards)
        return cls(array.shape, array.sharding, shards)

    def array(self) -> jax.Array:
        """The array again, on its devices."""
        parts = [jax.device_put(value, device) for device, value in self.shards]
        return jax.make_array_from_single_device_arrays(self.shape, self.sharding, parts)


@dataclasses.dataclass(eq=False)
class Held:
    """One version's buffers: per kind of export, or a snapshot from which an export can still be made.

    A copy in host memory takes the place of both when their memory is needed. ``view`` gives the shards of an
    export, by version and kind. With ``reuse`` the buffers of an export go to a later one once nothing begins
    here any more, unless somebody still holds its shards: of some they know nothing but the address.
    """

    version: Version
    exports: dict[str, Exported]
    tree: Any = None
    retired: bool = False
    exported: bool = True
    copied: bool = False
    view: Callable[[Version, str, Exported], Shards] = lambda version, kind, exported: shards_of(exported)
    reuse: bool = True
    _shards: dict[str, Shards] = dataclasses.field(default_factory=dict)
    _copies: dict[str, Shards] = dataclasses.field(default_factory=dict)
    _host_tree: Any = None
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def __post_init__(self) -> None:
        arrays = jax.tree.leaves((self.exports, self.tree))
        self.nbytes = sum(shard.data.nbytes for x in arrays for shard in x.addressable_shards)

    def shards(self, kind: str, correspondence: Correspondence) -> Shards | None:
        """The shards of one kind of export, made from the snapshot if need be; None if that can't be."""
        with self._lock:
            if self.retired:
                return None
            made = self._shards if self.exported else self._copies
            if kind not in made:
                exported = self.exports.get(kind)
                if exported is None:
                    tree = self._whole_tree()
                    if tree is None:
                        return None
                    exported = export(correspondence, tree)
                if self.exported:
                    self.exports[kind] = exported
                whole = self.view(self.version, kind, exported) if self.exported else None
                made[kind] = copy_of(shards_of(exported)) if whole is None else whole
            return made[kind]

    def _whole_tree(self) -> Any:
        if self.tree is None and self._host_tree is not None:
            return jax.tree.map(lambda leaf: leaf.array(), self._host_tree)
        return self.tree

    def copy(self) -> bool:
        """Make the copy in host memory; False when there is nothing (any more) to copy. Blocks."""
        with self._lock:
            if self.retired or self.copied:
                return False
            self._copies = {kind: copy_of(shards_of(exported)) for kind, exported in self.exports.items()}
            if self.tree is not None:
                self._host_tree = jax.tree.map(_HostLeaf.of, self.tree)
            self.copied = True
            return True

    def look_up(self) -> None:
        """Find the shards of all exports, which may still be being computed."""
        with self._lock:
            for kind, exported in self.exports.items():
                self._shards[kind] = self.view(self.version, kind, exported)

    def shed(self) -> Spare:
        """The export buffers go, the copy stays; the exports, for a later version to take over."""
        with self._lock:
            if not self.copied:
                return {}
            for kind in self.exports.keys() - self._copies.keys():  # asked for after the copy was made
                self._copies[kind] = copy_of(shards_of(self.exports[kind]))
            self.exported = False
            return self._unused()

    def retire(self) -> Spare:
        """No transfer begins from this version any more; its exports, for a later one to take over."""
        with self._lock:
            self.retired = True
            self._copies, self._host_tree = {}, None
            return self._unused()

    def _unused(self) -> Spare:
        """Let go of the exports; those of which nobody holds the shards, if they are to be used again."""
        exports, self.exports, self.tree = self.exports, {}, None
        shards = {kind: weakref.ref(found) for kind, found in self._shards.items()}
        self._shards.clear()
        free = {kind for kind in exports if kind not in shards or shards[kind]() is None}
        return {kind: exports[kind] for kind in free} if self.reuse else {}
