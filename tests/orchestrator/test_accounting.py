"""Flow, permits, admission, data source, advantages and the book's transitions on literal cases."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.orchestrator.admission import capacity, split_staleness, staleness
from jaxrl_sync.orchestrator.advantages import group_advantages, is_uniform
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import EvalConfig, LoopConfig, LoopConfigError
from jaxrl_sync.orchestrator.errors import EmptyDatasetError, FlowError, LoopError
from jaxrl_sync.orchestrator.flow import Flow, Permits
from jaxrl_sync.orchestrator.groups import EngineView
from jaxrl_sync.orchestrator.policy import LineageError, Policy
from jaxrl_sync.orchestrator.source import CursorError, DataSource
from jaxrl_sync.transfer.version import Version

from .simulator import loop_config

V0, V1 = Version("a", 0), Version("a", 1)
E0 = EngineView("e0", V0, 8)


def book(**changes: object) -> Book:
    return Book(loop_config(**changes), DataSource(None, 0), 1)


@pytest.mark.invariant(2)
def test_a_flow_that_does_not_balance_cannot_exist() -> None:
    with pytest.raises(FlowError, match="submitted 1 != settled 0"):
        Flow(submitted=1)
    with pytest.raises(FlowError, match="accepted 1 != queued 0"):
        Flow(submitted=1, accepted=1)
    with pytest.raises(FlowError, match="running is -1"):
        Flow().settle("errored", 1)
    flow = Flow().submit(4).settle("accepted", 3).settle("cancelled", 1).ship(1).drop_queued(2)
    assert (flow.accepted, flow.shipped, flow.queued, flow.dropped, flow.cancelled) == (1, 1, 0, 2, 1)


@pytest.mark.invariant(3)
def test_permits_never_go_below_zero_or_above_their_cap() -> None:
    permits = Permits(4).acquire(3)
    assert (permits.held, permits.free) == (3, 1)
    with pytest.raises(FlowError, match="5 permits held, expected 0 to 4"):
        permits.acquire(2)
    with pytest.raises(FlowError, match="-1 permits held"):
        permits.release(4)


@pytest.mark.invariant(13)
@pytest.mark.parametrize(
    ("step", "version", "outstanding", "room"),
    [
        (1, 0, 0, 30),
        (1, 0, 30, 0),
        (2, 0, 0, 20),
        (2, 1, 20, 10),
        (99, 98, 0, 20),
        (100, 99, 0, 10),
        (101, 100, 0, 0),
    ],
)
def test_capacity_fills_exactly_the_batches_within_the_bound(
    step: int, version: int, outstanding: int, room: int
) -> None:
    found = capacity(
        step=step, version=version, bound=2, samples_per_step=10, outstanding=outstanding, last_step=100
    )
    assert found == room


@pytest.mark.invariant(13)
@settings(max_examples=200, deadline=None)
@given(st.integers(0, 6), st.integers(1, 9), st.integers(0, 50), st.integers(0, 5))
def test_capacity_is_the_cumulative_inequality(bound: int, batch: int, version: int, ahead: int) -> None:
    step = version + 1 + ahead
    shipped = (step - 1) * batch
    for outstanding in (0, batch, 3 * batch):
        found = capacity(
            step=step,
            version=version,
            bound=bound,
            samples_per_step=batch,
            outstanding=outstanding,
            last_step=10**6,
        )
        assert found == (bound + version + 1) * batch - (shipped + outstanding)


@pytest.mark.invariant(15)
def test_staleness_is_in_flight_plus_in_queue() -> None:
    assert staleness(step=5, dispatch=1) == 3
    assert split_staleness(5, 1, 2) == (1, 2)
    assert split_staleness(5, 1, 9) == (3, 0)
    assert staleness(step=1, dispatch=4) == 0


@pytest.mark.invariant(7)
@pytest.mark.invariant(8)
def test_the_label_only_grows_and_stays_in_its_lineage() -> None:
    policy = Policy("a", 3)
    assert policy.publish(Version("a", 3)) and policy.publish(Version("a", 5))
    assert not policy.publish(Version("a", 5)) and not policy.publish(Version("a", 4))
    assert policy.label == Version("a", 5) and policy.committed == 5
    with pytest.raises(LineageError, match="b:6 was published, expected lineage a"):
        policy.publish(Version("b", 6))


@pytest.mark.invariant(48)
def test_advantages_ignore_order_and_are_zero_for_singletons_and_equal_rewards() -> None:
    rewards = [0.1, 0.7, 0.7, 0.3]
    base = dict(zip(rewards, group_advantages(rewards, normalize_std=True), strict=True))
    for order in itertools.permutations(rewards):
        found = group_advantages(order, normalize_std=True)
        assert [base[r] for r in order] == list(found), "bits depend on the order of the members"
    assert list(group_advantages([0.4], normalize_std=True)) == [0.0]
    assert list(group_advantages([0.4, 0.4], normalize_std=True)) == [0.0, 0.0]
    assert is_uniform([1.0, 1.0]) and not is_uniform(rewards)
    assert np.allclose(group_advantages([0.0, 1.0], normalize_std=False), [-0.5, 0.5])
    assert np.allclose(group_advantages([0.0, 1.0], normalize_std=True), [-1.0, 1.0])


@pytest.mark.invariant(59)
def test_the_cursor_follows_what_is_consumed_not_what_is_drawn() -> None:
    source = DataSource(6, 3)
    draws = [source.draw() for _ in range(4)]
    assert all(d is not None for d in draws)
    source.consume(2)
    assert source.cursor() == {"position": 0, "consumed": [2], "epoch": 0, "seed": 3, "size": 6}
    source.consume(0)
    source.consume(1)
    assert source.cursor()["position"] == 3 and source.cursor()["consumed"] == []
    again = DataSource(6, 3, cursor=source.cursor())
    first = again.draw()
    assert first is not None and first == draws[3]
    for position in (0, 2, 5):
        with pytest.raises(LoopError, match=f"position {position} consumed twice or before"):
            again.consume(position)


@pytest.mark.invariant(58)
@settings(max_examples=100, deadline=None)
@given(st.integers(1, 12), st.integers(0, 40), st.randoms(use_true_random=False))
def test_a_restored_source_yields_exactly_what_was_not_consumed(size: int, drawn: int, rng: object) -> None:
    source = DataSource(size, 1)
    positions = [d.position for d in (source.draw() for _ in range(drawn)) if d is not None]
    done = [p for p in positions if rng.random() < 0.5]  # type: ignore[attr-defined]
    for position in done:
        source.consume(position)
    again = DataSource(size, 1, cursor=source.cursor())
    rest = [d for d in (again.draw() for _ in range(drawn + 5)) if d is not None]
    assert not set(done) & {d.position for d in rest}
    assert set(positions) - set(done) <= {d.position for d in rest}
    assert all(d == source.at(d.position) for d in rest)


@pytest.mark.invariant(23)
def test_epochs_bound_a_finite_stream_and_shuffle_each_time() -> None:
    source = DataSource(8, 1, epochs=2)
    draws = [source.draw() for _ in range(17)]
    assert draws[16] is None and source.exhausted
    orders = [[d.item for d in draws[8 * e : 8 * e + 8] if d is not None] for e in range(2)]
    assert sorted(orders[0]) == sorted(orders[1]) == list(range(8))
    assert orders[0] != orders[1]


def test_a_foreign_cursor_and_an_empty_data_set_are_refused() -> None:
    with pytest.raises(CursorError, match="size=6, this run has 7"):
        DataSource(7, 3, cursor=DataSource(6, 3).cursor())
    with pytest.raises(EmptyDatasetError, match="0 training prompts"):
        DataSource(0, 3)


@pytest.mark.invariant(6)
def test_a_group_completes_when_arrived_and_ended_members_reach_its_size() -> None:
    b = book()
    group = b.admit([E0], 0.0)
    assert group is not None and b.permits.held == 4
    b.arrive(group.gid, 0, 0)
    b.lose(group.gid, 1, "errored", "x")
    b.lose(group.gid, 2, "cancelled", "y")
    assert not group.complete and not b.accept(group.gid, None)
    b.arrive(group.gid, 3, 1)
    assert group.complete and b.accept(group.gid, None)
    assert b.queue[0].samples == 2 and b.queue[0].completed_version == 1
    assert b.permits.held == 0
    b.check()


@pytest.mark.invariant(4)
@pytest.mark.invariant(5)
def test_a_completion_after_a_cancel_changes_nothing_but_the_count_of_late_ones() -> None:
    b = book()
    group = b.admit([E0], 0.0)
    assert group is not None
    b.arrive(group.gid, 0, 0)
    assert b.cancel(group.gid, "cancelled", "stale") is group
    assert b.permits.held == 0 and b.flow["train"].cancelled == 4
    before = (b.flow["train"], b.permits)
    assert b.arrive(group.gid, 1, 0) is None and b.lose(group.gid, 2, "errored", "x") is None
    assert b.cancel(group.gid, "errored", "again") is None
    assert (b.flow["train"], b.permits) == before and b.late == 2
    assert b.flow["train"].errored == 0, "a cancellation is no error"
    assert [(r.count, r.fate, r.reason) for r in b.records] == [(4, "cancelled", "stale")]


@pytest.mark.invariant(11)
def test_queued_groups_that_grow_too_old_are_dropped_and_their_prompts_come_again() -> None:
    b = book(staleness_bound=0, prompts_per_step=1)
    group = b.admit([E0], 0.0)
    assert group is not None
    for index in range(4):
        b.arrive(group.gid, index, 0)
    b.step = 2
    assert not b.accept(group.gid, None), "too old on insert"
    assert b.flow["train"].dropped == 4 and b.flow["train"].accepted == 0
    again = b.admit([EngineView("e0", V1, 8)], 1.0)
    assert again is not None and again.draw == group.draw and again.attempt == 1


@pytest.mark.invariant(17)
def test_an_open_group_needs_nothing_from_the_gate_any_more() -> None:
    b = book(staleness_bound=0, prompts_per_step=1)
    group = b.admit([E0], 0.0)
    assert group is not None and b.permits.held == 4, "all permits of a group are taken when it opens"
    b.draining = True
    assert b.admit([E0], 0.0) is None and b.room(0) == 0
    for index in range(4):
        assert b.arrive(group.gid, index, 0) is group
    assert b.accept(group.gid, None) and b.ready()


@pytest.mark.invariant(24)
def test_a_prompt_that_is_there_whenever_an_engine_is_lost_is_given_up_in_the_end() -> None:
    b = book(retry_cap=1)
    seen = []
    for _ in range(12):
        group = b.admit([E0], 0.0)
        assert group is not None
        if group.draw.position != 0:
            break
        seen.append(group.attempt)
        b.drop_lost(group.gid, "engine_lost")
    assert seen == [0] * 9 + [1], "lost engines cost no attempt for a while"
    assert b.prompts_given_up == 1 and b.source.cursor()["position"] == 1


@pytest.mark.invariant(13)
def test_an_engine_that_lags_takes_no_group_that_would_be_too_old() -> None:
    b = book(staleness_bound=1, prompts_per_step=1)
    b.step = 3
    old, new = EngineView("a-old", Version("a", 0), 8), EngineView("b-new", Version("a", 2), 8)
    group = b.admit([old, new], 0.0)
    assert group is not None and group.engine == "b-new"
    assert b.admit([old], 0.0) is None


def test_groups_go_to_the_engine_with_the_most_room() -> None:
    b = book()
    small, large = EngineView("a", V0, 4), EngineView("b", V0, 16)
    engines = [b.admit([small, large], 0.0) for _ in range(5)]
    assert [g.engine for g in engines if g is not None] == ["a", "b", "b", "b", "b"]


@pytest.mark.invariant(57)
def test_waiting_evaluation_gets_its_share_of_permits_and_no_more() -> None:
    b = book(max_in_flight=8, eval=EvalConfig(prompts=20, share=0.5))
    assert b.admit([E0], 0.0) is not None and b.admit([E0], 0.0) is not None
    b.eval_waiting = 20
    assert b.admit_eval(E0, 0, 1, "t", 0.0) is None, "no permit is free"
    first = next(iter(b.open.values()))
    for index in range(4):
        b.arrive(first.gid, index, 0)
    b.accept(first.gid, None)
    assert b.admit([E0], 0.0) is None, "the freed permits are kept for the evaluation"
    opened = [b.admit_eval(E0, i, 1, "t", 0.0) for i in range(6)]
    assert sum(g is not None for g in opened) == 4
    b.eval_waiting = 0
    b.check()


@pytest.mark.invariant(56)
def test_evaluation_is_never_stale() -> None:
    b = book(staleness_bound=0)
    assert b.admit_eval(E0, 0, 1, "t", 0.0) is not None
    b.step = 50
    assert b.stale_groups() == []


@pytest.mark.invariant(26)
def test_idle_means_nothing_open_queued_waiting_or_to_be_evaluated() -> None:
    b = book()
    assert b.idle()
    b.eval_waiting = 1
    assert not b.idle()
    b.eval_waiting = 0
    group = b.admit([E0], 0.0)
    assert group is not None and not b.idle()
    b.drop_lost(group.gid, "engine_lost")
    assert not b.idle() and len(b.retries) == 1


def test_settings_that_could_never_move_are_refused() -> None:
    with pytest.raises(LoopConfigError, match="allows 3 samples, which can't hold one group of 4"):
        loop_config(max_in_flight=3)
    with pytest.raises(LoopConfigError, match=r"sync.every_steps=3 needs loop.staleness_bound >= 2, found 1"):
        loop_config(publish_every=3, staleness_bound=1)
    assert LoopConfig(10, 0, 4, 4).permits == 16


def test_the_time_in_which_its_engine_stood_still_does_not_count_for_a_group() -> None:
    b = book(group_timeout_s=10.0)
    group = b.admit([EngineView("e0", V0, 8, stood_s=7.0)], 100.0)
    assert group is not None
    assert b.expired_groups(110.0, {"e0": 7.0}) == [] == b.expired_groups(140.0, {"e0": 37.5})
    assert group.age_s(140.0, 37.5) == 9.5
    assert b.expired_groups(110.1, {"e0": 7.0}) == [group.gid] == b.expired_groups(141.0, {"e0": 37.5})
    assert b.expired_groups(110.1, {"other": 50.0}) == [group.gid] == b.expired_groups(110.1)
