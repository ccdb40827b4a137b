"""Baselines move on only with an acknowledgement, and stay exact over versions that are lost, late or
dense.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.layout import Layout
from jaxrl_sync.sharding.slots import SlotLayout
from jaxrl_sync.transfer.delta.decode import Applier
from jaxrl_sync.transfer.delta.encode import Encoder
from jaxrl_sync.transfer.delta.snapshot import (
    BaselineError,
    DeviceSnapshot,
    HostSnapshot,
    apply_changes,
    regions_of,
)
from jaxrl_sync.transfer.version import Version
from tests.delta.bits import same_bits

SHAPES = {
    "a/norm": ((7,), jnp.float32, PartitionSpec()),
    "a/w": ((64, 48), jnp.bfloat16, PartitionSpec("fsdp", "tp")),
    "b/mask": ((33,), jnp.bool_, PartitionSpec()),
    "b/q": ((40, 16), jnp.int8, PartitionSpec("tp")),
    "c/w": ((16, 16), jnp.bfloat16, PartitionSpec(None, "fsdp")),
}


def tree_of(seed: int) -> dict[str, jax.Array]:
    """Random bits in every tensor, sharded over eight devices."""
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    rng = np.random.default_rng(seed)
    found = {}
    for path, (shape, dtype, spec) in SHAPES.items():
        kind = jnp.dtype(dtype)
        high = 2 if kind == jnp.bool_ else 1 << (8 * kind.itemsize)
        bits = rng.integers(0, high, shape, dtype=np.uint64).astype(f"u{kind.itemsize}")
        found[path] = jax.device_put(bits.view(kind), NamedSharding(mesh, spec))
    return found


def evolve(tree: dict[str, jax.Array], seed: int, share: float) -> dict[str, jax.Array]:
    """About ``share`` of the elements get other bits."""
    rng = np.random.default_rng(seed)
    found = {}
    for path, leaf in tree.items():
        host = np.asarray(leaf).copy()
        bits = host.view(f"u{host.itemsize}")
        bits[rng.random(bits.shape) < share] ^= 1
        found[path] = jax.device_put(host, leaf.sharding)
    return found


def slot_of(tree: dict[str, jax.Array]) -> tuple[SlotLayout, Any]:
    """The tree as a slot of this process."""
    slot = SlotLayout.of(Layout.of(tree), 0)
    memory = np.zeros(slot.total_bytes, np.uint8)
    views = slot.views(memory)
    for path, leaf in tree.items():
        for shard in leaf.addressable_shards:
            views[shard.device.id, path][...] = np.asarray(shard.data)
    return slot, memory


def test_host_baseline_through_lost_and_acknowledged_versions() -> None:
    tree = tree_of(0)
    slot, memory = slot_of(tree)
    with pytest.raises(BaselineError, match="no version"):
        HostSnapshot(slot).encode(memory, Version("run", 1))
    snapshot = HostSnapshot(slot, chunk_elements=1000)
    snapshot.seed(memory, Version("run", 0))
    receiver = memory.copy()
    for number in range(1, 8):
        tree = evolve(tree, number, (0.01, 0.3, 0.0, 1.0)[number % 4])
        _, memory = slot_of(tree)
        changes = snapshot.encode(memory, Version("run", number))
        if number % 3 == 0:
            continue  # lost: neither side moves, the next version is encoded against the same base
        apply_changes(snapshot.regions, receiver, changes, 1000)
        assert same_bits(receiver, memory)
        snapshot.commit(changes)
        assert same_bits(snapshot.memory, memory)
        assert snapshot.version == Version("run", number)
        with pytest.raises(BaselineError, match="against version"):
            snapshot.commit(changes)
    snapshot.close()
    with pytest.raises(BaselineError, match="closed"):
        snapshot.seed(memory, Version("run", 9))


def test_a_slot_is_few_regions_and_they_cover_every_tensor() -> None:
    slot, _ = slot_of(tree_of(0))
    regions = regions_of(slot)
    assert len(regions) < len(slot.entries)
    for entry in slot.entries:
        inside = [r for r in regions if r.offset <= entry.offset < r.offset + r.nbytes]
        assert len(inside) == 1
        assert entry.offset + entry.nbytes <= inside[0].offset + inside[0].nbytes


def test_device_baseline_while_later_steps_donate_what_was_published() -> None:
    tree = tree_of(0)
    snapshot = DeviceSnapshot(Encoder(tree), Applier(tree))
    snapshot.seed(tree, Version("run", 0))
    step = jax.jit(
        lambda t: {path: leaf ^ 1 if leaf.dtype == jnp.int8 else leaf for path, leaf in t.items()},
        donate_argnums=0,
    )
    for number in range(1, 6):
        tree = evolve(tree, number, (0.01, 1.0)[number == 3])
        expected = {path: np.asarray(leaf).copy() for path, leaf in tree.items()}
        changes = snapshot.encode(tree, Version("run", number))
        if number == 3:
            assert changes.dense, "a dense version sends tensors whole"
        snapshot.commit(changes)
        tree = step(tree)
        jax.block_until_ready(tree)
        for path, host in expected.items():
            assert same_bits(snapshot.tree[path], host)
    snapshot.close()
    assert snapshot.version is None
