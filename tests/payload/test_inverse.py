"""Positions of shards and entries of sections: the inverse of a box equals packing the shard's numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding import Copy
from jaxrl_sync.transfer.payload.inverse import Inverse, Local, boxes_of
from jaxrl_sync.transfer.payload.sections import Section, sections_of


def box(shape: tuple[int, ...], offset: int, strides: tuple[int, ...], device: int = 0) -> Copy:
    """A copy that reads these elements of a shard; where they go is of no interest here."""
    none = (0,) * len(shape)
    return Copy(device, "w", 9, "t", 2, shape, offset, strides, 0, none, 0, none, 0, none)


def packed(copy: Copy) -> np.ndarray[Any, Any]:
    """Numbers of the shard's elements, in the order of the stream."""
    numbers = np.array(copy.source_offset, np.int64)
    for size, stride in zip(copy.shape, copy.source_strides, strict=True):
        numbers = numbers[..., None] + np.arange(size) * stride
    return numbers.reshape(-1)


def check(section: Section, changed: dict[int, np.ndarray[Any, Any]], kind: Any = np.uint32) -> None:
    """All entries, by looking at every element of the stream."""
    rng = np.random.default_rng(1)
    changes: dict[tuple[int, str], Local] = {}
    for device, positions in changed.items():
        new, old = rng.integers(0, 1 << 16, (2, positions.size)).astype(np.uint16)
        changes[device, "w"] = positions.astype(kind), new, old
    places, new, old = Inverse(section).entries(changes)
    expected: list[tuple[int, int, int]] = []
    at = 0
    for copy in section.copies:
        positions, after, before = changes[copy.source_device, "w"]
        rows = {int(p): i for i, p in enumerate(positions)}
        for offset, number in enumerate(packed(copy).tolist()):
            if number in rows:
                i = rows[number]
                expected.append((at + offset, int(after[i]), int(before[i])))
        at += copy.num_elements
    assert list(zip(places.tolist(), new.tolist(), old.tolist(), strict=True)) == expected
    assert places.dtype == np.uint32 and new.dtype == np.uint16


CASES = {
    "run": ((60,), 7, (1,)),
    "rows of a matrix": ((5, 6), 3, (12, 1)),
    "transposed": ((6, 5), 3, (1, 12)),
    "reversed": ((5, 6), 80, (-12, -1)),
    "one axis reversed": ((5, 6), 11, (12, -1)),
    "every third": ((4, 5), 2, (20, 3)),
    "broadcast in front": ((3, 8), 4, (0, 1)),
    "broadcast behind": ((8, 3), 4, (2, 0)),
    "broadcast heads": ((2, 3, 4), 1, (10, 0, 1)),
    "windows that overlap": ((6, 4), 5, (1, 1)),
    "windows with a stride": ((3, 4, 2), 5, (6, 2, 5)),
    "scalar": ((), 13, ()),
    "axes of one": ((1, 4, 1), 13, (77, 2, 5)),
    "merged axes": ((3, 4, 5), 2, (20, 5, 1)),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", [np.uint32, np.uint64])
def test_every_element_finds_its_places(case: str, kind: Any) -> None:
    copy = box(*CASES[case])
    (section,) = sections_of([copy])
    for share in (1.0, 0.4, 0.0):
        chosen = np.flatnonzero(np.random.default_rng(2).random(100) < share)
        check(section, {0: chosen}, kind)


def test_a_whole_edge_of_random_boxes() -> None:
    rng = np.random.default_rng(3)
    for _ in range(60):
        copies = []
        for _ in range(int(rng.integers(1, 6))):
            shape = tuple(int(n) for n in rng.integers(1, 5, int(rng.integers(0, 5))))
            strides = tuple(int(s) for s in rng.choice([-13, -4, -1, 0, 1, 2, 3, 7, 30], len(shape)))
            low = sum(min(0, (n - 1) * s) for n, s in zip(shape, strides, strict=True))
            copies.append(box(shape, int(rng.integers(0, 20)) - low, strides, int(rng.integers(0, 2))))
        (section,) = sections_of(copies)
        changed = {d: np.flatnonzero(rng.random(500) < 0.3) for d in (0, 1)}
        check(section, changed)


def test_contiguous_axes_cost_one_division_and_cut_axes_stay_few() -> None:
    (whole,) = boxes_of(box((3, 4, 5), 2, (20, 5, 1)), 0)
    assert whole.axes == ((1, 60, 1),) and whole.ascending
    assert len(boxes_of(box((100, 4), 5, (1, 1)), 0)) == 4  # the shorter axis is cut
    (turned,) = boxes_of(box((6, 5), 3, (1, 12)), 0)
    assert not turned.ascending
