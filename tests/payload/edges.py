"""An edge between two small layouts: strided copies, several widths, replicas; for chain and shadow."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_sync.sharding import Edge, Layout, SlotLayout, plan, trace

DTYPES: dict[str, Any] = {
    "w": jnp.bfloat16,
    "h": jnp.float16,
    "f": jnp.float32,
    "q": jnp.float8_e4m3fn,
    "i": jnp.int8,
    "b": jnp.bool_,
}
SHAPE = (24, 40)

Tree = dict[str, npt.NDArray[Any]]


def _mesh(shape: tuple[int, int]) -> jax.sharding.Mesh:
    return jax.make_mesh(shape, ("x", "y"), axis_types=(AxisType.Auto,) * 2)


def layouts() -> tuple[Layout, Layout]:
    """Source rows over 4, columns over 2; target the other way, with one tensor replicated."""
    mesh = _mesh((4, 2))
    source = {
        k: jax.ShapeDtypeStruct(SHAPE, d, sharding=NamedSharding(mesh, P("x", "y")))
        for k, d in DTYPES.items()
    }
    target = {
        k: jax.ShapeDtypeStruct(
            SHAPE, d, sharding=NamedSharding(mesh, P("y", None) if k == "f" else P("y", "x"))
        )
        for k, d in DTYPES.items()
    }
    return Layout.of(source), Layout.of(target)


def edge() -> tuple[Edge, SlotLayout, Layout, Layout]:
    """The only edge between the two (one process), the receiver's slot, both layouts."""
    source, target = layouts()
    correspondence = trace(lambda tree: tree, source, target)
    made = plan(correspondence.export_layout, target, correspondence)
    (found,) = made.for_rank(0, side="source").edges
    return found, SlotLayout.of(target, 0), source, target


def shards(tree: Tree, layout: Layout) -> dict[tuple[int, str], npt.NDArray[Any]]:
    """Every shard of the tree as the layout says, C-contiguous."""
    found = {}
    for path, tensor in layout.items():
        for shard in tensor.shards:
            box = tuple(slice(a, b) for a, b in zip(shard.box.start, shard.box.stop, strict=True))
            found[shard.device, path] = np.ascontiguousarray(tree[path][box])
    return found


class Memory:
    """Slot memory and the views over it, with a generation as the real ones have."""

    _numbers = itertools.count(1)

    def __init__(self, layout: SlotLayout) -> None:
        self.data = memoryview(bytearray(layout.total_bytes))
        self.memory = self
        self.views: Any = layout.views(self.data)
        self.generation = next(self._numbers)


def random_tree(rng: np.random.Generator) -> Tree:
    """Any bits at all, NaN payloads and signed zeros among them; booleans stay 0 and 1."""
    tree = {}
    for name, dtype in DTYPES.items():
        kind = np.dtype(dtype)
        if kind == np.bool_:
            tree[name] = rng.integers(0, 2, SHAPE).astype(np.bool_)
        else:
            tree[name] = rng.integers(0, 256, (*SHAPE, kind.itemsize), np.uint8).view(kind)[..., 0]
    return tree


def stepped(tree: Tree, density: float, rng: np.random.Generator) -> Tree:
    """Another tree: about the share ``density`` of the elements with other bits."""
    fresh = random_tree(rng)
    return {k: np.where(rng.random(SHAPE) < density, fresh[k], v).astype(v.dtype) for k, v in tree.items()}


def same_bits(a: Tree, b: Tree) -> bool:
    """Whether two trees agree in every bit."""
    return all(a[k].tobytes() == b[k].tobytes() for k in a)
