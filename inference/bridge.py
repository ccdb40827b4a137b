"""From the engine's thread to an event loop: token chunks and futures, with deadlines.

The engine must never wait for a client. So its thread only appends to a list, and one wake-up of the loop
hands out all that is there.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import threading
from concurrent.futures import Future
from typing import TypeVar

from jaxrl_sync.inference.front import EngineFront
from jaxrl_sync.inference.request import GroupResult, Request, TokenChunk

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Arrival:
    """One thing that happened to the group ``key``: a chunk, or at the end its finished future."""

    key: int
    item: TokenChunk | Future[GroupResult]


class TokenBridge:
    """Moves what the engine's thread posts into queues of one event loop, in order."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._posted: list[tuple[asyncio.Queue[Arrival], Arrival]] = []

    def submit(self, front: EngineFront, request: Request, queue: asyncio.Queue[Arrival], key: int) -> None:
        """Submits ``request``; its chunks and its end arrive in ``queue`` under ``key``. Raises EngineError.

        The queue grows by at most the group's tokens.
        """
        handle = front.submit(request, lambda chunk: self._post(queue, Arrival(key, chunk)))
        handle.future.add_done_callback(lambda future: self._post(queue, Arrival(key, future)))

    def _post(self, queue: asyncio.Queue[Arrival], arrival: Arrival) -> None:
        with self._lock:
            first = not self._posted
            self._posted.append((queue, arrival))
        if first:
            with contextlib.suppress(RuntimeError):  # the loop has closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._deliver)

    def _deliver(self) -> None:
        with self._lock:
            posted, self._posted = self._posted, []
        for queue, arrival in posted:
            queue.put_nowait(arrival)


async def settled(future: Future[T], timeout_s: float) -> T:
    """The result of an engine's future. TimeoutError after ``timeout_s``; the future itself goes on.

    (``asyncio.wrap_future`` would cancel the engine's future with the waiting coroutine.)
    """
    loop = asyncio.get_running_loop()
    done = asyncio.Event()

    def wake(_: Future[T]) -> None:
        with contextlib.suppress(RuntimeError):  # the loop closed while the engine worked
            loop.call_soon_threadsafe(done.set)

    future.add_done_callback(wake)
    try:
        await asyncio.wait_for(done.wait(), timeout_s)
    except TimeoutError:
        raise TimeoutError(f"the engine gave no answer within {timeout_s:g} s") from None
    return future.result(0)
