"""Faults while frames of changes travel and where versions land in the memory that serves.

A small fleet: the trainer's two processes publish what changed (one element in 16), one engine has two slots,
one has a single slot. After each case the same must hold as in test_matrix.py.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.faults.cases import FRAMES, Strike
from tests.faults.fleet import Fleet, Replica, Trained
from tests.faults.network import Network
from tests.faults.strike import check_leaks, count_one, run_strike, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

REPLICAS = (Replica("framed", tp=1), Replica("inplace", tp=2, slots=1))


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    folder = tmp_path_factory.mktemp("frames")
    network = Network(folder)
    fleet: Fleet | None = None
    try:
        fleet = Fleet(network, folder, REPLICAS, trained=Trained("sparse", every=16, half_bytes=150_000))
        fleet.publish()
        whole = settled(fleet)
        assert {message["payload"] for message in whole.values()} == {"full"}
        yield fleet
    finally:
        if fleet is not None:
            fleet.close()
        network.close()


def check_framed(fleet: Fleet) -> None:
    """One more version comes to every engine as a frame; the proxy counts less than a quarter of it all."""
    found, came = count_one(fleet, fleet.publish)
    for rank, message in found.items():
        moved = came[rank]
        whole = sum(tensor.nbytes for tensor in fleet.expected.tree(fleet.lineage, fleet.number, 1).values())
        assert message["payload"] == "frame", message
        assert 2 * fleet.trained.half_bytes * 0.75 < moved < whole / 4, (rank, moved, whole)


@pytest.mark.full(share=0.15)
@pytest.mark.invariant(32)
@pytest.mark.parametrize("case", FRAMES, ids=[case.name for case in FRAMES])
def test_a_fleet_of_frames_and_of_one_slot_is_struck(fleet: Fleet, case: Strike) -> None:
    outcome = run_strike(fleet, case, check_framed)
    assert outcome is None or outcome["state"] in case.outcomes, outcome
    check_leaks(fleet)
