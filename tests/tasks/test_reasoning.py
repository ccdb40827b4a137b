"""The reasoning-gym task: long answers, the package's score, partial credit, no eval() of answers."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from jaxrl_sync.batch.rollout import Reward
from jaxrl_sync.tasks.protocol import TaskError
from jaxrl_sync.tasks.reasoning import ReasoningArgs, ReasoningTask
from tests.tasks.episodes import single_turn


@pytest.fixture(scope="module")
def task() -> ReasoningTask:
    return ReasoningTask(ReasoningArgs())


def scored(task: ReasoningTask, uid: str, text: str, eos: bool = True) -> Reward:
    answer = [*task.tokenizer.encode(text), *([task.stop_token_ids[0]] if eos else [])]
    return task.score(single_turn(task, uid, answer))


def distances(grid: list[list[int]]) -> list[list[int]]:
    """Distance of every cell to the nearest zero, by looking at all of them."""
    zeros = [(r, c) for r, row in enumerate(grid) for c, x in enumerate(row) if x == 0]
    return [
        [min(abs(r - i) + abs(c - j) for i, j in zeros) for c in range(len(grid[0]))]
        for r in range(len(grid))
    ]


def test_answers_are_the_distances_and_at_least_64_tokens_long(task: ReasoningTask) -> None:
    data = task.dataset("train", 0)
    for uid in (data[i] for i in range(50)):
        prompt = task.tokenizer.decode(task.prompt(uid))
        assert prompt.endswith("=") and len(prompt) == task.max_prompt_len
        grid = [[int(x) for x in row.split()] for row in prompt[:-1].split("\n")]
        text = "\n".join(" ".join(map(str, row)) for row in distances(grid))
        assert task.answer(uid) == [*task.tokenizer.encode(text), task.stop_token_ids[0]]
        assert len(task.answer(uid)) == task.max_new_tokens == 72
        assert scored(task, uid, text) == Reward(1.0, {"exact": 1.0, "places": 1.0, "score": 1.0})


def test_partial_credit_falls_with_every_wrong_place(task: ReasoningTask) -> None:
    right = task.tokenizer.decode(task.answer("0/3"))
    values = [scored(task, "0/3", "9" * n + right[n:]).value for n in range(0, 72, 8)]
    assert values[0] == 1.0 and all(a > b for a, b in zip(values[:-1], values[1:], strict=True))
    assert scored(task, "0/3", right, eos=False).components == {
        "exact": 0.0,
        "places": 71 / 72,
        "score": 0.0,
    }
    assert scored(task, "0/3", right + "0" * 72).value < 0.45
    assert scored(task, "0/3", "", eos=False).value == 0.0


def test_train_and_eval_share_no_entry_and_uids_say_all(task: ReasoningTask) -> None:
    train, held_out = task.dataset("train", 5), task.dataset("eval", 5)
    assert train.size == 100_000 and held_out.size == 256
    assert not set(train) & set(held_out)
    other = ReasoningTask(ReasoningArgs())
    for uid in (train[7], held_out[255]):
        assert other.prompt(uid) == task.prompt(uid)
    assert task.prompt("0/1") != task.prompt("1/1")


def test_demonstrations_go_round_the_train_split() -> None:
    small = ReasoningTask(ReasoningArgs(train_size=3))
    examples = small.sft_examples(5, 2)
    assert [e.uid for e in examples] == ["2/0", "2/1", "2/2", "2/0", "2/1"]
    assert all(e.sample().num_loss_tokens == 72 for e in examples)


def test_answers_never_reach_an_eval_of_the_package(task: ReasoningTask, tmp_path: Any) -> None:
    target = tmp_path / "written"
    attack = f"open({str(target)!r}, 'w')"
    for name in ("binary_matrix", "spiral_matrix", "n_queens"):
        args = ReasoningArgs(
            dataset=name,
            options="{}",
            after="",
            alphabet="\n" + "".join(map(chr, range(32, 127))),
            vocab_size=0,
            max_prompt_len=4000,
            max_new_tokens=1000,
        )
        assert scored(ReasoningTask(args), "0/0", attack).components["score"] == 0.0
        assert not target.exists()


def test_other_data_sets_use_the_scorer_of_the_package() -> None:
    args = ReasoningArgs(
        dataset="caesar_cipher",
        options='{"min_words": 12, "max_words": 12}',
        after="text: ",
        alphabet="\n" + "".join(map(chr, range(32, 127))),
        vocab_size=0,
        max_prompt_len=200,
        max_new_tokens=200,
    )
    cipher = ReasoningTask(args)
    assert scored(cipher, "0/0", cipher.tokenizer.decode(cipher.answer("0/0"))).value == 1.0
    assert scored(cipher, "0/0", "NOTHING").components["exact"] == 0.0


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ({"dataset": "no_such_set"}, "dataset 'no_such_set'"),
        ({"options": '{"min_m": 3}'}, "min_m"),
        ({"options": '{"min_n": 9, "max_n": 6}'}, "dataset 'binary_matrix'"),
        ({"options": "6"}, "expected a JSON object"),
        ({"options": "{"}, "is not JSON"),
        ({"after": "no such text"}, "see 'after'"),
        ({"alphabet": "01"}, "not in the alphabet"),
        ({"max_prompt_len": 20}, "prompt of 0/0 has 72 tokens, expected at most 20"),
        ({"exact_weight": 1.5}, "exact_weight=1.5"),
        ({"train_size": 0}, "train_size=0"),
    ],
)
def test_what_does_not_fit_is_refused_at_once(args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ReasoningTask(ReasoningArgs(**args))


def test_scoring_from_many_threads_gives_the_same(task: ReasoningTask) -> None:
    wanted = {f"{s}/{i}": task.answer(f"{s}/{i}") for s in range(3) for i in range(20)}
    fresh, wrong = ReasoningTask(ReasoningArgs()), []

    def check() -> None:
        for uid, answer in wanted.items():
            if fresh.score(single_turn(fresh, uid, answer)).value != 1.0:
                wrong.append(uid)

    threads = [threading.Thread(target=check) for _ in range(4)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong


def test_a_malformed_uid_is_named(task: ReasoningTask) -> None:
    with pytest.raises(TaskError, match="uid 'x/1', expected seed/number"):
        task.prompt("x/1")
