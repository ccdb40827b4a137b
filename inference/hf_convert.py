"""Between Hugging Face tensor names and this project's trees, block by block and bits kept.

All functions are pure over numpy. Loading goes *by target block*: given which part of an engine or trainer
tensor a device holds, it says which slices of which named tensors that part consists of, so nothing more is
ever read. A projection is stored there as ``[out, in]``, here as ``[in, heads, head_dim]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from jaxrl_sync.sharding.presets.lora import merged_kernel
from jaxrl_sync.sharding.presets.quantized import matrix
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig

Array = np.ndarray[Any, Any]
Range = tuple[int, int]
Box = tuple[Range, ...]
# Reads the box of one named tensor.
Read = Callable[[str, Box], Array]

EMBED, FINAL_NORM, HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"

# Trainer path below "layers/" -> name below "model.layers.N.".
_LAYER_NAMES = {
    "attn/q_proj/kernel": "self_attn.q_proj.weight",
    "attn/k_proj/kernel": "self_attn.k_proj.weight",
    "attn/v_proj/kernel": "self_attn.v_proj.weight",
    "attn/o_proj/kernel": "self_attn.o_proj.weight",
    "attn/q_norm/scale": "self_attn.q_norm.weight",
    "attn/k_norm/scale": "self_attn.k_norm.weight",
    "mlp/gate_proj/kernel": "mlp.gate_proj.weight",
    "mlp/up_proj/kernel": "mlp.up_proj.weight",
    "mlp/down_proj/kernel": "mlp.down_proj.weight",
    "input_norm/scale": "input_layernorm.weight",
    "post_attn_norm/scale": "post_attention_layernorm.weight",
}
_ENGINE_NORMS = {
    "input_norm": "input_layernorm.weight",
    "post_attn_norm": "post_attention_layernorm.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
}
_QK_NAMES = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")


def tensor_shapes(cfg: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a checkpoint of this decoder."""
    D, F, K = cfg.d_model, cfg.d_ff, cfg.head_dim
    heads, kv = cfg.num_heads * K, cfg.num_kv_heads * K
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj.weight": (heads, D),
        "self_attn.k_proj.weight": (kv, D),
        "self_attn.v_proj.weight": (kv, D),
        "self_attn.o_proj.weight": (D, heads),
        "self_attn.q_norm.weight": (K,),
        "self_attn.k_norm.weight": (K,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
        "input_layernorm.weight": (D,),
        "post_attention_layernorm.weight": (D,),
    }
    if not cfg.qk_norm:
        layer = {name: shape for name, shape in layer.items() if name not in _QK_NAMES}
    shapes: dict[str, tuple[int, ...]] = {EMBED: (cfg.vocab_size, D)}
    for i in range(cfg.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    shapes[FINAL_NORM] = (D,)
    if not cfg.tied_embeddings:
        shapes[HEAD] = (cfg.vocab_size, D)
    return shapes


def engine_block(path: str, box: Box, cfg: DecoderConfig, groups: int, read: Read) -> Array:
    """The part ``box`` of the engine tensor at ``path`` (``presets.qwen3.convert`` has their shapes).

    ``groups`` is G, the number of KV groups of the engine's fused QKV.
    """
    if path == "embed":
        return read(EMBED, box)
    if path == "final_norm":
        return read(FINAL_NORM, box)
    if path == "lm_head":
        return read(HEAD, box[::-1]).T
    _, layer, kind = path.split("/")
    prefix = f"model.layers.{layer}."
    if kind in _ENGINE_NORMS:
        return read(prefix + _ENGINE_NORMS[kind], box)
    if kind == "qkv":
        return _qkv_block(prefix, box, cfg, groups, read)
    if kind == "o":
        return _o_block(prefix, box, cfg, groups, read)
    if kind == "gate_up":
        d, which, f = box
        pair = [read(f"{prefix}mlp.{n}_proj.weight", (f, d)).T for n in ("gate", "up")]
        return np.stack(pair[which[0] : which[1]], axis=1)
    if kind == "down":
        return read(f"{prefix}mlp.down_proj.weight", box[::-1]).T
    raise KeyError(f"no engine tensor {path!r} in this decoder")


def _qkv_block(prefix: str, box: Box, cfg: DecoderConfig, groups: int, read: Read) -> Array:
    d, (g0, g1), (j0, j1), (k0, k1) = box
    K, Q, repeat = cfg.head_dim, cfg.num_heads // groups, groups // cfg.num_kv_heads
    q_rows = read(f"{prefix}self_attn.q_proj.weight", ((g0 * Q * K, g1 * Q * K), d))
    q_DxGxQxK = q_rows.reshape(g1 - g0, Q, K, -1).transpose(3, 0, 1, 2)
    h0, h1 = g0 // repeat, (g1 - 1) // repeat + 1
    head_of_group = np.arange(g0, g1) // repeat - h0

    def kv(name: str) -> Array:
        rows = read(f"{prefix}self_attn.{name}_proj.weight", ((h0 * K, h1 * K), d))
        per_head = rows.reshape(h1 - h0, K, -1)
        return per_head[head_of_group].transpose(2, 0, 1)[:, :, None]

    return np.concatenate([q_DxGxQxK, kv("k"), kv("v")], axis=2)[:, :, j0:j1, k0:k1]


def _o_block(prefix: str, box: Box, cfg: DecoderConfig, groups: int, read: Read) -> Array:
    (g0, g1), (j0, j1), (k0, k1), d = box
    K, Q = cfg.head_dim, cfg.num_heads // groups
    columns = read(f"{prefix}self_attn.o_proj.weight", (d, (g0 * Q * K, g1 * Q * K)))
    return columns.T.reshape(g1 - g0, Q, K, -1)[:, j0:j1, k0:k1]


def trainer_block(path: str, box: Box, cfg: DecoderConfig, read: Read) -> Array:
    """The part ``box`` of the trainer tensor at ``path`` (``presets.qwen3.TRAINER_AXES`` has their axes)."""
    if path == "embed/embedding":
        return read(EMBED, box)
    if path == "final_norm/scale":
        return read(FINAL_NORM, box)
    if path == "lm_head/kernel":
        return read(HEAD, box[::-1]).T
    kind = path.removeprefix("layers/")
    (first, last), rest = box[0], box[1:]
    blocks = [_layer_block(i, kind, rest, cfg.head_dim, read) for i in range(first, last)]
    return np.stack(blocks)


def _layer_block(layer: int, kind: str, box: Box, K: int, read: Read) -> Array:
    name = f"model.layers.{layer}.{_LAYER_NAMES[kind]}"
    if kind.endswith("/scale"):
        return read(name, box)
    if kind.startswith("mlp/"):
        return read(name, box[::-1]).T
    if kind == "attn/o_proj/kernel":
        (h0, h1), (k0, k1), d = box
        return read(name, (d, (h0 * K, h1 * K))).T.reshape(h1 - h0, K, -1)[:, k0:k1]
    d, (h0, h1), (k0, k1) = box
    rows = read(name, ((h0 * K, h1 * K), d))
    return rows.reshape(h1 - h0, K, -1).transpose(2, 0, 1)[:, :, k0:k1]


def from_engine(tree: Mapping[str, Any], cfg: DecoderConfig) -> Iterator[tuple[str, Array]]:
    """Named tensors of an engine tree, one at a time. A KV head that groups share is taken once.

    Quantised matrices are widened, adapters merged; both then are float32.
    """

    def whole(leaf: Any) -> Array:
        return np.asarray(matrix(leaf, np.float32, scale) if isinstance(leaf, dict) else leaf)

    scale = cfg.lora.scale if cfg.lora else 0.0
    K, D, F = cfg.head_dim, cfg.d_model, cfg.d_ff
    yield EMBED, np.asarray(tree["embed"])
    for i in range(cfg.num_layers):
        layer, prefix = tree["layers"][str(i)], f"model.layers.{i}."
        qkv_DxGxQxK = whole(layer["qkv"])
        groups = qkv_DxGxQxK.shape[1]
        repeat = groups // cfg.num_kv_heads
        q = qkv_DxGxQxK[:, :, :-2].transpose(1, 2, 3, 0)
        yield f"{prefix}self_attn.q_proj.weight", q.reshape(cfg.num_heads * K, D)
        for name, column in (("k", -2), ("v", -1)):
            per_head = qkv_DxGxQxK[:, ::repeat, column].transpose(1, 2, 0)
            yield f"{prefix}self_attn.{name}_proj.weight", per_head.reshape(cfg.num_kv_heads * K, D)
        yield f"{prefix}self_attn.o_proj.weight", whole(layer["o"]).reshape(cfg.num_heads * K, D).T
        gate_up_Dx2xF = whole(layer["gate_up"])
        yield f"{prefix}mlp.gate_proj.weight", gate_up_Dx2xF[:, 0].T.reshape(F, D)
        yield f"{prefix}mlp.up_proj.weight", gate_up_Dx2xF[:, 1].T.reshape(F, D)
        yield f"{prefix}mlp.down_proj.weight", whole(layer["down"]).T
        for kind, name in _ENGINE_NORMS.items():
            if name in _QK_NAMES and not cfg.qk_norm:
                continue
            yield prefix + name, np.asarray(layer[kind])
    yield FINAL_NORM, np.asarray(tree["final_norm"])
    if not cfg.tied_embeddings:
        yield HEAD, np.asarray(tree["lm_head"]).T


def from_trainer(tree: Mapping[str, Any], cfg: DecoderConfig) -> Iterator[tuple[str, Array]]:
    """Named tensors of a trainer tree, one at a time; LoRA adapters are merged into their kernels."""
    yield EMBED, np.asarray(tree["embed"]["embedding"])
    for i in range(cfg.num_layers):
        for path, name in _LAYER_NAMES.items():
            if name in _QK_NAMES and not cfg.qk_norm:
                continue
            *modules, kind = path.split("/")
            module: Any = tree["layers"]
            for part in modules:
                module = module[part]
            leaf = merged_kernel(module, i, cfg.lora) if kind == "kernel" else module[kind][i]
            yield f"model.layers.{i}.{name}", _named_layer(path, np.asarray(leaf))
    yield FINAL_NORM, np.asarray(tree["final_norm"]["scale"])
    if not cfg.tied_embeddings:
        yield HEAD, np.asarray(tree["lm_head"]["kernel"]).T


def _named_layer(path: str, value: Array) -> Array:
    """One layer's tensor as ``[out, in]``."""
    if path.endswith("/scale"):
        return value
    if path == "attn/o_proj/kernel":
        return value.reshape(-1, value.shape[-1]).T
    return value.reshape(value.shape[0], -1).T
