"""The dense Qwen3 or Llama decoder over the engine tree of ``sharding.presets.qwen3``.

Every function here computes on one device's shards inside ``jax.shard_map``: weights and cache arrive as
this device's part, activations are whole on every device, and the only collectives are one sum after
attention, one after the feed-forward block and the exchange of logits in ``inference.sampler``. With
``axis`` None the same code is the plain model on whole arrays. Weights are arguments, never closures.

Shape letters: S slots, P prefill rows, T positions, D model, G KV groups, Q queries per group, K head, F
feed-forward, V vocabulary; ``...`` stands for S or PxT.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxrl_sync.inference.kv_cache import Cache, LayerCache, write_token
from jaxrl_sync.sharding.presets.quantized import matrix
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig

Params = dict[str, Any]
Axis = str | None
Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

_MASKED = -1e30  # finite, so that a row without any key gives a mean instead of NaN


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """x / rms(x) * scale over the last axis, in float32; the result has x's dtype."""
    x32 = x.astype(jnp.float32)
    inv_rms = jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + eps)
    return (x32 * inv_rms * scale.astype(jnp.float32)).astype(x.dtype)


def rope_angles(position: jax.Array, cfg: DecoderConfig) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine ``[..., K/2]`` in float32 for integer positions ``[...]``."""
    half = cfg.head_dim // 2
    inv_freq = cfg.rope_theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if cfg.rope_scaling is not None:
        inv_freq = cfg.rope_scaling.apply(inv_freq)
    angle = position[..., None].astype(jnp.float32) * inv_freq
    return jnp.cos(angle), jnp.sin(angle)


def apply_rope(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotate the two halves of the last axis against each other (the HF Qwen3 convention)."""
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1).astype(x.dtype)


def decode_hidden(
    params: Params,
    cfg: DecoderConfig,
    cache: Cache,
    token_S: jax.Array,
    position_S: jax.Array,
    attend: int,
    axis: Axis,
    dtype: jnp.dtype,
) -> tuple[jax.Array, Cache]:
    """One token per slot through all layers: final hidden ``[S, D]`` and the cache with that token in it.

    ``attend`` (static) bounds the positions that attention reads: it must exceed every live position.
    """
    cos, sin = rope_angles(position_S, cfg)
    seen_SxT = jnp.arange(attend)[None, :] <= position_S[:, None]
    x_SxD = params["embed"][token_S].astype(dtype)
    layers: list[LayerCache] = []
    for i, old in enumerate(cache):

        def attention(q: jax.Array, k: jax.Array, v: jax.Array, old: LayerCache = old) -> jax.Array:
            new = LayerCache(
                write_token(old.k, k.astype(old.k.dtype), position_S),
                write_token(old.v, v.astype(old.v.dtype), position_S),
            )
            layers.append(new)
            keys, values = new.k[:, :, :attend].astype(dtype), new.v[:, :, :attend].astype(dtype)
            scores = jnp.einsum("sgqk,sgtk->sgqt", q, keys, preferred_element_type=jnp.float32)
            weights = _softmax(scores * cfg.head_dim**-0.5, seen_SxT[:, None, None, :]).astype(dtype)
            return jnp.einsum("sgqt,sgtk->sgqk", weights, values)

        x_SxD = _block(params["layers"][str(i)], x_SxD, cos, sin, attention, cfg, axis)
    return rms_norm(x_SxD, params["final_norm"], cfg.norm_eps), tuple(layers)


def prefill_hidden(
    params: Params, cfg: DecoderConfig, token_PxT: jax.Array, axis: Axis, dtype: jnp.dtype
) -> tuple[jax.Array, Cache]:
    """Whole rows through all layers, causal: final hidden ``[P, T, D]`` and keys and values ``[P, G, T, K]``.

    Padding stands at the end of a row, where causality hides it from the tokens before.
    """
    T = token_PxT.shape[1]
    cos, sin = rope_angles(jnp.arange(T), cfg)
    causal_TxT = jnp.tril(jnp.ones((T, T), bool))
    x_PxTxD = params["embed"][token_PxT].astype(dtype)
    layers: list[LayerCache] = []

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        layers.append(LayerCache(k.swapaxes(1, 2), v.swapaxes(1, 2)))
        scores = jnp.einsum("ptgqk,pugk->pgqtu", q, k, preferred_element_type=jnp.float32)
        weights = _softmax(scores * cfg.head_dim**-0.5, causal_TxT).astype(dtype)
        return jnp.einsum("pgqtu,pugk->ptgqk", weights, v)

    for i in range(cfg.num_layers):
        x_PxTxD = _block(params["layers"][str(i)], x_PxTxD, cos, sin, attention, cfg, axis)
    return rms_norm(x_PxTxD, params["final_norm"], cfg.norm_eps), tuple(layers)


def head_logits(params: Params, hidden_SxD: jax.Array, axis: Axis) -> jax.Array:
    """Float32 logits of *this device's slots*, ``[S / tp, V]``: sampling is split over slots, not repeated.

    With a tied head (whole on every device) each device computes its slots' logits alone. An untied head is
    split over the vocabulary, and one all-to-all turns vocabulary parts into slot parts.
    """
    if "lm_head" in params:
        part = _float32("...d,dv->...v", hidden_SxD, params["lm_head"])
        return part if axis is None else jax.lax.all_to_all(part, axis, 0, 1, tiled=True)
    return _float32("...d,vd->...v", my_rows(hidden_SxD, axis), params["embed"])


def my_rows(x: jax.Array, axis: Axis) -> jax.Array:
    """This device's equal part of the leading dimension of an array that is whole on every device."""
    if axis is None:
        return x
    rows = x.shape[0] // jax.lax.axis_size(axis)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * rows, rows)


def logits(params: Params, cfg: DecoderConfig, token_PxT: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Float32 logits ``[P, T, V]`` of whole rows on whole arrays: the form that references compare with."""
    hidden, _ = prefill_hidden(params, cfg, token_PxT, None, dtype)
    return head_logits(params, hidden, None)


def _block(
    layer: Params,
    x: jax.Array,
    cos: jax.Array,
    sin: jax.Array,
    attend: Attend,
    cfg: DecoderConfig,
    axis: Axis,
) -> jax.Array:
    """One layer; ``attend(q [..., G, Q, K], k [..., G, K], v [..., G, K]) -> [..., G, Q, K]``."""
    eps, scale = cfg.norm_eps, cfg.lora.scale if cfg.lora else 0.0
    h = rms_norm(x, layer["input_norm"], eps)
    qkv = jnp.einsum("...d,dgck->...gck", h, matrix(layer["qkv"], x.dtype, scale))
    heads = qkv.shape[-2] - 2
    q, k = qkv[..., :heads, :], qkv[..., heads, :]
    if "q_norm" in layer:
        q, k = rms_norm(q, layer["q_norm"], eps), rms_norm(k, layer["k_norm"], eps)
    q, k = apply_rope(q, *_over(cos, sin, 2)), apply_rope(k, *_over(cos, sin, 1))
    out = attend(q, k, qkv[..., heads + 1, :])
    x = x + _sum_over(axis, "...gqk,gqkd->...d", out, matrix(layer["o"], x.dtype, scale))
    h = rms_norm(x, layer["post_attn_norm"], eps)
    gate_up = jnp.einsum("...d,dcf->...cf", h, matrix(layer["gate_up"], x.dtype, scale))
    h = jax.nn.silu(gate_up[..., 0, :]) * gate_up[..., 1, :]
    return x + _sum_over(axis, "...f,fd->...d", h, matrix(layer["down"], x.dtype, scale))


def _sum_over(axis: Axis, subscripts: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """A product whose contraction runs over ``axis``: float32 partial sums, an all-reduce, then x's dtype."""
    part = _float32(subscripts, x, kernel)
    return (part if axis is None else jax.lax.psum(part, axis)).astype(x.dtype)


def _float32(subscripts: str, x: jax.Array, kernel: jax.Array) -> jax.Array:
    return jnp.einsum(subscripts, x, kernel.astype(x.dtype), preferred_element_type=jnp.float32)


def _over(cos: jax.Array, sin: jax.Array, dims: int) -> tuple[jax.Array, jax.Array]:
    """Angles broadcast over ``dims`` head dimensions before the last."""
    shape = (*cos.shape[:-1], *(1,) * dims, cos.shape[-1])
    return cos.reshape(shape), sin.reshape(shape)


def _softmax(scores: jax.Array, seen: jax.Array) -> jax.Array:
    return jax.nn.softmax(jnp.where(seen, scores, _MASKED), axis=-1)
