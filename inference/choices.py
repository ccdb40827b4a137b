"""From the token chunks of one sample to pieces of text: detokenising, stop strings, log-prob entries."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from jaxrl_sync.inference.request import FinishReason, TokenChunk
from jaxrl_sync.inference.stops import StopMatcher
from jaxrl_sync.inference.tokenizer import Tokenizer


@dataclasses.dataclass(frozen=True)
class TokenText:
    """One generated token as text: its bytes, its log-prob, and where its text begins in the choice."""

    text: str
    bytes: bytes
    logprob: float
    offset_chars: int


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one chunk added to a choice. ``token_ids`` has all tokens, the stop token too."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    tokens: tuple[TokenText, ...]
    finish_reason: FinishReason | None


class Choice:
    """The growing text of one sample; knows when its text, rather than the engine, ended it."""

    def __init__(
        self, index: int, tokenizer: Tokenizer, stops: Sequence[str], stop_token_ids: frozenset[int]
    ) -> None:
        self.index = index
        self.finished = False
        self.num_tokens = 0
        self._tokenizer = tokenizer
        self._stop_token_ids = stop_token_ids
        self._detokenizer = tokenizer.stream()
        self._matcher = StopMatcher(stops)
        self._num_chars = 0

    def advance(self, chunk: TokenChunk) -> Piece | None:
        """The piece of a chunk; None when the choice had finished before."""
        if self.finished:
            return None
        text, ids, entries = "", [], []
        for position, (token, logprob) in enumerate(zip(chunk.tokens, chunk.logprobs, strict=True)):
            self.num_tokens += 1
            ids.append(token)
            last = position == len(chunk.tokens) - 1
            if last and chunk.finish_reason == "stop" and token in self._stop_token_ids:
                break
            entries.append(self._entry(token, logprob))
            new = self._detokenizer.push([token])
            self._num_chars += len(new)
            text += self._matcher.push(new)
            if self._matcher.stopped:
                return self._piece(text, ids, entries, "stop")
        if chunk.finish_reason is None:
            return self._piece(text, ids, entries, None)
        return self._end(text, ids, entries, chunk.finish_reason)

    def finish(self, reason: FinishReason) -> Piece | None:
        """Ends the choice without a token; None when it had finished before."""
        return None if self.finished else self._end("", [], [], reason)

    def _end(self, text: str, ids: list[int], entries: list[TokenText], reason: FinishReason) -> Piece:
        text += self._matcher.push(self._detokenizer.flush())
        stopped = self._matcher.stopped
        text += self._matcher.flush()
        return self._piece(text, ids, entries, "stop" if stopped else reason)

    def _piece(
        self, text: str, ids: list[int], entries: list[TokenText], reason: FinishReason | None
    ) -> Piece:
        self.finished = reason is not None
        return Piece(self.index, text, tuple(ids), tuple(entries), reason)

    def _entry(self, token: int, logprob: float) -> TokenText:
        raw = self._tokenizer.token_bytes(token)
        return TokenText(raw.decode("utf-8", "replace"), raw, logprob, self._num_chars)
