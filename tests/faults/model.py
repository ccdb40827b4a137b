"""The weights of the fault tests: 2 million parameters whose bits follow from (lineage, number) alone.

A version is the same random masters with some mantissa bits flipped: every element of every version differs
from the one before, in any dtype of 8 bits of mantissa or more, and a test knows them without a trainer.
Where only one element in so many (``every``) is flipped, the others are the same in all versions.
"""

from __future__ import annotations

import functools
import hashlib
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.sharding.presets import qwen3
from tests.transfer.models import AXES, mesh

CONFIG = qwen3.DecoderConfig(
    vocab_size=8192, num_layers=4, d_model=128, num_heads=4, num_kv_heads=4, head_dim=32, d_ff=512
)
Box = tuple[tuple[int, int], ...]
Boxes = dict[str, list[Box]]
Array = np.ndarray[Any, Any]


def mask(lineage: str, number: int) -> np.uint32:
    """The mantissa bits that a version flips in the masters; two numbers in a row never share them."""
    return np.uint32(((zlib.crc32(lineage.encode()) + number * 37) % 127 + 1) << 16)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=2)
def flip(params: Any, bits: Any, every: int = 1) -> Any:
    """One optimizer step of these tests; its argument is donated."""

    def one(x: jax.Array) -> jax.Array:
        column = jax.lax.broadcasted_iota(jnp.uint32, x.shape, x.ndim - 1)
        mine = jnp.where(column % every == 0, jnp.uint32(bits), jnp.uint32(0))
        return jax.lax.bitcast_convert_type(jax.lax.bitcast_convert_type(x, jnp.uint32) ^ mine, jnp.float32)

    return jax.tree.map(one, params)


def masters() -> dict[str, Array]:
    """Path -> fp32 values, the same in every process."""
    rng = np.random.default_rng(20)
    shapes = leaves_by_path(qwen3.trainer_shapes(CONFIG))
    return {p: rng.standard_normal(s.shape, dtype=np.float32) for p, s in sorted(shapes.items())}


def trainer_params() -> Any:
    """The masters over 4 devices of a world, fsdp=2 x tp=2."""
    grid, values = mesh((2, 2), ("fsdp", "tp")), masters()

    def make(path: Any, leaf: Any) -> jax.Array:
        name = "/".join(p.key for p in path)
        spec: list[str | None] = []
        for axis, size in zip(qwen3.TRAINER_AXES[name], leaf.shape, strict=True):
            mapped = AXES.get(axis)
            spec.append(mapped if mapped not in spec and size % 2 == 0 else None)
        sharding = NamedSharding(grid, PartitionSpec(*spec))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: values[name][index])

    return jax.tree_util.tree_map_with_path(make, qwen3.trainer_shapes(CONFIG))


def convert_for(tp: int) -> Any:
    """The conversion to a replica with that many tensor-parallel shards, to bf16."""
    return lambda params: qwen3.convert(params, CONFIG, tp, jnp.bfloat16)


class Expected:
    """What every engine must hold, computed in the test's own process and kept per version and mesh."""

    def __init__(self, every: int = 1) -> None:
        self._every = every
        self._masters = masters()
        self._trees: dict[tuple[str, int, int], dict[str, Array]] = {}

    def tree(self, lineage: str, number: int, tp: int) -> dict[str, Array]:
        """Path -> global values of the engine's tree."""
        key = (lineage, number, tp)
        if key not in self._trees:
            bits = mask(lineage, number)
            flipped = {p: _flipped(v, bits, self._every) for p, v in self._masters.items()}
            tree = jax.jit(convert_for(tp))(_nested(flipped))
            self._trees[key] = {p: np.asarray(x) for p, x in leaves_by_path(tree).items()}
        return self._trees[key]

    def digest(self, lineage: str, number: int, tp: int, boxes: Boxes) -> str:
        """`digest` of the boxes that a rank says it holds."""
        tree = self.tree(lineage, number, tp)
        return digest(
            (path, box, tree[path][tuple(slice(a, b) for a, b in box)])
            for path, held in sorted(boxes.items())
            for box in held
        )

    def covers(self, tp: int, ranks: Iterable[Boxes]) -> bool:
        """Whether the boxes of all ranks of a replica together are the whole tree."""
        seen: dict[str, Array] = {p: np.zeros(x.shape, bool) for p, x in self.tree("", 0, tp).items()}
        for boxes in ranks:
            for path, held in boxes.items():
                for box in held:
                    seen[path][tuple(slice(a, b) for a, b in box)] = True
        return all(bool(x.all()) for x in seen.values())


def _flipped(values: Array, bits: np.uint32, every: int) -> Array:
    found = values.view(np.uint32).copy()
    found[..., ::every] ^= bits
    return found.view(np.float32)


def _nested(flat: Mapping[str, Array]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for path, value in flat.items():
        *folders, name = path.split("/")
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = value
    return tree


def shards(tree: Any) -> list[tuple[str, Box, Array]]:
    """(path, box, values) of what this process holds, each box once, in order; views, no copies."""
    found: dict[tuple[str, Box], Array] = {}
    for path, leaf in leaves_by_path(tree).items():
        for shard in leaf.addressable_shards:
            box = tuple(s.indices(n)[:2] for s, n in zip(shard.index, leaf.shape, strict=True))
            found.setdefault((path, box), np.asarray(shard.data))
    return [(path, box, found[path, box]) for path, box in sorted(found)]


def boxes_of(tree: Any) -> Boxes:
    """The boxes that this process holds (of abstract arrays with shardings, too)."""
    found: Boxes = {}
    for path, leaf in leaves_by_path(tree).items():
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        every = {tuple(s.indices(n)[:2] for s, n in zip(i, leaf.shape, strict=True)) for i in indices}
        found[path] = sorted(every)
    return found


def digest(parts: Iterable[tuple[str, Box, Array]]) -> str:
    """sha256 over paths, boxes and bits, in this order."""
    total = hashlib.sha256()
    for path, box, values in parts:
        total.update(f"{path}{[list(x) for x in box]}".encode())
        total.update(np.ascontiguousarray(values).tobytes())
    return total.hexdigest()
