"""Which part of the trainer tree is trained: all of it, or with LoRA the adapters; the rest is frozen.

Gradients, optimizer moments and the accumulator exist for the trained part alone.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
from jax.sharding import Mesh

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, is_trained, trainer_shapes
from jaxrl_sync.trainer.axes import Tree, param_shardings
from jaxrl_sync.trainer.config import TrainerConfig
from jaxrl_sync.trainer.model import init_params


def trained(tree: Tree, model: DecoderConfig) -> Tree:
    """The trained leaves of a tree of the trainer's structure, as nested dictionaries."""
    return tree if model.lora is None else _select(tree, lambda path: is_trained(path, model))


def frozen(tree: Tree, model: DecoderConfig) -> Tree:
    """The other leaves; empty without LoRA."""
    return {} if model.lora is None else _select(tree, lambda path: not is_trained(path, model))


def combine(a: Tree, b: Tree) -> Tree:
    """The tree of two whose leaves are disjoint: ``combine(trained(t), frozen(t))`` is ``t``."""
    if not b:
        return a
    whole = dict(a)
    for name, part in b.items():
        whole[name] = combine(a[name], part) if name in a else part
    return whole


def trained_shapes(model: DecoderConfig) -> Tree:
    """The trained part as ``jax.ShapeDtypeStruct`` leaves."""
    return trained(trainer_shapes(model), model)


def with_fresh_adapters(
    base: Tree, model: DecoderConfig, config: TrainerConfig, mesh: Mesh, seed: int
) -> Tree:
    """``base`` (the frozen part, on the mesh) with adapters as a fresh model of that seed has them."""
    where = trained(param_shardings(model, mesh), model)
    make = jax.jit(
        lambda s: trained(init_params(model, config.init_std, jax.random.key(s)), model), out_shardings=where
    )
    return combine(make(seed), base)


def _select(tree: Tree, wanted: Callable[[str], bool], prefix: str = "") -> Tree:
    found: Tree = {}
    for name, part in tree.items():
        path = f"{prefix}{name}"
        if not isinstance(part, dict):
            if wanted(path):
                found[name] = part
        elif inner := _select(part, wanted, f"{path}/"):
            found[name] = inner
    return found
