"""What a task is: prompts in, tokens in and out of an environment, a reward at the end. No jax.

All functions are plain and synchronous; the orchestrator calls them in threads, several at once, under
its own deadlines, and counts what they raise. A task therefore keeps no state between calls but what it made
at construction; what changes during an episode lives in an ``Environment`` of that episode alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, Protocol

import numpy as np

from jaxrl_sync.batch.rollout import Episode, Reward, Sample
from jaxrl_sync.inference.tokenizer import Tokenizer
from jaxrl_sync.sharding.errors import UserError

Split = Literal["train", "eval"]
Tokens = Sequence[int]


class TaskError(UserError, ValueError):
    """A task that cannot be made from its config: names the key, the value and what is expected."""

    exit_code = 2


@dataclasses.dataclass(frozen=True, slots=True)
class Dataset:
    """The prompts of one split, by number. ``size`` None: as many as wanted. ``uid_of`` is a pure function.

    A uid is unique within the task and says everything that ``Task.prompt`` needs.
    """

    size: int | None
    uid_of: Callable[[int], str]

    def __getitem__(self, item: int) -> str:
        if item < 0 or (self.size is not None and item >= self.size):
            raise IndexError(f"prompt {item}, expected 0 <= item < {self.size}")
        return self.uid_of(item)

    def __iter__(self) -> Iterator[str]:
        item = 0
        while self.size is None or item < self.size:
            yield self.uid_of(item)
            item += 1

    @classmethod
    def of(cls, uids: Sequence[str]) -> Dataset:
        """The data set of a list."""
        kept = tuple(uids)
        return cls(len(kept), kept.__getitem__)


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """The environment's answer to one turn: tokens for the context (never trained on), or the end."""

    tokens: Tokens
    done: bool


@dataclasses.dataclass(frozen=True, slots=True)
class Example:
    """One demonstration for a supervised warm-up: prompt and answer tokens, the stop token included."""

    uid: str
    prompt: Tokens
    answer: Tokens

    def sample(self) -> Sample:
        """The demonstration as a sample of advantage 1 that trains on the answer alone."""
        n, p = len(self.prompt) + len(self.answer), len(self.prompt)
        return Sample(
            uid=self.uid,
            group_id=self.uid,
            tokens=np.array([*self.prompt, *self.answer], np.int32),
            loss_mask=np.arange(n) >= p,
            logprobs=np.zeros(n, np.float32),
            versions=np.zeros(n, np.int32),
            reward=1.0,
            advantage=1.0,
            dispatch_version=0,
        )


class Environment(Protocol):
    """One episode of a multi-turn task."""

    def step(self, tokens: Tokens) -> Step:
        """Takes the model's tokens of a turn, stop token included if there was one. May raise, may block."""
        ...


class Task(Protocol):
    """A source of prompts and rewards. Attributes are constant; methods may be called from any thread."""

    @property
    def tokenizer(self) -> Tokenizer:
        """The task's own tokenizer; a model needs a vocabulary of at least ``tokenizer.vocab_size``."""
        ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """Tokens that end a turn."""
        ...

    @property
    def max_prompt_len(self) -> int:
        """Most tokens that ``prompt`` gives."""
        ...

    @property
    def max_new_tokens(self) -> int:
        """Most tokens that an answer needs in one turn, the stop token included."""
        ...

    @property
    def max_turns(self) -> int:
        """Most turns of an episode; 1 means that ``environment`` is never asked for."""
        ...

    def dataset(self, split: Split, seed: int) -> Dataset:
        """The prompts of a split; the same seed gives the same ones. Train and eval share no uid unless the
        task says so."""
        ...

    def prompt(self, uid: str) -> list[int]:
        """Prompt tokens; a pure function of the uid, since all members of a group share the prompt."""
        ...

    def environment(self, uid: str) -> Environment:
        """A fresh environment for one member of the group, for tasks of several turns."""
        ...

    def score(self, episode: Episode) -> Reward:
        """The reward of a finished episode. May raise (the episode then counts as errored), may be slow.

        The component ``exact`` (0 or 1) is what evaluation reports as exact match.
        """
        ...

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """Demonstrations from the train split for a supervised warm-up; empty if the task has none."""
        ...


class SingleTurnTask:
    """Base of tasks with one turn: gives them ``max_turns``, ``environment`` and no demonstrations."""

    max_turns = 1

    def environment(self, uid: str) -> Environment:
        """An environment that ends the episode after the first turn."""
        return _Done()

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """No demonstrations."""
        return []


class _Done:
    def step(self, tokens: Tokens) -> Step:
        return Step((), True)
