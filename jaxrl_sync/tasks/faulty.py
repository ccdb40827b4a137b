"""A task that fails on purpose, for tests of the loop: it raises, is slow, is empty or never ends.

Prompts are ``item-0``, ``item-1``, ...; arguments name the items at fault as comma-separated numbers.
"""

from __future__ import annotations

import dataclasses
import time

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.tasks.protocol import Dataset, Environment, Example, Split, Step, TaskError, Tokens

_ENDLESS_TURNS = 1 << 30


@dataclasses.dataclass(frozen=True)
class FaultyArgs:
    """What goes wrong. ``*`` for a list of items means all of them.

    ``prompt_raises``, ``score_raises``, ``step_raises``: items for which that call raises. ``never_ends``:
    items whose episodes go on for ever (each turn asks for another). ``slow_score_s``: seconds that scoring
    blocks, for ``slow_score`` items. ``size`` 0 is an empty data set. ``no_stop``: the stop token list is
    empty, so that an answer ends only at its length limit.
    """

    size: int = 16
    prompt_raises: str = ""
    score_raises: str = ""
    step_raises: str = ""
    never_ends: str = ""
    slow_score: str = ""
    slow_score_s: float = 0.0
    no_stop: bool = False
    max_new_tokens: int = 4
    turns: int = 1


class InjectedError(RuntimeError):
    """What a faulty task raises: a bug in a user's task, not a user error."""


class FaultyTask:
    """See the module's text. Rewards are the share of even token ids, so that groups differ."""

    Args = FaultyArgs

    def __init__(self, args: FaultyArgs) -> None:
        if args.size < 0 or args.turns < 1 or args.max_new_tokens < 1:
            raise TaskError(f"faulty: {args}, expected size >= 0, turns >= 1 and max_new_tokens >= 1")
        self._args = args
        self.tokenizer = CharTokenizer("0123456789+=", 16)
        self.stop_token_ids = () if args.no_stop else self.tokenizer.eos_ids
        self.max_prompt_len = 8
        self.max_new_tokens = args.max_new_tokens
        self.max_turns = _ENDLESS_TURNS if args.never_ends else args.turns

    def dataset(self, split: Split, seed: int) -> Dataset:
        """The same items in both splits."""
        return Dataset.of([f"item-{i}" for i in range(self._args.size)])

    def prompt(self, uid: str) -> list[int]:
        """The item's number and ``=``; raises ``InjectedError`` where told to."""
        self._raise_if(self._args.prompt_raises, uid, "prompt")
        return self.tokenizer.encode(f"{uid.removeprefix('item-')}=")

    def environment(self, uid: str) -> Environment:
        """An environment of ``turns`` turns, or an endless one."""
        return _Turns(self, uid)

    def score(self, episode: Episode) -> Reward:
        """Share of even token ids; raises or blocks where told to."""
        self._raise_if(self._args.score_raises, episode.uid, "score")
        if _named(self._args.slow_score, episode.uid):
            time.sleep(self._args.slow_score_s)
        tokens = episode.completion
        return Reward(float((tokens % 2 == 0).mean()) if len(tokens) else 0.0, {"exact": 0.0})

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """None."""
        return []

    def next_turn(self, uid: str, turn: int) -> Step:
        """What the environment of ``uid`` answers after its ``turn``-th turn, counted from 1."""
        self._raise_if(self._args.step_raises, uid, "step")
        endless = _named(self._args.never_ends, uid)
        done = not endless and turn >= self._args.turns
        return Step((), True) if done else Step(self.tokenizer.encode("+"), False)

    def _raise_if(self, items: str, uid: str, call: str) -> None:
        if _named(items, uid):
            raise InjectedError(f"injected fault in {call}() of {uid}")


class _Turns:
    def __init__(self, task: FaultyTask, uid: str) -> None:
        self._task, self._uid, self._turn = task, uid, 0

    def step(self, tokens: Tokens) -> Step:
        self._turn += 1
        return self._task.next_turn(self._uid, self._turn)


def _named(items: str, uid: str) -> bool:
    return items == "*" or uid.removeprefix("item-") in items.split(",")
