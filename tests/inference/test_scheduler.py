"""The scheduler as a pure function: literal states and events in, plans out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.plan import FULL, RUNNING, STOPPED, StepOutput, StepPlan
from jaxrl_sync.inference.request import Request, Sampling
from jaxrl_sync.inference.scheduler import (
    Decision,
    End,
    EndAll,
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
    slots=4,
    max_len=16,
    prefill_lengths=(4,),
    prefill_rows=2,
    attend_lengths=(8,),
    decode_steps_per_dispatch=2,
)
V0, V1 = Version("a", 0), Version("a", 1)


def group(
    uid: int, n: int = 1, prompt: int = 3, pin: Version | None = None, deadline_s: float = np.inf
) -> Group:
    tokens = tuple(range(1, prompt + 1))
    return Group(uid, Request(f"r{uid}", tokens, n, Sampling(max_tokens=5), version=pin), deadline_s)


def step(state: State, *events: Event, now: float = 0.0, config: EngineConfig = CONFIG) -> Decision:
    return schedule(state, events, now, config)


def output(plan: StepPlan, status: list[int]) -> StepOutput:
    """A dispatch in which every active slot drew a token per step."""
    tokens = np.where(plan.active, 7, -1)[None].repeat(plan.steps, 0).astype(np.int32)
    zeros = np.zeros(tokens.shape, np.float32)
    return StepOutput(tokens, zeros, {}, np.array(status), plan.steps, None, plan.swap, 0.0, 0.0, 0.0)


def serving(*events: Event) -> State:
    """A state with version V0 after one step over ``events``, nothing finished."""
    state = dataclasses.replace(initial_state(CONFIG), version=V0)
    decision = step(state, *events)
    return commit(decision.state, decision.plan, output(decision.plan, [RUNNING] * 4), V0)[0]


def test_a_group_prefills_once_and_fills_n_slots() -> None:
    plan = step(initial_state(CONFIG), Submit(group(7, n=3))).plan
    (prefill,) = plan.prefills
    assert prefill.row.tolist() == [0, 0, 0, -1]
    assert prefill.tokens.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0]]
    token, position, remaining, _, _, _, sample = prefill.ints[:, :7].T
    assert (token[:3].tolist(), position[:3].tolist()) == ([3, 3, 3], [2, 2, 2])
    assert remaining[:3].tolist() == [5, 5, 5] and sample[:3].tolist() == [0, 1, 2]
    assert plan.active.tolist() == [True, True, True, False]
    assert (plan.steps, plan.attend) == (2, 8)


def test_groups_enter_in_order_and_whole() -> None:
    decision = step(initial_state(CONFIG), *(Submit(group(i, n=n)) for i, n in enumerate([3, 2, 1])))
    assert decision.state.uid.tolist() == [0, 0, 0, -1]
    assert [w.group.uid for w in decision.state.waiting] == [1, 2]
    assert decision.admitted == (0,)


def test_a_group_larger_than_the_engine_enters_in_parts() -> None:
    first = step(initial_state(CONFIG), Submit(group(0, n=6)))
    state, finished = commit(
        first.state, first.plan, output(first.plan, [FULL, RUNNING, STOPPED, RUNNING]), V0
    )
    assert finished == (Finish(0, 0, 0, "length"), Finish(0, 2, 2, "stop"))
    second = step(state)
    assert second.state.sample.tolist() == [4, 1, 5, 3]
    assert second.admitted == () and second.state.waiting == ()


def test_batches_hold_at_most_prefill_rows_and_use_the_shortest_bucket() -> None:
    plan = step(initial_state(CONFIG), *(Submit(group(i, prompt=p)) for i, p in enumerate([3, 5, 9]))).plan
    assert [p.tokens.shape for p in plan.prefills] == [(2, 4), (2, 16)]
    assert [p.row.tolist() for p in plan.prefills] == [[0, 1, -1, -1], [-1, -1, 0, -1]]
    assert plan.attend == 16


def test_deterministic_mode_has_one_shape() -> None:
    config = dataclasses.replace(CONFIG, deterministic=True)
    plan = step(initial_state(config), Submit(group(0)), config=config).plan
    assert plan.prefills[0].tokens.shape == (2, 16) and plan.attend == 16


def test_schedule_is_pure() -> None:
    state = serving(Submit(group(0, n=2)))
    events = (Submit(group(1, n=2)), End(frozenset({0}), "abort"))
    before = [state.uid.tolist(), state.sample.tolist(), state.length.tolist(), dict(state.groups)]
    plans = [step(state, *events).plan.to_bytes() for _ in range(2)]
    assert plans[0] == plans[1]
    assert before == [state.uid.tolist(), state.sample.tolist(), state.length.tolist(), dict(state.groups)]


def test_abort_frees_running_and_waiting_samples() -> None:
    state = serving(Submit(group(0, n=4)), Submit(group(1, n=2)))
    decision = step(state, End(frozenset({0, 1, 99}), "abort"))
    assert [(f.uid, f.sample, f.slot) for f in decision.finished] == [
        *((0, i, i) for i in range(4)),
        *((1, i, -1) for i in range(2)),
    ]
    assert decision.plan.empty and not decision.state.groups


@pytest.mark.invariant(25)
def test_a_group_past_its_deadline_ends_with_timeout_also_while_paused() -> None:
    state = serving(Submit(group(0, deadline_s=5.0)), Submit(group(1)), Pause("keep"))
    assert state.next_deadline_s == 5.0
    assert step(state, now=4.9).finished == ()
    decision = step(state, now=5.0)
    assert [(f.uid, f.reason) for f in decision.finished] == [(0, "timeout")]
    assert set(decision.state.groups) == {1}


@pytest.mark.invariant(33)
def test_pause_modes() -> None:
    state = serving(Submit(group(0)))
    keep = step(state, Pause("keep"), Submit(group(1)))
    assert keep.plan.empty and keep.state.standing and keep.state.running == 1
    wait = step(state, Pause("wait"), Submit(group(1)))
    assert wait.plan.steps == 2 and not wait.plan.prefills and not wait.state.standing
    abort = step(state, Submit(group(1)), Pause("abort"))
    assert abort.plan.empty and {f.reason for f in abort.finished} == {"abort"} and len(abort.finished) == 2
    twice = step(keep.state, Pause("keep"), Pause("keep"), Resume(), Resume())
    assert twice.plan.steps == 2 and twice.state.running == 2


def test_a_swap_waits_for_pinned_groups_and_lets_the_others_go_on() -> None:
    state = serving(Submit(group(0, pin=V0)), Submit(group(1)))
    waiting = step(state, Swap(V1, 9.0), Submit(group(2)), Submit(group(3, pin=V0)))
    assert waiting.plan.swap is None and waiting.plan.steps == 2
    ended = step(waiting.state, End(frozenset({0, 3}), "abort"))
    assert ended.plan.swap == V1 and ended.state.swap is None


def test_pinned_groups_go_first_while_a_swap_waits() -> None:
    state = serving(Submit(group(0, n=3, pin=V0)))
    decision = step(state, Swap(V1, 9.0), Submit(group(1)), Submit(group(2, pin=V0)))
    assert decision.state.uid.tolist() == [0, 0, 0, 2]


def test_a_swap_gives_up_at_its_deadline() -> None:
    state = serving(Submit(group(0, pin=V0)))
    waiting = step(state, Swap(V1, 9.0))
    assert waiting.state.next_deadline_s == 9.0
    late = step(waiting.state, now=9.0)
    assert late.expired_swap == Swap(V1, 9.0) and late.plan.swap is None and late.state.swap is None


def test_recompute_lists_running_slots_only_at_a_swap() -> None:
    config = dataclasses.replace(CONFIG, kv_policy="recompute")
    state = serving(Submit(group(0, n=2)))
    assert step(state, config=config).recompute == ()
    decision = step(state, Swap(V1, 9.0), Submit(group(1)), config=config)
    assert decision.recompute == (0, 1) and decision.state.uid.tolist() == [0, 0, 1, -1]


def test_the_label_moves_only_by_what_was_installed() -> None:
    state = serving(Submit(group(0)))
    decision = step(state, Swap(V1, 9.0))
    assert decision.plan.swap == V1 and decision.state.version == V0
    assert commit(decision.state, decision.plan, output(decision.plan, [RUNNING] * 4), V0)[0].version == V0


def test_end_all_leaves_nothing() -> None:
    decision = step(serving(Submit(group(0, n=2)), Submit(group(1, n=4))), EndAll("error"))
    assert decision.plan.empty and decision.state.running == 0 and decision.state.waiting == ()


def test_plans_survive_the_wire() -> None:
    state = serving(Submit(group(0)))
    plan = step(state, Swap(V1, 9.0), *(Submit(group(i, prompt=i)) for i in (4, 8))).plan
    plan = dataclasses.replace(plan, warm_up=True)
    again = StepPlan.from_bytes(plan.to_bytes())
    assert (again.number, again.steps, again.attend, again.swap, again.warm_up) == (1, 2, 16, V1, True)
    assert again.active.tolist() == plan.active.tolist() and len(again.prefills) == len(plan.prefills)
    for old, new in zip(plan.prefills, again.prefills, strict=True):
        for name in ("tokens", "row", "ints", "floats"):
            np.testing.assert_array_equal(getattr(old, name), getattr(new, name))
            assert getattr(old, name).dtype == getattr(new, name).dtype
    with pytest.raises(ValueError, match="step plan: expected"):
        StepPlan.from_bytes(plan.to_bytes() + b"x")
