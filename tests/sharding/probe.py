"""The element-id probe: runs a conversion on arrays that hold each element's own number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sync.sharding import Correspondence
from jaxrl_sync.sharding.layout import dtype_of

Ids = dict[str, np.ndarray[Any, np.dtype[np.int32]]]


def ids_of(shapes: dict[str, tuple[int, ...]]) -> Ids:
    """Path -> int32 array of distinct positive numbers."""
    found, at = {}, 1
    for path, shape in shapes.items():
        size = int(np.prod(shape))
        found[path] = np.arange(at, at + size, dtype=np.int32).reshape(shape)
        at += size
    return found


def probed(convert: Callable[[Any], Any], ids: Ids, op_by_op: bool = False) -> dict[str, Any]:
    """What the function makes of the ids; compiled without optimisation, which is faster here.

    ``op_by_op``: each operation on its own, which is what the program means. jaxlib 0.10.2 compiles some
    chains of overlapping slice updates wrongly (seed 59546 of `programs`; 0.12.0.1 does not), so a test
    that finds a difference asks again this way.
    """
    compiled = jax.jit(convert, compiler_options={"xla_backend_optimization_level": 0})
    run = convert if op_by_op else compiled
    return {k: np.asarray(v) for k, v in run({k: jnp.asarray(v) for k, v in ids.items()}).items()}


def agreed(corr: Correspondence, convert: Callable[[Any], Any], ids: Ids) -> dict[str, Any]:
    """Asserts that correspondence and probe agree, and returns what they agree on."""
    want = {path: predicted(corr, path, ids) for path in corr.tensors}
    found = probed(convert, ids)
    if any(not np.array_equal(want[path], found[path]) for path in want):
        found = probed(convert, ids, op_by_op=True)
    for path in want:
        assert np.array_equal(want[path], found[path]), path
    return found


def predicted(corr: Correspondence, path: str, ids: Ids) -> Any:
    """The same from the correspondence alone; asserts that each element is named exactly once."""
    tensor = corr.tensors[path]
    flat = np.zeros(int(np.prod(tensor.shape)), np.int64)
    named = np.zeros(flat.shape, np.int64)
    for f in tensor.fragments:
        at, of = np.array(f.start), np.array(f.offset)
        for a in f.axes:
            at = at[..., None] + np.arange(a.size) * a.stride
            of = of[..., None] + np.arange(a.size) * a.step
        leaf = corr.leaves[f.source]
        assert leaf.kind != "computed", f"{path} is computed by {leaf.reason}"
        values = (
            np.frombuffer(leaf.values, dtype_of(leaf.dtype)) if leaf.kind == "constant" else ids[leaf.path]
        )
        for dtype in leaf.casts:
            values = values.astype(dtype)  # small numbers, which every dtype of the programs holds
        flat[at.ravel()] = np.broadcast_to(values.ravel()[of], at.shape).ravel()
        np.add.at(named, at.ravel(), 1)
    assert (named == 1).all(), f"{path}: elements named {sorted(set(named.tolist()))} times"
    return flat.reshape(tensor.shape)
