"""The trainer's weights as an engine's, inside one JAX world: what a colocated engine installs.

A target tensor that is a trainer tensor as it is, in the same boxes on the same devices, *is* that tensor:
the engine's array stands over the trainer's buffers and nothing is copied. The rest goes through the mapper:
inside one process by ``reshard``, in a world of several by one jitted conversion onto the target's shardings.
Arrays that share the trainer's buffers die with its next update, which donates them: the engine sleeps first.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax

from jaxrl_sync.sharding import Layout, plan, reshard, trace
from jaxrl_sync.sharding.correspondence import Correspondence, TensorMap
from jaxrl_sync.sharding.paths import leaves_by_path, nested

Convert = Callable[[Any], Any]


@dataclasses.dataclass(frozen=True)
class Installed:
    """An engine tree and what it cost: bytes of this process's shards, those written and those shared."""

    tree: Any
    copied_bytes: int
    shared_bytes: int


class InProcess:
    """Makes engine trees of trainer trees. ``take`` is collective over the processes of the mesh.

    ``source``: a trainer tree (arrays, or ``jax.ShapeDtypeStruct`` with shardings). ``target``: the engine's
    abstract tree on the same devices in the same order. Holds no weights; MappingError for trees that
    ``convert`` does not lead from one to the other.
    """

    def __init__(self, convert: Convert, source: Any, target: Any) -> None:
        self._targets = leaves_by_path(target, "target")
        found = trace(convert, source, Layout.of(target))
        self.shared = shared_tensors(found, leaves_by_path(source, "source"), self._targets)
        """Target path -> the trainer tensor that it is."""
        rest = {path: x for path, x in self._targets.items() if path not in self.shared}

        def remaining(tree: Any) -> Any:
            made = leaves_by_path(convert(tree), "converted")
            return nested({path: made[path] for path in rest})

        self._rest = tuple(rest)
        self._move: Callable[[Any], Any] | None = None
        if rest:
            self._move = self._mover(remaining, source, nested(rest))

    def take(self, tree: Any) -> Installed:
        """The engine tree of ``tree``, which is laid out as ``source`` was. Blocks until it is there."""
        leaves = leaves_by_path(tree, "trainer")
        made = {} if self._move is None else leaves_by_path(jax.block_until_ready(self._move(tree)))
        shared = {path: self._alias(leaves[name], path) for path, name in self.shared.items()}
        return Installed(nested({**made, **shared}), _local_bytes(made), _local_bytes(shared))

    def _alias(self, array: jax.Array, path: str) -> jax.Array:
        """The same buffers as an array with the target's sharding."""
        shards = [shard.data for shard in array.addressable_shards]
        sharding = self._targets[path].sharding
        return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)

    @staticmethod
    def _mover(remaining: Convert, source: Any, target: Any) -> Callable[[Any], Any]:
        if jax.process_count() > 1:
            where = jax.tree.map(lambda x: x.sharding, target)
            jitted: Callable[[Any], Any] = jax.jit(remaining, out_shardings=where)
            return jitted
        correspondence = trace(remaining, source, Layout.of(target))
        layout = Layout.of(target)
        moves = plan(correspondence.export_layout, layout, correspondence)
        kinds = leaves_by_path(target)

        def move(tree: Any) -> Any:
            made = leaves_by_path(reshard(tree, moves))
            return {path: _placed(x, kinds[path].sharding) for path, x in made.items()}

        return move


def _placed(array: jax.Array, sharding: jax.sharding.Sharding) -> jax.Array:
    """The same buffers under the target's own sharding: a plan knows boxes, not meshes."""
    shards = [shard.data for shard in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, sharding, shards)


def shared_tensors(
    correspondence: Correspondence, sources: dict[str, Any], targets: dict[str, Any]
) -> dict[str, str]:
    """Target path -> source path of the tensors that need no copy: same elements, dtype and boxes."""
    shared = {}
    for path, tensor in correspondence.tensors.items():
        name = _whole_param(correspondence, tensor)
        if name is not None and _boxes(sources[name]) == _boxes(targets[path]):
            shared[path] = name
    return shared


def _whole_param(correspondence: Correspondence, tensor: TensorMap) -> str | None:
    """The parameter that a target tensor is, element for element; None where it is anything else."""
    if len(tensor.fragments) != 1:
        return None
    (fragment,) = tensor.fragments
    leaf = correspondence.leaves[fragment.source]
    same = (
        leaf.kind == "param" and not leaf.casts and (leaf.shape, leaf.dtype) == (tensor.shape, tensor.dtype)
    )
    in_place = fragment.offset == fragment.start == 0 and all(a.stride == a.step for a in fragment.axes)
    whole = fragment.num_elements == math.prod(tensor.shape)
    return leaf.path if same and in_place and whole else None


def _boxes(x: Any) -> dict[Any, Any]:
    """Device -> what it holds of an array, or of the array that an abstract leaf stands for."""
    shape = tuple(x.shape)
    boxes = x.sharding.devices_indices_map(shape)
    return {d: tuple(s.indices(n) for s, n in zip(index, shape, strict=True)) for d, index in boxes.items()}


def _local_bytes(leaves: dict[str, Any]) -> int:
    return sum(shard.data.nbytes for x in leaves.values() for shard in x.addressable_shards)
