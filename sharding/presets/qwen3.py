"""The dense Qwen3 or Llama decoder as data: its shape, the trainer's tree, the engine's, the conversion.

Two trees describe one model. The *trainer tree* has scanned layers (a leading layer dimension) and one
tensor per projection, which is what fp32 masters, FSDP and optax want. The *engine tree* has per-layer
dictionaries with fused, GQA-interleaved QKV and fused gate-up, which is what a decode step under tensor
parallelism wants. ``convert`` is the pure function between them; the mapper traces it.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from jaxrl_sync.sharding.presets.lora import (
    LEAVES,
    Lora,
    adapter_axes,
    adapter_specs,
    fused_adapters,
    merged_kernel,
)
from jaxrl_sync.sharding.shardings import placed

Tree = dict[str, Any]


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """Llama 3's stretched RoPE: long wavelengths are slowed by ``factor``, short ones kept, the rest blended.

    A wavelength over ``original_max_position / low_freq_factor`` tokens is long, one under
    ``original_max_position / high_freq_factor`` short (the Llama 3 herd of models, arXiv 2407.21783, and the
    ``rope_type`` "llama3" of published configurations).
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int

    def __post_init__(self) -> None:
        if not (self.factor >= 1 and 0 < self.low_freq_factor < self.high_freq_factor):
            raise ValueError(
                f"rope scaling: expected factor >= 1 and 0 < low_freq_factor < high_freq_factor, got {self}"
            )

    def apply(self, frequency: jax.Array) -> jax.Array:
        """Angles per token, float32, after scaling."""
        turns = self.original_max_position * frequency / (2 * jnp.pi)
        blend = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        kept = jnp.clip(blend, 0.0, 1.0)
        return frequency * (kept + (1.0 - kept) / self.factor)


@dataclasses.dataclass(frozen=True)
class DecoderConfig:
    """Shape of a dense decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    ``qk_norm``: queries and keys are normalised per head (Qwen3); without it the decoder is Llama's.
    ``lora``: the projections have adapters, and nothing else is trained.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tied_embeddings: bool = False
    qk_norm: bool = True
    rope_scaling: RopeScaling | None = None
    lora: Lora | None = None

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads={self.num_heads} must be a multiple of num_kv_heads={self.num_kv_heads}"
            )

    @property
    def num_params(self) -> int:
        """Number of parameters, a tied head counted once."""
        return sum(int(jnp.prod(jnp.array(x.shape))) for x in jax.tree.leaves(trainer_shapes(self)))


# Logical axes of the trainer tree, in the order of each tensor's dimensions.
TRAINER_AXES: dict[str, tuple[str, ...]] = {
    "embed/embedding": ("vocab", "embed"),
    "layers/attn/q_proj/kernel": ("layer", "embed", "heads", "head_dim"),
    "layers/attn/k_proj/kernel": ("layer", "embed", "kv_heads", "head_dim"),
    "layers/attn/v_proj/kernel": ("layer", "embed", "kv_heads", "head_dim"),
    "layers/attn/o_proj/kernel": ("layer", "heads", "head_dim", "embed"),
    "layers/attn/q_norm/scale": ("layer", "norm"),
    "layers/attn/k_norm/scale": ("layer", "norm"),
    "layers/mlp/gate_proj/kernel": ("layer", "embed", "ff"),
    "layers/mlp/up_proj/kernel": ("layer", "embed", "ff"),
    "layers/mlp/down_proj/kernel": ("layer", "ff", "embed"),
    "layers/input_norm/scale": ("layer", "norm"),
    "layers/post_attn_norm/scale": ("layer", "norm"),
    "final_norm/scale": ("norm",),
    "lm_head/kernel": ("embed", "vocab"),
}
TRAINER_AXES |= adapter_axes(TRAINER_AXES)


QK_NORMS = ("q_norm", "k_norm")


def _has(path: str, cfg: DecoderConfig) -> bool:
    """Whether the trainer tree of this decoder has that tensor."""
    module, _, leaf = path.rpartition("/")
    if leaf in LEAVES:
        return cfg.lora is not None and module.removeprefix("layers/") in cfg.lora.targets
    if path == "lm_head/kernel":
        return not cfg.tied_embeddings
    return cfg.qk_norm or module.rpartition("/")[2] not in QK_NORMS


def is_trained(path: str, cfg: DecoderConfig) -> bool:
    """Whether updates change that tensor of the trainer tree: all of them, or with LoRA the adapters."""
    return cfg.lora is None or path.rpartition("/")[2] in LEAVES


def trainer_shapes(cfg: DecoderConfig, dtype: Any = jnp.float32) -> Tree:
    """The trainer tree as ``jax.ShapeDtypeStruct`` leaves (fp32 masters by default), nested by ``/``."""
    L, D, H, KV, K, F, V = (
        cfg.num_layers,
        cfg.d_model,
        cfg.num_heads,
        cfg.num_kv_heads,
        cfg.head_dim,
        cfg.d_ff,
        cfg.vocab_size,
    )
    rank = cfg.lora.rank if cfg.lora else 0
    sizes = {
        "rank": rank,
        "layer": L,
        "embed": D,
        "heads": H,
        "kv_heads": KV,
        "head_dim": K,
        "ff": F,
        "vocab": V,
    }
    norm_size = {"q_norm": K, "k_norm": K, "input_norm": D, "post_attn_norm": D, "final_norm": D}
    tree: Tree = {}
    for path, axes in TRAINER_AXES.items():
        parts = path.split("/")
        if not _has(path, cfg):
            continue
        shape = tuple(norm_size[parts[-2]] if a == "norm" else sizes[a] for a in axes)
        node = tree
        for part in parts[:-1]:
            node = node.setdefault(part, {})
        node[parts[-1]] = jax.ShapeDtypeStruct(shape, dtype)
    return tree


def kv_groups(cfg: DecoderConfig, tp: int) -> int:
    """Number of KV groups G in the engine's fused QKV: KV heads are replicated when tp exceeds them.

    Every group holds Q = num_heads // G query heads, one key and one value head, and groups divide by tp.
    """
    if cfg.num_heads % tp:
        raise ValueError(f"tp={tp} must divide num_heads={cfg.num_heads}")
    if cfg.num_kv_heads % tp == 0:
        return cfg.num_kv_heads
    if tp % cfg.num_kv_heads == 0:
        return tp
    raise ValueError(f"tp={tp} must divide num_kv_heads={cfg.num_kv_heads} or be a multiple of it")


def engine_specs(cfg: DecoderConfig, axis: str = "tp", adapters: bool = False) -> Tree:
    """Partition specs of the engine tree over one tensor-parallel axis; ``adapters`` as in ``convert``."""
    P = PartitionSpec
    layer: Tree = {
        "input_norm": P(),
        "qkv": P(None, axis),
        "q_norm": P(),
        "k_norm": P(),
        "o": P(axis),
        "post_attn_norm": P(),
        "gate_up": P(None, None, axis),
        "down": P(axis),
    }
    if not cfg.qk_norm:
        layer = {name: spec for name, spec in layer.items() if name not in QK_NORMS}
    if adapters and cfg.lora is not None:
        for name, specs in adapter_specs(cfg.lora, axis).items():
            layer[name] = {"base": layer[name], **specs}
    tree: Tree = {
        "embed": P(),
        "layers": {str(i): dict(layer) for i in range(cfg.num_layers)},
        "final_norm": P(),
    }
    if not cfg.tied_embeddings:
        tree["lm_head"] = P(None, axis)
    return tree


def convert(
    params: Tree, cfg: DecoderConfig, tp: int, dtype: Any = jnp.bfloat16, adapters: bool = False
) -> Tree:
    """The engine tree of a trainer tree, cast to ``dtype``.

    Engine tensors, with G = kv_groups(cfg, tp) and Q = num_heads // G:
    ``embed [V, D]``, per layer ``qkv [D, G, Q + 2, K]`` (Q queries, then one key, one value per group),
    ``o [G, Q, K, D]``, ``gate_up [D, 2, F]``, ``down [F, D]``, norms, ``final_norm [D]`` and, untied,
    ``lm_head [D, V]``. LoRA adapters are added to their matrices; with ``adapters`` they stand beside them,
    each such matrix being ``{"base", ...}`` as ``presets.lora.merge`` takes it.
    """
    G = kv_groups(cfg, tp)
    Q, K, D = cfg.num_heads // G, cfg.head_dim, cfg.d_model
    repeat = G // cfg.num_kv_heads
    attn, mlp = params["layers"]["attn"], params["layers"]["mlp"]
    merged = None if adapters else cfg.lora

    def layer(i: int) -> Tree:
        q_DxGxQxK = merged_kernel(attn["q_proj"], i, merged).reshape(D, G, Q, K)
        k_DxGx1xK = jnp.repeat(merged_kernel(attn["k_proj"], i, merged), repeat, axis=1)[:, :, None, :]
        v_DxGx1xK = jnp.repeat(merged_kernel(attn["v_proj"], i, merged), repeat, axis=1)[:, :, None, :]
        matrices: Tree = {
            "qkv": jnp.concatenate([q_DxGxQxK, k_DxGx1xK, v_DxGx1xK], axis=2),
            "o": merged_kernel(attn["o_proj"], i, merged).reshape(G, Q, K, D),
            "gate_up": jnp.stack(
                [merged_kernel(mlp["gate_proj"], i, merged), merged_kernel(mlp["up_proj"], i, merged)], axis=1
            ),
            "down": merged_kernel(mlp["down_proj"], i, merged),
        }
        if adapters:
            for name, pairs in fused_adapters(params["layers"], i, G, repeat).items():
                matrices[name] = {"base": matrices[name], **pairs}
        return {
            "input_norm": params["layers"]["input_norm"]["scale"][i],
            **({name: attn[name]["scale"][i] for name in QK_NORMS} if cfg.qk_norm else {}),
            **matrices,
            "post_attn_norm": params["layers"]["post_attn_norm"]["scale"][i],
        }

    tree: Tree = {
        "embed": params["embed"]["embedding"],
        "layers": {str(i): layer(i) for i in range(cfg.num_layers)},
        "final_norm": params["final_norm"]["scale"],
    }
    if not cfg.tied_embeddings:
        tree["lm_head"] = params["lm_head"]["kernel"]
    cast: Tree = jax.tree.map(lambda x: x.astype(dtype), tree)
    return cast


def engine_abstract(
    cfg: DecoderConfig, mesh: Mesh, dtype: Any = jnp.bfloat16, axis: str = "tp", adapters: bool = False
) -> Tree:
    """The engine tree as ``jax.ShapeDtypeStruct`` leaves with ``NamedSharding`` over ``mesh``.

    An ``axis`` that the mesh lacks is a `MappingError`.
    """
    tp = mesh.shape.get(axis, 1)
    shapes = jax.eval_shape(lambda p: convert(p, cfg, tp, dtype, adapters), trainer_shapes(cfg))
    tree: Tree = placed(shapes, mesh, engine_specs(cfg, axis, adapters))
    return tree
