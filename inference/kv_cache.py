"""The KV cache of one engine: per layer two arrays ``[slots, G, max_len, K]``, sharded over KV groups.

The layout puts slot and group first, so that attention is one batched product without a transposed copy.
A slot's content beyond its position is never read unmasked, so a slot needs no clearing between samples.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, kv_groups


class LayerCache(NamedTuple):
    """Keys and values of one layer, ``[slots, G, max_len, K]`` each (inside shard_map: this device's G)."""

    k: jax.Array
    v: jax.Array


Cache = tuple[LayerCache, ...]


def cache_spec(axis: str) -> PartitionSpec:
    """Slots and positions whole on every device, KV groups over the tensor-parallel axis."""
    return PartitionSpec(None, axis)


def empty_cache(
    cfg: DecoderConfig, mesh: Mesh, slots: int, max_len: int, dtype: jnp.dtype, axis: str = "tp"
) -> Cache:
    """A zeroed cache on ``mesh``, committed to its sharding."""
    shape = (slots, kv_groups(cfg, mesh.shape[axis]), max_len, cfg.head_dim)
    make = jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=NamedSharding(mesh, cache_spec(axis)))
    return tuple(LayerCache(make(), make()) for _ in range(cfg.num_layers))


def cache_bytes(cfg: DecoderConfig, tp: int, slots: int, max_len: int, dtype: jnp.dtype) -> int:
    """Bytes of the cache over all devices."""
    itemsize = jnp.dtype(dtype).itemsize
    return 2 * cfg.num_layers * slots * kv_groups(cfg, tp) * max_len * cfg.head_dim * itemsize


def write_token(cache_SxGxTxK: jax.Array, new_SxGxK: jax.Array, position_S: jax.Array) -> jax.Array:
    """Put one token's keys or values of every slot at that slot's position.

    float32 is scattered in place. bfloat16 is selected over the whole row: its scatter alters NaN bits and
    converts the whole array on jax 0.10.
    """
    slots, _, T, _ = cache_SxGxTxK.shape
    if cache_SxGxTxK.dtype == jnp.float32:
        return cache_SxGxTxK.at[jnp.arange(slots), :, position_S].set(
            new_SxGxK, unique_indices=True, indices_are_sorted=True, mode="drop"
        )
    here_SxT = jnp.arange(T)[None, :] == position_S[:, None]
    return jnp.where(here_SxT[:, None, :, None], new_SxGxK[:, :, None, :], cache_SxGxTxK)


def write_prefix(cache_SxGxTxK: jax.Array, prefix_PxGxTxK: jax.Array, row_S: jax.Array) -> jax.Array:
    """Copy prefilled row ``row_S[s]`` to the front of slot s; -1 leaves the slot alone.

    This is how a group shares its prefix: one row, copied to as many slots as the group has samples.
    """
    T = prefix_PxGxTxK.shape[2]
    rows_SxGxTxK = prefix_PxGxTxK[jnp.maximum(row_S, 0)].astype(cache_SxGxTxK.dtype)
    front = jnp.where((row_S >= 0)[:, None, None, None], rows_SxGxTxK, cache_SxGxTxK[:, :, :T])
    return cache_SxGxTxK.at[:, :, :T].set(front)
