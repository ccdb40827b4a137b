"""The protocol under random schedules of faults in simulated time; and proof that the test can fail."""

from __future__ import annotations

import concurrent.futures
import gc
import os
import random
import time
from multiprocessing import get_context

import hypothesis
import pytest
from hypothesis import Phase, given, settings

from .mutants import MUTANTS
from .schedules import SCHEDULES
from .simulation import Schedule, Simulation
from .world import Violation

CI_SCHEDULES = 1000
FULL_SCHEDULES = 5000
PHASES = (Phase.explicit, Phase.generate, Phase.shrink)
SEED = int(os.environ.get("JAXRL_SYNC_SIMULATION_SEED", "0")) or random.SystemRandom().randrange(1, 1 << 32)


def _play(count: int, seed: int) -> tuple[int, int]:
    """So many schedules: (schedules, events). A failure is shrunk, its message is the story of that one."""
    played, events = 0, 0

    @hypothesis.seed(seed)
    @settings(max_examples=count, database=None, deadline=None, print_blob=False, phases=PHASES)
    @given(SCHEDULES)
    def schedules_hold(schedule: Schedule) -> None:
        nonlocal played, events
        played += 1
        events += Simulation(schedule).run().events

    gc.collect()
    gc.freeze()  # what is imported isn't looked through again and again
    try:
        schedules_hold()
    finally:
        gc.unfreeze()
    return played, events


def _play_all(counts: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    """Parts of many schedules, each in a process of its own where there are several."""
    start, seeds = time.monotonic(), [SEED + i for i in range(len(counts))]
    with capsys.disabled():
        print(f"\nseed {SEED} (JAXRL_SYNC_SIMULATION_SEED)")
    if len(counts) == 1:
        done = [_play(counts[0], SEED)]
    else:
        with concurrent.futures.ProcessPoolExecutor(len(counts), get_context("spawn")) as pool:
            done = list(pool.map(_play, counts, seeds))
    played, events = (sum(numbers) for numbers in zip(*done, strict=True))
    with capsys.disabled():
        print(f"{played} schedules, {events} events in {time.monotonic() - start:.0f} s; seed {SEED}")


@pytest.mark.slow
@pytest.mark.invariant(29)
@pytest.mark.invariant(31)
@pytest.mark.invariant(32)
@pytest.mark.invariant(33)
def test_any_schedule_of_faults_keeps_every_property_1000(capsys: pytest.CaptureFixture[str]) -> None:
    _play_all([CI_SCHEDULES], capsys)


@pytest.mark.full
def test_any_schedule_of_faults_keeps_every_property_5000(capsys: pytest.CaptureFixture[str]) -> None:
    _play_all([FULL_SCHEDULES // 4] * 4, capsys)


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
