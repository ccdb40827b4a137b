"""The density report against counts made by hand and against its own codings."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from jaxrl_sync.transfer.density import DensityMeter, tensor_class
from tests.codec.deltas import DTYPES, adversarial, one_step


def test_counts_classes_gaps_and_overlap_by_hand() -> None:
    zero: dict[str, np.ndarray[Any, Any]] = {
        f"layers/{i}/w": np.zeros((4, 8), np.float32) for i in range(3)
    } | {"embed": np.zeros(16, np.int8)}
    first = {path: leaf.copy() for path, leaf in zero.items()}
    first["layers/0/w"].flat[[0, 1, 3, 20]] = -0.0  # a change of bits alone
    first["layers/1/w"].flat[[5]] = np.nan
    second = {path: leaf.copy() for path, leaf in first.items()}
    second["layers/0/w"].flat[[1, 2]] = 7.0
    second["layers/1/w"].flat[[5]] = np.nan  # the same bits
    meter = DensityMeter()
    a, b = meter.measure(zero, first), meter.measure(first, second)
    layers = next(c for c in a.classes if c.name == "layers/*/w")
    assert (layers.tensors, layers.untouched, layers.elements, layers.changed) == (3, 1, 96, 5)
    assert a.changed == 5 and a.elements == 112 and a.full_bytes == 3 * 128 + 16
    assert a.gaps == {1: 1, 2: 1, 5: 1}  # gaps 1, 2 and 17
    assert a.overlap is None and b.overlap == 0.5 and b.changed == 2
    assert a.untouched_tensors == 0.5 and b.to_json()["classes"]["embed"]["changed"] == 0


def test_bound_entropy_and_bytes_of_a_trained_step() -> None:
    before, after = one_step(1 << 20, 0.01)
    found = DensityMeter().measure({"w": before}, {"w": after})
    p = found.fraction
    assert p == pytest.approx(0.01, rel=0.05)
    bound = (-p * math.log2(p) - (1 - p) * math.log2(1 - p)) / p
    assert found.position_bound_bits == pytest.approx(bound)
    bits = {name: 8 * size / found.changed for name, size in found.position_bytes.items()}
    assert bound * 0.99 < bits["rice"] < bound * 1.03 and bits["u32"] == 32 and bits["gap8"] < bound * 1.1
    assert found.entropy_bits["ulp"] < found.entropy_bits["xor"] < found.entropy_bits["new"]
    assert found.value_bytes["ulp+zstd"] < found.value_bytes["xor+zstd"] < found.value_bytes["overwrite+zstd"]
    assert found.best_bytes(idempotent=False) < found.best_bytes(idempotent=True) < found.full_bytes / 70


@pytest.mark.parametrize("name", DTYPES)
def test_every_width_and_every_bit_counts(name: str) -> None:
    old, new = adversarial(DTYPES[name], 500)
    found = DensityMeter().measure({"x": old.view(DTYPES[name])}, {"x": new.view(DTYPES[name])})
    assert found.changed == int(np.count_nonzero(old != new))
    none = DensityMeter().measure({"x": old}, {"x": old})
    assert none.changed == 0 and none.best_bytes(True) == 0 and none.position_bound_bits == 0.0


def test_trees_that_do_not_fit_are_named() -> None:
    one = {"a": np.zeros(3, ml_dtypes.bfloat16)}
    with pytest.raises(ValueError, match=r"'a': before bfloat16\[3\], after float32\[3\]"):
        DensityMeter().measure(one, {"a": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="'b' is in one of the two trees only"):
        DensityMeter().measure(one | {"b": np.zeros(1)}, one)
    assert tensor_class("layers/3/expert17/up") == "layers/*/expert*/up"
