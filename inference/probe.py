"""Version stamps inside the weights: proof that no forward pass mixes tensors of two versions.

With ``EngineConfig.version_probe`` the engine tree carries one int32 ``version_stamp`` of shape ``[1]``
beside the tensors of every layer and one at the top (embedding, final norm, head). They are tensors like all
others: they are exported, packed, sent, verified and swapped with the rest. Every prefill and decode step
reduces them to a least and a greatest stamp, in the same jitted function that computes the tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig

Tree = dict[str, Any]
STAMP = "version_stamp"


def span(params: Tree, cfg: DecoderConfig, result: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Least and greatest stamp of an engine tree, int32 scalars; (0, 0) for a tree without stamps.

    The stamps are read twice, freely and once ``result`` (of the forward pass) exists, so that weights
    overwritten under a running pass show too. The barrier also keeps the read inside a decode loop.
    """
    if STAMP not in params:
        return jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32)
    stamps = [params[STAMP], *(params["layers"][str(i)][STAMP] for i in range(cfg.num_layers))]
    late, _ = jax.lax.optimization_barrier((stamps, result))
    everything = jnp.concatenate([*stamps, *late])
    return jnp.min(everything), jnp.max(everything)


def add_source_stamp(trainer_tree: Tree, cfg: DecoderConfig, number: int | jax.Array) -> Tree:
    """The trainer's tree with its stamps: ``version_stamp`` int32 ``[num_layers + 1]``, all ``number``.

    On the mesh of the tree, replicated; every process of the mesh must make this call.
    """
    sharding = getattr(jax.tree.leaves(trainer_tree)[0], "sharding", None)
    whole = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None
    make = jax.jit(lambda n: jnp.full((cfg.num_layers + 1,), n, jnp.int32), out_shardings=whole)
    return trainer_tree | {STAMP: make(number)}


def source_shape(cfg: DecoderConfig) -> jax.ShapeDtypeStruct:
    """Abstract value of the trainer's stamp leaf."""
    return jax.ShapeDtypeStruct((cfg.num_layers + 1,), jnp.int32)


def stamped_convert(convert: Callable[[Tree], Tree]) -> Callable[[Tree], Tree]:
    """``convert`` extended to a source tree with a stamp leaf; the mapper can trace it."""

    def converted(params: Tree) -> Tree:
        stamp = params[STAMP]
        tree = convert({name: leaf for name, leaf in params.items() if name != STAMP})
        layers = {name: layer | {STAMP: stamp[int(name) + 1][None]} for name, layer in tree["layers"].items()}
        return tree | {"layers": layers, STAMP: stamp[0][None]}

    return converted


def stamped_abstract(tree: Tree, mesh: Mesh) -> Tree:
    """An abstract engine tree (``qwen3.engine_abstract``) with its stamps, replicated over ``mesh``."""
    leaf = jax.ShapeDtypeStruct((1,), jnp.int32, sharding=NamedSharding(mesh, PartitionSpec()))
    return with_leaf(tree, leaf)


def with_leaf(tree: Tree, leaf: Any) -> Tree:
    """An engine-shaped tree with ``leaf`` at every place of a stamp."""
    return tree | {"layers": {n: layer | {STAMP: leaf} for n, layer in tree["layers"].items()}, STAMP: leaf}
