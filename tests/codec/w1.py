"""W1: shapes of Qwen3-0.6B in bfloat16. A step of normal weights of which 1 % change; independent changes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np

from jaxrl_sync.transfer.codec import choose, costs, frame, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions
from jaxrl_sync.transfer.codec.choose import Delta
from jaxrl_sync.transfer.codec.rules import CodingRules
from tests.codec import hostile

V, D, HEADS, KV, K, F, LAYERS = 151_936, 1024, 16, 8, 128, 3072, 28
W1_BYTES = 1_503_264_768
CHUNK = 1 << 22
SLOW = 1e6
"""Bytes per second: sizes alone decide."""


def shapes(scale: float) -> list[tuple[int, ...]]:
    """Of the tensors of that share of W1."""
    vocab = int(V * scale) // 64 * 64
    layer: list[tuple[int, ...]] = [
        (D, HEADS * K),
        (D, KV * K),
        (D, KV * K),
        (HEADS * K, D),
        (D, F),
        (D, F),
        (F, D),
    ]
    layer += [(D,), (D,), (K,), (K,)]
    return [(vocab, D), (D, vocab), (D,), *(layer * max(1, round(LAYERS * scale)))]


def step_scale() -> float:
    """The size of the step at which 1 % of the bfloat16 weights change, by bisection on 4M of them."""
    rng = np.random.default_rng(1)
    weights, step = _drawn(rng, CHUNK)
    before = weights.astype(ml_dtypes.bfloat16).view(np.uint16)
    low, high = 1e-9, 1e-3
    for _ in range(30):
        scale = math.sqrt(low * high)
        after = (weights + np.float32(scale) * step).astype(ml_dtypes.bfloat16).view(np.uint16)
        low, high = (scale, high) if np.mean(after != before) < 0.01 else (low, scale)
    return low


def _drawn(rng: np.random.Generator, count: int) -> tuple[np.ndarray[tuple[int], np.dtype[np.float32]], ...]:
    weights = rng.standard_normal(count, np.float32) * np.float32(0.02)
    return weights, np.clip(rng.standard_normal(count, np.float32), -1, 1)


def deltas(scale: float) -> Iterator[Delta]:
    """The step, tensor by tensor; ``scale`` is the share of W1's layers and vocabulary."""
    rng, size = np.random.default_rng(2), np.float32(step_scale())
    for shape in shapes(scale):
        elements = math.prod(shape)
        parts: list[tuple[Positions, Bits, Bits]] = []
        for at in range(0, elements, CHUNK):
            weights, step = _drawn(rng, min(CHUNK, elements - at))
            before = weights.astype(ml_dtypes.bfloat16).view(np.uint16)
            after = (weights + size * step).astype(ml_dtypes.bfloat16).view(np.uint16)
            places = np.flatnonzero(before != after)
            parts.append(((places + at).astype(np.uint32), after[places], before[places]))
        places32, new, old = (np.concatenate(column) for column in zip(*parts, strict=True))
        yield Delta(elements, places32, new, old)


def frame_bytes(parts: list[Delta], rules: CodingRules) -> int:
    """Of a frame whose codings are the smallest ones."""
    changes, codings = [], []
    for delta in parts:
        coding = choose.choose(delta, SLOW, costs.measured(), rules).coding
        codes = values.codes_of(delta.new, delta.old, coding.values)
        changes.append(frame.Changes(delta.elements, delta.positions, codes, coding.values))
        codings.append(coding)
    return len(frame.encode(hostile.HEAD, changes, codings))


def independent(elements: int, density: float) -> Positions:
    """W1-delta: positions of independent changes."""
    rng, parts = np.random.default_rng(3), []
    for at in range(0, elements, CHUNK):
        found = np.flatnonzero(rng.random(min(CHUNK, elements - at), np.float32) < density)
        parts.append((found + at).astype(np.uint32))
    return np.concatenate(parts)


def entropy_bits(density: float) -> float:
    """H(p) / p: bits per changed element."""
    return -math.log2(density) - (1 - density) / density * math.log2(1 - density)
