"""Policy-gradient losses as sums over tokens, and the metrics that go with them, also as sums.

With sg the stop-gradient, mu the rollout policy, A the advantage and N the number of valid tokens of the
whole batch, every loss here is ``-(1/N) sum(w * objective)``; this module returns the sum, the caller divides
once by N. So the result depends neither on the split into micro-batches, nor on packing, nor on ranks.

    clip          r = pi / pi_anchor;  min(r A, clip(r, 1-lo, 1+hi) A); dual clip for A < 0: max(., c A)
                  (PPO, arXiv 1707.06347; asymmetric clip, arXiv 2503.14476; dual clip, arXiv 1912.09729)
    decoupled     w = sg(pi_prox / mu) before the clip against pi_prox   (arXiv 2110.00641, 2505.24298)
    tis_token     w = min(rho_t, C)        rho = pi_prox / mu, or sg(pi) / mu with anchor rollout
    tis_sequence  w = min(prod_t rho_t, C)
    masked_is     w = rho_t if lo <= rho_t <= hi else 0    (masked tokens stay in N)
    geo mask      w = 0 for sequences with exp(mean_t log rho_t) outside [lo, hi]
    none          r = pi / sg(pi): the plain policy gradient

and, with ``entropy_coef``, less that times the entropy of the live policy at every sampled token.

Log-ratios are clamped to +-20 before exp. A log-ratio that is not finite gets weight 0 and is counted.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from jaxrl_sync.trainer.config import LossConfig

Batch = dict[str, jax.Array]
Sums = dict[str, jax.Array]

METRICS = (
    "tokens",
    "loss",
    "nll",
    "entropy",
    "mismatch_k1",
    "mismatch_k3",
    "ratio",
    "ratio_sq",
    "behaviour_ratio",
    "behaviour_ratio_sq",
    "clipped_low",
    "clipped_high",
    "truncated",
    "masked",
    "nonfinite",
    "extreme",
    "reference_k3",
    "advantage",
)


def log_ratio(
    numerator: jax.Array, denominator: jax.Array, limit: float
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Clamped difference of log-probs, whether it was finite, and whether it was clamped."""
    difference = numerator - denominator
    finite = jnp.isfinite(difference)
    difference = jnp.where(finite, difference, 0.0)
    return jnp.clip(difference, -limit, limit), finite, jnp.abs(difference) > limit


def segment_sums(values: jax.Array, segments: jax.Array) -> jax.Array:
    """For every token the sum of ``values`` over its segment of its row; ``[B, S]`` float32."""
    size = segments.shape[1] + 1

    def row(v: jax.Array, s: jax.Array) -> jax.Array:
        return jax.ops.segment_sum(v, s, num_segments=size)[s]

    return jax.vmap(row)(values, segments)


def effective_sample_fraction(weight_sum: jax.Array, weight_sq_sum: jax.Array, count: jax.Array) -> jax.Array:
    """(sum w)^2 / (n sum w^2): 1 for equal weights, 1/n when one weight dominates; 0 of nothing."""
    return jnp.where(count > 0, weight_sum**2 / jnp.maximum(count * weight_sq_sum, 1e-30), 0.0)


def importance_weights(
    loss: LossConfig, log_rho: jax.Array, mask: jax.Array, segments: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Per-token weights (no gradient), and which of them were truncated and which masked to zero."""
    log_rho = jax.lax.stop_gradient(jnp.where(mask, log_rho, 0.0))
    rho = jnp.exp(log_rho)
    weights, truncated, masked = jnp.ones_like(rho), jnp.zeros_like(mask), jnp.zeros_like(mask)
    if loss.correction == "tis_sequence":
        product = jnp.clip(segment_sums(log_rho, segments), -loss.max_log_ratio, loss.max_log_ratio)
        rho = jnp.exp(product)
    if loss.correction in ("tis_token", "tis_sequence", "decoupled"):
        truncated = jnp.zeros_like(mask) if loss.is_cap is None else rho > loss.is_cap
        weights = rho if loss.is_cap is None else jnp.minimum(rho, loss.is_cap)
    if loss.correction == "masked_is":
        masked = (rho < loss.is_low) | (rho > loss.is_high)
        weights = jnp.where(masked, 0.0, rho)
    if loss.geo_low is not None and loss.geo_high is not None:
        count = jnp.maximum(segment_sums(mask.astype(jnp.float32), segments), 1.0)
        mean = segment_sums(log_rho, segments) / count
        outside = (mean < jnp.log(loss.geo_low)) | (mean > jnp.log(loss.geo_high))
        masked, weights = masked | outside, jnp.where(outside, 0.0, weights)
    return weights, truncated & mask, masked & mask


def clipped_objective(
    loss: LossConfig, ratio: jax.Array, advantages: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """min(r A, clip(r) A), with the optional dual clip; and where it was clipped below and above."""
    low, high = 1.0 - loss.clip_low, 1.0 + loss.clip_high
    below = (ratio < low) & (advantages < 0)
    above = (ratio > high) & (advantages > 0)
    bounded = jnp.where(below, low, jnp.where(above, high, ratio))
    objective = bounded * advantages
    if loss.dual_clip is not None:
        floor = loss.dual_clip * advantages
        objective = jnp.where((advantages < 0) & (objective < floor), floor, objective)
    return objective, below, above


def policy_loss(
    loss: LossConfig, logp: jax.Array, entropy: jax.Array, batch: Batch
) -> tuple[jax.Array, Sums]:
    """Loss sum (divide by the global N) and metric sums of one micro-batch.

    ``logp`` and ``entropy``: float32 ``[B, S]`` of the live policy. ``batch``: ``loss_mask`` bool,
    ``segments`` int32, ``advantages``, ``rollout_logprobs`` and, where the loss asks for them,
    ``proximal_logprobs`` and ``reference_logprobs``, float32. Tokens outside the mask count nowhere and get
    no gradient.
    """
    mask, mu = batch["loss_mask"], batch["rollout_logprobs"]
    advantages = jnp.where(mask, batch["advantages"], 0.0)  # 0 * NaN of a place outside the mask is NaN
    limit, live = loss.max_log_ratio, jax.lax.stop_gradient(logp)
    anchor = batch["proximal_logprobs"] if loss.anchor == "proximal" else mu
    behaviour, finite, extreme = log_ratio(live, mu, limit)
    bypass = loss.correction == "none" or (loss.anchor == "rollout" and loss.correction != "clip")
    log_r, finite_r, extreme_r = log_ratio(logp, live if bypass else anchor, limit)
    log_rho, finite_rho, extreme_rho = log_ratio(anchor if loss.anchor == "proximal" else live, mu, limit)
    finite, extreme = finite & finite_r & finite_rho, extreme | extreme_r | extreme_rho
    used = mask & finite
    ratio = jnp.exp(log_r)
    no = jnp.zeros_like(mask)
    objective, below, above = (
        (ratio * advantages, no, no) if bypass else clipped_objective(loss, ratio, advantages)
    )
    weights, truncated, masked = importance_weights(loss, log_rho, used, batch["segments"])
    per_token = -weights * objective
    reference_k3 = jnp.zeros_like(logp)
    if loss.needs_reference:
        log_ref, finite_ref, _ = log_ratio(batch["reference_logprobs"], logp, limit)
        reference_k3 = jnp.where(finite_ref, jnp.expm1(log_ref) - log_ref, 0.0)
        score = jnp.exp(log_ratio(logp, mu, limit)[0]) if loss.kl_weighting == "importance" else 1.0
        per_token = per_token + loss.kl_coef * score * reference_k3
    if loss.entropy_coef:
        per_token = per_token - loss.entropy_coef * entropy
    per_token = jnp.where(used, per_token, 0.0)
    total = jnp.sum(per_token)

    def over(values: jax.Array, where: jax.Array) -> jax.Array:
        kept = jnp.where(where, jax.lax.stop_gradient(values).astype(jnp.float32), 0.0)
        return jnp.sum(kept)

    rho = jnp.exp(behaviour)
    sums = {
        "tokens": over(mask, mask),
        "loss": jax.lax.stop_gradient(total),
        "nll": over(-logp, mask),
        "entropy": over(entropy, mask),
        "mismatch_k1": over(-behaviour, used),
        "mismatch_k3": over(jnp.expm1(behaviour) - behaviour, used),
        "ratio": over(ratio, used),
        "ratio_sq": over(jnp.square(ratio), used),
        "behaviour_ratio": over(rho, used),
        "behaviour_ratio_sq": over(jnp.square(rho), used),
        "clipped_low": over(below, used),
        "clipped_high": over(above, used),
        "truncated": over(truncated, used),
        "masked": over(masked, used),
        "nonfinite": over(~finite, mask),
        "extreme": over(extreme, mask),
        "reference_k3": over(reference_k3, used),
        "advantage": over(advantages, mask),
    }
    return total, sums


def zero_sums() -> Sums:
    """Metric sums of nothing."""
    return {name: jnp.zeros((), jnp.float32) for name in METRICS}


def summarize(sums: dict[str, float], denominator: float) -> dict[str, float]:
    """Means and fractions of one update from host floats: the loss per N, everything else per used token."""
    tokens = max(sums["tokens"], 1.0)
    used = max(sums["tokens"] - sums["nonfinite"], 1.0)
    means = {name: sums[name] / used for name in METRICS if not name.endswith(("ratio_sq", "loss", "tokens"))}
    for name in ("nll", "entropy", "advantage", "nonfinite", "extreme"):
        means[name] = sums[name] / tokens
    variance = sums["ratio_sq"] / used - means["ratio"] ** 2
    square = max(used * sums["behaviour_ratio_sq"], 1e-30)
    return {
        **means,
        "loss": sums["loss"] / denominator,
        "tokens": sums["tokens"],
        "ratio_std": max(variance, 0.0) ** 0.5,
        "ess": sums["behaviour_ratio"] ** 2 / square,
        "nonfinite_tokens": sums["nonfinite"],
        "extreme_tokens": sums["extreme"],
    }
