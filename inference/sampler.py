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

CANDIDATES = 1024
BLOCK = 512
_BELOW_ONE = 1.0 - 2.0**-20


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


def draw(
    logits_SxV: jax.Array, rows: SamplingRows, position_S: jax.Array, *, with_entropy: bool = True
) -> Drawn:
    """One token per row. ``position_S`` is the position the drawn token takes in its sequence.

    Without ``with_entropy`` the entropies are zeros, and a pass over the logits is saved.
    """
    temperature = jnp.where(rows.temperature > 0, rows.temperature, 1.0)
    scaled = logits_SxV / temperature[:, None]
    logprobs = jax.nn.log_softmax(scaled, axis=-1)
    filtered = jnp.any((rows.top_k > 0) | (rows.top_p < 1))
    keep = jax.lax.cond(filtered, kept_tokens, _keep_all, logprobs, rows.top_k, rows.top_p)
    sampled = _inverse_cdf(jnp.where(keep, jnp.exp(logprobs), 0.0), _uniform(rows.key, position_S))
    token = jnp.where(rows.temperature > 0, sampled, jnp.argmax(scaled, axis=-1)).astype(jnp.int32)
    logprob = jnp.take_along_axis(logprobs, token[:, None], axis=-1)[:, 0]
    entropy = _entropy(logprobs) if with_entropy else jnp.zeros_like(logprob)
    return Drawn(token, logprob, entropy)


def kept_tokens(logprob_SxV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array) -> jax.Array:
    """Mask of the tokens that may be drawn: the top_k largest, then the smallest set of mass >= top_p.

    The mass is that of the distribution after top_k. Ties with the last token of either set stay in. Only
    the ``CANDIDATES`` largest are put in order, unless some row's set reaches beyond them.
    """
    V = logprob_SxV.shape[-1]
    if V <= CANDIDATES:
        return logprob_SxV >= _floor(logprob_SxV, top_k_S, top_p_S, V)[0]
    floor, enough = _floor(logprob_SxV, top_k_S, top_p_S, CANDIDATES)
    floor = jax.lax.cond(jnp.all(enough), lambda: floor, lambda: _floor(logprob_SxV, top_k_S, top_p_S, V)[0])
    kept: jax.Array = logprob_SxV >= floor
    return kept


def _floor(
    logprob_SxV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array, M: int
) -> tuple[jax.Array, jax.Array]:
    """The least log-prob ``[S, 1]`` of each row's set, and whether the M largest were enough to tell."""
    V = logprob_SxV.shape[-1]
    k_S = jnp.where(top_k_S > 0, jnp.minimum(top_k_S, V), V)
    ordered = jax.lax.top_k(logprob_SxV, M)[0]
    kth = jnp.take_along_axis(ordered, jnp.minimum(k_S - 1, M - 1)[:, None], axis=-1)
    kth = jnp.where(k_S[:, None] < V, kth, -jnp.inf)
    mass = jnp.where(ordered >= kth, jnp.exp(ordered), 0.0)
    limit_S = top_p_S * jnp.where(k_S < V, jnp.sum(mass, axis=-1), 1.0)
    before = jnp.cumsum(mass, axis=-1) - mass
    last = jnp.sum((before < limit_S[:, None]) & (ordered >= kth), axis=-1) - 1
    nucleus = jnp.take_along_axis(ordered, jnp.maximum(last, 0)[:, None], axis=-1)
    floor = jnp.where(top_p_S[:, None] < 1, jnp.maximum(nucleus, kth), kth)
    ends_inside = (k_S <= M) | ((k_S == V) & ((top_p_S >= 1) | (jnp.sum(mass, axis=-1) >= limit_S)))
    return floor, ends_inside


def _keep_all(logprob_SxV: jax.Array, top_k_S: jax.Array, top_p_S: jax.Array) -> jax.Array:
    return jnp.ones(logprob_SxV.shape, bool)


def _entropy(logprob_SxV: jax.Array) -> jax.Array:
    terms = jnp.where(jnp.isfinite(logprob_SxV), jnp.exp(logprob_SxV) * logprob_SxV, 0.0)
    return -jnp.sum(terms, axis=-1)


def _uniform(key_Sx2: jax.Array, position_S: jax.Array) -> jax.Array:
    def one(key: jax.Array, position: jax.Array) -> jax.Array:
        return jax.random.uniform(jax.random.fold_in(jax.random.wrap_key_data(key), position), ())

    return jax.vmap(one)(key_Sx2, position_S)


def _inverse_cdf(weight_SxV: jax.Array, uniform_S: jax.Array) -> jax.Array:
    """The token at which the cumulative weight passes uniform x total; only tokens of positive weight.

    A large vocabulary is cut into blocks: the block is found by cumulative block sums, the token by the
    cumulative sum inside it, so that one pass reads all weights instead of a scan over them.
    """
    S, V = weight_SxV.shape
    width = V if V <= 2 * BLOCK else BLOCK
    blocks = -(-V // width)
    padded = jnp.pad(weight_SxV, ((0, 0), (0, blocks * width - V))).reshape(S, blocks, width)
    sums_SxB = jnp.sum(padded, axis=-1)
    target_S = jnp.minimum(uniform_S, _BELOW_ONE) * jnp.sum(sums_SxB, axis=-1)
    block_S, inside_S = _first_above(sums_SxB, target_S)
    weights_SxW = jnp.take_along_axis(padded, block_S[:, None, None], axis=1)[:, 0]
    token_S, _ = _first_above(weights_SxW, inside_S)
    return block_S * width + token_S


def _first_above(weight_SxN: jax.Array, target_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """First index of positive weight whose cumulative sum exceeds the target, and the target's rest there.

    Rounding may leave no such index; then it is the last one of positive weight.
    """
    total_SxN = jnp.cumsum(weight_SxN, axis=-1)
    positive = weight_SxN > 0
    above = (total_SxN > target_S[:, None]) & positive
    last = weight_SxN.shape[-1] - 1 - jnp.argmax(positive[:, ::-1], axis=-1)
    index_S = jnp.where(jnp.any(above, axis=-1), jnp.argmax(above, axis=-1), last)
    before = jnp.take_along_axis(total_SxN - weight_SxN, index_S[:, None], axis=-1)[:, 0]
    return index_S, target_S - before
