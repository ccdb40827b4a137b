"""Addition of two numbers, one character per token: the default task, learnable from random weights.

Prompt ``a+b=`` with ``digits`` digits per number, answer the sum in ``digits + 1`` digits (leading zeros) and
``<eos>``: ``07+05=`` -> ``012<eos>``. Reward: the share of answer digits that are right, place by place; the
last ``eos_weight`` of it is for ending right after them. ``exact`` asks for all digits and the end.

Evaluation. With ``eval_share`` 0 both splits are the same prompts: right where the table of pairs is small
(1 digit: 100 pairs) and the question is whether the policy learned it, which is how the default config is
evaluated. With ``eval_share`` > 0 a pair belongs to eval if the hash of its uid says so, whatever the seed.
"""

from __future__ import annotations

import dataclasses
import random

import xxhash

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.tasks.protocol import Dataset, Example, SingleTurnTask, Split, TaskError

ALPHABET = "0123456789+="


@dataclasses.dataclass(frozen=True)
class AdditionArgs:
    """Arguments of the task: see the module's text. ``vocab_size`` pads the vocabulary (0: no padding)."""

    digits: int = 1
    eval_share: float = 0.0
    eos_weight: float = 0.2
    vocab_size: int = 16

    def __post_init__(self) -> None:
        if not 1 <= self.digits <= 6:
            raise TaskError(f"addition: digits={self.digits}, expected 1 to 6")
        for name in ("eval_share", "eos_weight"):
            if not 0 <= getattr(self, name) < 1:
                raise TaskError(f"addition: {name}={getattr(self, name)}, expected at least 0 and below 1")


class AdditionTask(SingleTurnTask):
    """See the module's text. The uid of ``a + b`` is ``a+b`` without leading zeros."""

    Args = AdditionArgs

    def __init__(self, args: AdditionArgs) -> None:
        self._args = args
        self.tokenizer = CharTokenizer(ALPHABET, args.vocab_size or None)
        self.stop_token_ids = self.tokenizer.eos_ids
        self.max_prompt_len = 2 * args.digits + 2
        self.max_new_tokens = args.digits + 2

    def dataset(self, split: Split, seed: int) -> Dataset:
        """All pairs of the split in an order drawn from ``seed``; beyond 3 digits, pairs drawn from it."""
        limit = 10**self._args.digits
        if self._args.digits > 3:
            return Dataset(None, lambda item: self._draw(split, seed, item))
        uids = [f"{a}+{b}" for a in range(limit) for b in range(limit)]
        uids = [uid for uid in uids if self._belongs(uid, split)]
        random.Random(f"addition/{split}/{seed}").shuffle(uids)
        return Dataset.of(uids)

    def prompt(self, uid: str) -> list[int]:
        """Tokens of ``a+b=`` with leading zeros."""
        a, b = self._pair(uid)
        return self.tokenizer.encode(f"{a:0{self._args.digits}}+{b:0{self._args.digits}}=")

    def score(self, episode: Episode) -> Reward:
        """Share of places that are right, and the end; components ``exact`` and ``digits``."""
        wanted = self._answer(episode.uid)
        found = [int(t) for t in episode.completion]
        right = [i < len(found) and found[i] == t for i, t in enumerate(wanted)]
        exact = found == wanted
        digits = sum(right[:-1]) / (len(right) - 1)
        end = len(found) == len(wanted) and right[-1]
        weight = self._args.eos_weight
        return Reward((1 - weight) * digits + weight * end, {"exact": float(exact), "digits": digits})

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """Right answers to ``count`` prompts of the train split."""
        data = self.dataset("train", seed)
        uids = [data[i % data.size if data.size else i] for i in range(count)]
        return [Example(uid, self.prompt(uid), self._answer(uid)) for uid in uids]

    def _answer(self, uid: str) -> list[int]:
        a, b = self._pair(uid)
        return [*self.tokenizer.encode(f"{a + b:0{self._args.digits + 1}}"), self.stop_token_ids[0]]

    def _pair(self, uid: str) -> tuple[int, int]:
        a, plus, b = uid.partition("+")
        if not (plus and a.isdigit() and b.isdigit()) or max(len(a), len(b)) > self._args.digits:
            raise TaskError(f"addition: uid {uid!r}, expected a+b of at most {self._args.digits} digits each")
        return int(a), int(b)

    def _belongs(self, uid: str, split: Split) -> bool:
        if self._args.eval_share == 0:
            return True
        held_out = xxhash.xxh64_intdigest(uid.encode()) < self._args.eval_share * 2**64
        return held_out == (split == "eval")

    def _draw(self, split: Split, seed: int, item: int) -> str:
        rng = random.Random(f"addition/{split}/{seed}/{item}")
        while True:
            uid = f"{rng.randrange(10**self._args.digits)}+{rng.randrange(10**self._args.digits)}"
            if self._belongs(uid, split):
                return uid
