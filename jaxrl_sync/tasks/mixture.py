"""Several tasks in one run: each with its label, its weight and its own prompts, over one vocabulary.

Weights are shares of what is *trained*: a group that is filtered or given up is replaced by another one of
the same task (``orchestrator.source.MixedSource``). Tasks with character tokenizers of different alphabets
get one alphabet, all their characters in order; a task keeps seeing its own ids, which are translated at
its border. Other tokenizers must be equal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jaxrl_sync.batch.rollout import Episode, Int32s, Reward
from jaxrl_sync.config.sections import TaskSection
from jaxrl_sync.inference.tokenizer import NUM_SPECIAL, CharTokenizer, Tokenizer
from jaxrl_sync.tasks.protocol import Dataset, Environment, Example, Split, Step, Task, TaskError, Tokens
from jaxrl_sync.tasks.registry import make_task


@dataclasses.dataclass(frozen=True)
class Part:
    """One task of a run. ``label`` names it in metrics, ``weight`` is its share beside the other weights."""

    label: str
    task: Task
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Mixture:
    """The tasks of a run, one or more. All of them read and write the ids of ``tokenizer``."""

    parts: tuple[Part, ...]

    @property
    def tokenizer(self) -> Tokenizer:
        """The one vocabulary of all tasks."""
        return self.parts[0].task.tokenizer

    @property
    def labels(self) -> tuple[str, ...]:
        """The parts' labels, in the order of the config."""
        return tuple(part.label for part in self.parts)

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """``count`` demonstrations, as many of each task as its weight says; of tasks that have some."""
        able = [p for p in self.parts if p.task.sft_examples(1, seed)]
        total = sum(p.weight for p in able)
        ends = [round(count * sum(p.weight for p in able[: i + 1]) / total) for i in range(len(able))]
        starts = [0, *ends]
        several = [
            p.task.sft_examples(b - a, seed) for p, a, b in zip(able, starts, ends, strict=False) if b > a
        ]
        return _interleave(several)


def make_mixture(section: TaskSection) -> Mixture:
    """The tasks that the config's ``[task]`` asks for. Raises ``TaskError`` (exit code 2)."""
    if not section.mix:
        return Mixture((Part(section.name, make_task(section.name, section.args)),))
    parts = [
        Part(entry.label or entry.name, make_task(entry.name, entry.args), entry.weight)
        for entry in section.mix
    ]
    labels = [part.label for part in parts]
    for label in labels:
        if labels.count(label) > 1:
            raise TaskError(
                f"task.mix has {label!r} {labels.count(label)} times, expected a 'label' for each of them"
            )
    return Mixture(tuple(_with_one_vocabulary(parts)))


def _with_one_vocabulary(parts: Sequence[Part]) -> list[Part]:
    tokenizers = [part.task.tokenizer for part in parts]
    if all(t == tokenizers[0] for t in tokenizers):
        return list(parts)
    chars = [t for t in tokenizers if isinstance(t, CharTokenizer)]
    if len(chars) < len(tokenizers):
        raise TaskError(
            f"task.mix: the tokenizers of {', '.join(p.label for p in parts)} differ, expected equal ones or "
            "character tokenizers"
        )
    alphabet = "".join(dict.fromkeys("".join(t.alphabet for t in chars)))
    shared = CharTokenizer(alphabet, max(NUM_SPECIAL + len(alphabet), *(t.vocab_size for t in chars)))
    return [
        dataclasses.replace(part, task=Translated(part.task, own, shared))
        for part, own in zip(parts, chars, strict=True)
    ]


def _interleave(several: Sequence[Sequence[Example]]) -> list[Example]:
    """All examples, each list spread evenly over the whole, so that every batch has some of each."""
    placed = [((i + 0.5) / len(one), k, i) for k, one in enumerate(several) for i in range(len(one))]
    return [several[k][i] for _, k, i in sorted(placed)]


class Translated:
    """A task that sees the ids of its own character tokenizer, in a run that has those of ``tokenizer``.

    A sampled character that the task does not know reaches it as an id that stands for no text.
    """

    def __init__(self, task: Task, own: CharTokenizer, shared: CharTokenizer) -> None:
        self._task, self.tokenizer = task, shared
        self._out = _table(own, shared)
        self._in = {id_: own_id for own_id, id_ in self._out.items()}
        self._foreign = own.vocab_size
        self.stop_token_ids = tuple(self._translate(task.stop_token_ids))
        self.max_prompt_len, self.max_new_tokens = task.max_prompt_len, task.max_new_tokens
        self.max_turns = task.max_turns

    def dataset(self, split: Split, seed: int) -> Dataset:
        """The task's own."""
        return self._task.dataset(split, seed)

    def prompt(self, uid: str) -> list[int]:
        """The task's prompt in the shared vocabulary."""
        return self._translate(self._task.prompt(uid))

    def environment(self, uid: str) -> Environment:
        """The task's environment behind the same border."""
        return _TranslatedEnvironment(self._task.environment(uid), self._back, self._translate)

    def score(self, episode: Episode) -> Reward:
        """The task's score of the episode in its own ids."""
        turns = (
            dataclasses.replace(turn, prompt=self._own(turn.prompt), tokens=self._own(turn.tokens))
            for turn in episode.turns
        )
        return self._task.score(dataclasses.replace(episode, turns=tuple(turns)))

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """The task's demonstrations in the shared vocabulary."""
        return [
            Example(e.uid, self._translate(e.prompt), self._translate(e.answer))
            for e in self._task.sft_examples(count, seed)
        ]

    def _translate(self, tokens: Tokens) -> list[int]:
        try:
            return [self._out[int(t)] for t in tokens]
        except KeyError as missing:
            raise TaskError(
                f"token {missing} stands for no character of {self.tokenizer.alphabet!r}"
            ) from None

    def _own(self, tokens: Int32s) -> Int32s:
        return np.array(self._back(tokens), np.int32)

    def _back(self, tokens: Any) -> list[int]:
        return [self._in.get(int(t), self._foreign) for t in tokens]


def _table(own: CharTokenizer, shared: CharTokenizer) -> Mapping[int, int]:
    chars = zip(own.encode(own.alphabet), shared.encode(own.alphabet), strict=True)
    return {**{i: i for i in range(NUM_SPECIAL)}, **dict(chars)}


@dataclasses.dataclass(frozen=True)
class _TranslatedEnvironment:
    environment: Environment
    back: Callable[[Tokens], list[int]]
    translate: Callable[[Tokens], list[int]]

    def step(self, tokens: Tokens) -> Step:
        step = self.environment.step(self.back(tokens))
        return Step(self.translate(step.tokens), step.done)
