"""Bits that break comparisons: NaN payloads, both zeros, denormals, and changes in every pattern and size."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2", "int8", "bool")
PATTERNS = ("none", "all", "alternating", "one percent", "ends", "rows")
SIZES = (0, 1, 31, 33, 1023, 1024, 1025, 5000)

Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]


def changed(pattern: str, n: int, rng: np.random.Generator) -> npt.NDArray[np.bool_]:
    """Which of n elements change."""
    at = np.arange(n)
    found: dict[str, npt.NDArray[np.bool_]] = {
        "none": np.zeros(n, bool),
        "all": np.ones(n, bool),
        "alternating": at % 2 == 0,
        "one percent": rng.random(n) < 0.01,
        "ends": (at == 0) | (at == n - 1),
        "rows": (at // 100) % 7 == 3,
    }
    return found[pattern]


def pair(dtype: str, n: int, pattern: str, seed: int = 0) -> Pair:
    """(old, new) of random bits, special ones among them; ``new`` differs exactly where the pattern says."""
    rng = np.random.default_rng(seed)
    kind = jnp.dtype(dtype)
    width = 8 * kind.itemsize
    high = 2 if dtype == "bool" else 1 << width
    old = rng.integers(0, high, n, dtype=np.uint64).astype(f"u{kind.itemsize}")
    if dtype != "bool" and n > 8:
        top = 1 << (width - 1)
        old[:8] = [0, top, 1, top | 1, high - 1, top - 1, high - 2, top - 2]  # zeros, denormals, NaNs
    flip = old.dtype.type(1) if dtype == "bool" else None
    steps = rng.choice(np.array([1, 1, 1, 3, high // 2, high - 1], np.uint64), n).astype(old.dtype)
    new = np.where(changed(pattern, n, rng), old ^ (flip or steps), old).astype(old.dtype)
    return old.view(kind), new.view(kind)


def same_bits(a: Any, b: Any) -> bool:
    """Whether two arrays are equal bit for bit."""
    x, y = np.asarray(a), np.asarray(b)
    return x.dtype == y.dtype and x.shape == y.shape and x.tobytes() == y.tobytes()
