"""Guess the number: a small environment of several turns.

Prompt ``?``. Each turn the model writes ``digits`` digits and ``<eos>``; the environment answers ``<`` (the
secret is below the guess), ``>`` (above) or, for anything that is no guess, ``!``. The episode ends with the
right guess or after ``max_turns`` turns. The secret is a function of the uid, so all members of a group seek
the same.

Reward: 1 for the right guess in the first turn, ``decay`` times that for every further one; without it
0.5 x (1 - distance of the best guess / range), less ``junk_penalty`` per turn without a guess, at least 0.
"""

from __future__ import annotations

import dataclasses

import xxhash

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.tasks.protocol import Dataset, Environment, Example, Split, Step, TaskError, Tokens

ALPHABET = "0123456789?<>!"


@dataclasses.dataclass(frozen=True)
class GuessArgs:
    """Arguments of the task; ``size`` prompts per split, ``vocab_size`` 0 does not pad the vocabulary."""

    digits: int = 1
    max_turns: int = 4
    decay: float = 0.9
    junk_penalty: float = 0.1
    size: int = 1024
    vocab_size: int = 18

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 6 or self.max_turns < 1 or self.size < 1:
            raise TaskError(f"guess: {self}, expected digits 1 to 6, max_turns and size at least 1")
        if not (0 < self.decay <= 1 and 0 <= self.junk_penalty <= 1):
            raise TaskError(f"guess: {self}, expected 0 < decay <= 1 and 0 <= junk_penalty <= 1")


class GuessTask:
    """See the module's text."""

    Args = GuessArgs

    def __init__(self, args: GuessArgs) -> None:
        self._args = args
        self.tokenizer = CharTokenizer(ALPHABET, args.vocab_size or None)
        self.stop_token_ids = self.tokenizer.eos_ids
        self.max_prompt_len = 1
        self.max_new_tokens = args.digits + 1
        self.max_turns = args.max_turns

    def dataset(self, split: Split, seed: int) -> Dataset:
        """``size`` secrets drawn by the uid ``split/seed/number``."""
        return Dataset(self._args.size, lambda item: f"{split}/{seed}/{item}")

    def prompt(self, uid: str) -> list[int]:
        """The same for every uid: nothing is known before the first guess."""
        return self.tokenizer.encode("?")

    def environment(self, uid: str) -> Environment:
        """Answers guesses for one episode."""
        return _Oracle(self, self.secret(uid), self._args.max_turns)

    def score(self, episode: Episode) -> Reward:
        """Components: ``exact`` (found), ``turns`` used and ``junk`` turns without a guess."""
        secret, span = self.secret(episode.uid), 10**self._args.digits
        guesses = [self.guess(turn.tokens.tolist()) for turn in episode.turns]
        junk = sum(g is None for g in guesses)
        parts = {"exact": float(secret in guesses), "turns": float(len(guesses)), "junk": float(junk)}
        if secret in guesses:
            value = self._args.decay ** guesses.index(secret)
        else:
            best = min((abs(g - secret) for g in guesses if g is not None), default=span)
            value = 0.5 * (1 - best / span)
        return Reward(max(0.0, value - self._args.junk_penalty * junk), parts)

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """First guesses in the right format: the middle of the range."""
        answer = self.tokenizer.encode(str(10**self._args.digits // 2).zfill(self._args.digits))
        data = self.dataset("train", seed)
        uids = [data[i % self._args.size] for i in range(count)]
        return [Example(uid, self.prompt(uid), [*answer, self.stop_token_ids[0]]) for uid in uids]

    def secret(self, uid: str) -> int:
        """The number to be found."""
        return int(xxhash.xxh64_intdigest(uid.encode()) % 10**self._args.digits)

    def guess(self, tokens: Tokens) -> int | None:
        """The number in a turn's tokens; None for anything but ``digits`` digits and the stop token."""
        *body, last = tokens or (0,)
        text = self.tokenizer.decode(body)
        well_formed = last in self.stop_token_ids and len(body) == self._args.digits == len(text)
        return int(text) if well_formed and text.isdigit() else None


class _Oracle:
    def __init__(self, task: GuessTask, secret: int, turns: int) -> None:
        self._task, self._secret, self._left = task, secret, turns

    def step(self, tokens: Tokens) -> Step:
        self._left -= 1
        guess = self._task.guess(tokens)
        if guess == self._secret or self._left == 0:
            return Step((), True)
        mark = "!" if guess is None else "<" if self._secret < guess else ">"
        return Step(self._task.tokenizer.encode(mark), False)
