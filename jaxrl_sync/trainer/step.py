"""One optimizer update as two compiled functions of fixed shapes: accumulate micro-batches, then apply.

``accumulate`` adds a micro-batch's gradient *sum* and metric sums to an accumulator that it is given and
gives back (donated); ``apply`` divides by the global token count once, updates the state in place (donated)
and returns the accumulator zeroed. No shape depends on how many micro-batches, ranks or replicas there are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import Tree, batch_sharding, param_shardings, replicated
from jaxrl_sync.trainer.config import LossConfig, TrainerConfig
from jaxrl_sync.trainer.logprobs import policy_logprobs
from jaxrl_sync.trainer.losses import METRICS, Batch, Sums, policy_loss, summarize, zero_sums
from jaxrl_sync.trainer.optimizer import learning_rate, make_optimizer
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.trainer.trained import combine, frozen, trained, trained_shapes

FIELDS: dict[str, Any] = {
    "tokens": np.int32,
    "positions": np.int32,
    "segments": np.int32,
    "loss_mask": np.bool_,
    "advantages": np.float32,
    "rollout_logprobs": np.float32,
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Sums over the micro-batches so far: gradients (the trained part of the tree, float32) and metrics."""

    grads: Tree
    sums: Sums


@dataclasses.dataclass(frozen=True)
class Step:
    """The compiled functions of one trainer, for one mesh, model, batch shape and loss.

    ``accumulate(params, accumulator, micro) -> accumulator``; ``apply(state, accumulator, N) ->
    (state, accumulator, info)``; ``logprobs(params, micro) -> [rows, seq_len]``. ``accumulator`` and
    ``state`` are donated: the caller's references are dead afterwards.
    """

    mesh: Mesh
    model: DecoderConfig
    config: TrainerConfig
    loss: LossConfig
    accumulate: Any
    apply: Any
    logprobs: Callable[[Tree, Batch], jax.Array]
    zeros: Callable[[], Accumulator]

    @property
    def fields(self) -> dict[str, Any]:
        """Dtype by name of what a micro-batch holds: what the losses use, and the extras of the config."""
        return {**FIELDS, **dict.fromkeys(self.config.extras, np.float32)}

    def put(self, fields: Mapping[str, np.ndarray[Any, Any]]) -> Batch:
        """This process's rows of one micro-batch as global arrays ``[rows, seq_len]`` on the mesh."""
        sharding = batch_sharding(self.mesh)
        shape = (self.config.rows, self.config.seq_len)
        return {
            name: jax.make_array_from_process_local_data(sharding, np.asarray(fields[name], dtype), shape)
            for name, dtype in self.fields.items()
        }

    def compile(self, state: TrainState, accumulator: Accumulator, micro: Batch) -> None:
        """Compile both functions without running them.

        Ranks that meet in a collective for the first time have 30 s to find each other (gloo), which is less
        than their compile times may differ: compile, meet in a barrier, then run.
        """
        self.accumulate.lower(state.params, accumulator, micro).compile()
        self.apply.lower(state, accumulator, self.scalar(1.0)).compile()

    def empty(self, rows: int) -> Batch:
        """A micro-batch of padding; ``rows`` are this process's."""
        shape = (rows, self.config.seq_len)
        return self.put({name: np.zeros(shape, dtype) for name, dtype in self.fields.items()})

    def update(
        self, state: TrainState, accumulator: Accumulator, micros: Iterable[Batch], denominator: float
    ) -> tuple[TrainState, Accumulator, dict[str, float]]:
        """One whole update over ``micros``; waits for it and returns host metrics. Donates both arguments."""
        for micro in micros:
            accumulator = self.accumulate(state.params, accumulator, micro)
        state, accumulator, info = self.apply(state, accumulator, self.scalar(denominator))
        return state, accumulator, host_metrics(info, denominator)

    def scalar(self, value: float) -> jax.Array:
        """A committed float32 scalar on the mesh, so that no call sees an uncommitted argument."""
        where = replicated(self.mesh)
        return jax.make_array_from_callback((), where, lambda _: np.asarray(value, np.float32))

    def count(self, value: int) -> jax.Array:
        """A committed int32 scalar on the mesh."""
        where = replicated(self.mesh)
        return jax.make_array_from_callback((), where, lambda _: np.asarray(value, np.int32))


def host_metrics(info: Sums, denominator: float) -> dict[str, float]:
    """Floats of one update: ``summarize`` of the sums, and grad_norm, learning_rate, skipped."""
    values = {name: float(value) for name, value in jax.device_get(info).items()}
    extra = {name: values[name] for name in ("grad_norm", "learning_rate", "skipped")}
    return {**summarize(values, denominator), **extra}


def loss_sum(
    params: Tree, model: DecoderConfig, config: TrainerConfig, loss: LossConfig, mesh: Mesh, micro: Batch
) -> tuple[jax.Array, Sums]:
    """The loss sum of one micro-batch under ``params``, with metric sums."""
    logp, entropy = policy_logprobs(
        params,
        model,
        config,
        mesh,
        micro["tokens"],
        micro["positions"],
        micro["segments"],
        entropy_gradient=loss.entropy_coef != 0.0,
    )
    return policy_loss(loss, logp, entropy, micro)


def apply_update(
    state: TrainState,
    accumulator: Accumulator,
    denominator: jax.Array,
    config: TrainerConfig,
    model: DecoderConfig,
) -> tuple[TrainState, Accumulator, Sums]:
    """Divide the gradient sum by N, clip, AdamW.

    A gradient that is not finite leaves weights and moments as they are and is reported as ``skipped``; the
    update still counts. A denominator that is not finite is a rehearsal: it does not even count.
    """
    optimizer = make_optimizer(config.optimizer)
    grads = jax.tree.map(lambda g: g / denominator, accumulator.grads)
    norm = optax.tree_utils.tree_norm(grads)
    good = jnp.isfinite(norm)
    old_params = trained(state.params, model)
    updates, opt_state = optimizer.update(grads, state.opt_state, old_params)
    params = optax.apply_updates(old_params, updates)
    params, opt_state = jax.tree.map(
        lambda new, old: jnp.where(good, new, old), (params, opt_state), (old_params, state.opt_state)
    )
    params = combine(params, frozen(state.params, model))
    info = {
        **accumulator.sums,
        "grad_norm": norm,
        "learning_rate": jnp.asarray(learning_rate(config.optimizer)(state.updates), jnp.float32),
        "skipped": 1.0 - good.astype(jnp.float32),
    }
    committed = jnp.isfinite(denominator).astype(jnp.int32)
    new_state = TrainState(params, opt_state, state.updates + committed, state.rng)
    zeroed = Accumulator(jax.tree.map(jnp.zeros_like, accumulator.grads), zero_sums())
    return new_state, zeroed, info


def build_step(model: DecoderConfig, config: TrainerConfig, loss: LossConfig, mesh: Mesh) -> Step:
    """Compile-ready functions; each compiles once, on its first call."""
    params = param_shardings(model, mesh)
    scalar, rows = replicated(mesh), batch_sharding(mesh)
    state = train_state.shardings(model, config, mesh)
    sums: Any = dict.fromkeys(METRICS, scalar)
    accumulator = Accumulator(trained(params, model), sums)
    info = {**sums, **dict.fromkeys(("grad_norm", "learning_rate", "skipped"), scalar)}

    def accumulate(p: Tree, acc: Accumulator, micro: Batch) -> Accumulator:
        rest = frozen(p, model)

        def objective(q: Tree) -> tuple[jax.Array, Sums]:
            return loss_sum(combine(q, rest), model, config, loss, mesh, micro)

        (_, new), grads = jax.value_and_grad(objective, has_aux=True)(trained(p, model))
        added: Accumulator = jax.tree.map(jnp.add, acc, Accumulator(grads, new))
        return added

    def logprobs(p: Tree, micro: Batch) -> jax.Array:
        return policy_logprobs(
            p, model, config, mesh, micro["tokens"], micro["positions"], micro["segments"]
        )[0]

    def zeros() -> Accumulator:
        grads = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), trained_shapes(model))
        return Accumulator(grads, zero_sums())

    return Step(
        mesh,
        model,
        config,
        loss,
        jax.jit(accumulate, donate_argnums=(1,), out_shardings=accumulator),
        jax.jit(
            lambda s, a, n: apply_update(s, a, n, config, model),
            donate_argnums=(0, 1),
            out_shardings=(state, accumulator, info),
        ),
        jax.jit(logprobs, out_shardings=rows),
        jax.jit(zeros, out_shardings=accumulator),
    )
