"""The entropy bonus: a metric without a gradient unless the loss asks for it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.trainer.config import LossConfig
from jaxrl_sync.trainer.logprobs import token_logprobs
from jaxrl_sync.trainer.losses import policy_loss


def _entropy_sum(hidden: jax.Array, head: jax.Array, chunk: int, gradient: bool) -> jax.Array:
    targets = jnp.zeros(hidden.shape[:2], jnp.int32)
    return jnp.sum(token_logprobs(hidden, head, targets, 0.7, chunk, gradient)[1])


@pytest.mark.parametrize("chunk", [2, 4])
def test_the_entropy_has_its_own_gradient_or_none(chunk: int) -> None:
    rng = np.random.default_rng(0)
    hidden, head = jnp.asarray(rng.normal(size=(2, 4, 5))), jnp.asarray(rng.normal(size=(5, 7)))

    def plain(h: jax.Array) -> jax.Array:
        logp = jax.nn.log_softmax(jnp.einsum("bsd,dv->bsv", h, head) / 0.7)
        return -jnp.sum(jnp.exp(logp) * logp)

    found = jax.grad(lambda h: _entropy_sum(h, head, chunk, True))(hidden)
    np.testing.assert_allclose(found, jax.grad(plain)(hidden), rtol=1e-4, atol=1e-5)
    assert not np.asarray(jax.grad(lambda h: _entropy_sum(h, head, chunk, False))(hidden)).any()


def test_the_loss_takes_off_the_entropy_of_trained_tokens_only() -> None:
    logp, entropy = jnp.array([[-1.0, -2.0, -0.5]]), jnp.array([[0.3, 0.6, 9.0]])
    batch: dict[str, Any] = {
        "loss_mask": jnp.array([[True, True, False]]),
        "segments": jnp.ones((1, 3), jnp.int32),
        "advantages": jnp.zeros((1, 3)),
        "rollout_logprobs": logp,
    }

    def total(e: jax.Array) -> jax.Array:
        return policy_loss(LossConfig(entropy_coef=0.1), logp, e, batch)[0]

    assert float(total(entropy)) == pytest.approx(-0.09)
    np.testing.assert_allclose(jax.grad(total)(entropy), [[-0.1, -0.1, 0.0]], rtol=1e-6)
