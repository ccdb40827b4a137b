"""Random conversion programs for the exactness tests: chains of the movement operations on random shapes.

A program is a seed: the same seed builds the same program on every run. Sizes stay tiny, structure does not.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Tree = dict[str, Any]
Op = Callable[[np.random.Generator, list[Any]], Any]


def _shape(rng: np.random.Generator, rank_to: int = 4) -> tuple[int, ...]:
    sizes = rng.choice([1, 2, 3, 4, 5, 6, 8], int(rng.integers(0, rank_to + 1)))
    shape = tuple(int(n) for n in sizes)
    return (*shape[:-1], 0) if shape and rng.random() < 0.02 else shape


def _factors(rng: np.random.Generator, size: int) -> tuple[int, ...]:
    shape = []
    while size > 1:
        divisors = [d for d in range(2, size + 1) if size % d == 0]
        shape.append(int(rng.choice(divisors)))
        size //= shape[-1]
    for _ in range(int(rng.integers(0, 2))):
        shape.insert(int(rng.integers(0, len(shape) + 1)), 1)
    return tuple(shape)


def _reshape(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    return x.reshape(x.shape if x.size == 0 else _factors(rng, x.size))


def _transpose(rng: np.random.Generator, pool: list[Any]) -> Any:
    return pool[-1].transpose([int(i) for i in rng.permutation(pool[-1].ndim)])


def _slice(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    index = []
    for n in x.shape:
        a, b = sorted(int(i) for i in rng.integers(0, n + 1, 2))
        index.append(slice(a, max(b, a + 1), int(rng.integers(1, 4))) if n else slice(None))
    return x[tuple(index)]


def _dynamic_slice(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    sizes = [int(rng.integers(1, n + 1)) if n else 0 for n in x.shape]
    return jax.lax.dynamic_slice(x, [int(rng.integers(-1, n + 2)) for n in x.shape], sizes)


def _update(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    part = _dynamic_slice(rng, [jnp.flip(x)])
    return jax.lax.dynamic_update_slice(x, part, [int(rng.integers(0, n + 1)) for n in x.shape])


def _concatenate(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0:
        return jnp.stack([x, x])
    axis = int(rng.integers(0, x.ndim))
    other = pool[int(rng.integers(0, len(pool)))]
    same = (other.ndim, other.dtype) == (x.ndim, x.dtype) and all(
        a == b for i, (a, b) in enumerate(zip(x.shape, other.shape, strict=True)) if i != axis
    )
    return jnp.concatenate([x, other if same else jnp.flip(x), x], axis=axis)


def _stack(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    return jnp.stack([x, jnp.flip(x), x], axis=int(rng.integers(0, x.ndim + 1)))


def _split(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0:
        return x
    axis = int(rng.integers(0, x.ndim))
    return jnp.split(x, [int(rng.integers(0, x.shape[axis] + 1))], axis=axis)[int(rng.integers(0, 2))]


def _expand(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = jnp.expand_dims(pool[-1], int(rng.integers(0, pool[-1].ndim + 1)))
    return (
        x if rng.random() < 0.5 else jnp.repeat(x, int(rng.integers(1, 4)), axis=int(rng.integers(0, x.ndim)))
    )


def _squeeze(rng: np.random.Generator, pool: list[Any]) -> Any:
    return jnp.squeeze(pool[-1])


def _broadcast(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    return jnp.broadcast_to(x, (int(rng.integers(1, 4)), *x.shape))


def _tile(rng: np.random.Generator, pool: list[Any]) -> Any:
    return jnp.tile(pool[-1], tuple(int(i) for i in rng.integers(1, 3, max(1, pool[-1].ndim))))


def _pad(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    config = [(int(rng.integers(-1, 3)), int(rng.integers(-1, 3)), int(rng.integers(0, 3))) for _ in x.shape]
    small = [n < 3 for n in x.shape]
    config = [
        (max(a, 0), max(b, 0), k) if s else (a, b, k) for (a, b, k), s in zip(config, small, strict=True)
    ]
    return jax.lax.pad(x, jnp.zeros((), x.dtype), config)


def _flip(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    return jnp.flip(x, [d for d in range(x.ndim) if rng.random() < 0.5])


def _take(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0 or x.size == 0:
        return x
    axis = int(rng.integers(0, x.ndim))
    n = x.shape[axis]
    rows = rng.permutation(n) if rng.random() < 0.5 else rng.integers(-n, n, int(rng.integers(1, 7)))
    return jnp.take(x, rows, axis=axis, mode="wrap" if rng.random() < 0.3 else None)


def _index(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim < 2 or x.size == 0:
        return x
    rows = rng.integers(0, x.shape[0], (2, 3))
    return (
        x[rows, rng.integers(0, x.shape[1], (2, 1))]
        if rng.random() < 0.5
        else x[:, rng.integers(0, x.shape[1], 3)]
    )


def _scatter(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0 or x.size == 0:
        return x
    rows = rng.permutation(x.shape[0])[: int(rng.integers(1, x.shape[0] + 1))]
    return x.at[rows].set(jnp.flip(x)[: len(rows)])


def _interleave(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0 or x.shape[-1] % 2:
        return x
    half = x.shape[-1] // 2
    return jnp.stack([x[..., :half], x[..., half:]], axis=-1).reshape(x.shape)


def _where(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0:
        return jnp.where(rng.random() < 0.5, x, jnp.zeros_like(x))
    mask = np.asarray(rng.random(x.shape[-1]) < 0.5)
    return (
        jnp.where(mask, x, jnp.flip(x)) if rng.random() < 0.5 else jnp.where(mask, x, jnp.zeros((), x.dtype))
    )


def _vmap(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim < 2:
        return x
    return jax.vmap(lambda row: jnp.flip(row, 0).T, in_axes=1, out_axes=int(rng.integers(0, x.ndim)))(x)


def _scan(rng: np.random.Generator, pool: list[Any]) -> Any:
    x = pool[-1]
    if x.ndim == 0 or x.shape[0] == 0:
        return x
    carry = jnp.zeros(x.shape[1:], x.dtype)
    return jax.lax.scan(
        lambda c, row: (row, jnp.stack([c, row])), carry, x, reverse=bool(rng.random() < 0.5)
    )[1]


def _nested(rng: np.random.Generator, pool: list[Any]) -> Any:
    seed = int(rng.integers(0, 1 << 30))

    def inner(x: Any) -> Any:
        r = np.random.default_rng(seed)
        return _transpose(r, [_slice(r, [x])])

    custom = jax.custom_jvp(inner)
    custom.defjvp(lambda x, dx: (inner(*x), inner(*dx)))
    return (jax.jit(inner), jax.checkpoint(inner), custom)[int(rng.integers(0, 3))](pool[-1])


_CASTS = {"int32": ("int16", "float32"), "int16": ("int32", "float32"), "float32": ("bfloat16", "int32")}
"""What values are cast to: bfloat16 is the end, since compilers skip roundings that a later cast undoes."""


def _cast(rng: np.random.Generator, pool: list[Any]) -> Any:
    choices = [t for t in _CASTS.get(str(pool[-1].dtype), ()) if t != "bfloat16"]
    return pool[-1].astype(rng.choice(choices)) if choices else pool[-1]


def _round(rng: np.random.Generator, pool: list[Any]) -> Any:
    choices = _CASTS.get(str(pool[-1].dtype), ())
    return pool[-1].astype(rng.choice(choices)) if choices else pool[-1]


def _arithmetic(rng: np.random.Generator, pool: list[Any]) -> Any:
    """Exact in floats, and modulo a power of two in integers, so that every compiler finds the same bits."""
    x = pool[-1]
    kind = int(rng.integers(0, 6))
    if kind == 0:
        return -x
    if kind == 1:
        return jnp.maximum(x, jnp.flip(x))
    if kind == 2:
        return jax.jit(lambda y: y * 2)(x)
    if kind == 3 and x.ndim:
        return jax.lax.scan(lambda c, row: (c, jnp.abs(row)), 0, x)[1]
    if x.dtype.kind != "i":
        return x + x
    return x @ jnp.flip(x).T if kind == 4 and x.ndim == 2 else x * 3 + jnp.flip(x)


OPS: tuple[Op, ...] = (
    _reshape, _reshape, _reshape, _transpose, _transpose, _slice, _slice, _dynamic_slice, _update,
    _concatenate, _stack, _split, _expand, _squeeze, _broadcast, _tile, _pad, _flip, _take, _index,
    _scatter, _interleave, _where, _vmap, _scan, _nested,
)  # fmt: skip

MIXES: dict[str, tuple[Op, ...]] = {
    "moves": OPS,
    "casts": (*OPS, _cast, _cast, _cast, _cast),
    "arithmetic": (*OPS, *(_arithmetic,) * 8, *(_round,) * 4),
}
"""Which operations a program draws from: "casts" of small whole numbers change none of them."""

MAX_ELEMENTS = 3000


def program(seed: int, mix: str = "moves") -> tuple[Callable[[Tree], Tree], dict[str, tuple[int, ...]]]:
    """(convert, source shapes): two outputs, each the end of a chain of operations of that mix."""
    ops = MIXES[mix]
    rng = np.random.default_rng(seed)
    shapes = {"a": _shape(rng), "b": _shape(rng)}
    seeds = [int(s) for s in rng.integers(0, 1 << 30, 2)]
    lengths = [int(n) for n in rng.integers(1, 7, 2)]

    def convert(tree: Tree) -> Tree:
        out: Tree = {}
        for name, seed_of, length in zip(("x", "y"), seeds, lengths, strict=True):
            r = np.random.default_rng(seed_of)
            pool = [tree["a"], tree["b"]] if name == "x" else [tree["b"], tree["a"]]
            for _ in range(length):
                made = ops[int(r.integers(0, len(ops)))](r, pool)
                if math.prod(made.shape) <= MAX_ELEMENTS and made.ndim <= 7:
                    pool.append(made)
            out[name] = pool[-1]
        return out

    return convert, shapes
