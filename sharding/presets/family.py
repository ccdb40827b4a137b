"""Decoder families as data: dense or mixture-of-experts, grouped-query or latent attention.

One description covers Llama, Qwen3, Qwen3-MoE, DeepSeek-V3 and Kimi-K2. The *trainer tree* has scanned
layers: a group of dense layers and one of expert layers, each with a leading layer dimension, experts stacked
[layer, expert, in, out]. The *engine tree* has a dictionary per layer with fused projections and, as engines
that load one expert at a time want it, a tensor per expert (or stacked ones).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class FamilyConfig:
    """Shape of one model. ``num_dense_layers`` come first; ``q_rank`` > 0 means latent attention (MLA)."""

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    num_dense_layers: int = -1
    num_experts: int = 0
    d_expert: int = 0
    num_shared_experts: int = 0
    qk_norm: bool = False
    q_rank: int = 0
    kv_rank: int = 0
    rope_dim: int = 0
    tied_embeddings: bool = False
    router_bias: bool = False

    @property
    def dense_layers(self) -> int:
        """Layers with a plain feed-forward block."""
        if not self.num_experts:
            return self.num_layers
        return max(0, self.num_dense_layers)

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        return self.num_layers - self.dense_layers

    @property
    def num_params(self) -> int:
        """All parameters, a tied head counted once."""
        total = 0
        for shape in trainer_shapes(self).values():
            size = 1
            for n in shape:
                size *= n
            total += size
        return total


def _attention(cfg: FamilyConfig) -> Shapes:
    D, H, KV, K = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
    if cfg.q_rank:
        # Latent attention: compressed queries, keys and values; K is head_dim without rotary part.
        return {
            "q_a": (D, cfg.q_rank),
            "q_a_norm": (cfg.q_rank,),
            "q_b": (cfg.q_rank, H, K + cfg.rope_dim),
            "kv_a": (D, cfg.kv_rank + cfg.rope_dim),
            "kv_a_norm": (cfg.kv_rank,),
            "kv_b": (cfg.kv_rank, H, 2 * K),
            "o": (H, K, D),
        }
    norms = {"q_norm": (K,), "k_norm": (K,)} if cfg.qk_norm else {}
    return {"q": (D, H, K), "k": (D, KV, K), "v": (D, KV, K), "o": (H, K, D), **norms}


def _feed_forward(d: int, f: int) -> Shapes:
    return {"gate": (d, f), "up": (d, f), "down": (f, d)}


def _layer(cfg: FamilyConfig, experts: bool) -> Shapes:
    D = cfg.d_model
    shapes = {f"attn/{k}": s for k, s in _attention(cfg).items()}
    shapes |= {"input_norm": (D,), "post_attn_norm": (D,)}
    if not experts:
        return shapes | {f"mlp/{k}": s for k, s in _feed_forward(D, cfg.d_ff).items()}
    stacked = _feed_forward(D, cfg.d_expert)
    shapes |= {f"experts/{k}": (cfg.num_experts, *s) for k, s in stacked.items()}
    shapes["router"] = (D, cfg.num_experts)
    if cfg.router_bias:
        shapes["router_bias"] = (cfg.num_experts,)
    if cfg.num_shared_experts:
        shapes |= {
            f"shared/{k}": s for k, s in _feed_forward(D, cfg.num_shared_experts * cfg.d_expert).items()
        }
    return shapes


def trainer_shapes(cfg: FamilyConfig) -> Shapes:
    """Path -> shape of the trainer tree."""
    shapes: Shapes = {"embed": (cfg.vocab_size, cfg.d_model), "final_norm": (cfg.d_model,)}
    if not cfg.tied_embeddings:
        shapes["lm_head"] = (cfg.d_model, cfg.vocab_size)
    for group, count, experts in (("dense", cfg.dense_layers, False), ("moe", cfg.expert_layers, True)):
        if count:
            shapes |= {f"{group}/{k}": (count, *s) for k, s in _layer(cfg, experts).items()}
    return shapes


def _engine_layer(cfg: FamilyConfig, dtype: Any, per_expert: bool, layer: Tree) -> Tree:
    """One layer of the engine from one layer of the trainer; jitted once per group by `convert`."""
    layer = jax.tree.map(lambda x: x.astype(dtype), layer)
    attn = dict(layer["attn"])
    out: Tree = {
        "input_norm": layer["input_norm"],
        "post_attn_norm": layer["post_attn_norm"],
        "o": attn.pop("o"),
    }
    if cfg.q_rank:
        out |= {"qkv_a": jnp.concatenate([attn.pop("q_a"), attn.pop("kv_a")], axis=1), **attn}
    else:
        G, Q = cfg.num_kv_heads, cfg.num_heads // cfg.num_kv_heads
        q = attn.pop("q").reshape(cfg.d_model, G, Q, cfg.head_dim)
        out["qkv"] = jnp.concatenate([q, attn.pop("k")[:, :, None], attn.pop("v")[:, :, None]], axis=2)
        out |= attn
    for block in ("mlp", "shared"):
        if block in layer:
            out[f"{block}_gate_up"] = jnp.stack([layer[block]["gate"], layer[block]["up"]], axis=1)
            out[f"{block}_down"] = layer[block]["down"]
    if "experts" in layer:
        out["router"] = layer["router"]
        if cfg.router_bias:
            out["router_bias"] = layer["router_bias"]
        if per_expert:
            for e in range(cfg.num_experts):
                out[f"expert{e}"] = {k: w[e] for k, w in layer["experts"].items()}
        else:
            experts = layer["experts"]
            out["experts_gate_up"] = jnp.stack([experts["gate"], experts["up"]], axis=2)
            out["experts_down"] = experts["down"]
    return out


def convert(
    params: Tree,
    cfg: FamilyConfig,
    dtype: Any = jnp.bfloat16,
    per_expert: bool = True,
    jit_layers: bool = True,
) -> Tree:
    """The engine tree of a trainer tree (nested dictionaries by the paths of `trainer_shapes`).

    ``per_expert``: a tensor per expert and projection, else experts stacked. ``jit_layers``: the layer
    conversion is one jitted function called per layer, which the mapper follows once and not per layer.
    """
    plain = functools.partial(_engine_layer, cfg, dtype, per_expert)
    layer: Callable[[Tree], Tree] = jax.jit(plain) if jit_layers else plain
    layers: Tree = {}
    for group, first in (("dense", 0), ("moe", cfg.dense_layers)):
        count = cfg.dense_layers if group == "dense" else cfg.expert_layers
        for i in range(count):
            layers[str(first + i)] = layer(jax.tree.map(lambda w, i=i: w[i], params[group]))
    tree: Tree = {"layers": layers}
    for name in ("embed", "final_norm", *(() if cfg.tied_embeddings else ("lm_head",))):
        tree[name] = params[name].astype(dtype)
    return tree


def engine_split(path: str, cfg: FamilyConfig) -> int | None:
    """The dimension of an engine tensor that tensor parallelism splits, or None."""
    last = path.rsplit("/", 1)[-1]
    table = {"qkv": 1, "o": 0, "q_b": 1, "kv_b": 1, "lm_head": 1, "gate": 1, "up": 1, "down": 0}
    table |= {"mlp_gate_up": 2, "shared_gate_up": 2, "mlp_down": 0, "shared_down": 0}
    table |= {"experts_gate_up": 3, "experts_down": 1}
    return table.get(last)


def expert_of(path: str) -> int | None:
    """The expert number of a per-expert engine tensor ("layers/3/expert17/up"), or None."""
    parts = path.split("/")
    name = parts[-2] if len(parts) > 1 else ""
    return int(name[6:]) if name.startswith("expert") and name[6:].isdigit() else None
