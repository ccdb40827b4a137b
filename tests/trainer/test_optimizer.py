"""AdamW, clip and schedules against a few lines of numpy."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jaxrl_sync.trainer.config import OptimizerConfig, TrainerConfigError
from jaxrl_sync.trainer.optimizer import learning_rate, make_optimizer


def test_schedules() -> None:
    warm = learning_rate(OptimizerConfig(learning_rate=1.0, warmup_steps=4))
    np.testing.assert_allclose(
        [np.asarray(warm(i)) for i in range(6)], [0.2, 0.4, 0.6, 0.8, 1.0, 1.0], rtol=1e-6
    )
    cosine = learning_rate(
        OptimizerConfig(
            learning_rate=2.0, schedule="cosine", warmup_steps=2, total_steps=10, final_fraction=0.1
        )
    )
    t = np.arange(9) / 8
    expected = 2.0 * (0.1 + 0.9 * 0.5 * (1 + np.cos(np.pi * t)))
    np.testing.assert_allclose([np.asarray(cosine(2 + i)) for i in range(9)], expected, rtol=1e-5)
    with pytest.raises(TrainerConfigError, match="total_steps=3: expected more than warmup_steps=5"):
        OptimizerConfig(schedule="cosine", warmup_steps=5, total_steps=3)


def test_adamw_with_a_global_norm_clip_and_decay_of_kernels_only() -> None:
    config = OptimizerConfig(learning_rate=0.1, weight_decay=0.5, max_grad_norm=1.0, beta1=0.9, beta2=0.99)
    optimizer = make_optimizer(config)
    params = {"a": {"kernel": np.array([1.0, -2.0], np.float32)}, "n": {"scale": np.array([3.0], np.float32)}}
    moments = optimizer.init(params)
    m, v = np.zeros(3), np.zeros(3)
    flat = np.array([1.0, -2.0, 3.0])
    for step, grad in enumerate(([3.0, 0.0, 4.0], [0.1, 0.2, -0.2]), start=1):
        g = np.array(grad) / max(1.0, np.linalg.norm(grad))
        m, v = 0.9 * m + 0.1 * g, 0.99 * v + 0.01 * g**2
        adam = m / (1 - 0.9**step) / (np.sqrt(v / (1 - 0.99**step)) + 1e-8)
        flat = flat - 0.1 * (adam + 0.5 * flat * np.array([1, 1, 0]))
        grads = {
            "a": {"kernel": np.asarray(grad[:2], np.float32)},
            "n": {"scale": np.asarray(grad[2:], np.float32)},
        }
        updates, moments = optimizer.update(grads, moments, params)
        params = jax.tree.map(np.add, params, updates)
    np.testing.assert_allclose(params["a"]["kernel"], flat[:2], rtol=1e-5)
    np.testing.assert_allclose(params["n"]["scale"], flat[2:], rtol=1e-5)
