"""A fleet of real processes under faults: who is struck, when, and what follows (docs/faults.md).

The fleet is one for all cases; after each, every engine serves the committed version bit for bit, nothing is
left over, and nobody else's generation has stood still.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.cases import BROKEN, STRIKES, Broken, Strike
from tests.faults.fleet import Fleet
from tests.faults.network import Network
from tests.faults.strike import check_counted, check_leaks, run_broken, run_strike, settled

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SHARE = 0.06
"""Of the cases in a plain run: each takes some seconds of real time."""


class Standing:
    """The fleet of this module, started when it is first needed and anew after a failure."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._count = 0
        self._network: Network | None = None
        self._fleet: Fleet | None = None

    def get(self) -> Fleet:
        """A fleet that serves a version and is as a case may find it."""
        if self._fleet is None:
            self._count += 1
            folder = self._folder / str(self._count)
            folder.mkdir()
            self._network = Network(folder)
            self._fleet = Fleet(self._network, folder)
            self._fleet.publish()
            settled(self._fleet)
            check_leaks(self._fleet)
        return self._fleet

    def close(self) -> None:
        """End it."""
        if self._fleet is not None:
            self._fleet.close()
        if self._network is not None:
            self._network.close()
        self._fleet = self._network = None


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standing]:
    made = Standing(tmp_path_factory.mktemp("fleet"))
    yield made
    made.close()


@pytest.fixture
def fleet(standing: Standing, request: pytest.FixtureRequest) -> Iterator[Fleet]:
    failed = request.session.testsfailed
    yield standing.get()
    if request.session.testsfailed > failed:
        standing.close()


def strikes(*roles: str) -> pytest.MarkDecorator:
    chosen = [case for case in STRIKES if case.role in roles]
    return pytest.mark.parametrize("case", chosen, ids=[case.name for case in chosen])


def struck(fleet: Fleet, case: Strike) -> None:
    outcome = run_strike(fleet, case)
    assert outcome is None or outcome["state"] in case.outcomes, outcome
    check_leaks(fleet)


def test_every_edge_uses_its_transport_and_the_proxy_counts_its_bytes(fleet: Fleet) -> None:
    check_counted(fleet)
    check_leaks(fleet)


@pytest.mark.full(share=SHARE)
@strikes("hub")
def test_the_hub_is_struck(fleet: Fleet, case: Strike) -> None:
    struck(fleet, case)


@pytest.mark.full(share=SHARE)
@pytest.mark.invariant(32)
@strikes("trainer")
def test_a_rank_of_the_trainer_is_struck(fleet: Fleet, case: Strike) -> None:
    struck(fleet, case)


@pytest.mark.full(share=SHARE)
@pytest.mark.invariant(31)
@strikes("one", "pair", "local", "leaf")
def test_an_engine_is_struck_in_its_round(fleet: Fleet, case: Strike) -> None:
    struck(fleet, case)


@pytest.mark.full(share=SHARE)
@pytest.mark.invariant(32)
@strikes("relay")
def test_a_source_is_struck_in_its_readers_round(fleet: Fleet, case: Strike) -> None:
    struck(fleet, case)


@pytest.mark.full(share=SHARE)
@pytest.mark.invariant(33)
@strikes("two")
def test_an_engine_is_struck_in_another_ones_round(fleet: Fleet, case: Strike) -> None:
    struck(fleet, case)


@pytest.mark.full(share=SHARE)
@pytest.mark.invariant(33)
@pytest.mark.parametrize("case", BROKEN, ids=[case.name for case in BROKEN])
def test_connections_are_broken(fleet: Fleet, case: Broken) -> None:
    if case.action == "unplug" and not fleet.network.real:
        pytest.skip("NO NAMESPACES HERE: no cable to pull")
    outcome = run_broken(fleet, case)
    assert outcome["state"] == "committed", outcome
    check_leaks(fleet)
