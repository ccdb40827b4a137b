"""The trainer's decoder in Flax NNX: its state is exactly the trainer tree of ``sharding.presets.qwen3``.

Steps of ``hidden_states``: cast the fp32 masters to the compute dtype and gather their FSDP shards, look the
tokens up, scan one layer module over the leading layer dimension, normalise. The head is applied in
``logprobs``, a piece of the sequence at a time. Shape letters: B rows, S tokens of a row, D model,
H query heads, N key/value heads, G = H // N, K head size, F feed-forward, L layers, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.lora import Lora
from jaxrl_sync.sharding.presets.qwen3 import TRAINER_AXES, DecoderConfig
from jaxrl_sync.trainer.axes import Tree, constrain
from jaxrl_sync.trainer.config import TrainerConfig

_MASKED = -1e30  # finite, so that a row of padding has a softmax and no NaN


class Kernel(nnx.Module):
    """One projection."""

    def __init__(
        self, shape: tuple[int, ...], std: float, rngs: nnx.Rngs, lora: Lora | None = None, inner: int = 1
    ) -> None:
        """With ``lora``, ``shape`` has the layer dimension first, then ``inner`` contracted ones."""
        self.kernel = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))
        self.lora_scale = lora.scale if lora else 0.0
        if lora:
            layers, rows, columns = shape[0], shape[1 : 1 + inner], shape[1 + inner :]
            spread = math.prod(rows) ** -0.5
            drawn = jax.random.normal(rngs.params(), (layers, *rows, lora.rank), jnp.float32)
            self.lora_a = nnx.Param(spread * drawn)
            self.lora_b = nnx.Param(jnp.zeros((layers, lora.rank, *columns), jnp.float32))

    def __call__(self, x: jax.Array, out_dims: int = 1) -> jax.Array:
        """Contract the last dimensions of ``x`` with the first of the kernel, of which ``out_dims`` stay.

        One plain matrix product over all tokens: on CPU its backward pass is about twice as fast as that of
        a contraction over several dimensions.
        """
        kernel = self.kernel[...]
        inner, outer = kernel.shape[:-out_dims], kernel.shape[-out_dims:]
        lead = x.shape[: x.ndim - len(inner)]
        rows = x.reshape(-1, math.prod(inner))
        flat = rows @ kernel.reshape(math.prod(inner), math.prod(outer))
        if self.lora_scale:
            rank = self.lora_b[...].shape[0]
            low = rows @ self.lora_a[...].reshape(-1, rank)
            flat = flat + self.lora_scale * (low @ self.lora_b[...].reshape(rank, -1))
        return flat.reshape(*lead, *outer)


def _lora(cfg: DecoderConfig, target: str) -> Lora | None:
    return cfg.lora if cfg.lora and target in cfg.lora.targets else None


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last dimension, in float32."""

    def __init__(self, shape: tuple[int, ...], eps: float) -> None:
        self.scale = nnx.Param(jnp.ones(shape, jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        x32 = x.astype(jnp.float32)
        inverse = jax.lax.rsqrt(jnp.mean(jnp.square(x32), axis=-1, keepdims=True) + self.eps)
        return (x32 * inverse * self.scale[...].astype(jnp.float32)).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE over packed rows; q/k norm where the decoder has it."""

    def __init__(self, cfg: DecoderConfig, std: float, rngs: nnx.Rngs) -> None:
        L, D, H, N, K = cfg.num_layers, cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim
        self.q_proj = Kernel((L, D, H, K), std, rngs, _lora(cfg, "attn/q_proj"))
        self.k_proj = Kernel((L, D, N, K), std, rngs, _lora(cfg, "attn/k_proj"))
        self.v_proj = Kernel((L, D, N, K), std, rngs, _lora(cfg, "attn/v_proj"))
        self.o_proj = Kernel((L, H, K, D), std, rngs, _lora(cfg, "attn/o_proj"), inner=2)
        self.normed = cfg.qk_norm
        if self.normed:
            self.q_norm = RMSNorm((L, K), cfg.norm_eps)
            self.k_norm = RMSNorm((L, K), cfg.norm_eps)

    def __call__(self, x_BSD: jax.Array, rope: tuple[jax.Array, jax.Array], mask_BST: jax.Array) -> jax.Array:
        q_BSHK, k_BTNK = self.q_proj(x_BSD, out_dims=2), self.k_proj(x_BSD, out_dims=2)
        if self.normed:
            q_BSHK, k_BTNK = self.q_norm(q_BSHK), self.k_norm(k_BTNK)
        q_BSHK, k_BTNK = rotate(q_BSHK, rope), rotate(k_BTNK, rope)
        v_BNTK = jnp.swapaxes(self.v_proj(x_BSD, out_dims=2), 1, 2)
        B, S, H, K = q_BSHK.shape
        N = k_BTNK.shape[2]
        # Batch dimensions first, the queries of one group in rows: one plain batched product per (B, N).
        q_BNGSK = q_BSHK.reshape(B, S, N, H // N, K).transpose(0, 2, 3, 1, 4)
        q_BNQK = q_BNGSK.reshape(B, N, (H // N) * S, K)
        k_BNTK = jnp.swapaxes(k_BTNK, 1, 2)
        scores = jnp.einsum("bnqk,bntk->bnqt", q_BNQK, k_BNTK, preferred_element_type=jnp.float32)
        scores = scores.reshape(B, N, H // N, S, S) * K**-0.5
        weights = jax.nn.softmax(jnp.where(mask_BST[:, None, None], scores, _MASKED), axis=-1)
        weights = weights.astype(v_BNTK.dtype).reshape(B, N, (H // N) * S, S)
        out_BNQK = jnp.einsum("bnqt,bntk->bnqk", weights, v_BNTK)
        out_BSHK = out_BNQK.reshape(B, N, H // N, S, K).transpose(0, 3, 1, 2, 4).reshape(B, S, H, K)
        return self.o_proj(out_BSHK)


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, cfg: DecoderConfig, std: float, rngs: nnx.Rngs) -> None:
        L, D, F = cfg.num_layers, cfg.d_model, cfg.d_ff
        self.gate_proj = Kernel((L, D, F), std, rngs, _lora(cfg, "mlp/gate_proj"))
        self.up_proj = Kernel((L, D, F), std, rngs, _lora(cfg, "mlp/up_proj"))
        self.down_proj = Kernel((L, F, D), std, rngs, _lora(cfg, "mlp/down_proj"))

    def __call__(self, x_BSD: jax.Array) -> jax.Array:
        return self.down_proj(jax.nn.silu(self.gate_proj(x_BSD)) * self.up_proj(x_BSD))


class Layers(nnx.Module):
    """All layers, stacked; called with one layer's slice merged in."""

    def __init__(self, cfg: DecoderConfig, std: float, rngs: nnx.Rngs) -> None:
        self.attn = Attention(cfg, std, rngs)
        self.mlp = FeedForward(cfg, std, rngs)
        self.input_norm = RMSNorm((cfg.num_layers, cfg.d_model), cfg.norm_eps)
        self.post_attn_norm = RMSNorm((cfg.num_layers, cfg.d_model), cfg.norm_eps)

    def __call__(self, x_BSD: jax.Array, rope: tuple[jax.Array, jax.Array], mask_BST: jax.Array) -> jax.Array:
        x_BSD = x_BSD + self.attn(self.input_norm(x_BSD), rope, mask_BST)
        return x_BSD + self.mlp(self.post_attn_norm(x_BSD))


class Embed(nnx.Module):
    """Token embedding."""

    def __init__(self, cfg: DecoderConfig, std: float, rngs: nnx.Rngs) -> None:
        shape = (cfg.vocab_size, cfg.d_model)
        self.embedding = nnx.Param(std * jax.random.normal(rngs.params(), shape, jnp.float32))

    def __call__(self, tokens_BS: jax.Array) -> jax.Array:
        return self.embedding[...][tokens_BS]


class Decoder(nnx.Module):
    """The whole model; ``nnx.state`` of it has the paths of the trainer tree."""

    def __init__(self, cfg: DecoderConfig, std: float, rngs: nnx.Rngs) -> None:
        self.embed = Embed(cfg, std, rngs)
        self.layers = Layers(cfg, std, rngs)
        self.final_norm = RMSNorm((cfg.d_model,), cfg.norm_eps)
        if not cfg.tied_embeddings:
            self.lm_head = Kernel((cfg.d_model, cfg.vocab_size), std, rngs)


def init_params(cfg: DecoderConfig, std: float, key: jax.Array) -> Tree:
    """Fresh fp32 masters: normal with standard deviation ``std``, norms one."""
    tree: Tree = nnx.to_pure_dict(nnx.state(Decoder(cfg, std, nnx.Rngs(params=key))))
    return tree


@functools.lru_cache
def _graph(cfg: DecoderConfig) -> Any:
    return nnx.split(nnx.eval_shape(lambda: Decoder(cfg, 1.0, nnx.Rngs(params=0))))[0]


def rope_tables(positions_BS: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """cos and sin ``[B, S, 1, K/2]`` in float32 (RoPE, arXiv 2104.09864, in the half-split pairing)."""
    exponent = jnp.arange(0, cfg.head_dim, 2, dtype=jnp.float32) / cfg.head_dim
    frequency = cfg.rope_theta**-exponent
    if cfg.rope_scaling is not None:
        frequency = cfg.rope_scaling.apply(frequency)
    angles = positions_BS[..., None].astype(jnp.float32) * frequency
    return jnp.cos(angles)[:, :, None], jnp.sin(angles)[:, :, None]


def rotate(x_BSHK: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate the pairs (i, i + K/2) of every head by the position's angles."""
    cos, sin = rope
    first, second = jnp.split(x_BSHK.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x_BSHK.dtype)


def attention_mask(segments_BS: jax.Array) -> jax.Array:
    """``[B, S, S]``: a token sees itself and earlier tokens of its own segment; padding is segment 0."""
    same = segments_BS[:, :, None] == segments_BS[:, None, :]
    return jnp.tril(same)


def compute_params(params: Tree, config: TrainerConfig, mesh: Mesh) -> Tree:
    """The masters in the compute dtype, with the FSDP axis gathered unless every layer gathers its own."""

    def place(path: Any, x: jax.Array) -> jax.Array:
        name = "/".join(str(key.key) for key in path)
        x = x.astype(config.compute_dtype)
        if config.gather == "layer" and name.startswith("layers/"):
            return x
        return constrain(x, TRAINER_AXES[name], mesh, gathered=("embed",))

    tree: Tree = jax.tree_util.tree_map_with_path(place, params)
    return tree


def _gather_layer(layer: Tree, mesh: Mesh) -> Tree:
    def place(path: Any, x: jax.Array) -> jax.Array:
        axes = TRAINER_AXES["/".join(["layers", *(str(key.key) for key in path)])][1:]
        return constrain(x, axes, mesh, gathered=("embed",))

    tree: Tree = jax.tree_util.tree_map_with_path(place, layer)
    return tree


def hidden_states(
    compute: Tree,
    cfg: DecoderConfig,
    config: TrainerConfig,
    mesh: Mesh,
    tokens_BS: jax.Array,
    positions_BS: jax.Array,
    segments_BS: jax.Array,
) -> jax.Array:
    """Hidden states ``[B, S, D]`` after the final norm, in the compute dtype.

    ``compute`` comes from ``compute_params``. Rows are packed: ``positions`` restart in every segment, and no
    token sees another segment, so packed rows equal unpacked ones.
    """
    model = nnx.merge(_graph(cfg), compute)
    rope = rope_tables(positions_BS, cfg)
    mask_BST = attention_mask(segments_BS)
    graph, stacked = nnx.split(model.layers)
    weights_L: Tree = nnx.to_pure_dict(stacked)

    def layer(x_BSD: jax.Array, weights: Tree) -> tuple[jax.Array, None]:
        if config.gather == "layer":
            weights = _gather_layer(weights, mesh)
        x_BSD = nnx.merge(graph, weights)(x_BSD, rope, mask_BST)
        return constrain(x_BSD, ("batch", "seq", "features"), mesh), None

    body = jax.checkpoint(layer) if config.remat else layer
    x_BSD = constrain(model.embed(tokens_BS), ("batch", "seq", "features"), mesh)
    x_BSD, _ = jax.lax.scan(body, x_BSD, weights_L, unroll=config.scan_unroll)
    hidden: jax.Array = model.final_norm(x_BSD)
    return hidden


def head_kernel(compute: Tree) -> jax.Array:
    """The head ``[D, V]``: its own tensor, or the transposed embedding when tied."""
    if "lm_head" in compute:
        kernel: jax.Array = compute["lm_head"]["kernel"]
        return kernel
    return jnp.swapaxes(compute["embed"]["embedding"], 0, 1)
