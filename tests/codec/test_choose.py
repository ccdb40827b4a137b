"""The automatic choice against every coding measured, on a grid of link rate and density."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from jaxrl_sync.transfer.codec import choose, costs, positions
from jaxrl_sync.transfer.codec.choose import Delta
from jaxrl_sync.transfer.codec.costs import Line, Speeds, name_of
from jaxrl_sync.transfer.codec.frame import Coding
from jaxrl_sync.transfer.codec.measure import Measured, all_codings
from jaxrl_sync.transfer.codec.rules import CodingRules
from tests.codec.deltas import one_step

RATES = (2e6, 12.5e6, 125e6, 1.25e9, 12.5e9, math.inf)
DENSITIES = (0.0007, 0.01, 0.05, 0.3, 0.9)
ELEMENTS = 1 << 20


def _delta(density: float) -> tuple[Delta, np.ndarray[tuple[int], np.dtype[np.generic]]]:
    before, after = one_step(ELEMENTS, density)
    places = np.flatnonzero(before != after).astype(np.uint32)
    return Delta(ELEMENTS, places, after[places], before[places]), after


def _speeds(delta: Delta, measured: dict[Coding, Measured]) -> Speeds:
    """The coders' speeds in this very measurement, so that only sizes and the choice itself are tried."""
    lines = {}
    for coding, cost in measured.items():
        value = coding.values + ("+zstd" if coding.zstd else "")
        if coding.positions.kind == "all":
            zstd = coding.zstd
            units = ELEMENTS if zstd else ELEMENTS * delta.itemsize
            lines["all+zstd" if zstd else "all"] = Line(0.0, cost.seconds / units)
        elif value == "overwrite":
            lines[name_of(coding.positions)] = Line(cost.seconds, 0.0)
    cheapest = measured[Coding(positions.Coding("u32"))].seconds
    for kind, zstd in itertools.product(("overwrite", "xor", "ulp"), (False, True)):
        coding = Coding(positions.Coding("u32"), kind, zstd)  # type: ignore[arg-type]
        lines[kind + ("+zstd" if zstd else "")] = Line(measured[coding].seconds - cheapest, 0.0)
    return Speeds(lines)


@pytest.mark.parametrize("density", DENSITIES)
def test_the_choice_is_within_five_percent_of_the_best_measured_coding(density: float) -> None:
    delta, whole = _delta(density)
    measured = all_codings(delta, whole)
    speeds = _speeds(delta, measured)
    for rate in RATES:
        found = choose.choose(delta, rate, speeds, CodingRules(values="auto")).coding
        seconds = {c: m.seconds + m.nbytes / rate for c, m in measured.items()}
        best = min(seconds, key=lambda c: seconds[c])
        assert seconds[found] <= 1.05 * seconds[best] + 2e-6, (rate, str(found), str(best))


def test_overwrite_alone_is_chosen_unless_more_is_allowed() -> None:
    delta, _ = _delta(0.01)
    for rate in RATES:
        assert choose.choose(delta, rate, costs.measured(), CodingRules()).coding.values == "overwrite"
    # So slow that bytes decide, however long coders took on a machine in use.
    slow = choose.choose(delta, 1e3, costs.measured(), CodingRules(values="auto")).coding
    assert slow.values == "ulp" and slow.zstd


@pytest.mark.parametrize("kind", ["u32", "gap16", "gap8", "rice", "bitmap"])
def test_a_fixed_coding_is_kept_whatever_it_costs(kind: positions.Kind) -> None:
    delta, _ = _delta(0.05)
    rules = CodingRules(positions=kind, values="xor", zstd="off", whole=False)  # type: ignore[arg-type]
    for rate in (1e6, 1e10):
        found = choose.choose(delta, rate, costs.measured(), rules).coding
        assert (found.positions.kind, found.values, found.zstd) == (kind, "xor", False)


def test_estimated_sizes_are_those_that_come_out() -> None:
    for density in DENSITIES:
        delta, whole = _delta(density)
        exact = {c: m.nbytes for c, m in all_codings(delta, whole).items()}
        for rate, values in itertools.product(RATES[:-1], ("overwrite", "auto")):
            found = choose.choose(delta, rate, costs.measured(), CodingRules(values=values))
            size = exact[found.coding]
            close = 0.1 if found.coding.zstd or found.coding.positions.zstd else 1e-3
            assert found.nbytes == pytest.approx(size, rel=close, abs=16), (density, rate, str(found.coding))


def test_nothing_changed_costs_nothing() -> None:
    empty = np.empty(0, np.uint16)
    delta = Delta(1000, np.empty(0, np.uint32), empty, empty)
    found = choose.choose(delta, 1e6, costs.measured(), CodingRules())
    assert found.coding.positions.kind == "none" and found.seconds == found.nbytes == 0


def test_rules_refuse_what_they_do_not_know() -> None:
    for wrong in ({"positions": "u64"}, {"values": "add"}, {"zstd": "maybe"}):
        with pytest.raises(ValueError, match="expected"):
            CodingRules(**wrong)  # type: ignore[arg-type]
