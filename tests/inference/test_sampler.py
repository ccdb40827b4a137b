"""Drawing: exact filters, the right distribution, unfiltered log-probs, keys by identity."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.request import hash32
from jaxrl_sync.inference.sampler import SamplingRows, draw, kept_tokens, sample_keys

jitted_draw = jax.jit(draw)


def rows(S: int, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, seed: int = 0) -> SamplingRows:
    key = sample_keys(
        jnp.full(S, seed, jnp.uint32), jnp.full(S, 5, jnp.uint32), jnp.arange(S, dtype=jnp.int32)
    )
    full = jnp.full(S, temperature), jnp.full(S, top_k), jnp.full(S, top_p)
    return SamplingRows(*full, key)


@pytest.mark.parametrize(
    ("top_k", "top_p", "kept"),
    [
        (0, 1.0, [1, 1, 1, 1, 1]),
        (2, 1.0, [0, 1, 0, 1, 0]),
        (9, 1.0, [1, 1, 1, 1, 1]),
        (0, 0.39, [0, 1, 0, 0, 0]),
        (0, 0.41, [0, 1, 0, 1, 0]),
        (0, 0.75, [1, 1, 0, 1, 0]),
        (2, 0.56, [0, 1, 0, 0, 0]),
        (2, 0.58, [0, 1, 0, 1, 0]),
        (1, 0.01, [0, 1, 0, 0, 0]),
    ],
)
def test_filters(top_k: int, top_p: float, kept: list[int]) -> None:
    """Probabilities 0.2, 0.4, 0.05, 0.3, 0.05; top_p sees the distribution after top_k."""
    logprobs = jnp.log(jnp.array([[0.2, 0.4, 0.05, 0.3, 0.05]]))
    mask = kept_tokens(logprobs, jnp.array([top_k]), jnp.array([top_p], jnp.float32))
    assert mask[0].astype(int).tolist() == kept


def plain_filter(logprobs: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """The same sets by sorting in float64."""
    order = np.argsort(-logprobs, kind="stable")
    kept = order[: top_k or len(order)]
    p = np.exp(logprobs[kept].astype(np.float64))
    p /= p.sum()
    size = len(kept) if top_p == 1 else int(np.searchsorted(np.cumsum(p), top_p)) + 1
    mask = np.zeros(len(order), bool)
    mask[kept[:size]] = True
    return mask


@pytest.mark.parametrize("spread", [0.5, 3.0])
def test_filters_of_a_large_vocabulary_with_and_without_enough_candidates(spread: float) -> None:
    """With spread 0.5 the nucleus is wider than the candidates, with 3.0 it is far smaller."""
    settings = [(0, 1.0), (50, 1.0), (0, 0.9), (2000, 0.7), (1500, 1.0), (40, 0.5)]
    logits = jax.random.normal(jax.random.key(2), (len(settings), 5000)) * spread
    logprobs = jax.nn.log_softmax(logits)
    top_k, top_p = (jnp.array([s[i] for s in settings]) for i in (0, 1))
    mask = np.asarray(jax.jit(kept_tokens)(logprobs, top_k, top_p))
    for found, row, (k, p) in zip(mask, np.asarray(logprobs), settings, strict=True):
        assert np.count_nonzero(found != plain_filter(row, k, p)) <= 1  # a rounding at the set's edge
    assert mask.sum(1)[[0, 1, 4]].tolist() == [5000, 50, 1500]


def test_frequencies_of_a_large_vocabulary() -> None:
    S, V = 20_000, 1300
    p = np.zeros(V)
    p[[3, 511, 512, 1299]] = 0.1, 0.2, 0.3, 0.4
    logits = jnp.broadcast_to(jnp.log(jnp.array(p)), (S, V))
    counts = np.bincount(jitted_draw(logits, rows(S), jnp.full(S, 1)).token, minlength=V) / S
    np.testing.assert_allclose(counts, p, atol=0.015)
    assert counts[p == 0].sum() == 0


def test_frequencies_follow_the_distribution() -> None:
    p = np.array([0.5, 0.0, 0.3, 0.15, 0.05])
    S = 20_000
    logits = jnp.broadcast_to(jnp.log(jnp.array(p)), (S, 5))
    drawn = jitted_draw(logits, rows(S), jnp.full(S, 3))
    counts = np.bincount(drawn.token, minlength=5) / S
    np.testing.assert_allclose(counts, p, atol=0.015)
    assert counts[1] == 0


def test_temperature_and_filters_shape_draws_but_filters_never_shape_logprobs() -> None:
    S, p = 20_000, np.array([0.4, 0.3, 0.2, 0.1])
    logits = jnp.broadcast_to(jnp.log(jnp.array(p)), (S, 4))
    drawn = jitted_draw(logits, rows(S, temperature=0.5, top_k=2), jnp.full(S, 0))
    squared = p**2 / (p**2).sum()
    kept = squared[:2] / squared[:2].sum()
    np.testing.assert_allclose(np.bincount(drawn.token, minlength=4)[:2] / S, kept, atol=0.015)
    np.testing.assert_allclose(drawn.logprob, np.log(squared)[np.asarray(drawn.token)], rtol=1e-5)
    np.testing.assert_allclose(drawn.entropy, -(squared * np.log(squared)).sum(), rtol=1e-5)


def test_greedy_takes_the_first_maximum_and_reports_at_temperature_one() -> None:
    logits = jnp.array([[0.0, 2.0, 2.0, 1.0]])
    drawn = jitted_draw(logits, rows(1, temperature=0.0), jnp.array([0]))
    assert drawn.token.tolist() == [1]
    np.testing.assert_allclose(drawn.logprob, jax.nn.log_softmax(logits)[:, 1])


def test_keys_are_those_of_the_documented_convention() -> None:
    seed, request = 17, hash32("prompt-4")
    found = sample_keys(
        jnp.full(3, seed, jnp.uint32), jnp.full(3, request, jnp.uint32), jnp.arange(3, dtype=jnp.int32)
    )
    for i in range(3):
        expected = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), request), i)
        np.testing.assert_array_equal(found[i], jax.random.key_data(expected))
    assert len({tuple(k.tolist()) for k in found}) == 3


def test_a_row_depends_on_its_identity_not_on_its_place() -> None:
    logits = jax.random.normal(jax.random.key(1), (1, 50))
    one = rows(6)
    order = jnp.array([3, 5, 0, 1, 4, 2])
    shuffled = SamplingRows(*(x[order] for x in one))
    many = jnp.broadcast_to(logits, (6, 50))
    a = jitted_draw(many, one, jnp.full(6, 9)).token
    b = jitted_draw(many, shuffled, jnp.full(6, 9)).token
    assert a[order].tolist() == b.tolist() and len(set(a.tolist())) > 1


def test_extreme_logits_stay_finite() -> None:
    logits = jnp.array([[1e30, -1e30, 0.0], [-jnp.inf, 0.0, -jnp.inf]])
    drawn = jitted_draw(logits, rows(2), jnp.array([0, 0]))
    assert drawn.token.tolist() == [0, 1]
    assert np.isfinite(np.asarray(drawn.logprob)).all() and np.isfinite(np.asarray(drawn.entropy)).all()
