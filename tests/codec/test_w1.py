"""Sizes on W1-step: shapes of W1 in bfloat16, normal weights (0.02), one clipped-normal step, 1 % changed."""

from __future__ import annotations

import numpy as np
import pytest

from jaxrl_sync.transfer.codec import rice
from jaxrl_sync.transfer.codec.rules import CodingRules
from tests.codec import w1


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("scale", [1 / 28, pytest.param(1.0, marks=pytest.mark.full)], ids=["share", "whole"])
def test_frames_of_one_step_of_w1(scale: float) -> None:
    """At least 78 times smaller than everything with overwrite, 140 times with ulp."""
    deltas = list(w1.deltas(scale))
    whole = sum(2 * d.elements for d in deltas)
    assert scale < 1 or whole == w1.W1_BYTES
    changed = sum(d.positions.size for d in deltas) * 2 / whole
    assert changed == pytest.approx(0.01, rel=0.01)
    overwrite = whole / w1.frame_bytes(deltas, CodingRules(whole=False))
    ulp = whole / w1.frame_bytes(deltas, CodingRules(values="ulp", whole=False))
    print(f"{whole} bytes, {100 * changed:.3f} % changed: overwrite {overwrite:.1f}x, ulp {ulp:.1f}x smaller")
    assert overwrite >= 78 and ulp >= 140


@pytest.mark.timeout(600)
@pytest.mark.parametrize("density", [0.001, 0.01])
@pytest.mark.parametrize("elements", [1 << 22, pytest.param(w1.W1_BYTES // 2, marks=pytest.mark.full)])
def test_rice_stays_near_the_entropy_at_the_size_of_w1(elements: int, density: float) -> None:
    """W1-delta: independent changes; Rice within 3 % of H(p)/p bits per entry."""
    places = w1.independent(elements, density)
    stream = rice.encode(places, rice.guess(places.size, elements))
    assert len(stream) * 8 / places.size <= 1.03 * w1.entropy_bits(density)
    np.testing.assert_array_equal(
        rice.decode(stream, rice.guess(places.size, elements), places.size, elements), places
    )
