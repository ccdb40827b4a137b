"""Hypothesis strategies of fleets and faults. Times are simple numbers, so that a shrunk one reads well."""

from __future__ import annotations

import itertools

from hypothesis import strategies as st

from .simulation import KINDS, PHASES, Fault, Schedule

SOON_S = (0.0, 0.02, 0.1, 0.3, 1.0, 2.0, 5.0, 12.0)
LASTS_S = (0.5, 1.0, 3.0, 8.0, 15.0, 25.0, 40.0)

FAULTS = st.builds(
    Fault,
    after_s=st.sampled_from(SOON_S),
    kind=st.sampled_from(KINDS),
    who=st.integers(0, 19),
    lasts_s=st.sampled_from(LASTS_S),
    phase=st.sampled_from([*PHASES, ""]),
)

SCHEDULES = st.builds(
    Schedule,
    seed=st.integers(0, 1 << 20),
    trainer_ranks=st.integers(1, 2),
    engines=st.sampled_from([(1,), (2,), (1, 1), (1, 2), (2, 2), (3,), (1, 1, 1), (2, 1, 1)]),
    modes=st.sampled_from([("shm",), ("tcp",), ("verbs",), ("shm", "tcp"), ("verbs", "shm")]),
    verify=st.booleans(),
    fanout=st.sampled_from(["star", "chain", "tree"]),
    relays=st.booleans(),
    two_sites=st.booleans(),
    slots=st.sampled_from([2, 2, 1, 3]),
    copies=st.sampled_from([None, 1]),
    frames=st.booleans(),
    keep_versions=st.integers(1, 2),
    ttl_s=st.sampled_from([6.0, 20.0]),
    period_s=st.sampled_from([3.0, 1.0]),
    trains_on=st.booleans(),
    faults=st.lists(st.lists(FAULTS, max_size=4), max_size=6).map(
        lambda parts: tuple(itertools.chain(*parts))
    ),
)
