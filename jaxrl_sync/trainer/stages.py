"""Stages: passes over ready micro-batches that add named per-token fields before the update.

Both stages of today are log-probs in the wire convention: ``proximal`` under the weights at the start of
the update, ``reference`` under frozen ones. A stage has a mesh of its own, which may be the trainer's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer.axes import Tree, batch_sharding, param_shardings
from jaxrl_sync.trainer.config import LossConfig, TrainerConfig
from jaxrl_sync.trainer.logprobs import policy_logprobs
from jaxrl_sync.trainer.losses import Batch

INPUTS = ("tokens", "positions", "segments")


def copy_params(params: Tree, shardings: Tree) -> Tree:
    """``params`` in fresh buffers: a later update may donate the originals."""
    copy = jax.jit(lambda tree: tree, out_shardings=jax.tree.map(lambda x: x.sharding, params))(params)
    tree: Tree = jax.device_put(copy, shardings)
    return tree


class LogprobStage:
    """Adds field ``<name>_logprobs``. Owns its frozen weights, if it was given any."""

    def __init__(
        self, name: str, model: DecoderConfig, config: TrainerConfig, mesh: Mesh, frozen: Tree | None = None
    ) -> None:
        self.name, self.field, self.mesh = name, f"{name}_logprobs", mesh
        self._params = param_shardings(model, mesh)
        self._rows = batch_sharding(mesh)
        self.frozen = None if frozen is None else copy_params(frozen, self._params)

        def logprobs(params: Tree, inputs: Batch) -> jax.Array:
            return policy_logprobs(
                params, model, config, mesh, inputs["tokens"], inputs["positions"], inputs["segments"]
            )[0]

        self.compiled: Any = jax.jit(logprobs, out_shardings=self._rows)

    def run(self, live: Tree, micros: Sequence[Batch]) -> list[Batch]:
        """``micros`` with the field added, on the mesh that they are on. Dispatches; does not wait."""
        params = live if self.frozen is None else self.frozen
        if self.frozen is None and self._foreign(micros[0]):
            params = copy_params(live, self._params)
        return [{**micro, self.field: self._field(params, micro)} for micro in micros]

    def compile(self, live: Tree, micro: Batch) -> None:
        """Compile without running, where the stage runs on the mesh of ``micro``."""
        if not self._foreign(micro):
            params = live if self.frozen is None else self.frozen
            self.compiled.lower(params, {name: micro[name] for name in INPUTS}).compile()

    def _foreign(self, micro: Batch) -> bool:
        return micro["tokens"].sharding.device_set != self._rows.device_set

    def _field(self, params: Tree, micro: Batch) -> jax.Array:
        inputs = {name: micro[name] for name in INPUTS}
        if not self._foreign(micro):
            added: jax.Array = self.compiled(params, inputs)
            return added
        away = self.compiled(params, jax.device_put(inputs, self._rows))
        home: jax.Array = jax.device_put(away, micro["tokens"].sharding)
        return home


def build_stages(
    model: DecoderConfig, config: TrainerConfig, loss: LossConfig, mesh: Mesh, reference: Tree | None
) -> list[LogprobStage]:
    """The stages that ``loss`` asks for; ``reference`` is copied where the loss has a KL term."""
    stages = []
    if loss.needs_proximal:
        stages.append(LogprobStage("proximal", model, config, mesh))
    if loss.needs_reference:
        if reference is None:
            raise ValueError(f"loss.kl_coef={loss.kl_coef} needs reference weights, found none")
        stages.append(LogprobStage("reference", model, config, mesh, frozen=reference))
    return stages
