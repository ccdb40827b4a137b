"""Guess the number: feedback, masking of the environment's tokens, reward by turns."""

from __future__ import annotations

import pytest

from jaxrl_sync.tasks.multi_turn import GuessArgs, GuessTask
from jaxrl_sync.tasks.protocol import TaskError
from tests.tasks.episodes import play


def uid_with_secret(task: GuessTask, secret: int) -> str:
    return next(uid for uid in task.dataset("train", 0) if task.secret(uid) == secret)


def tokens(task: GuessTask, text: str, eos: bool = True) -> list[int]:
    return [*task.tokenizer.encode(text), *([task.stop_token_ids[0]] if eos else [])]


def test_bisection_is_led_to_the_secret_and_only_guesses_are_trained_on() -> None:
    task = GuessTask(GuessArgs(digits=1, max_turns=4, decay=0.9))
    uid = uid_with_secret(task, 6)
    episode = play(task, uid, [tokens(task, t) for t in ("4", "7", "6", "0")])
    assert [task.tokenizer.decode(t.prompt.tolist()) for t in episode.turns] == ["?", ">", "<"]
    reward = task.score(episode)
    assert reward.value == pytest.approx(0.81)
    assert reward.components == {"exact": 1.0, "turns": 3.0, "junk": 0.0}
    sample = episode.__class__(uid, "g", 0, "lin", 0, episode.turns, reward).sample(1.0)
    text = task.tokenizer.decode(sample.tokens.tolist(), skip_special_tokens=False)
    assert text == "?4<eos>>7<eos><6<eos>"
    assert sample.loss_mask.tolist() == [False, True, True] * 3


def test_the_episode_ends_after_the_last_turn_with_credit_for_closeness() -> None:
    task = GuessTask(GuessArgs(digits=1, max_turns=2))
    uid = uid_with_secret(task, 6)
    episode = play(task, uid, [tokens(task, t) for t in ("0", "5", "6")])
    assert len(episode.turns) == 2
    assert task.score(episode).value == pytest.approx(0.5 * 0.9)
    assert task.score(episode).components["exact"] == 0.0


@pytest.mark.parametrize(("text", "eos"), [("66", True), ("6", False), ("?", True), ("", True), ("", False)])
def test_what_is_no_guess_is_marked_and_costs(text: str, eos: bool) -> None:
    task = GuessTask(GuessArgs(digits=1, max_turns=3, junk_penalty=0.1))
    uid = uid_with_secret(task, 6)
    episode = play(task, uid, [tokens(task, text, eos), tokens(task, "6")])
    assert task.tokenizer.decode(episode.turns[1].prompt.tolist()) == "!"
    assert task.score(episode).value == pytest.approx(0.9 - 0.1)


def test_rewards_are_never_negative_and_members_share_the_secret() -> None:
    task = GuessTask(GuessArgs(digits=2, max_turns=3, junk_penalty=1.0))
    uid = task.dataset("eval", 1)[0]
    episode = play(task, uid, [tokens(task, "?")] * 3)
    assert len(episode.turns) == 3 and task.score(episode).value == 0.0
    assert task.prompt(uid) == GuessTask(GuessArgs(digits=2)).prompt(uid)
    assert task.secret(uid) == GuessTask(GuessArgs(digits=2)).secret(uid)
    assert not set(task.dataset("train", 1)) & set(task.dataset("eval", 1))


def test_secrets_are_spread_over_the_range() -> None:
    task = GuessTask(GuessArgs(digits=1))
    counts = [0] * 10
    for uid in task.dataset("train", 0):
        counts[task.secret(uid)] += 1
    assert min(counts) > 60 and sum(counts) == 1024


def test_demonstrations_have_the_right_format() -> None:
    task = GuessTask(GuessArgs(digits=2))
    assert {task.guess(e.answer) for e in task.sft_examples(3, 0)} == {50}


def test_bad_arguments_are_named() -> None:
    with pytest.raises(TaskError, match="digits=9"):
        GuessArgs(digits=9)
    with pytest.raises(TaskError, match="decay=0"):
        GuessArgs(decay=0)
