"""Sizes on W1-step: shapes of W1 in bfloat16, normal weights (0.02), one clipped-normal step, 1 % changed."""

from __future__ import annotations

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

from jaxrl_sync.transfer.codec import choose, costs, frame, rice, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions
from jaxrl_sync.transfer.codec.choose import Delta
from jaxrl_sync.transfer.codec.rules import CodingRules
from tests.codec import hostile

V, D, HEADS, KV, K, F, LAYERS = 151_936, 1024, 16, 8, 128, 3072, 28
W1_BYTES = 1_503_264_768
CHUNK = 1 << 22
SLOW = 1e6
"""Bytes per second: sizes alone decide."""


def _shapes(scale: float) -> list[tuple[int, ...]]:
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


def _step_scale() -> float:
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


def _deltas(scale: float) -> Iterator[Delta]:
    rng, size = np.random.default_rng(2), np.float32(_step_scale())
    for shape in _shapes(scale):
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


def _frame_bytes(deltas: list[Delta], rules: CodingRules) -> int:
    changes, codings = [], []
    for delta in deltas:
        coding = choose.choose(delta, SLOW, costs.measured(), rules).coding
        codes = values.codes_of(delta.new, delta.old, coding.values)
        changes.append(frame.Changes(delta.elements, delta.positions, codes, coding.values))
        codings.append(coding)
    return len(frame.encode(hostile.HEAD, changes, codings))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scale", [1 / 28, pytest.param(1.0, marks=pytest.mark.full)], ids=["share", "whole"])
def test_frames_of_one_step_of_w1(scale: float) -> None:
    """At least 78 times smaller than everything with overwrite, 140 times with ulp."""
    deltas = list(_deltas(scale))
    whole = sum(2 * d.elements for d in deltas)
    assert scale < 1 or whole == W1_BYTES
    changed = sum(d.positions.size for d in deltas) * 2 / whole
    assert changed == pytest.approx(0.01, rel=0.01)
    overwrite = whole / _frame_bytes(deltas, CodingRules(whole=False))
    ulp = whole / _frame_bytes(deltas, CodingRules(values="ulp", whole=False))
    print(f"{whole} bytes, {100 * changed:.3f} % changed: overwrite {overwrite:.1f}x, ulp {ulp:.1f}x smaller")
    assert overwrite >= 78 and ulp >= 140


@pytest.mark.timeout(600)
@pytest.mark.parametrize("density", [0.001, 0.01])
@pytest.mark.parametrize("elements", [1 << 22, pytest.param(W1_BYTES // 2, marks=pytest.mark.full)])
def test_rice_stays_near_the_entropy_at_the_size_of_w1(elements: int, density: float) -> None:
    """W1-delta: independent changes; Rice within 3 % of H(p)/p bits per entry."""
    rng, parts = np.random.default_rng(3), []
    for at in range(0, elements, CHUNK):
        found = np.flatnonzero(rng.random(min(CHUNK, elements - at), np.float32) < density)
        parts.append((found + at).astype(np.uint32))
    places = np.concatenate(parts)
    stream = rice.encode(places, rice.guess(places.size, elements))
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    assert len(stream) * 8 / places.size <= 1.03 * entropy
    np.testing.assert_array_equal(
        rice.decode(stream, rice.guess(places.size, elements), places.size, elements), places
    )
