"""The protocol under random schedules of faults in simulated time; and proof that the test can fail."""

from __future__ import annotations

import gc
import os
import random
import time

import hypothesis
import pytest
from hypothesis import Phase, given, settings

from .mutants import MUTANTS
from .schedules import SCHEDULES
from .simulation import Schedule, Simulation
from .world import Violation

pytestmark = pytest.mark.timeout(1800)  # a minute of a core's time, and somebody else's may come first

CI_SCHEDULES = 1000
FULL_SCHEDULES = 5000
FULL_PARTS = 20
"""A plain run takes a share of them."""
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
SEED = int(os.environ.get("JAXRL_SYNC_SIMULATION_SEED", "0")) or (
    random.Random(os.environ["JAXRL_SYNC_TEST_SEED"])  # of a commit always the same
    if "JAXRL_SYNC_TEST_SEED" in os.environ
    else random.SystemRandom()
).randrange(1, 1 << 32)


def _play(count: int, seed: int, capsys: pytest.CaptureFixture[str]) -> None:
    """So many schedules. A failure is shrunk, its message is the story of that one; the seed is printed."""
    played, events, start = 0, 0, time.monotonic()

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, print_blob=False, phases=PHASES)
    @given(SCHEDULES)
    def schedules_hold(schedule: Schedule) -> None:
        nonlocal played, events
        played += 1
        events += Simulation(schedule).run().events

    with capsys.disabled():
        print(f"\nseed {seed} (JAXRL_SYNC_SIMULATION_SEED={SEED})")
    gc.collect()
    gc.freeze()  # what is imported isn't looked through again and again
    try:
        schedules_hold()
    finally:
        gc.unfreeze()
    with capsys.disabled():
        print(f"{played} schedules, {events} events in {time.monotonic() - start:.0f} s")


@pytest.mark.slow
@pytest.mark.invariant(29)
@pytest.mark.invariant(31)
@pytest.mark.invariant(32)
@pytest.mark.invariant(33)
def test_any_schedule_of_faults_keeps_every_property_1000(capsys: pytest.CaptureFixture[str]) -> None:
    _play(CI_SCHEDULES, SEED, capsys)


@pytest.mark.full
@pytest.mark.parametrize("part", range(FULL_PARTS))
def test_any_schedule_of_faults_keeps_every_property_5000(
    capsys: pytest.CaptureFixture[str], part: int
) -> None:
    _play(FULL_SCHEDULES // FULL_PARTS, SEED + 1 + part, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_seeded_mistake_is_found(name: str) -> None:
    """Each mutant of a machine breaks a property within the number of schedules that CI plays."""

    def broken(schedule: Schedule) -> bool:
        try:
            Simulation(schedule).run()
        except (Violation, AssertionError, RuntimeError):
            return True
        return False

    search = settings(max_examples=CI_SCHEDULES, database=None, deadline=None, phases=[Phase.generate])
    with MUTANTS[name]():
        hypothesis.find(SCHEDULES, broken, settings=search, random=random.Random(1))


def test_the_same_schedule_is_the_same_story() -> None:
    schedule = Schedule(7, 2, (1, 2), ("shm", "tcp"), True, True)
    first, again = Simulation(schedule).run(), Simulation(schedule).run()
    assert first.story() == again.story() and first.events == again.events
