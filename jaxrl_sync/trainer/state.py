"""The state of training: masters, optimizer moments, the number of committed updates, the random key."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer.axes import Tree, param_shardings, replicated
from jaxrl_sync.trainer.config import TrainerConfig
from jaxrl_sync.trainer.model import init_params
from jaxrl_sync.trainer.optimizer import make_optimizer, state_shardings
from jaxrl_sync.trainer.trained import trained, trained_shapes


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """``params``: the trainer tree, float32. ``opt_state``: moments of its trained part. ``updates``: int32
    scalar, committed optimizer updates. ``rng``: raw uint32 key data, so that it is a plain array on disk."""

    params: Tree
    opt_state: Any
    updates: jax.Array
    rng: jax.Array


def shardings(model: DecoderConfig, config: TrainerConfig, mesh: Mesh) -> Any:
    """A ``TrainState`` with a ``NamedSharding`` in place of every array."""
    params = param_shardings(model, mesh)
    scalar: Any = replicated(mesh)
    optimizer = make_optimizer(config.optimizer)
    moments = state_shardings(optimizer, trained_shapes(model), trained(params, model), scalar)
    return TrainState(params, moments, scalar, scalar)


def _create(model: DecoderConfig, config: TrainerConfig, seed: jax.Array) -> TrainState:
    key = jax.random.key(seed)
    params = init_params(model, config.init_std, jax.random.fold_in(key, 0))
    opt_state = make_optimizer(config.optimizer).init(trained(params, model))
    rng = jax.random.key_data(jax.random.fold_in(key, 1))
    return TrainState(params, opt_state, jnp.zeros((), jnp.int32), rng)


def create(model: DecoderConfig, config: TrainerConfig, mesh: Mesh, seed: int) -> TrainState:
    """A fresh state, made on the mesh with committed shardings; the same numbers on every mesh."""
    make = jax.jit(lambda s: _create(model, config, s), out_shardings=shardings(model, config, mesh))
    state: TrainState = make(jnp.uint32(seed))
    return state


def fresh_moments(model: DecoderConfig, config: TrainerConfig, mesh: Mesh, params: Tree) -> Any:
    """Optimizer state of ``config.optimizer`` before its first update, on the mesh."""
    where = shardings(model, config, mesh).opt_state
    return jax.jit(make_optimizer(config.optimizer).init, out_shardings=where)(trained(params, model))


def from_params(
    model: DecoderConfig, config: TrainerConfig, mesh: Mesh, params: Tree, seed: int
) -> TrainState:
    """A state at update 0 around given weights (taken over, on the mesh already)."""
    where = replicated(mesh)
    rng = np.asarray(jax.random.key_data(jax.random.fold_in(jax.random.key(seed), 1)))
    moments = fresh_moments(model, config, mesh, params)
    scalars = [
        jax.make_array_from_callback(x.shape, where, x.__getitem__) for x in (np.zeros((), np.int32), rng)
    ]
    return TrainState(params, moments, *scalars)


def abstract(model: DecoderConfig, config: TrainerConfig, mesh: Mesh) -> TrainState:
    """The state as ``jax.ShapeDtypeStruct`` leaves with shardings: what a checkpoint is restored into."""
    shapes = jax.eval_shape(lambda s: _create(model, config, s), jax.ShapeDtypeStruct((), jnp.uint32))
    state: TrainState = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s),
        shapes,
        shardings(model, config, mesh),
    )
    return state
