"""The addition task: its prompts, its reward place by place, and splits that do not depend on the seed."""

from __future__ import annotations

import pytest

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.tasks.addition import AdditionArgs, AdditionTask
from jaxrl_sync.tasks.protocol import TaskError
from tests.tasks.episodes import single_turn


def scored(task: AdditionTask, uid: str, text: str, eos: bool = True) -> Reward:
    answer = [*task.tokenizer.encode(text), *([task.stop_token_ids[0]] if eos else [])]
    return task.score(single_turn(task, uid, answer))


def test_prompts_and_answers_by_hand() -> None:
    task = AdditionTask(AdditionArgs(digits=2))
    assert task.tokenizer.decode(task.prompt("7+58")) == "07+58="
    example = task.sft_examples(1, 0)[0]
    a, b = map(int, example.uid.split("+"))
    assert task.tokenizer.decode(example.answer) == f"{a + b:03}"
    assert example.answer[-1] == task.stop_token_ids[0]
    assert len(example.prompt) == task.max_prompt_len and len(example.answer) == task.max_new_tokens
    assert example.sample().loss_mask.tolist() == [False] * 6 + [True] * 4


@pytest.mark.parametrize(
    ("text", "eos", "value", "exact"),
    [
        ("12", True, 1.0, 1.0),
        ("12", False, 0.8, 0.0),  # right digits, no end
        ("13", True, 0.6, 0.0),
        ("02", True, 0.6, 0.0),
        ("13", False, 0.4, 0.0),
        ("1", True, 0.4, 0.0),
        ("121", False, 0.8, 0.0),
        ("", True, 0.0, 0.0),
        ("=+", True, 0.2, 0.0),
    ],
)
def test_reward_counts_right_places_and_the_end(text: str, eos: bool, value: float, exact: float) -> None:
    reward = scored(AdditionTask(AdditionArgs(digits=1, eos_weight=0.2)), "7+5", text, eos)
    assert reward.value == pytest.approx(value)
    assert reward.components["exact"] == exact


def test_an_episode_without_turns_has_no_reward() -> None:
    task = AdditionTask(AdditionArgs())
    assert task.score(Episode("1+1", "g", 0, "lin", 0, ())).value == 0


def test_one_digit_evaluates_over_the_whole_table_by_default() -> None:
    task = AdditionTask(AdditionArgs(digits=1))
    train, held_out = task.dataset("train", 0), task.dataset("eval", 0)
    assert train.size == held_out.size == 100
    assert set(train) == set(held_out) == {f"{a}+{b}" for a in range(10) for b in range(10)}
    assert list(train) == list(task.dataset("train", 0)) != list(task.dataset("train", 1))


@pytest.mark.parametrize("digits", [1, 2, 4])
def test_a_held_out_share_is_disjoint_and_the_same_for_every_seed(digits: int) -> None:
    task = AdditionTask(AdditionArgs(digits=digits, eval_share=0.25))
    take = 100 if digits < 4 else 400
    trains = [_first(task, "train", seed, take) for seed in (0, 1)]
    evals = [_first(task, "eval", seed, take) for seed in (0, 1)]
    assert not (trains[0] | trains[1]) & (evals[0] | evals[1])
    if digits == 1:
        assert evals[0] == evals[1] and 10 <= len(evals[0]) <= 40
        assert len(trains[0]) + len(evals[0]) == 100


def _first(task: AdditionTask, split: str, seed: int, count: int) -> set[str]:
    data = task.dataset("train" if split == "train" else "eval", seed)
    return {data[i] for i in range(min(count, data.size or count))}


def test_more_digits_draw_pairs_for_ever_from_the_seed() -> None:
    task = AdditionTask(AdditionArgs(digits=5))
    data = task.dataset("train", 3)
    assert data.size is None
    assert data[10**9] == task.dataset("train", 3)[10**9] != task.dataset("train", 4)[10**9]


def test_bad_arguments_and_uids_are_named() -> None:
    with pytest.raises(TaskError, match="digits=0"):
        AdditionArgs(digits=0)
    with pytest.raises(TaskError, match="eval_share=1"):
        AdditionArgs(eval_share=1)
    for uid in ("1", "1+x", "12+3", "1+2+3", ""):
        with pytest.raises(TaskError, match="expected a\\+b"):
            AdditionTask(AdditionArgs()).prompt(uid)
