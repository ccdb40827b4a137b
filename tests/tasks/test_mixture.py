"""Several tasks in one run: one vocabulary for all, labels, demonstrations by weight."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.config.sections import TaskSection
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.tasks.faulty import FaultyTask
from jaxrl_sync.tasks.mixture import Mixture, make_mixture
from jaxrl_sync.tasks.protocol import TaskError
from jaxrl_sync.tasks.registry import make_task
from tests.tasks.episodes import play, single_turn


def mixture(*entries: dict[str, Any]) -> Mixture:
    return make_mixture(TaskSection.model_validate({"mix": list(entries)}))


def test_one_task_is_a_mixture_of_itself_and_keeps_its_ids() -> None:
    alone = make_mixture(TaskSection(name="addition", args={"digits": 2}))
    assert alone.labels == ("addition",) and alone.tokenizer == make_task("addition").tokenizer
    assert alone.parts[0].task.prompt("1+2") == make_task("addition", {"digits": 2}).prompt("1+2")


def test_tasks_of_different_alphabets_share_one_and_keep_their_rewards() -> None:
    both = mixture({"name": "addition"}, {"name": "guess", "weight": 3})
    sums, guess = both.parts[0].task, both.parts[1].task
    shared = both.tokenizer
    assert (
        isinstance(shared, CharTokenizer)
        and shared.alphabet == "0123456789+=?<>!"
        and shared.vocab_size == 19
    )
    assert sums.tokenizer is guess.tokenizer is shared and guess.stop_token_ids == shared.eos_ids
    assert shared.decode(sums.prompt("3+4")) == "3+4=" and shared.decode(guess.prompt("x")) == "?"
    right = single_turn(sums, "3+4", [*shared.encode("07"), *shared.eos_ids])
    assert sums.score(right).value == pytest.approx(1.0)
    assert (
        sums.score(single_turn(sums, "3+4", [*shared.encode("<7"), *shared.eos_ids])).components["digits"]
        == 0.5
    )
    own: Any = make_task("guess")
    secret = own.secret("train/0/1")
    answers = [[*shared.encode(text), *shared.eos_ids] for text in ("=", str((secret + 1) % 10), str(secret))]
    episode = play(guess, "train/0/1", answers)
    marks = [shared.decode(turn.prompt.tolist()) for turn in episode.turns]
    assert marks == ["?", "!", "<" if secret < 9 else ">"]
    found = guess.score(episode)
    assert found.components == {"exact": 1.0, "turns": 3.0, "junk": 1.0}
    assert np.array_equal(episode.turns[0].tokens, answers[0]), "the episode itself is left alone"


def test_demonstrations_come_in_the_ratio_of_the_weights_in_every_stretch() -> None:
    several = mixture({"name": "addition", "weight": 3}, {"name": "guess"}, {"name": "faulty", "weight": 9})
    has_none = [not part.task.sft_examples(1, 0) for part in several.parts]
    examples = several.sft_examples(40, 0)
    assert has_none == [False, False, True] and len(examples) == 40
    for stretch in (examples[:20], examples[20:]):
        assert Counter("+" in e.uid for e in stretch) == {True: 15, False: 5}
    assert several.tokenizer.decode(examples[0].prompt).endswith("=")
    assert mixture({"name": "faulty"}, {"name": "faulty", "label": "again"}).sft_examples(8, 0) == []


def test_what_does_not_fit_together_is_named() -> None:
    with pytest.raises(TaskError, match="task.mix has 'guess' 2 times, expected a 'label' for each"):
        mixture({"name": "guess"}, {"name": "guess", "args": {"digits": 2}})
    with pytest.raises(TaskError, match="'addition' has no argument 'digts'; did you mean 'digits'"):
        mixture({"name": "guess"}, {"name": "addition", "args": {"digts": 2}})
    with pytest.raises(TaskError, match="the tokenizers of guess, tests.tasks.test_mixture:Foreign differ"):
        mixture({"name": "guess"}, {"name": "tests.tasks.test_mixture:Foreign"})


class Foreign(FaultyTask):
    """A task with a tokenizer of another kind."""

    def __init__(self, args: Any) -> None:
        super().__init__(args)
        other: Any = object()
        self.tokenizer = other
