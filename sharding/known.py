"""Constants of a traced program: evaluated at once, with repeated dimensions kept at size 1."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import normal, row_major
from jaxrl_sync.sharding.values import Value

KNOWN_LIMIT = 1 << 22
"""Constants of more elements are not written out; as blocks of repeated rows they can still be moved."""

ELEMENTWISE = frozenset(
    "add sub mul div rem max min neg sign floor ceil round abs lt le gt ge eq ne and or not xor select_n "
    "convert_element_type exp log sin cos tanh sqrt rsqrt pow integer_pow is_finite clamp "
    "shift_left shift_right_logical shift_right_arithmetic copy".split()
)

_NUMPY: dict[str, Any] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "max": np.maximum,
    "min": np.minimum,
}


@dataclasses.dataclass(frozen=True)
class Known:
    """An array of ``shape`` that is ``small`` broadcast: same rank, repeated dimensions of size 1."""

    small: Any
    shape: tuple[int, ...]

    @classmethod
    def of(cls, array: Any) -> Known:
        """A constant as it is; arrays of jax become numpy, key arrays stay what they are."""
        if not isinstance(array, np.ndarray):
            try:
                array = np.asarray(array)
            except TypeError:  # a random key has no numpy form
                pass
        return cls(array, tuple(array.shape))

    @property
    def dtype(self) -> np.dtype[Any]:
        """The element type."""
        dtype = self.small.dtype
        if not isinstance(dtype, np.dtype):
            raise MappingError(f"a constant of type {dtype} can't be a part of the weights")
        return dtype

    def array(self) -> Any:
        """Written out, as a read-only view; keys, which have no numpy form, as they are."""
        if not isinstance(self.small.dtype, np.dtype):
            return self.small
        return np.broadcast_to(np.asarray(self.small), self.shape)

    def cast(self, dtype: np.dtype[Any]) -> Known:
        """Converted as jax converts."""
        return Known(np.asarray(jax.numpy.asarray(self.small).astype(dtype)), self.shape)

    def broadcast(self, shape: Sequence[int], dims: Sequence[int]) -> Known:
        """lax.broadcast_in_dim without writing anything out."""
        small = [1] * len(shape)
        for d, n in zip(dims, self.small.shape, strict=True):
            small[d] = n
        return Known(np.asarray(self.small).reshape(small), tuple(shape))

    def spread(self, source: int) -> Value:
        """The constant as a value over a source that holds ``small``."""
        if math.prod(self.shape) == 0:
            return Value(self.shape, self.dtype, ())
        strides, steps = row_major(self.shape), row_major(self.small.shape)
        axes = [
            (n, stride, step if m > 1 else 0)
            for n, m, stride, step in zip(self.shape, self.small.shape, strides, steps, strict=True)
        ]
        return Value(self.shape, self.dtype, (normal(source, 0, 0, axes),))


def bind(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Runs one equation on real or traced values, as jax's own evaluation of a jaxpr does."""
    given = eqn.primitive.get_bind_params(eqn.params)
    functions, params = given if isinstance(given, tuple) else ((), given)
    outs = eqn.primitive.bind(*functions, *operands, **params)
    return list(outs) if eqn.primitive.multiple_results else [outs]


def bind_in_context(eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """`bind` where the program had set a mesh: its shardings over Explicit axes need the same one."""
    with eqn.ctx.manager:
        return bind(eqn, operands)


def evaluate_known(eqn: Any, args: list[Known]) -> list[Known]:
    """The outputs of an operation on constants. Elementwise ones run on the unrepeated parts only."""
    name = eqn.primitive.name
    shapes = [tuple(v.aval.shape) for v in eqn.outvars]
    if name in ELEMENTWISE:
        operands = _aligned([a for a in args], shapes[0])
    else:
        operands = [a.small if a.small.shape == a.shape else a.array() for a in args]
    simple = _NUMPY.get(name)
    if simple is not None and all(isinstance(x, np.ndarray) and x.dtype.kind in "biu" for x in operands):
        with np.errstate(over="ignore"):
            return [Known(np.asarray(simple(*operands)), shapes[0])]
    if name == "select_n" and all(isinstance(x, np.ndarray) for x in operands) and len(operands) == 3:
        return [Known(np.where(np.asarray(operands[0]).astype(bool), operands[2], operands[1]), shapes[0])]
    outs = bind(eqn, [jax.numpy.asarray(x) for x in operands])
    if name in ELEMENTWISE:
        return [Known(np.asarray(o), s) for o, s in zip(outs, shapes, strict=True)]
    return [Known.of(o) for o in outs]


def _aligned(args: list[Known], shape: tuple[int, ...]) -> list[Any]:
    """The small parts, brought to one common small shape; scalar operands stay scalars."""
    ranked = [a for a in args if len(a.shape) == len(shape)]
    common = tuple(max((a.small.shape[d] for a in ranked), default=1) for d in range(len(shape)))
    if 0 in shape:
        common = shape
    return [
        np.broadcast_to(a.small, common)
        if len(a.shape) == len(shape) and a.small.shape != common
        else a.small
        for a in args
    ]
