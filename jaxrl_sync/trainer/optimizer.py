"""AdamW with a schedule and a global-norm clip, through optax."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.sharding import NamedSharding

from jaxrl_sync.trainer.axes import Tree
from jaxrl_sync.trainer.config import OptimizerConfig


def learning_rate(config: OptimizerConfig) -> optax.Schedule:
    """Learning rate as a function of committed updates: linear warm-up, then constant or cosine."""
    if config.schedule == "cosine":
        after = optax.cosine_decay_schedule(
            config.learning_rate, config.total_steps - config.warmup_steps, config.final_fraction
        )
    else:
        after = optax.constant_schedule(config.learning_rate)
    if not config.warmup_steps:
        return after
    # Update 0 already moves: the ramp ends at the full rate on update warmup_steps.
    ramp = optax.linear_schedule(
        config.learning_rate / (config.warmup_steps + 1), config.learning_rate, config.warmup_steps
    )
    return optax.join_schedules([ramp, after], [config.warmup_steps])


def decayed(params: Tree) -> Tree:
    """Which tensors weight decay applies to: kernels and embeddings, not norm scales."""
    tree: Tree = jax.tree_util.tree_map_with_path(lambda path, _: path[-1].key != "scale", params)
    return tree


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """Clip by global norm, then AdamW (arXiv 1711.05101)."""
    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.adamw(
            learning_rate(config),
            b1=config.beta1,
            b2=config.beta2,
            eps=config.eps,
            weight_decay=config.weight_decay,
            mask=decayed,
        ),
    )


def state_shardings(
    optimizer: optax.GradientTransformation, params: Tree, shardings: Tree, other: NamedSharding
) -> Any:
    """Shardings of the optimizer state: moments like their parameters, counters ``other``.

    ``params`` may be abstract; nothing is allocated.
    """
    abstract = jax.eval_shape(optimizer.init, params)
    return optax.tree_utils.tree_map_params(
        optimizer,
        lambda _, sharding: sharding,
        abstract,
        shardings,
        transform_non_params=lambda _: other,
    )
