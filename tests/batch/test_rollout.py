"""Rollout records check their invariants when they are made."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.batch.rollout import Episode, Group, Reward, RolloutError, Sample, Timing, Turn


def turn(prompt: list[int], tokens: list[int], versions: list[int], **kw: Any) -> Turn:
    return Turn(prompt, tokens, [-0.5] * len(tokens), versions, **kw)  # type: ignore[arg-type]


def episode(*turns: Turn, index: int = 0, reward: float | None = 1.0, dispatch_version: int = 3) -> Episode:
    scored = None if reward is None else Reward(reward)
    return Episode("u", "g", index, "lin", dispatch_version, turns, scored)


def sample_fields() -> dict[str, Any]:
    return dict(
        uid="u",
        group_id="g",
        tokens=[5, 6, 7],
        loss_mask=[False, True, True],
        logprobs=[0.0, -1.0, -2.0],
        versions=[3, 3, 4],
        reward=1.0,
        advantage=0.5,
        dispatch_version=3,
    )


@pytest.mark.invariant(9)
@pytest.mark.invariant(42)
def test_an_episode_of_two_turns_becomes_one_sample_with_the_environment_masked() -> None:
    s = episode(turn([1, 2], [5, 6], [3, 4]), turn([8], [7], [5], finish_reason="length")).sample(0.25)
    assert s.tokens.tolist() == [1, 2, 5, 6, 8, 7]
    assert s.loss_mask.tolist() == [False, False, True, True, False, True]
    assert s.logprobs.tolist() == [0.0, 0.0, -0.5, -0.5, 0.0, -0.5]
    assert s.versions.tolist() == [3, 3, 3, 4, 4, 5]
    assert (s.advantage, s.reward, s.finish_reason, s.num_loss_tokens, s.num_versions) == (
        0.25,
        1.0,
        "length",
        3,
        3,
    )


@pytest.mark.invariant(9)
@pytest.mark.parametrize("name", ["loss_mask", "logprobs", "versions"])
def test_fields_of_another_length_are_refused_by_name(name: str) -> None:
    fields = sample_fields()
    fields[name] = fields[name][:-1]
    with pytest.raises(RolloutError, match=rf"len\({name}\) is 2, expected len\(tokens\) = 3"):
        Sample(**fields)


@pytest.mark.invariant(10)
def test_versions_that_decrease_are_refused_within_and_between_turns() -> None:
    with pytest.raises(RolloutError, match=r"versions\[2\] is 4 after 5"):
        Sample(**{**sample_fields(), "versions": [3, 5, 4]})
    with pytest.raises(RolloutError, match="turn 1: version 4 after version 5"):
        episode(turn([1], [5], [5]), turn([8], [7], [4]))
    with pytest.raises(RolloutError, match="turn 0: version 2 after version 3"):
        episode(turn([1], [5], [2]), dispatch_version=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"logprobs": [0.0, -1.0, float("nan")]}, r"logprobs\[2\] is nan"),
        ({"logprobs": [0.0, -1.0, 0.5]}, "at most 0"),
        ({"tokens": [5, -6, 7]}, "tokens has -6"),
        ({"tokens": [[5, 6, 7]]}, r"shape \(1, 3\)"),
        ({"tokens": ["x", 6, 7]}, "expected values of int32"),
        ({"loss_mask": [True, True, True]}, "token 0 has no context"),
        ({"advantage": float("inf")}, "advantage is inf"),
        ({"dispatch_version": 4}, "before its dispatch version 4"),
        ({k: [] for k in ("tokens", "loss_mask", "logprobs", "versions")}, "no tokens"),
    ],
)
def test_a_bad_sample_is_refused_with_the_value_found(change: dict[str, Any], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        Sample(**{**sample_fields(), **change})


def test_records_are_copies_that_nobody_can_write_to() -> None:
    tokens = np.array([5, 6, 7], np.int64)
    s = Sample(**{**sample_fields(), "tokens": tokens})
    tokens[0] = 99
    assert s.tokens.tolist() == [5, 6, 7] and s.tokens.dtype == np.int32
    with pytest.raises(ValueError, match="read-only"):
        s.tokens[0] = 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        s.reward = 2.0  # type: ignore[misc]


@pytest.mark.invariant(15)
def test_staleness_counts_from_the_version_trained_on() -> None:
    s = Sample(**sample_fields())
    assert [s.staleness(step) for step in (2, 4, 5, 7)] == [0, 0, 1, 3]


@pytest.mark.invariant(48)
def test_a_group_holds_its_own_survivors_only() -> None:
    group = Group("g", "u", 4, 3, tuple(episode(turn([1], [5], [3]), index=i, reward=i) for i in (0, 2)))
    assert group.rewards.tolist() == [0.0, 2.0]
    assert [s.advantage for s in group.samples([-1.0, 1.0])] == [-1.0, 1.0]
    with pytest.raises(RolloutError, match="3 advantages, expected 2"):
        group.samples([0.0, 0.0, 0.0])
    with pytest.raises(RolloutError, match="each member once"):
        Group("g", "u", 4, 3, (group.episodes[0], group.episodes[0]))
    with pytest.raises(RolloutError, match="at most 1"):
        Group("g", "u", 1, 3, group.episodes)
    with pytest.raises(RolloutError, match="expected its own only"):
        Group("other", "u", 4, 3, group.episodes)


def test_an_unscored_episode_is_no_sample_and_rewards_are_finite() -> None:
    with pytest.raises(RolloutError, match="no reward yet"):
        episode(turn([1], [5], [3]), reward=None).sample()
    with pytest.raises(RolloutError, match="'exact' is nan"):
        Reward(1.0, {"exact": float("nan")})


def test_timings_add_up_and_turns_name_their_end() -> None:
    e = episode(turn([1], [5], [3], timing=Timing(1, 2, 3)), turn([8], [7], [3], timing=Timing(0.5, 0, 1, 4)))
    assert e.timing == Timing(1.5, 2, 4, 4)
    assert (e.num_sampled_tokens, e.end_version, e.completion.tolist()) == (2, 3, [7])
    with pytest.raises(RolloutError, match="finish_reason 'eos'"):
        turn([1], [5], [3], finish_reason="eos")


def test_truncation_keeps_the_first_tokens() -> None:
    s = Sample(**sample_fields()).truncated(2)
    assert (s.tokens.tolist(), s.loss_mask.tolist(), s.finish_reason) == ([5, 6], [False, True], "length")


def test_batch_and_tasks_never_import_jax() -> None:
    code = (
        "import sys, jaxrl_sync.batch.connection, jaxrl_sync.batch.pack, jaxrl_sync.tasks.registry as r\n"
        "r.make_task('addition'), r.make_task('reasoning'), r.make_task('guess'), r.make_task('faulty')\n"
        "assert 'jax' not in sys.modules, 'jax was imported'"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
