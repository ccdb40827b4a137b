"""Inside jit: arrays as flat unsigned words, and strided blocks of them read and written.

Words, because floats do not survive every compiler: a bf16 scatter of jax 0.10 changes the bits of NaNs. A
block is a box of the flat array seen in a mixed radix whose digits are the block's strides, so it is a gather
or scatter of one row, which compilers turn into a slice; what does not nest that way goes by computed
indices. Starts are operands, not constants: blocks that differ only in where they lie share one program.

Not by ``lax.dynamic_slice`` itself: in a fusion that also holds a slice made by the compiler, XLA (jaxlib
0.10.2 and 0.12.0.1, CPU) takes "dynamic_slice.1" and "dynamic-slice.1" for one, and reads wrong elements.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jaxrl_sync.sharding.layout import is_packed

INDEX_LIMIT = (1 << 31) - 1
"""Positions that an index of a jitted program can name without 64-bit types."""


def words_per_element(dtype: np.dtype[Any]) -> int:
    """Words that one element takes: words are as wide as elements, but never wider than 4 bytes."""
    return max(1, dtype.itemsize // 4)


def to_words(x: jax.Array) -> jax.Array:
    """Bit for bit as a flat array of unsigned integers of 1, 2 or 4 bytes; in jit."""
    dtype = np.dtype(x.dtype)
    if dtype.kind == "b":
        return x.astype(np.uint8).reshape(-1)
    if dtype.kind == "c":
        x = jnp.stack([lax.real(x), lax.imag(x)], axis=-1)
    elif (narrow := _narrow(dtype)) is not None:
        return lax.bitcast_convert_type(x, narrow).astype(np.uint8).reshape(-1)
    word = np.dtype(f"u{min(4, np.dtype(x.dtype).itemsize)}")
    return lax.bitcast_convert_type(x, word).reshape(-1)


def from_words(words: jax.Array, shape: tuple[int, ...], dtype: np.dtype[Any]) -> jax.Array:
    """The array that `to_words` made these words of; in jit."""
    if dtype.kind == "b":
        return (words != 0).reshape(shape)
    if (narrow := _narrow(dtype)) is not None:
        return lax.bitcast_convert_type(words.astype(narrow).reshape(shape), dtype)
    if dtype.kind == "c":
        part = np.dtype(f"f{dtype.itemsize // 2}")
        pair = from_words(words, (*shape, 2), part)
        return lax.complex(pair[..., 0], pair[..., 1])
    tail = (2,) if dtype.itemsize == 8 else ()
    return lax.bitcast_convert_type(words.reshape(*shape, *tail), dtype)


def opaque(words: jax.Array, starts: jax.Array) -> jax.Array:
    """The same words, of which a compiler can't tell that they are parts of floats; in jit, for CPUs.

    LLVM turns a choice between words that come from, or become, floats of two bytes into one between floats,
    and without AVX-512 takes some of these through f32, which changes NaNs (jaxlib 0.10.2 and 0.12.0.1). So
    they are xored with the sign of a start: 0, which only the program's caller knows.
    """
    return words if starts.size == 0 else words ^ (starts[0] >> 31).astype(words.dtype)


def _narrow(dtype: np.dtype[Any]) -> Any:
    """The unsigned type as wide as one of less than a byte, or None."""
    if not is_packed(dtype):
        return None
    return jnp.dtype("uint2" if dtype.name.endswith("int2") else "uint4")


@dataclasses.dataclass(frozen=True)
class View:
    """A strided block of a flat array: everything but where it starts.

    ``size``: words of the flat array. ``shape``, ``strides``: of the block, in words; a stride may be
    negative or (to read) 0. ``digits``: the mixed radix in which the block is a box, most significant first,
    or None where it is no box; then ``base`` is a fixed offset that keeps indices small.
    """

    size: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    digits: tuple[int, ...] | None
    base: int = 0

    @property
    def num_words(self) -> int:
        """Words of the block."""
        return math.prod(self.shape)

    @property
    def num_starts(self) -> int:
        """Integers that say where it starts."""
        return 1 if self.digits is None else len(self.digits)

    @property
    def order(self) -> tuple[int, ...]:
        """Dimensions of the block that move, by descending stride."""
        return tuple(
            sorted((d for d, s in enumerate(self.strides) if s), key=lambda d: -abs(self.strides[d]))
        )

    @property
    def extents(self) -> tuple[int, ...]:
        """The box in the mixed radix."""
        return (*(self.shape[d] for d in self.order), 1)

    @property
    def flipped(self) -> tuple[int, ...]:
        """Places in ``order`` of dimensions that run backwards."""
        return tuple(i for i, d in enumerate(self.order) if self.strides[d] < 0)


Start = tuple[int, ...]


def views(
    size: int, offset: int, shape: Sequence[int], strides: Sequence[int], width: int
) -> list[tuple[View, Start]]:
    """A strided block in elements of ``width`` words as views of a flat array of ``size`` words.

    One, unless indices would not fit 32 bits: then it is cut along its outermost dimension.
    """
    axes = [(n, s * width) for n, s in zip(shape, strides, strict=True) if n > 1]
    if width > 1:
        axes.append((width, 1))
    return _views(size, offset * width, axes)


def _views(size: int, offset: int, axes: Sequence[tuple[int, int]]) -> list[tuple[View, Start]]:
    shape, strides = tuple(n for n, _ in axes), tuple(s for _, s in axes)
    low = offset + sum((n - 1) * s for n, s in axes if s < 0)
    live = sorted(((abs(s), n) for n, s in axes if s), reverse=True)
    borders = [size, *(s for s, _ in live), 1]
    digits = tuple(a // b for a, b in itertools.pairwise(borders))
    start, rest = [], low
    for border in borders[1:]:
        start.append(rest // border)
        rest %= border
    nests = all(a % b == 0 for a, b in itertools.pairwise(borders))
    if nests and all(i + n <= m for i, (_, n), m in zip(start, live, digits, strict=False)):
        if max(digits, default=0) <= INDEX_LIMIT:
            return [(View(size, shape, strides, digits), tuple(start))]
    if size <= INDEX_LIMIT:
        return [(View(size, shape, strides, None), (offset,))]
    if sum((n - 1) * s for s, n in live) < INDEX_LIMIT:
        return [(View(size, shape, strides, None, low), (offset - low,))]
    (n, s), inner = axes[0], list(axes[1:])  # the first, so that the pieces follow each other when packed
    half = n // 2
    parts = ((offset, half), (offset + half * s, n - half))
    return [v for at, m in parts for v in _views(size, at, [(m, s), *inner] if m > 1 else inner)]


def _indices(view: View, start: Sequence[Any]) -> jax.Array:
    where = start[0].astype(np.int32)
    for d, s in enumerate(view.strides):
        where = where + lax.broadcasted_iota(np.int32, view.shape, d) * np.int32(s)
    return jnp.broadcast_to(where, view.shape).reshape(-1)


def _window(flat: jax.Array, view: View) -> jax.Array:
    """The part that indices count from; all of it where 32 bits are enough."""
    if view.size <= INDEX_LIMIT:
        return flat
    span = sum((n - 1) * abs(s) for n, s in zip(view.shape, view.strides, strict=True)) + 1
    return lax.slice(flat, (view.base,), (view.base + span,))


def read(flat: jax.Array, view: View, start: Sequence[Any]) -> jax.Array:
    """The block's words in row-major order of its shape; in jit. ``start``: `View.num_starts` int32s."""
    if view.digits is None:
        return _window(flat, view).at[_indices(view, start)].get(mode="promise_in_bounds")
    every = tuple(range(len(view.digits)))
    numbers = lax.GatherDimensionNumbers(every, (), every)
    box = lax.gather(
        flat.reshape(view.digits), jnp.stack(list(start)), numbers, view.extents, mode="promise_in_bounds"
    )
    order = view.order
    box = lax.rev(box.reshape(view.extents[:-1]), view.flipped)
    dims = sorted(order)
    box = lax.transpose(box, [order.index(d) for d in dims])
    return lax.broadcast_in_dim(box, view.shape, dims).reshape(-1)


def write(flat: jax.Array, view: View, start: Sequence[Any], block: jax.Array) -> jax.Array:
    """``flat`` with the block's words, in row-major order, in their places; in jit."""
    sure: Any = {"mode": "promise_in_bounds", "unique_indices": True, "indices_are_sorted": True}
    if view.digits is None:
        where = _indices(view, start)
        window = _window(flat, view).at[where].set(block, mode="promise_in_bounds", unique_indices=True)
        return window if view.size <= INDEX_LIMIT else _put_back(flat, window, view.base)
    box = lax.transpose(block.reshape(view.shape), view.order)
    box = lax.rev(box, view.flipped).reshape(view.extents)
    every = tuple(range(len(view.digits)))
    numbers = lax.ScatterDimensionNumbers(every, (), every)
    return lax.scatter(flat.reshape(view.digits), jnp.stack(list(start)), box, numbers, **sure).reshape(-1)


def _put_back(flat: jax.Array, window: jax.Array, base: int) -> jax.Array:
    return jnp.concatenate([flat[:base], window, flat[base + window.size :]])
