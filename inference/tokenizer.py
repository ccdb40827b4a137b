"""Tokenizers: text to token ids and back. No jax here: tasks and the orchestrator import this too.

``CharTokenizer`` has a small fixed alphabet, for models trained from nothing; ``HFTokenizer`` (in
``hf_tokenizer``) reads the files that lie beside a published checkpoint. ``load_tokenizer`` picks one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Protocol

from jaxrl_sync.sharding.errors import UserError

PAD, BOS, EOS = "<pad>", "<bos>", "<eos>"
PAD_ID, BOS_ID, EOS_ID = 0, 1, 2
NUM_SPECIAL = 3

# Newline, then all printable ASCII from space to tilde: 96 characters, a vocabulary of 99.
ASCII_ALPHABET = "\n" + "".join(chr(c) for c in range(0x20, 0x7F))

REPLACEMENT = "\ufffd"


class TokenizerError(UserError, ValueError):
    """A tokenizer that cannot be loaded, or text that it cannot encode."""

    exit_code = 2


class Detokenizer(Protocol):
    """Turns the tokens of one sample into text as they come; never hands out half a character."""

    def push(self, ids: Iterable[int]) -> str:
        """The text that ``ids`` complete; what may still change is held back."""
        ...

    def flush(self) -> str:
        """What was held back, at the end of the sample."""
        ...


class Tokenizer(Protocol):
    """What the server and the tasks need of a tokenizer. Implementations are immutable and thread-safe."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id; a model's vocabulary must be at least this large."""
        ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a generation; the first is the one to append in training data."""
        ...

    @property
    def pad_id(self) -> int: ...

    @property
    def chat_template(self) -> str | None:
        """The Jinja source that came with the tokenizer, or None."""
        ...

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Ids of ``text``; with ``add_special_tokens`` as the model wants a document to begin (e.g. BOS)."""
        ...

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``. Ids that stand for no text become U+FFFD or nothing."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that one token stands for (a part of a character, perhaps); for log-prob listings."""
        ...

    def special_tokens(self) -> dict[str, str]:
        """Template variables such as ``bos_token`` and ``eos_token``."""
        ...

    def can_encode(self, text: str) -> bool:
        """Whether every character of ``text`` has an id."""
        ...

    def stream(self) -> Detokenizer:
        """A detokenizer for one sample."""
        ...


@dataclasses.dataclass(frozen=True)
class CharTokenizer:
    """One id per character: 0 ``<pad>``, 1 ``<bos>``, 2 ``<eos>``, then ``alphabet`` in order from 3.

    ``size`` pads the vocabulary (ids past the alphabet stand for no text), so that it divides by a
    tensor-parallel degree. Raises TokenizerError on a repeated character or a ``size`` too small.
    """

    alphabet: str = ASCII_ALPHABET
    size: int | None = None

    def __post_init__(self) -> None:
        repeated = sorted({c for c in self.alphabet if self.alphabet.count(c) > 1})
        if not self.alphabet or repeated:
            raise TokenizerError(
                f"alphabet needs distinct characters, at least one; repeated: {repeated} in {self.alphabet!r}"
            )
        least = NUM_SPECIAL + len(self.alphabet)
        if self.size is not None and self.size < least:
            raise TokenizerError(f"vocabulary size {self.size} is below {least} (3 special ids + alphabet)")

    @functools.cached_property
    def _ids(self) -> dict[str, int]:
        return {c: i for i, c in enumerate(self.alphabet, start=NUM_SPECIAL)}

    @property
    def vocab_size(self) -> int:
        return self.size if self.size is not None else NUM_SPECIAL + len(self.alphabet)

    @property
    def bos_id(self) -> int | None:
        return BOS_ID

    @property
    def eos_ids(self) -> tuple[int, ...]:
        return (EOS_ID,)

    @property
    def pad_id(self) -> int:
        return PAD_ID

    @property
    def chat_template(self) -> str | None:
        return None

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """One id per character, never a special one; TokenizerError names a character without an id."""
        try:
            return [self._ids[c] for c in text]
        except KeyError as missing:
            char = missing.args[0]
            raise TokenizerError(
                f"character {char!r} at position {text.index(char)} is not in the alphabet {self.alphabet!r}"
            ) from None

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return "".join(self._text(i, skip_special_tokens) for i in ids)

    def token_bytes(self, token_id: int) -> bytes:
        return self._text(token_id, skip_special=False).encode()

    def special_tokens(self) -> dict[str, str]:
        return {"bos_token": BOS, "eos_token": EOS, "pad_token": PAD}

    def can_encode(self, text: str) -> bool:
        return all(c in self._ids for c in text)

    def stream(self) -> Detokenizer:
        return _CharStream(self)

    def _text(self, token_id: int, skip_special: bool) -> str:
        if 0 <= token_id < NUM_SPECIAL:
            return "" if skip_special else (PAD, BOS, EOS)[token_id]
        index = token_id - NUM_SPECIAL
        return self.alphabet[index] if 0 <= index < len(self.alphabet) else REPLACEMENT


@dataclasses.dataclass(frozen=True)
class _CharStream:
    """Every token is whole characters, so nothing is ever held back."""

    tokenizer: CharTokenizer

    def push(self, ids: Iterable[int]) -> str:
        return self.tokenizer.decode(list(ids))

    def flush(self) -> str:
        return ""


def load_tokenizer(spec: str, size: int | None = None) -> Tokenizer:
    """The tokenizer that ``spec`` names.

    ``"char"``: printable ASCII and newline; ``"char:ALPHABET"``: those characters, in that order;
    anything else: a path to a ``tokenizer.json`` or to the directory that holds one (needs the ``serve``
    extra). ``size`` pads a character vocabulary. Raises TokenizerError.
    """
    if spec == "char":
        return CharTokenizer(size=size)
    if spec.startswith("char:"):
        return CharTokenizer(spec[len("char:") :], size)
    from jaxrl_sync.inference.hf_tokenizer import HFTokenizer

    return HFTokenizer.load(Path(spec))
