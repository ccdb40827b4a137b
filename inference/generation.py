"""One text generation under way: engine requests in, pieces of text out, and nothing left running behind."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator

from jaxrl_sync.inference.bridge import Arrival, TokenBridge
from jaxrl_sync.inference.choices import Choice, Piece
from jaxrl_sync.inference.front import EngineFront
from jaxrl_sync.inference.openai_types import Options
from jaxrl_sync.inference.request import Request, TokenChunk
from jaxrl_sync.inference.tokenizer import Tokenizer

DEFAULT_TIMEOUT_S = 600.0
# The engine keeps a request's deadline itself; this much later the server stops waiting for it.
ENGINE_GRACE_S = 30.0
SIGN_OF_LIFE_EVERY_S = 15.0


@dataclasses.dataclass(frozen=True)
class Job:
    """One accepted call: its engine requests (one per prompt), and what every part of its answer carries."""

    answer_id: str
    kind: str
    created: int
    model: str
    options: Options
    requests: tuple[Request, ...]
    stops: tuple[str, ...]
    stop_token_ids: frozenset[int]

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.options.n

    @property
    def prompt_tokens(self) -> int:
        return sum(len(r.prompt) for r in self.requests)


class Generation:
    """A submitted job. ``close`` aborts what still runs: after the last piece, or when the client is gone.

    Submitting raises EngineError (queue full, not serving, ...), and then nothing of the job runs.
    """

    def __init__(self, front: EngineFront, bridge: TokenBridge, tokenizer: Tokenizer, job: Job) -> None:
        self.job = job
        self._front = front
        self._queue: asyncio.Queue[Arrival] = asyncio.Queue()
        self._running: set[int] = set()
        self._choices = [Choice(i, tokenizer, job.stops, job.stop_token_ids) for i in range(job.num_choices)]
        self._unfinished = job.num_choices
        self._end = time.monotonic() + (job.options.timeout_s or DEFAULT_TIMEOUT_S) + ENGINE_GRACE_S
        try:
            for key, request in enumerate(job.requests):
                bridge.submit(front, request, self._queue, key)
                self._running.add(key)
        except BaseException:
            self.close()
            raise

    @property
    def completion_tokens(self) -> int:
        """Tokens generated so far that belong to the text or ended it."""
        return sum(c.num_tokens for c in self._choices)

    async def pieces(self) -> AsyncIterator[Piece | None]:
        """Pieces of all choices as they come, the last of each with its finish reason; None is a sign of
        life while nothing comes. Raises EngineError, TimeoutError."""
        while self._unfinished:
            arrival = await self._next()
            if arrival is None:
                yield None
                continue
            for piece in self._advance(arrival):
                yield piece

    def close(self) -> None:
        """Aborts what still runs. Idempotent; does not wait."""
        running, self._running = self._running, set()
        if running:
            self._front.abort([self.job.requests[key].request_id for key in running])

    def _advance(self, arrival: Arrival) -> list[Piece]:
        first = arrival.key * self.job.options.n
        if isinstance(arrival.item, TokenChunk):
            pieces = [self._choices[first + arrival.item.sample].advance(arrival.item)]
        else:
            self._running.discard(arrival.key)
            samples = arrival.item.result(0).samples
            pieces = [self._choices[first + i].finish(s.finish_reason) for i, s in enumerate(samples)]
        self._abort_stopped(arrival.key)
        known = [p for p in pieces if p is not None]
        self._unfinished -= sum(p.finish_reason is not None for p in known)
        return known

    def _abort_stopped(self, key: int) -> None:
        """The engine knows no stop strings: once they ended all samples of a group, it is told."""
        n = self.job.options.n
        if key in self._running and all(c.finished for c in self._choices[key * n : (key + 1) * n]):
            self._running.discard(key)
            self._front.abort([self.job.requests[key].request_id])

    async def _next(self) -> Arrival | None:
        left_s = self._end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(f"request {self.job.answer_id} outlived its deadline in the engine")
        try:
            return await asyncio.wait_for(self._queue.get(), min(left_s, SIGN_OF_LIFE_EVERY_S))
        except TimeoutError:
            return None
