"""The scheduler under random events: every sample ends once, slots are never shared, nobody starves."""

from __future__ import annotations

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.plan import FULL, RUNNING, STOPPED, StepOutput
from jaxrl_sync.inference.request import Request, Sampling
from jaxrl_sync.inference.scheduler import (
    FREE,
    Decision,
    End,
    Event,
    Finish,
    Group,
    Pause,
    Resume,
    State,
    Submit,
    Swap,
    commit,
    initial_state,
    schedule,
)
from jaxrl_sync.transfer.version import Version

CONFIG = EngineConfig(
    slots=5, max_len=12, prefill_lengths=(4,), prefill_rows=2, decode_steps_per_dispatch=2, max_stop_ids=1
)
SUBMIT = st.tuples(st.just("submit"), st.integers(1, 8), st.integers(1, 11), st.booleans(), st.integers(1, 9))
OTHER = st.sampled_from(["abort", "keep", "wait", "abort all", "resume", "swap"])
STEPS = st.lists(st.lists(st.one_of(SUBMIT, OTHER), max_size=3), min_size=1, max_size=25)


class World:
    """Drives the scheduler with a device that draws one token per step and stops at random."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.state: State = dataclasses.replace(initial_state(CONFIG), version=Version("a", 0))
        self.groups: dict[int, Group] = {}
        self.left: dict[tuple[int, int], int] = {}
        self.ended: list[Finish] = []
        self.now = 0.0

    def event(self, what: object) -> Event:
        if isinstance(what, tuple):
            _, n, prompt, pinned, max_tokens = what
            uid = len(self.groups)
            pin = self.state.version if pinned else None
            request = Request(
                f"r{uid}", tuple(range(prompt)), n, Sampling(max_tokens=max_tokens), version=pin
            )
            deadline = self.now + float(self.rng.choice([4.0, 1000.0]))
            self.groups[uid] = Group(uid, request, deadline)
            self.left |= {(uid, i): min(max_tokens, CONFIG.max_len - prompt) for i in range(n)}
            return Submit(self.groups[uid])
        if what == "abort":
            return End(frozenset(self.rng.integers(0, len(self.groups) + 1, 2).tolist()), "abort")
        if what == "resume":
            return Resume()
        if what == "swap":
            version = self.state.version
            assert version is not None
            return Swap(Version(version.lineage, version.number + 1), self.now + 3.0)
        return Pause({"keep": "keep", "wait": "wait", "abort all": "abort"}[str(what)])  # type: ignore[arg-type]

    def step(self, events: list[Event]) -> None:
        before = self.state.version
        decision = schedule(self.state, events, self.now, CONFIG)
        self.check(decision)
        self.ended += decision.finished
        self.state = decision.state
        if not decision.plan.empty:
            output = self.execute(decision)
            version = decision.plan.swap or before
            self.state, finished = commit(self.state, decision.plan, output, version)
            self.ended += finished
        self.now += 1.0

    def check(self, decision: Decision) -> None:
        state, plan = decision.state, decision.plan
        held = [(u, s) for u, s in zip(state.uid.tolist(), state.sample.tolist(), strict=True) if u != FREE]
        assert len(set(held)) == len(held), "two slots hold one sample"
        assert not set(held) & {(f.uid, f.sample) for f in self.ended}, "an ended sample has a slot"
        assert {u for u, _ in held} <= set(state.groups)
        rows = [p.row for p in plan.prefills]
        assert all(np.count_nonzero(r >= 0) > 0 for r in rows)
        assert not rows or np.sum([r >= 0 for r in rows], axis=0).max() == 1, "a slot is prefilled twice"
        if plan.steps:
            assert state.length[plan.active].max() <= plan.attend
        if plan.swap is not None:
            pinned = [u for u in state.groups if self.groups[u].request.version is not None]
            entering = {u for u, g in self.groups.items() if g.request.version == self.state.version}
            assert not [u for u in pinned if u not in entering], "a swap under a pinned group"

    def execute(self, decision: Decision) -> StepOutput:
        plan, state = decision.plan, decision.state
        tokens = np.full((CONFIG.decode_steps_per_dispatch, CONFIG.slots), -1, np.int32)
        status = np.full(CONFIG.slots, RUNNING, np.int32)
        for s in np.flatnonzero(plan.active if plan.steps else []).tolist():
            key = (int(state.uid[s]), int(state.sample[s]))
            for k in range(plan.steps):
                tokens[k, s] = 1
                self.left[key] -= 1
                if self.rng.random() < 0.1 or self.left[key] == 0:
                    status[s] = STOPPED if self.left[key] else FULL
                    break
        zeros = np.zeros(tokens.shape, np.float32)
        return StepOutput(tokens, zeros, {}, status, plan.steps, None, plan.swap, 0.0, 0.0, 0.0)


@settings(max_examples=150, deadline=None)
@given(STEPS, st.integers(0, 2**16))
def test_random_schedules_end_every_sample_once(steps: list[list[object]], seed: int) -> None:
    world = World(seed)
    for events in steps:
        world.step([world.event(e) for e in events])
    world.step([Resume()])
    for _ in range(400):
        if not world.state.groups:
            break
        world.step([])
    ended = [(f.uid, f.sample) for f in world.ended]
    expected = [(uid, i) for uid, g in world.groups.items() for i in range(g.request.n)]
    assert sorted(ended) == sorted(expected)
    assert world.state.running == 0 and world.state.waiting == ()
