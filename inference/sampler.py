"""Drawing tokens: random bits by request identity, filters, and log-probs in the trainer's convention.

Log-probs are those of ``log_softmax(logits / temperature)`` in float32 over the *unfiltered* distribution;
greedy rows (temperature 0) report at temperature 1. The random number of the token at position p of sample i
comes from ``fold_in(fold_in(fold_in(key(run_seed), hash32(request_id)), i), p)``: slots never enter.

One uniform number per token is turned into a token through the cumulative distribution: a vocabulary of
100,000 then costs one hash per row instead of 100,000.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

_TINY = 1.0 - 2.0**-20


class SamplingRows(NamedTuple):
    """Per-slot sampling parameters on the device, ``[S]`` each; ``key`` is ``[S, 2]`` uint32 (threefry)."""

    temperature: jax.Array
    top_k: jax.Array
    top_p: jax.Array
    key: jax.Array


class Drawn(NamedTuple):
    """Tokens int32, their log-probs and the entropy of the unfiltered distribution, float32; ``[S]`` each."""

    token: jax.Array
    logprob: jax.Array
    entropy: jax.Array


def sample_keys(seed_S: jax.Array, hash_S: jax.Array, sample_S: jax.Array) -> jax.Array:
    """Raw keys ``[S, 2]`` of every (seed, request hash, sample index); uint32, uint32, int32 in."""

    def one(seed: jax.Array, request: jax.Array, sample: jax.Array) -> jax.Array:
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), request)
        return jax.random.key_data(jax.random.fold_in(key, sample))

    return jax.vmap(one)(seed_S, hash_S, sample_S)


def draw(logits_SxV: jax.Array, rows: SamplingRows, position_S: jax.Array) -> Drawn:
    """One token per row. ``position_S`` is the position the drawn token takes in its sequence."""
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits_SxV / temperature[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    filtered = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    keep = jax.lax.cond(filtered, kept_tokens, _keep_all, scaled, rows.top_k, rows.top_p)
    sampled = _inverse_cdf(jnp.where(keep, jnp.exp(logprobs), 0.0), _uniform(rows.key, position_S))
    token = jnp.where(rows.temperature > 0, sampled, jnp.argmax(scaled, axis=-1)).astype(jnp.int32)
    logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    entropy = -jnp.sum(jnp.where(jnp.isfinite(logprobs), jnp.exp(logprobs) * logprobs, 0.0), axis=-1)
    return Drawn(token, logprob, entropy)


def kept_tokens(scaled_SxV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array) -> jax.Array:
    """Mask of the tokens that may be drawn: the top_k largest, then the smallest set of mass >= top_p.

    The mass is that of the distribution after top_k. Ties with the last token of either set stay in.
    """
    V = scaled_SxV.shape[-1]
    k_S = jnp.where(top_k_S > 0, jnp.minimum(top_k_S, V), V)
    ordered = jnp.flip(jnp.sort(scaled_SxV, axis=-1), axis=-1)
    kth = jnp.take_along_axis(ordered, (k_S - 1)[:, None], axis=-1)
    mass = jax.nn.softmax(jnp.where(ordered >= kth, ordered, -jnp.inf), axis=-1)
    before = jnp.cumsum(mass, axis=-1) - mass
    last = jnp.sum((before < top_p_S[:, None]) & (ordered >= kth), axis=-1) - 1
    floor = jnp.take_along_axis(ordered, jnp.maximum(last, 0)[:, None], axis=-1)
    floor = jnp.where(top_p_S[:, None] < 1, jnp.maximum(floor, kth), kth)
    return scaled_SxV >= floor


def _keep_all(scaled_SxV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array) -> jax.Array:
    return jnp.ones(scaled_SxV.shape, bool)


def _uniform(key_Sx2: jax.Array, position_S: jax.Array) -> jax.Array:
    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), ())

    return jax.vmap(one)(key_Sx2, position_S)


def _inverse_cdf(weight_SxV: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """The first token whose cumulative weight exceeds uniform x total; only tokens of positive weight.

    The threshold stays below the total, and rounding in the cumulative sum can't reach a masked token.
    """
    total_SxV = jnp.cumsum(weight_SxV, axis=-1)
    threshold = jnp.minimum(uniform_S, _TINY) * total_SxV[:, -1]
    reached = (total_SxV > threshold[:, None]) & (weight_SxV > 0)
    return jnp.where(jnp.any(reached, axis=-1), jnp.argmax(reached, axis=-1), jnp.argmax(weight_SxV, axis=-1))
