"""Optimizer state in host memory while a colocated engine has the devices.

Shard by shard on each process, so nothing here is collective. The way back gives arrays of the very shardings
that were taken away: compiled functions see no difference.
"""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import Sharding, SingleDeviceSharding

_HOST = ("pinned_host", "unpinned_host")


def host_kind(device: Any) -> str:
    """The kind of host memory that ``device`` can copy from fastest."""
    kinds = {memory.kind for memory in device.addressable_memories()}
    return next(kind for kind in _HOST if kind in kinds)


class Offloaded:
    """A tree that was moved to host memory; its device arrays are deleted. ``restore`` brings it back."""

    def __init__(self, tree: Any) -> None:
        self.shardings = jax.tree.map(lambda x: x.sharding, tree)
        self.tree = jax.tree.map(lambda x: _moved(x, x.sharding, host_kind(_a_device(x))), tree)
        jax.block_until_ready(self.tree)
        for leaf in jax.tree.leaves(tree):
            leaf.delete()

    @property
    def nbytes(self) -> int:
        """Bytes of this process's shards."""
        return sum(s.data.nbytes for x in jax.tree.leaves(self.tree) for s in x.addressable_shards)

    def restore(self) -> Any:
        """The tree on its devices again, bit for bit; blocks until it is there."""
        tree = jax.tree.map(lambda x, s: _moved(x, s, s.memory_kind), self.tree, self.shardings)
        return jax.block_until_ready(tree)


def _a_device(x: jax.Array) -> Any:
    return next(iter(x.sharding.addressable_devices))


def _moved(x: jax.Array, sharding: Sharding, kind: str | None) -> jax.Array:
    """A copy of ``x`` in memory of ``kind`` of the same devices."""
    shards = [
        jax.device_put(shard.data, SingleDeviceSharding(shard.device, memory_kind=kind))
        for shard in x.addressable_shards
    ]
    target = sharding if kind in (None, sharding.memory_kind) else sharding.with_memory_kind(str(kind))
    return jax.make_array_from_single_device_arrays(x.shape, target, shards)
