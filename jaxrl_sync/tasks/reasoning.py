"""Tasks of the reasoning-gym package, with long answers: the second config's environment.

The default is its ``binary_matrix``: for every cell of a 6 x 6 matrix of zeros and ones the distance to the
nearest zero. The answer has 71 characters, each cell depends on a neighbourhood that lies at fixed distances
in the prompt, and a cell can be right while others are wrong, so that a tiny character-level policy earns
partial credit after a short supervised warm-up (``sft_examples``) on the format.

Reward: ``exact_weight`` times the package's own score plus the rest times the share of characters that
agree place by place with the package's answer. Answers of other data sets are scored the same way.
"""

from __future__ import annotations

import dataclasses
import json
import threading
from typing import Any

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.inference.tokenizer import CharTokenizer
from jaxrl_sync.tasks.protocol import Dataset, Example, SingleTurnTask, Split, TaskError

# Data sets whose scorer hands the model's answer to eval(): they are scored by comparison instead.
_EVALUATES_ANSWERS = {"binary_matrix", "codeio", "n_queens", "spiral_matrix", "string_insertion"}
_END_OF_PROMPT = "="


@dataclasses.dataclass(frozen=True)
class ReasoningArgs:
    """Arguments of the task.

    ``dataset`` and ``options`` (a JSON object) go to the package. ``after`` shortens the prompt to what
    follows its last occurrence in the question ("" keeps the whole question). ``alphabet`` has the characters
    of the tokenizer, ``vocab_size`` pads it (0: no padding). ``max_prompt_len`` and ``max_new_tokens`` are
    checked against every prompt and answer that is used.
    """

    dataset: str = "binary_matrix"
    options: str = '{"min_n": 6, "max_n": 6}'
    after: str = "matrix below:\n"
    alphabet: str = "0123456789 \n="
    vocab_size: int = 16
    train_size: int = 100_000
    eval_size: int = 256
    exact_weight: float = 0.2
    max_prompt_len: int = 72
    max_new_tokens: int = 72

    def __post_init__(self) -> None:
        for name in ("train_size", "eval_size", "max_prompt_len", "max_new_tokens"):
            if getattr(self, name) < 1:
                raise TaskError(f"reasoning: {name}={getattr(self, name)}, expected at least 1")
        if not 0 <= self.exact_weight <= 1:
            raise TaskError(f"reasoning: exact_weight={self.exact_weight}, expected 0 to 1")


class ReasoningTask(SingleTurnTask):
    """See the module's text. A uid is ``seed/number``: the generator's seed and the entry's number.

    Train entries come first in the generator's stream and eval entries after them.
    """

    Args = ReasoningArgs

    def __init__(self, args: ReasoningArgs) -> None:
        self._args = args
        self._options = _read_options(args.options)
        self._sources: dict[int, Any] = {}
        self._lock = threading.Lock()
        self._package_scorer = args.dataset not in _EVALUATES_ANSWERS
        self.tokenizer = CharTokenizer(args.alphabet, args.vocab_size or None)
        self.stop_token_ids = self.tokenizer.eos_ids
        self.max_prompt_len = args.max_prompt_len
        self.max_new_tokens = args.max_new_tokens
        self.prompt("0/0")  # a data set, an option or an alphabet that does not fit is refused now

    def dataset(self, split: Split, seed: int) -> Dataset:
        """``train_size`` or ``eval_size`` entries of the generator with this seed."""
        first = 0 if split == "train" else self._args.train_size
        size = self._args.train_size if split == "train" else self._args.eval_size
        return Dataset(size, lambda item: f"{seed}/{first + item}")

    def prompt(self, uid: str) -> list[int]:
        """Tokens of the (shortened) question and ``=``."""
        question: str = self._entry(uid)["question"]
        if self._args.after:
            head, found, question = question.rpartition(self._args.after)
            if not found:
                raise TaskError(f"reasoning: no {self._args.after!r} in the question of {uid}, see 'after'")
        return self._checked(uid, question.strip() + _END_OF_PROMPT, self._args.max_prompt_len, "prompt")

    def score(self, episode: Episode) -> Reward:
        """Components: ``exact`` (the package's score is 1), ``places`` (characters that agree), ``score``."""
        entry = self._entry(episode.uid)
        tokens = [int(t) for t in episode.completion]
        ended = bool(tokens) and tokens[-1] in self.stop_token_ids
        found = self.tokenizer.decode(tokens)
        wanted = str(entry["answer"])
        score = self._score(found, entry) if ended else 0.0
        agree = sum(a == b for a, b in zip(found, wanted, strict=False)) + ended
        places = agree / (max(len(found), len(wanted)) + 1)
        weight = self._args.exact_weight
        value = weight * score + (1 - weight) * places
        return Reward(value, {"exact": float(score >= 1), "places": places, "score": score})

    def sft_examples(self, count: int, seed: int) -> list[Example]:
        """Right answers to the first ``count`` entries of the train split, which goes round when it ends."""
        uids = [f"{seed}/{i % self._args.train_size}" for i in range(count)]
        return [Example(uid, self.prompt(uid), self.answer(uid)) for uid in uids]

    def answer(self, uid: str) -> list[int]:
        """The package's answer, stop token included."""
        text = str(self._entry(uid)["answer"])
        room = self._args.max_new_tokens - 1
        return [*self._checked(uid, text, room, "answer"), self.stop_token_ids[0]]

    def _score(self, text: str, entry: Any) -> float:
        if not self._package_scorer:
            return float(text == entry["answer"])
        return min(1.0, max(0.0, float(self._source(0).score_answer(answer=text, entry=entry))))

    def _entry(self, uid: str) -> Any:
        seed, _, number = uid.partition("/")
        if not (seed.isdigit() and number.isdigit()):
            raise TaskError(f"reasoning: uid {uid!r}, expected seed/number")
        return self._source(int(seed))[int(number)]

    def _source(self, seed: int) -> Any:
        """The package's data set for one seed; entries of it are made when asked for."""
        with self._lock:
            if seed not in self._sources:
                self._sources[seed] = self._create(seed)
            return self._sources[seed]

    def _create(self, seed: int) -> Any:
        try:
            import reasoning_gym  # type: ignore[import-untyped]
        except ModuleNotFoundError as e:
            raise TaskError("task 'reasoning' needs the package reasoning-gym (extra 'run')") from e
        size = self._args.train_size + self._args.eval_size
        try:
            return reasoning_gym.create_dataset(self._args.dataset, seed=seed, size=size, **self._options)
        except (ValueError, TypeError, AssertionError) as e:
            raise TaskError(
                f"reasoning: dataset {self._args.dataset!r} with {self._args.options}: {e}"
            ) from e

    def _checked(self, uid: str, text: str, room: int, what: str) -> list[int]:
        tokens = self.tokenizer.encode(text)
        if len(tokens) > room:
            raise TaskError(f"reasoning: {what} of {uid} has {len(tokens)} tokens, expected at most {room}")
        return tokens


def _read_options(text: str) -> dict[str, Any]:
    try:
        options = json.loads(text)
    except ValueError as e:
        raise TaskError(f"reasoning: options={text!r} is not JSON: {e}") from e
    if not isinstance(options, dict):
        raise TaskError(f"reasoning: options={text!r}, expected a JSON object")
    return options
