"""The algebra of fragments against plain enumeration of elements."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from jaxrl_sync.sharding.correspondence import TensorMap
from jaxrl_sync.sharding.coverage import prove_coverage
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import (
    Axis,
    Fragment,
    by_dimension,
    coalesce,
    flatten,
    index_ranges,
    normal,
    restrict,
    row_major,
)


def elements(f: Fragment) -> dict[int, int]:
    found = {}
    for index in np.ndindex(*[a.size for a in f.axes]):
        at = f.start + sum(i * a.stride for i, a in zip(index, f.axes, strict=True))
        assert at not in found
        found[at] = f.offset + sum(i * a.step for i, a in zip(index, f.axes, strict=True))
    return found


def random_fragment(rng: random.Random, size: int) -> Fragment:
    start, unit = rng.randint(0, size - 1), 1
    axes: list[tuple[int, int, int]] = []
    for _ in range(rng.randint(0, 3)):
        n, stride = rng.randint(1, 5), unit * rng.randint(1, 2)
        if start + (n - 1) * stride + sum((m - 1) * s for m, s, _ in axes) >= size:
            break
        axes.append((n, stride, rng.randint(-7, 7)))
        unit = stride * n
    rng.shuffle(axes)
    return normal(0, 100, start, axes)


@pytest.mark.parametrize("seed", range(4))
def test_cutting_restricting_and_merging_keep_every_element(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(150):
        shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 4))]
        f = random_fragment(rng, math.prod(shape))
        want = elements(f)
        pieces = by_dimension(f, shape)
        got: dict[int, int] = {}
        for p in pieces:
            for d, n in enumerate(shape):
                last = p.start[d] + sum((a.size - 1) * a.stride for a in p.axes if a.dim == d)
                assert 0 <= p.start[d] <= last < n
            got |= elements(flatten(p, shape))
        assert got == want
        assert {
            k: v for g in coalesce(flatten(p, shape) for p in pieces) for k, v in elements(g).items()
        } == want
        d = rng.randrange(len(shape))
        low, high = sorted((rng.randint(0, shape[d]), rng.randint(0, shape[d])))
        cut = [elements(flatten(q, shape)) for p in pieces for q in restrict(p, d, low, high)]
        assert sum(map(len, cut)) == len({k for e in cut for k in e})
        stride = row_major(shape)[d]
        assert {k for e in cut for k in e} == {k for k in want if low <= k // stride % shape[d] < high}


def test_a_reshape_costs_no_cut_and_a_row_border_few() -> None:
    line = Fragment(0, 0, 0, (Axis(1 << 40, 1, 1),))
    assert by_dimension(line, (1 << 40,)) == by_dimension(line, (1 << 40,))
    assert len(by_dimension(line, (1 << 20, 1 << 20))) == 1
    assert len(by_dimension(normal(0, 0, 3, [(1 << 30, 1, 1)]), (1 << 20, 1 << 20))) == 3


def test_ranges_of_two_mixed_axes() -> None:
    # index = 3 i + j with i < 4, j < 3: 2 <= index < 8 is the tail of row 0, row 1, the head of row 2
    assert set(index_ranges([(4, 3), (3, 1)], 0, 2, 8)) == {
        ((0, 1), (2, 3)),
        ((1, 2), (0, 3)),
        ((2, 3), (0, 2)),
    }


def _map(*fragments: tuple[int, list[tuple[int, int, int]]], size: int) -> TensorMap:
    return TensorMap((size,), "float32", tuple(normal(0, 0, start, axes) for start, axes in fragments))


def test_coverage_accepts_interleaved_and_blocked_fragments() -> None:
    prove_coverage("w", _map((0, [(8, 2, 1)]), (1, [(8, 2, 1)]), size=16))
    prove_coverage("w", _map((0, [(5, 1, 1)]), (5, [(7, 1, 1)]), size=12))


@pytest.mark.parametrize(
    ("fragments", "words"),
    [
        ([(0, [(8, 2, 1)]), (0, [(8, 2, 1)])], "write the same"),
        ([(0, [(8, 2, 1)])], "cover 8 of 16"),
        ([(0, [(8, 1, 1)]), (9, [(8, 1, 1)])], "outside"),
        ([(0, [(9, 1, 1)]), (8, [(7, 1, 1)])], "write the same"),
    ],
)
def test_coverage_refuses_gaps_and_overlaps(
    fragments: list[tuple[int, list[tuple[int, int, int]]]], words: str
) -> None:
    with pytest.raises(MappingError, match=words):
        prove_coverage("w", _map(*fragments, size=16))


@pytest.mark.parametrize("seed", range(3))
def test_coverage_agrees_with_enumeration(seed: int) -> None:
    rng = random.Random(seed)
    refused = 0
    for _ in range(200):
        size = rng.choice([6, 8, 12])
        fragments, left = [], set(range(size))
        while left:
            f = random_fragment(rng, size)
            if rng.random() < 0.9 and not set(elements(f)) <= left:
                f = Fragment(0, 0, min(left), ())
            fragments.append(f)
            left -= set(elements(f))
        once = sum(f.num_elements for f in fragments) == size
        try:
            prove_coverage("w", TensorMap((size,), "int8", tuple(fragments)))
            assert once
        except MappingError:
            assert not once
            refused += 1
    assert refused > 5
