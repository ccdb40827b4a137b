"""Export buffers: a version's tensors in wire dtype, in buffers that no later train step can overwrite."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sync.sharding import Correspondence
from jaxrl_sync.transfer.transports.pinned import Pinned
from jaxrl_sync.transfer.version import Version

Shards = Pinned
Exported = dict[str, jax.Array]


@functools.lru_cache(maxsize=8)
def _copier(shardings: tuple[Any, ...]) -> Any:
    return jax.jit(lambda xs: [jnp.copy(x) for x in xs], out_shardings=list(shardings))


def export(correspondence: Correspondence, tree: Any, into: Exported | None = None) -> Exported:
    """The exported leaves in buffers of their own; blocks until they are computed: ``tree`` may be donated.

    ``into``: an older export whose buffers are taken over, except those that a transfer still reads.
    """
    exported: Exported = correspondence.export(tree, into)
    jax.block_until_ready(exported)
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
    return Pinned(
        {
            (shard.device.id, path): np.ascontiguousarray(np.asarray(shard.data))
            for path, array in exported.items()
            for shard in array.addressable_shards
        }
    )


@dataclasses.dataclass(eq=False)
class Held:
    """One version's buffers: per kind of export, or a snapshot from which an export can still be made."""

    version: Version
    exports: dict[str, Exported]
    tree: Any = None
    retired: bool = False
    _shards: dict[str, Shards] = dataclasses.field(default_factory=dict)
    _lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)

    def shards(self, kind: str, correspondence: Correspondence) -> Shards | None:
        """The shards of one kind of export, made from the snapshot if need be; None if that can't be."""
        with self._lock:
            if self.retired:
                return None
            if kind not in self._shards:
                if kind not in self.exports:
                    if self.tree is None:
                        return None
                    self.exports[kind] = export(correspondence, self.tree)
                self._shards[kind] = shards_of(self.exports[kind])
            return self._shards[kind]

    def retire(self) -> dict[str, Exported]:
        """No transfer begins from this version any more; its exports, for a later one to take over."""
        with self._lock:
            self.retired = True
            self._shards.clear()
            exports, self.exports, self.tree = self.exports, {}, None
        return exports
