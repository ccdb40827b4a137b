"""Losses on literal numbers: formulas, ratio 1, non-finite log-probs, masks, metrics."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.trainer.config import LossConfig, TrainerConfigError, validate_loss
from jaxrl_sync.trainer.losses import METRICS, policy_loss, summarize

CORRECTIONS = [
    LossConfig(),
    LossConfig(correction="clip"),
    LossConfig(correction="clip", dual_clip=3.0),
    LossConfig(correction="clip", anchor="proximal"),
    LossConfig(correction="decoupled", anchor="proximal", is_cap=None),
    LossConfig(correction="tis_token"),
    LossConfig(correction="tis_token", anchor="proximal"),
    LossConfig(correction="tis_sequence"),
    LossConfig(correction="tis_sequence", anchor="proximal"),
    LossConfig(correction="masked_is"),
    LossConfig(correction="masked_is", anchor="proximal", geo_low=0.99, geo_high=1.01),
]


def _batch(mu: Any, advantages: Any, mask: Any = None, segments: Any = None, **more: Any) -> Any:
    mu = jnp.asarray(mu, jnp.float32)
    return {
        "loss_mask": jnp.ones(mu.shape, bool) if mask is None else jnp.asarray(mask, bool),
        "advantages": jnp.broadcast_to(jnp.asarray(advantages, jnp.float32), mu.shape),
        "rollout_logprobs": mu,
        "segments": jnp.ones(mu.shape, jnp.int32) if segments is None else jnp.asarray(segments, jnp.int32),
        **{name: jnp.asarray(value, jnp.float32) for name, value in more.items()},
    }


@functools.partial(jax.jit, static_argnums=0)
def _compiled(config: LossConfig, logp: Any, batch: Any) -> Any:
    def total(x: Any) -> Any:
        return policy_loss(config, x, jnp.zeros_like(x), batch)

    return jax.value_and_grad(total, has_aux=True)(logp)


def _loss(config: LossConfig, logp: Any, batch: Any) -> tuple[float, dict[str, float], Any]:
    """Loss sum, metric sums and the gradient by token."""
    (value, sums), grad = _compiled(config, jnp.asarray(logp, jnp.float32), batch)
    return float(value), {name: float(v) for name, v in sums.items()}, np.asarray(grad)


@pytest.mark.invariant(45)
@pytest.mark.parametrize("config", CORRECTIONS, ids=lambda c: f"{c.correction}-{c.anchor}")
def test_at_ratio_one_every_correction_is_the_plain_gradient_bit_for_bit(config: LossConfig) -> None:
    rng = np.random.default_rng(0)
    logp = rng.normal(-2, 1, (4, 16)).astype(np.float32)
    advantages = rng.normal(size=(4, 16)).astype(np.float32)
    mask = rng.random((4, 16)) < 0.7
    batch = _batch(logp, advantages, mask, proximal_logprobs=logp)
    _, sums, grad = _loss(config, logp, batch)
    expected = np.where(mask, -advantages, np.float32(0))
    assert (grad == expected).all()
    assert sums["masked"] == sums["truncated"] == sums["clipped_low"] == sums["clipped_high"] == 0


@pytest.mark.invariant(45)
def test_weights_carry_no_gradient() -> None:
    """With a weight w = rho the gradient is w times the plain one, and nothing from w itself."""
    logp, mu, prox = [[-1.0, -1.0]], [[-1.5, -0.6]], [[-1.2, -0.9]]
    batch = _batch(mu, [[2.0, -3.0]], proximal_logprobs=prox)
    rho, ratio = np.exp([0.3, -0.3]), np.exp([0.2, -0.1])
    _, _, grad = _loss(LossConfig(correction="decoupled", anchor="proximal", is_cap=None), logp, batch)
    # the first ratio, exp(0.2) = 1.22, is above 1.2 with A > 0: clipped, no gradient
    np.testing.assert_allclose(grad, [[0.0, -rho[1] * ratio[1] * -3.0]], rtol=1e-6)
    _, _, grad = _loss(LossConfig(correction="tis_token"), logp, batch)
    np.testing.assert_allclose(grad, [[-np.exp(0.5) * 2.0, -np.exp(-0.4) * -3.0]], rtol=1e-6)


def test_the_clip_is_the_one_of_the_formula() -> None:
    ratio = np.array([0.5, 0.9, 1.1, 1.5], np.float32)
    config = LossConfig(correction="clip", clip_low=0.2, clip_high=0.28)
    for advantage in (1.0, -1.0):
        value, sums, grad = _loss(config, np.log(ratio)[None], _batch(np.zeros((1, 4)), advantage))
        clipped = np.clip(ratio, 0.8, 1.28)
        surrogate = np.minimum(ratio * advantage, clipped * advantage)
        assert value == pytest.approx(-surrogate.sum(), rel=1e-6)
        moving = ratio * advantage <= clipped * advantage
        np.testing.assert_allclose(grad[0], np.where(moving, -advantage * ratio, 0), rtol=1e-5)
        assert (sums["clipped_low"], sums["clipped_high"]) == ((0, 1) if advantage > 0 else (1, 0))


def test_dual_clip_bounds_the_loss_of_bad_tokens() -> None:
    batch = _batch(np.zeros((1, 2)), [[-2.0, 2.0]])
    logp = np.log([[9.0, 0.1]])
    plain, _, _ = _loss(LossConfig(correction="clip"), logp, batch)
    bounded, _, grad = _loss(LossConfig(correction="clip", dual_clip=3.0), logp, batch)
    assert plain == pytest.approx(18.0 - 0.2, rel=1e-5)
    assert bounded == pytest.approx(6.0 - 0.2, rel=1e-5)
    assert grad[0, 0] == 0


def test_truncation_by_token_and_by_sequence() -> None:
    log_rho = np.array([[0.6, 0.6, -0.2, 0.0, 0.5, 9.9]])
    segments = [[1, 1, 1, 2, 2, 0]]
    mask = [[1, 1, 1, 1, 1, 0]]
    batch = _batch(np.zeros((1, 6)), 1.0, mask, segments)
    _, sums, grad = _loss(LossConfig(correction="tis_token", is_cap=1.7), log_rho, batch)
    np.testing.assert_allclose(-grad[0], [1.7, 1.7, np.exp(-0.2), 1.0, np.exp(0.5), 0], rtol=1e-5)
    assert sums["truncated"] == 2
    _, sums, grad = _loss(LossConfig(correction="tis_sequence", is_cap=2.5), log_rho, batch)
    np.testing.assert_allclose(-grad[0], [2.5] * 3 + [np.exp(0.5)] * 2 + [0], rtol=1e-5)
    assert sums["truncated"] == 3


def test_masked_importance_sampling_drops_what_is_outside_but_not_from_the_denominator() -> None:
    log_rho = np.log([[0.4, 0.5001, 1.9, 2.1]])
    _, sums, grad = _loss(LossConfig(correction="masked_is"), log_rho, _batch(np.zeros((1, 4)), 1.0))
    np.testing.assert_allclose(-grad[0], [0, 0.5001, 1.9, 0], rtol=1e-4)
    assert (sums["masked"], sums["tokens"]) == (2, 4)


@pytest.mark.invariant(50)
@pytest.mark.parametrize("shift", [0.005, 0.02])
def test_the_geometric_mask_does_not_depend_on_length(shift: float) -> None:
    config = LossConfig(correction="tis_token", geo_low=0.99, geo_high=1.01)
    kept = []
    for length in (1, 7, 200):
        logp = np.full((1, 200), shift)
        mask = np.arange(200)[None] < length
        _, sums, _ = _loss(config, logp, _batch(np.zeros((1, 200)), 1.0, mask))
        assert sums["masked"] in (0, length)
        kept.append(sums["masked"] == 0)
    assert kept == [shift < 0.01] * 3


@pytest.mark.invariant(47)
@pytest.mark.parametrize("config", CORRECTIONS, ids=lambda c: f"{c.correction}-{c.anchor}")
def test_log_probs_that_are_not_finite_weigh_nothing_and_are_counted(config: LossConfig) -> None:
    mu = np.array([[-np.inf, np.nan, -1.0, -60.0, -1.0]])
    logp = np.array([[-1.0, -1.0, -1.0, -1.0, -1.0]])
    batch = _batch(mu, 1.0, [[1, 1, 1, 1, 0]], proximal_logprobs=logp)
    value, sums, grad = _loss(config, logp, batch)
    assert np.isfinite(value) and np.isfinite(grad).all()
    assert (grad[0, [0, 1, 4]] == 0).all()
    assert (sums["nonfinite"], sums["extreme"]) == (2, 1)
    assert abs(grad[0, 3]) <= np.exp(20.0) * 1.01
    assert all(np.isfinite(v) for v in sums.values())


@pytest.mark.invariant(49)
def test_tokens_outside_the_mask_get_no_gradient_whatever_they_hold() -> None:
    logp = np.array([[-1.0, -2.0, -3.0]])
    for config in CORRECTIONS:
        batch = _batch([[-1.0, np.nan, -9.0]], [[1.0, np.nan, 5.0]], [[1, 0, 0]], [[1, 1, 0]])
        batch["proximal_logprobs"] = jnp.asarray([[-1.0, np.inf, 0.0]])
        _, sums, grad = _loss(config, logp, batch)
        assert (grad[0, 1:] == 0).all() and grad[0, 0] == -1
        assert sums["tokens"] == 1 and sums["nonfinite"] == 0


@pytest.mark.invariant(51)
def test_effective_sample_size_and_mismatch_are_those_before_truncation() -> None:
    equal = _batch(np.zeros((1, 8)), 1.0)
    _, sums, _ = _loss(LossConfig(correction="tis_token", is_cap=0.5), np.zeros((1, 8)), equal)
    assert summarize(sums, 8)["ess"] == pytest.approx(1.0)
    assert summarize(sums, 8)["truncated"] == 1.0
    one = np.array([[15.0] + [-15.0] * 7])
    _, sums, _ = _loss(LossConfig(correction="tis_token", is_cap=2.0), one, equal)
    assert summarize(sums, 8)["ess"] == pytest.approx(1 / 8, rel=1e-4)
    x = np.array([[0.1, -0.2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0]])
    _, sums, _ = _loss(LossConfig(correction="clip"), x, equal)
    means = summarize(sums, 8)
    assert means["mismatch_k1"] == pytest.approx(-x.mean(), rel=1e-5)
    assert means["mismatch_k3"] == pytest.approx((np.exp(x) - x - 1).mean(), rel=1e-4)
    assert means["ratio"] == pytest.approx(np.exp(x).mean(), rel=1e-5)
    assert means["ratio_std"] == pytest.approx(np.exp(x).std(), rel=1e-3)


@pytest.mark.parametrize("weighting", ["none", "importance"])
def test_the_reference_penalty_is_k3(weighting: Any) -> None:
    logp, ref, mu = np.array([[-1.0, -2.0]]), np.array([[-1.5, -1.0]]), np.array([[-1.2, -2.0]])
    config = LossConfig(kl_coef=0.1, kl_weighting=weighting)
    batch = _batch(mu, 0.0, reference_logprobs=ref)
    value, sums, grad = _loss(config, logp, batch)
    y = ref - logp
    k3, slope = np.exp(y) - y - 1, 1 - np.exp(y)
    weight = np.exp(logp - mu) if weighting == "importance" else np.ones_like(mu)
    score = k3 * weight if weighting == "importance" else 0
    assert value == pytest.approx(0.1 * (weight * k3).sum(), rel=1e-5)
    np.testing.assert_allclose(grad, 0.1 * (weight * slope + score), rtol=1e-4)
    assert sums["reference_k3"] == pytest.approx(k3.sum(), rel=1e-5)


def test_sums_are_named_once_and_add_over_micro_batches() -> None:
    rng = np.random.default_rng(1)
    logp, mu = rng.normal(-2, 0.5, (4, 8)), rng.normal(-2, 0.5, (4, 8))
    adv, mask = rng.normal(size=(4, 8)), rng.random((4, 8)) < 0.6
    config = LossConfig(correction="masked_is")
    whole = _loss(config, logp, _batch(mu, adv, mask))[1]
    parts = [
        _loss(config, logp[i : i + 2], _batch(mu[i : i + 2], adv[i : i + 2], mask[i : i + 2]))[1]
        for i in (0, 2)
    ]
    assert set(whole) == set(METRICS)
    for name in METRICS:
        assert whole[name] == pytest.approx(sum(p[name] for p in parts), rel=1e-5, abs=1e-5)


@pytest.mark.invariant(52)
def test_asynchrony_needs_an_explicit_correction() -> None:
    validate_loss(0, LossConfig())
    validate_loss(2, LossConfig(correction="clip"))
    with pytest.raises(TrainerConfigError, match=r"staleness_bound=2 needs an explicit loss.correction"):
        validate_loss(2, LossConfig())
    with pytest.raises(TrainerConfigError, match="leaves the staleness uncorrected"):
        validate_loss(1, LossConfig(correction="clip", anchor="proximal"))
    with pytest.raises(TrainerConfigError, match="expected 'proximal' for correction='decoupled'"):
        LossConfig(correction="decoupled")
