"""Low-rank adapters: beside a frozen matrix W the trained pair A, B, for W + (alpha / rank) A B.

Formula: LoRA (arXiv 2106.09685), A drawn at random and B zero at the start. The trainer's tree has
``lora_a`` and ``lora_b`` beside the kernels that are adapted. An engine gets either merged matrices, which
the mapper sees as computed leaves (evaluated on the trainer's mesh), or base matrices and adapters side by
side, which are moved; it merges them in its step, and between two versions only adapters change.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

Tree = dict[str, Any]

# Path below "layers/" of what can be adapted -> how many of the kernel's dimensions are contracted.
TARGETS: dict[str, int] = {
    "attn/q_proj": 1,
    "attn/k_proj": 1,
    "attn/v_proj": 1,
    "attn/o_proj": 2,
    "mlp/gate_proj": 1,
    "mlp/up_proj": 1,
    "mlp/down_proj": 1,
}
LEAVES = ("lora_a", "lora_b")


@dataclasses.dataclass(frozen=True)
class Lora:
    """Rank, scale and the projections that have adapters (``TARGETS``)."""

    rank: int
    alpha: float
    targets: tuple[str, ...] = tuple(TARGETS)

    def __post_init__(self) -> None:
        if self.rank < 1 or not self.alpha > 0:
            raise ValueError(f"lora: expected rank >= 1 and alpha > 0, got {self.rank} and {self.alpha}")
        unknown = sorted(set(self.targets) - TARGETS.keys())
        if unknown or not self.targets:
            raise ValueError(f"lora.targets: expected some of {list(TARGETS)}, got {list(self.targets)}")

    @property
    def scale(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank


def adapter_axes(kernel_axes: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    """Logical axes of all possible adapters: ``layers/<target>/lora_a`` [layer, in..., rank], ``lora_b``."""
    found: dict[str, tuple[str, ...]] = {}
    for target, inner in TARGETS.items():
        layer, *rest = kernel_axes[f"layers/{target}/kernel"]
        found[f"layers/{target}/lora_a"] = (layer, *rest[:inner], "rank")
        found[f"layers/{target}/lora_b"] = (layer, "rank", *rest[inner:])
    return found


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """A B: ``[in..., r]`` and ``[r, out...]`` to ``[in..., out...]``, in float32."""
    return jnp.tensordot(a.astype(jnp.float32), b.astype(jnp.float32), 1)


def merged_kernel(projection: Tree, layer: int, lora: Lora | None) -> jax.Array:
    """One layer's kernel of the trainer's tree, with its adapter added if it has one."""
    kernel: jax.Array = projection["kernel"][layer]
    if lora is None or LEAVES[0] not in projection:
        return kernel
    return kernel + lora.scale * product(projection["lora_a"][layer], projection["lora_b"][layer])


def fused_adapters(layers: Tree, layer: int, groups: int, repeat: int) -> dict[str, Tree]:
    """Engine matrix -> its adapters, from the trainer's ``layers``; see ``merge`` for names and shapes.

    ``groups`` and ``repeat``: KV groups of the engine, and how often each KV head stands among them.
    """
    attn, mlp = layers["attn"], layers["mlp"]
    found: dict[str, Tree] = {"qkv": {}, "o": {}, "gate_up": {}, "down": {}}

    def pair(projection: Tree) -> tuple[jax.Array, jax.Array] | None:
        if LEAVES[0] not in projection:
            return None
        return projection["lora_a"][layer], projection["lora_b"][layer]

    for name in ("q", "k", "v"):
        if (ab := pair(attn[f"{name}_proj"])) is not None:
            rank, heads, size = ab[1].shape
            b = ab[1].reshape(rank, groups, heads // groups, size) if name == "q" else ab[1]
            found["qkv"] |= {f"{name}_a": ab[0], f"{name}_b": b if name == "q" else jnp.repeat(b, repeat, 1)}
    if (ab := pair(attn["o_proj"])) is not None:
        heads, size, rank = ab[0].shape
        found["o"] = {"a": ab[0].reshape(groups, heads // groups, size, rank), "b": ab[1]}
    for name in ("gate", "up"):
        if (ab := pair(mlp[f"{name}_proj"])) is not None:
            found["gate_up"] |= {f"{name}_a": ab[0], f"{name}_b": ab[1]}
    if (ab := pair(mlp["down_proj"])) is not None:
        found["down"] = {"a": ab[0], "b": ab[1]}
    return {name: adapters for name, adapters in found.items() if adapters}


def adapter_specs(lora: Lora, axis: str) -> dict[str, Tree]:
    """Partition specs of ``fused_adapters``: as the engine's matrices over one tensor-parallel axis."""
    whole, rows, columns = PartitionSpec(), PartitionSpec(axis), PartitionSpec(None, axis)
    found: dict[str, Tree] = {"qkv": {}, "o": {}, "gate_up": {}, "down": {}}
    for target in lora.targets:
        name = target.partition("/")[2].removesuffix("_proj")
        matrix = {"o": "o", "down": "down", "gate": "gate_up", "up": "gate_up"}.get(name, "qkv")
        if matrix in ("o", "down"):
            found[matrix] = {"a": rows, "b": whole}
        else:
            found[matrix] |= {f"{name}_a": whole, f"{name}_b": columns}
    return {name: adapters for name, adapters in found.items() if adapters}


def merge(base: jax.Array, leaf: Tree, scale: float) -> jax.Array:
    """An engine matrix with its adapters added, float32.

    ``base``: qkv ``[D, G, Q + 2, K]`` with ``q_a [D, r]``, ``q_b [r, G, Q, K]``, ``k_a``, ``k_b [r, G, K]``,
    ``v_a``, ``v_b``; gate_up ``[D, 2, F]`` with ``gate_a [D, r]``, ``gate_b [r, F]``, ``up_a``, ``up_b``; o
    and down with ``a`` and ``b``. Adapters that are not there count as zero.
    """
    base = base.astype(jnp.float32)
    if "a" in leaf:
        return base + scale * product(leaf["a"], leaf["b"])
    if base.ndim == 3:
        parts = [_part(leaf, name, base[:, 0])[:, None] for name in ("gate", "up")]
        return base + scale * jnp.concatenate(parts, axis=1)
    query = _part(leaf, "q", base[:, :, :-2])
    key_value = [_part(leaf, name, base[:, :, 0])[:, :, None] for name in ("k", "v")]
    return base + scale * jnp.concatenate([query, *key_value], axis=2)


def _part(leaf: Tree, name: str, like: jax.Array) -> jax.Array:
    if f"{name}_a" not in leaf:
        return jnp.zeros_like(like)
    return product(leaf[f"{name}_a"], leaf[f"{name}_b"])
