"""Whole runs in fake time under faults: identities, bounds and liveness of the loop's own book."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.orchestrator.errors import BarrenError
from jaxrl_sync.orchestrator.source import CursorError, DataSource, MixedSource

from . import simulator as sim

SCHEDULES = st.fixed_dictionaries(
    {
        "bound": st.integers(0, 4),
        "lead": st.integers(0, 3),
        "depth": st.integers(0, 3),
        "prompts": st.integers(1, 5),
        "group": st.integers(1, 6),
        "policy": st.sampled_from(["drop", "wait"]),
        "batch_by": st.sampled_from(["groups", "samples"]),
        "sample_error": st.sampled_from([0.0, 0.1, 0.4]),
        "never_ends": st.sampled_from([0.0, 0.02]),
        "filtered": st.sampled_from([0.0, 0.3]),
        "swap_failure": st.sampled_from([0.0, 0.3]),
        "deaths": st.lists(st.floats(0, 40), max_size=3),
        "train_s": st.sampled_from([0.1, 1.0, 5.0]),
        "eval_every": st.integers(0, 4),
        "seed": st.integers(0, 10_000),
    }
)


def _run(case: dict[str, Any], steps: int = 12) -> tuple[Any, Any]:
    config = sim.loop_config(
        steps=steps,
        staleness_bound=case["bound"],
        lead=case["lead"],
        pipeline_depth=case["depth"],
        prompts_per_step=case["prompts"],
        group_size=case["group"],
        stale_policy=case["policy"],
        batch_by=case["batch_by"],
        barren_cap=10_000,
    )
    faults = sim.Faults(
        sample_error=case["sample_error"],
        never_ends=case["never_ends"],
        filtered=case["filtered"],
        late_completion=0.2,
        swap_failure=case["swap_failure"],
        engine_deaths_s=tuple(case["deaths"]),
        eval_every=case["eval_every"],
    )
    simulation = sim.Simulation(config, seed=case["seed"], faults=faults, train_s=case["train_s"])
    return simulation, simulation.run()


@pytest.mark.invariant(1)
@pytest.mark.invariant(2)
@pytest.mark.invariant(3)
@pytest.mark.invariant(11)
@pytest.mark.invariant(13)
@pytest.mark.invariant(15)
@pytest.mark.invariant(21)
@pytest.mark.invariant(22)
@settings(max_examples=60, deadline=None)
@given(SCHEDULES)
def test_any_schedule_of_faults_ends_with_every_step_and_every_identity(case: dict[str, Any]) -> None:
    simulation, outcome = _run(case)
    assert outcome.ended, f"stuck at step {simulation.book.step} after {outcome.elapsed_s} s"
    assert len(outcome.batches) == 12
    assert max(outcome.staleness) <= case["bound"]
    if case["batch_by"] == "groups":
        assert {len(b) for b in outcome.batches} == {case["prompts"]}
    simulation.shutdown()
    train = simulation.book.flow["train"]
    assert train.running == 0 and simulation.book.permits.held == 0
    assert simulation.book.permits.acquired == simulation.book.permits.released


@pytest.mark.invariant(58)
@pytest.mark.invariant(59)
@pytest.mark.invariant(62)
@settings(max_examples=30, deadline=None)
@given(SCHEDULES, st.integers(1, 11))
def test_a_resume_from_any_batch_consumes_every_prompt_exactly_once(case: dict[str, Any], stop: int) -> None:
    case = {**case, "filtered": 0.0, "sample_error": 0.0, "never_ends": 0.0, "policy": "wait", "bound": 2}
    first, before = _run(case)
    seen = [g.draw.position for b in before.batches[:stop] for g in b]
    second = sim.Simulation(
        first.config,
        seed=case["seed"] + 1,
        start=stop,
        cursor=before.cursors[stop - 1],
        train_s=case["train_s"],
    )
    fresh = second.book.room(stop)
    assert fresh == min(case["depth"] or 12, 2 + 1, 12 - stop) * first.config.samples_per_step, (
        "a resume starts with full capacity"
    )
    after = second.run()
    assert after.ended
    seen += [g.draw.position for b in after.batches for g in b]
    given_up = (
        before.cursors[stop - 1]["position"]
        + len(before.cursors[stop - 1]["consumed"])
        - len([p for b in before.batches[:stop] for p in b])
    )
    assert len(seen) == len(set(seen)), "a prompt was trained twice"
    assert given_up >= 0
    done = second.source.cursor()
    assert done["position"] + len(done["consumed"]) == len(seen) + given_up + second.book.prompts_given_up


@pytest.mark.invariant(12)
def test_bound_zero_dispatches_each_step_on_the_version_before_it() -> None:
    config = sim.loop_config(staleness_bound=0, steps=8)
    outcome = sim.Simulation(config, seed=3).run()
    assert outcome.ended and set(outcome.staleness) == {0}
    for step, batch in enumerate(outcome.batches, start=1):
        assert [g.draw.position for g in batch] == list(range(4 * (step - 1), 4 * step))
        assert {g.version.number for g in batch} == {step - 1}


@pytest.mark.invariant(66)
def test_same_config_and_seed_give_the_same_schedule() -> None:
    faults = sim.Faults(sample_error=0.2, never_ends=0.01, filtered=0.2, engine_deaths_s=(4.0,))
    traces = [sim.Simulation(sim.loop_config(), seed=5, faults=faults).run().trace for _ in range(2)]
    assert traces[0] == traces[1] and len(traces[0]) == 20
    other = sim.Simulation(sim.loop_config(), seed=6, faults=faults).run().trace
    assert other != traces[0]


@pytest.mark.invariant(24)
def test_a_prompt_that_always_fails_is_given_up_after_the_retry_cap_and_replaced() -> None:
    config = sim.loop_config(retry_cap=2)
    simulation = sim.Simulation(config, seed=1, faults=sim.Faults(failing_items=frozenset({3, 7})))
    outcome = simulation.run()
    assert outcome.ended and len(outcome.batches) == 20
    trained = {g.draw.item for b in outcome.batches for g in b}
    assert not trained & {3, 7}
    assert simulation.book.prompts_given_up == 2
    assert simulation.book.flow["train"].errored == 2 * 3 * 4


@pytest.mark.invariant(24)
def test_only_failing_prompts_end_the_run_with_their_cause() -> None:
    config = sim.loop_config(barren_cap=5)
    simulation = sim.Simulation(config, seed=1, faults=sim.Faults(sample_error=1.0))
    with pytest.raises(BarrenError, match="5 prompts in a row .* ended as: sample"):
        simulation.run()
    simulation.book.check()


@pytest.mark.invariant(25)
def test_a_rollout_that_never_ends_costs_its_timeout_and_returns_its_permits() -> None:
    config = sim.loop_config(steps=6, group_timeout_s=7.0)
    simulation = sim.Simulation(config, seed=2, faults=sim.Faults(never_ends=0.05))
    outcome = simulation.run()
    assert outcome.ended
    assert simulation.book.reasons["train/cancelled/timeout"] > 0
    assert outcome.elapsed_s < 6 * (7.0 + 3.0)
    simulation.shutdown()
    assert simulation.book.permits.held == 0


@pytest.mark.invariant(53)
@pytest.mark.invariant(54)
def test_pacing_trains_slow_prompts_at_the_rate_at_which_they_are_sampled() -> None:
    slow = frozenset(range(0, 4000, 5))
    faults = sim.Faults(slow_items=slow, slow_factor=6.0)
    config = sim.loop_config(steps=150, group_timeout_s=1e4)
    outcome = sim.Simulation(config, seed=4, faults=faults, train_s=0.5).run()
    trained = [g.draw.item in slow for b in outcome.batches for g in b]
    assert outcome.ended and abs(sum(trained) / len(trained) - 0.2) < 0.02
    gap = _ks_distance(outcome.lengths_sampled, outcome.lengths_trained)
    critical = 1.63 * (1 / len(outcome.lengths_sampled) + 1 / len(outcome.lengths_trained)) ** 0.5
    assert gap < critical, "trained lengths do not follow the sampled ones (KS test at 1 %)"


@pytest.mark.invariant(54)
def test_dropping_counts_every_sample_it_loses_to_staleness() -> None:
    faults = sim.Faults(slow_items=frozenset(range(0, 4000, 5)), slow_factor=20.0)
    config = sim.loop_config(steps=60, staleness_bound=1, stale_policy="drop", group_timeout_s=1e4)
    simulation = sim.Simulation(config, seed=4, faults=faults, train_s=0.2)
    outcome = simulation.run()
    reasons = simulation.book.reasons
    lost = reasons["train/cancelled/stale"] + reasons["train/dropped/stale"]
    flow = simulation.book.flow["train"]
    assert outcome.ended and lost > 0
    assert lost == flow.cancelled + flow.dropped


@pytest.mark.invariant(64)
def test_buffered_bytes_stay_bounded_over_a_long_run() -> None:
    config = sim.loop_config(steps=400, staleness_bound=3)
    simulation = sim.Simulation(config, seed=9, train_s=3.0, generate_s=0.1)
    outcome = simulation.run()
    assert outcome.ended
    assert outcome.max_bytes <= (3 + 1) * 4 * 100
    book, cursor = simulation.book, simulation.source.cursor()
    assert len(book.records) <= 256 and len(book.reasons) < 20 and len(book.details) < 20
    assert not book.open and not book.queue and not book.retries
    assert max(len(c["consumed"]) for c in outcome.cursors) <= (3 + 1) * 4, "the cursor stays small"
    assert cursor["position"] == 400 * 4 and cursor["consumed"] == []


def test_a_small_pipeline_depth_trains_on_fresher_samples_under_the_same_bound() -> None:
    means = []
    for depth in (0, 1):
        config = sim.loop_config(steps=60, staleness_bound=4, pipeline_depth=depth)
        outcome = sim.Simulation(config, seed=3, train_s=4.0, generate_s=0.3).run()
        assert outcome.ended and len(outcome.batches) == 60
        means.append(sum(k * n for k, n in outcome.staleness.items()) / outcome.staleness.total())
    assert means[0] > 3.5 and means[1] < 3.1


@pytest.mark.invariant(16)
def test_publishing_every_other_step_is_counted_in_updates() -> None:
    config = sim.loop_config(publish_every=2, staleness_bound=3)
    outcome = sim.Simulation(config, seed=2).run()
    assert outcome.ended
    assert {g.version.number % 2 for b in outcome.batches for g in b} == {0}
    assert max(outcome.staleness) <= 3


@pytest.mark.invariant(23)
@pytest.mark.parametrize(("rule", "sizes"), [("short", [4, 4, 2]), ("drop", [4, 4])])
def test_the_rest_at_the_end_of_the_data_follows_its_rule(rule: str, sizes: list[int]) -> None:
    config = sim.loop_config(epochs=1, last_batch=rule)
    simulation = sim.Simulation(config, seed=2, size=10)
    outcome = simulation.run()
    assert outcome.ended and [len(b) for b in outcome.batches] == sizes


@pytest.mark.invariant(23)
def test_a_finite_data_set_goes_round_with_each_item_once_per_epoch() -> None:
    outcome = sim.Simulation(sim.loop_config(steps=10), seed=2, size=10).run()
    draws = sorted((g.draw.position, g.draw.item) for b in outcome.batches for g in b)
    for epoch in range(3):
        items = [item for position, item in draws if position // 10 == epoch]
        assert sorted(items) == list(range(10))


@pytest.mark.invariant(56)
@pytest.mark.invariant(57)
def test_evaluation_shares_permits_and_leaves_the_stream_of_prompts_alone() -> None:
    config = sim.loop_config()
    a = sim.Simulation(config, seed=8).run()
    with_eval = sim.Simulation(config, seed=8, faults=sim.Faults(eval_every=3))
    b = with_eval.run()
    assert a.ended and b.ended
    assert sorted(b.evals)[:5] == [(3, i) for i in range(5)]
    assert with_eval.book.flow["eval"].cancelled == 0
    assert sorted(g.draw.position for x in a.batches for g in x) == sorted(
        g.draw.position for x in b.batches for g in x
    )


def _ks_distance(a: list[float], b: list[float]) -> float:
    """Largest distance of the two empirical distribution functions."""
    points = sorted(set(a) | set(b))
    a, b = sorted(a), sorted(b)
    i = j = 0
    worst = 0.0
    for point in points:
        while i < len(a) and a[i] <= point:
            i += 1
        while j < len(b) and b[j] <= point:
            j += 1
        worst = max(worst, abs(i / len(a) - j / len(b)))
    return worst


@pytest.mark.invariant(55)
@settings(max_examples=25, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([1.0, 2.5, 7.0]), st.sampled_from([0.0, 0.3, 0.8])), min_size=2, max_size=3
    ),
    st.sampled_from(["wait", "drop"]),
    st.floats(0.0, 0.3),
    st.lists(st.floats(0, 100), max_size=2),
    st.integers(0, 10_000),
)
def test_the_mix_of_tasks_that_is_trained_has_its_weights_whatever_is_filtered_lost_or_dropped(
    parts: list[tuple[float, float]], policy: str, error: float, deaths: list[float], seed: int
) -> None:
    config = sim.loop_config(steps=60, stale_policy=policy, barren_cap=10_000, retry_cap=1)
    weights, filtered = [w for w, _ in parts], tuple(f for _, f in parts)
    faults = sim.Faults(
        sample_error=error,
        filtered_by_part=filtered,
        failing_items=frozenset({3, 4, 7}),
        engine_deaths_s=tuple(deaths),
        late_completion=0.2,
    )
    simulation = sim.Simulation(config, seed=seed, faults=faults, train_s=0.5, mix=weights)
    outcome = simulation.run()
    assert outcome.ended
    trained, total, book = sim.mix_of(outcome), 60 * 4, simulation.book
    waiting = len(book.queue) + len(book.retries) + sum(g.kind == "train" for g in book.open.values())
    for part, weight in enumerate(weights):
        wanted = weight / sum(weights) * total
        assert abs(trained[part] - wanted) <= waiting + len(weights) + 8, (trained, weights, waiting)
    positions = [g.draw.position for batch in outcome.batches for g in batch]
    assert len(set(positions)) == total, "prompts of different tasks never share a position"


@pytest.mark.invariant(55)
@pytest.mark.invariant(58)
def test_a_mix_resumes_with_its_ratio_and_every_task_goes_on_at_its_own_cursor() -> None:
    config = sim.loop_config(steps=40, seed=3)
    mix, faults = [1.0, 3.0], sim.Faults(filtered_by_part=(0.7, 0.0))
    whole = sim.Simulation(config, seed=5, faults=faults, mix=mix).run()
    half = whole.cursors[19]
    second = sim.Simulation(config, seed=6, faults=faults, mix=mix, start=20, cursor=half)
    after = second.run()
    seen = [[g.draw.position for b in batches for g in b] for batches in (whole.batches[:20], after.batches)]
    assert not set(seen[0]) & set(seen[1]) and len(seen[1]) == 80
    trained = sim.mix_of(after) + Counter(p % 2 for p in seen[0])
    assert abs(trained[0] - 40) <= 4 and abs(trained[1] - 120) <= 4
    assert [row["trained"] for row in second.source.cursor()["mix"]] == [trained[0], trained[1]]
    with pytest.raises(CursorError, match=r"is of \['task-0', 'task-1'\], this run has the mix \['task-0',"):
        sim.Simulation(config, seed=6, mix=[1.0, 1.0, 1.0], cursor=half)
    with pytest.raises(CursorError, match="seed=None"):
        sim.Simulation(config, seed=6, cursor=half)
    with pytest.raises(CursorError, match="is of one task"):
        sim.Simulation(config, seed=6, mix=mix, cursor=DataSource(None, 3).cursor())


@pytest.mark.invariant(55)
def test_a_task_whose_data_has_ended_leaves_the_mix_to_the_others() -> None:
    source = MixedSource.make(["a", "b", "c"], [4.0, 1.0, 1.0], [3, None, 2], 0, epochs=1)
    parts = [draw.part for draw in (source.draw() for _ in range(12)) if draw is not None]
    assert parts[:6] == [0, 0, 0, 1, 2, 1] and parts.count(0) == 3 and parts.count(2) == 2
    assert parts.count(1) == 7 and not source.exhausted
    whole = MixedSource.make(["a", "b"], [1.0, 2.0], [2, 3], 0, epochs=1)
    draws = [whole.draw() for _ in range(6)]
    assert draws[5] is None and whole.exhausted
    assert all(d == whole.at(d.position) for d in draws if d is not None)
