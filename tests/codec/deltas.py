"""Deltas to code: random ones of a density, and adversarial bits of every width."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

DTYPES = {
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float16": np.dtype(np.float16),
    "float32": np.dtype(np.float32),
    "float64": np.dtype(np.float64),
    "float8": np.dtype(ml_dtypes.float8_e4m3fn),
    "int8": np.dtype(np.int8),
    "bool": np.dtype(np.bool_),
}


def positions(elements: int, density: float, seed: int = 0) -> npt.NDArray[np.uint32]:
    """Independent changes."""
    rng = np.random.default_rng(seed)
    return np.flatnonzero(rng.random(elements) < density).astype(np.uint32)


def adversarial(dtype: np.dtype[Any], count: int, seed: int = 0) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """(old, new) bits: every corner of the width against every other, then random ones."""
    rng = np.random.default_rng(seed)
    width = dtype.itemsize * 8
    kind = np.dtype(f"<u{dtype.itemsize}")
    if dtype == np.bool_:
        old = rng.integers(0, 2, count).astype(kind)
        return old, 1 - old
    top = 1 << (width - 1)
    one = {16: 0x3F80, 32: 0x3F800000, 64: 0x3FF0000000000000}.get(width, 0x38)
    infinity = {16: 0x7F80, 32: 0x7F800000, 64: 0x7FF0000000000000}.get(width, 0x78)
    corners = [
        0,
        1,
        2,
        top - 1,
        top,
        top + 1,
        2 * top - 1,
        one,
        one - 1,
        infinity,
        infinity + 1,
        top | infinity,
    ]
    grid = np.array([(a, b) for a in corners for b in corners if a != b], kind)
    old = rng.integers(0, 2**width - 1, count, np.uint64, endpoint=True).astype(kind)
    new = rng.integers(0, 2**width - 1, count, np.uint64, endpoint=True).astype(kind)
    size = min(count, len(grid))
    old[:size], new[:size] = grid[:size, 0], grid[:size, 1]
    return old, new


def one_step(
    elements: int, density: float, seed: int = 0
) -> tuple[npt.NDArray[np.uint16], npt.NDArray[np.uint16]]:
    """Normal weights of deviation 0.02 in bfloat16 before and after one clipped-normal step.

    The step of the float32 weights is scaled so that the share ``density`` of the bfloat16 ones changes.
    """
    rng = np.random.default_rng(seed)
    weights = rng.normal(0, 0.02, elements).astype(np.float32)
    step = np.clip(rng.normal(0, 1, elements), -1, 1).astype(np.float32)
    before = weights.astype(ml_dtypes.bfloat16).view(np.uint16)
    after, low, high = before, 1e-9, 1e-3
    for _ in range(24):
        scale = (low * high) ** 0.5
        after = (weights + np.float32(scale) * step).astype(ml_dtypes.bfloat16).view(np.uint16)
        low, high = (scale, high) if np.mean(after != before) < density else (low, scale)
    return before, after
