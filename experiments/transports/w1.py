"""Workload W1: Qwen3-0.6B shapes with an untied head, bf16, 311 tensors, 1,503,264,768 bytes; case A."""

from __future__ import annotations

import zlib
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

V, D, HEADS, KV, K, F, LAYERS = 151_936, 1024, 16, 8, 128, 3072, 28
SOURCE_MESH, TARGET_MESH = (4, 1), (1, 4)

Tree = dict[str, Any]


def shapes(scale: float) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """Path -> (shape, spec). A scale below 1 has fewer layers and a smaller vocabulary."""
    column, row, none = PartitionSpec("fsdp", "tp"), PartitionSpec("tp", "fsdp"), PartitionSpec()
    vocab = max(64, int(V * scale) // 64 * 64)
    found = {"embed": ((vocab, D), row), "lm_head": ((D, vocab), column), "final_norm": ((D,), none)}
    for i in range(max(1, round(LAYERS * scale))):
        layer = {
            "q": ((D, HEADS * K), column), "k": ((D, KV * K), column), "v": ((D, KV * K), column),
            "o": ((HEADS * K, D), row), "gate": ((D, F), column), "up": ((D, F), column),
            "down": ((F, D), row),
            "norm1": ((D,), none), "norm2": ((D,), none), "q_norm": ((K,), none), "k_norm": ((K,), none),
        }  # fmt: skip
        found |= {f"layer_{i}.{name}": value for name, value in layer.items()}
    return found


def total_bytes(scale: float) -> int:
    """Bytes of all tensors."""
    return sum(2 * int(np.prod(shape)) for shape, _ in shapes(scale).values())


def mesh(shape: tuple[int, int]) -> Mesh:
    """fsdp x tp over the four devices of this process."""
    return Mesh(np.array(jax.devices()[:4]).reshape(shape), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def params(scale: float) -> Tree:
    """Random bit patterns of seed 0 on the source mesh."""
    rng, grid = np.random.default_rng(0), mesh(SOURCE_MESH)
    made = {}
    for path, (shape, spec) in shapes(scale).items():
        host = rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
        made[path] = jax.device_put(host, NamedSharding(grid, spec))
    return made


def target(scale: float) -> Tree:
    """The abstract tree on the target mesh."""
    grid = mesh(TARGET_MESH)
    return {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(grid, spec))
        for path, (shape, spec) in shapes(scale).items()
    }


def checksum(tree: Tree) -> dict[str, int]:
    """Path -> crc32 of the global bits, read from the shards: independent of the library's own digests."""
    found = {}
    for path, leaf in tree.items():
        whole = np.empty(leaf.shape, np.uint16)
        for shard in leaf.addressable_shards:
            whole[shard.index] = np.asarray(shard.data).view(np.uint16)
        found[path] = zlib.crc32(whole.data)
    return found
