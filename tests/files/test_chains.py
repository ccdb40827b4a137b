"""Which versions stay, and which chain is cheapest: pure functions, over random histories."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxrl_sync.transfer.files.chains import cheapest
from jaxrl_sync.transfer.files.collect import kept
from jaxrl_sync.transfer.files.errors import NoVersion
from jaxrl_sync.transfer.files.manifest import Manifest, Part
from jaxrl_sync.transfer.version import Version

SCHEMA = "0" * 32
PART = Part(0, "000000000000-e1-t1-r0-table", 1, "00")


def manifest(number: int, base: int | None, anchor: bool, sizes: tuple[int, int]) -> Manifest:
    """A version of a history."""
    stem = f"{number:012d}-e1-t{number + 1}"
    return Manifest(
        "channel",
        1,
        number + 1,
        number + 1,
        Version("run", number),
        None if base is None else Version("run", base),
        stem if anchor else None,
        SCHEMA,
        sizes[0] if anchor else 0,
        sizes[1],
        0.0,
        (PART,),
    )


@st.composite
def histories(draw: st.DrawFn) -> list[Manifest]:
    """Versions as a writer makes them, with gaps: each on the one before it, an anchor now and then."""
    found: list[Manifest] = []
    numbers = sorted(draw(st.sets(st.integers(0, 40), min_size=1, max_size=14)))
    for number in numbers:
        fresh = not found or draw(st.integers(0, 5)) == 0
        base = None if fresh else found[-1].version.number
        anchor = base is None or draw(st.booleans())
        sizes = draw(st.tuples(st.integers(1, 100), st.integers(1, 100)))
        found.append(manifest(number, base, anchor, sizes))
    return found


@given(histories(), st.integers(1, 5), st.data())
def test_what_stays_can_be_read_and_nothing_stays_in_vain(
    history: list[Manifest], keep: int, data: st.DataObject
) -> None:
    wanted = data.draw(st.sets(st.sampled_from([m.version for m in history]), max_size=3))
    stay = kept(history, keep, wanted)
    left = [m for m in history if m.version in stay]
    roots = {m.version for m in history[-keep:]} | wanted
    assert roots <= stay
    for version in stay:
        cheapest(left, version)  # a whole chain
    for version in stay - roots:  # each of the others is on the way down from a root
        without = [m for m in left if m.version != version]
        broken = []
        for root in roots:
            try:
                cheapest(without, root)
            except NoVersion:
                broken.append(root)
        assert broken


@given(histories(), st.data())
def test_the_cheapest_chain_is_the_cheapest_of_all(history: list[Manifest], data: st.DataObject) -> None:
    by_version = {m.version: m for m in history}
    target = data.draw(st.sampled_from(history))
    held = data.draw(st.none() | st.sampled_from([m.version for m in history]))
    costs: list[int] = []

    def walk(at: Version, cost: int) -> None:
        if at == held:
            costs.append(cost)
        found = by_version[at]
        if found.anchor is not None:
            costs.append(cost + found.anchor_bytes)
        if found.base is not None:
            walk(found.base, cost + found.delta_bytes)

    walk(target.version, 0)
    chain = cheapest(history, target.version, held, SCHEMA)
    assert chain.nbytes == min(costs)
    versions = [m.version for m in chain.deltas]
    start = chain.anchor.version if chain.anchor is not None else held
    for base, step in itertools.pairwise([start, *versions]):
        assert step is not None and by_version[step].base == base
    assert (versions[-1] if versions else start) == target.version


def test_a_chain_with_a_hole_is_refused_by_name() -> None:
    history = [manifest(2, 1, False, (0, 5)), manifest(3, 2, False, (0, 5))]
    with pytest.raises(NoVersion, match="run:1 is missing below it"):
        cheapest(history, Version("run", 3))
    assert cheapest(history, Version("run", 3), Version("run", 1), SCHEMA).nbytes == 10
    with pytest.raises(NoVersion):
        cheapest(history, Version("run", 3), Version("run", 1), "another")
