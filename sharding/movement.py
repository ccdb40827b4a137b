"""What each movement primitive of jax does to abstract values: a table from primitive name to rule.

A rule gets the interpreter, the equation's params, its operands (`Value`s, and `Known`s where
`STATIC_OPERANDS` says so) and the avals of its outputs; it returns the outputs, or None if it can't follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from jaxrl_sync.sharding import values as v
from jaxrl_sync.sharding.fragments import coalesce
from jaxrl_sync.sharding.gathers import gather, scatter
from jaxrl_sync.sharding.known import KNOWN_LIMIT, Known
from jaxrl_sync.sharding.values import Value

if TYPE_CHECKING:
    from jaxrl_sync.sharding.interpret import Interpreter

Params = dict[str, Any]
Rule = Callable[["Interpreter", Params, list[Any], Sequence[Any]], list[Value] | None]


def _same(_: Interpreter, __: Params, args: list[Any], outs: Sequence[Any]) -> list[Value]:
    return args[: len(outs)]


def _reshape(_: Interpreter, params: Params, args: list[Any], outs: Sequence[Any]) -> list[Value]:
    value = args[0]
    if params.get("dimensions") is not None:
        value = v.transpose(value, params["dimensions"])
    return [v.reshape(value, tuple(outs[0].shape))]


def _to_shape(_: Interpreter, __: Params, args: list[Any], outs: Sequence[Any]) -> list[Value]:
    return [v.reshape(args[0], tuple(outs[0].shape))]


def _transpose(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.transpose(args[0], params["permutation"])]


def _broadcast(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.broadcast_in_dim(args[0], tuple(params["shape"]), params["broadcast_dimensions"])]


def _slice(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.slice_box(args[0], params["start_indices"], params["limit_indices"], params["strides"])]


def _dynamic_slice(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    low = _clamped(args[1:], args[0].shape, params["slice_sizes"])
    high = [a + n for a, n in zip(low, params["slice_sizes"], strict=True)]
    return [v.slice_box(args[0], low, high)]


def _dynamic_update_slice(_: Interpreter, __: Params, args: list[Any], ___: Sequence[Any]) -> list[Value]:
    low = _clamped(args[2:], args[0].shape, args[1].shape)
    return [v.overwrite(args[0], low, args[1])]


def _clamped(starts: Sequence[Known], shape: Sequence[int], sizes: Sequence[int]) -> list[int]:
    raw = [int(s.array()) for s in starts]
    return [min(max(i, 0), n - m) for i, n, m in zip(raw, shape, sizes, strict=True)]


def _concatenate(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    joined = v.concatenate(args, params["dimension"])
    return [Value(joined.shape, joined.dtype, coalesce(joined.fragments))]


def _stack(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.stack(args, params["axis"])]


def _tile(_: Interpreter, params: Params, args: list[Any], outs: Sequence[Any]) -> list[Value]:
    value, reps = args[0], params["reps"]
    wide = tuple(n for r, s in zip(reps, value.shape, strict=True) for n in (r, s))
    dims = range(1, len(wide), 2)
    return [v.reshape(v.broadcast_in_dim(value, wide, dims), tuple(outs[0].shape))]


def _split(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    parts, at = [], 0
    for size in params["sizes"]:
        parts.append(v.slice_dim(args[0], params["axis"], at, at + int(size)))
        at += int(size)
    return parts


def _unstack(_: Interpreter, params: Params, args: list[Any], outs: Sequence[Any]) -> list[Value]:
    axis = params["axis"]
    rows = [v.slice_dim(args[0], axis, i, i + 1) for i in range(len(outs))]
    return [v.reshape(r, tuple(o.shape)) for r, o in zip(rows, outs, strict=True)]


def _pad(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.pad(args[0], args[1], params["padding_config"])]


def _rev(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    return [v.reverse(args[0], params["dimensions"])]


def _gather(run: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value]:
    fill = run.value(Known.of(_fill_value(params.get("fill_value"), args[0].dtype)))
    return [gather(args[0], args[1].array(), fill, params)]


def _fill_value(given: Any, dtype: np.dtype[Any]) -> Any:
    """What lax.gather puts where an index is outside: NaN, the smallest or largest integer, True."""
    if given is not None:
        return np.asarray(given, dtype)
    if jax.numpy.issubdtype(dtype, jax.numpy.integer):  # int4 among them, which are none to numpy
        ends = jax.numpy.iinfo(dtype)
        signed = jax.numpy.issubdtype(dtype, jax.numpy.signedinteger)
        return np.asarray(ends.min if signed else ends.max, dtype)
    return np.asarray(True if dtype.kind == "b" else np.nan, dtype)


def _scatter(_: Interpreter, params: Params, args: list[Any], __: Sequence[Any]) -> list[Value] | None:
    if params.get("update_jaxpr") is not None:  # `apply` of jax.numpy: a function of what is there
        return None
    return [scatter(args[0], args[1].array(), args[2], params)]


def _select(run: Interpreter, _: Params, args: list[Any], __: Sequence[Any]) -> list[Value] | None:
    which, cases = args[0], args[1:]
    if isinstance(which, Value):
        return None
    shape = cases[0].shape
    if which.shape != shape:
        return [cases[int(which.array())]]
    small = np.asarray(which.small).astype(np.int64)
    if small.size > KNOWN_LIMIT:
        return None
    boxes = []
    for case in range(len(cases)):
        for low, high, inside in v.select_boxes(small == case):
            if inside:
                full = [
                    (0, n) if m == 1 else (a, b)
                    for a, b, m, n in zip(low, high, small.shape, shape, strict=True)
                ]
                boxes.append((tuple(a for a, _ in full), tuple(b for _, b in full), case))
    return [v.select(boxes, cases)] if math.prod(shape) else [cases[0]]


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "squeeze": _to_shape,
    "expand_dims": _to_shape,
    "transpose": _transpose,
    "broadcast_in_dim": _broadcast,
    "slice": _slice,
    "dynamic_slice": _dynamic_slice,
    "dynamic_update_slice": _dynamic_update_slice,
    "concatenate": _concatenate,
    "stack": _stack,
    "unstack": _unstack,
    "tile": _tile,
    "split": _split,
    "pad": _pad,
    "rev": _rev,
    "gather": _gather,
    "scatter": _scatter,
    "select_n": _select,
    **{
        name: _same
        for name in "copy copy_p optimization_barrier sharding_constraint reshard mesh_cast device_put name "
        "pvary layout_constraint stop_gradient".split()
    },
}

STATIC_OPERANDS: dict[str, Callable[[int], Sequence[int]]] = {
    "dynamic_slice": lambda n: range(1, n),
    "dynamic_update_slice": lambda n: range(2, n),
    "gather": lambda n: (1,),
    "scatter": lambda n: (1,),
    "select_n": lambda n: (0,),
}
