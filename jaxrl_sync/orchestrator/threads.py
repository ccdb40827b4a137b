"""Blocking calls (hub, sockets, tasks, packing) off the event loop, each with a deadline.

Threads are daemons: one that hangs can't keep the process alive. A call that passes its deadline is left to
itself and counted; its late result goes nowhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from jaxrl_sync.orchestrator.errors import DeadlineError, LoopError

T = TypeVar("T")


@dataclasses.dataclass(eq=False)
class _Job:
    """One call on its way to a thread and back. ``abandoned`` is set once nobody waits any more."""

    call: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    result: asyncio.Future[Any]
    what: str
    abandoned: bool = False
    returned: bool = False
    hung: bool = False

    def run(self) -> None:
        """In the thread: call, then hand the outcome to the event loop."""
        value, error = None, None
        try:
            value = self.call()
        except BaseException as caught:
            error = (
                RuntimeError(f"{self.what}: StopIteration") if isinstance(caught, StopIteration) else caught
            )
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self.loop.call_soon_threadsafe(self._settle, value, error)

    def _settle(self, value: Any, error: BaseException | None) -> None:
        if self.result.done():
            return
        if error is None:
            self.result.set_result(value)
        else:
            self.result.set_exception(error)

    async def wait(self, timeout_s: float) -> Any:
        """The outcome; ``DeadlineError`` naming ``what`` when it is late."""
        try:
            done, _ = await asyncio.wait([self.result], timeout=timeout_s)
        except asyncio.CancelledError:
            self.abandoned = True
            self.result.cancel()
            raise
        if not done:
            self.abandoned = True
            self.result.cancel()
            raise DeadlineError(f"waited {timeout_s:g} s for {self.what}")
        return self.result.result()


def _job(call: Callable[[], Any], what: str) -> _Job:
    loop = asyncio.get_running_loop()
    return _Job(call, loop, loop.create_future(), what)


async def in_thread(call: Callable[..., T], *args: Any, timeout_s: float, what: str) -> T:
    """``call(*args)`` in a daemon thread of its own; ``DeadlineError`` naming ``what`` when late.

    For the few calls that may block for long (hub, sockets). Raises what the call raises.
    """
    job = _job(lambda: call(*args), what)
    threading.Thread(target=job.run, name=f"call-{what[:24]}", daemon=True).start()
    value: T = await job.wait(timeout_s)
    return value


class CallPool:
    """Runs many short blocking calls on up to ``threads`` reusable daemon threads; a task's code, above all.

    A call starts at once when it has passed the gate, so that its deadline counts its own time. A thread
    whose call passed its deadline is given up and replaced; ``max_hung`` of them at once are a
    ``LoopError``.
    """

    def __init__(self, threads: int, max_hung: int = 64) -> None:
        self._gate = asyncio.Semaphore(threads)
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._idle = 0
        self._max_hung = max_hung
        self.hung = 0
        """Threads whose call passed its deadline and still has not returned."""

    async def run(self, call: Callable[..., T], *args: Any, timeout_s: float, what: str) -> T:
        """``call(*args)`` in a pool thread; raises what it raises, ``DeadlineError`` when it is late."""
        async with self._gate:
            if self.hung >= self._max_hung:
                raise LoopError(f"{self.hung} calls hang in threads, the last ones for {what}")
            job = _job(lambda: call(*args), what)
            self._hand_over(job)
            try:
                value: T = await job.wait(timeout_s)
            finally:
                self._note_hung(job)
            return value

    def _note_hung(self, job: _Job) -> None:
        with self._lock:
            if job.abandoned and not job.returned:
                job.hung = True
                self.hung += 1

    def close(self) -> None:
        """Let idle threads end; hung ones are daemons."""
        with self._lock:
            for _ in range(self._idle):
                self._jobs.put(None)

    def _hand_over(self, job: _Job) -> None:
        with self._lock:
            fresh = self._idle == 0
            self._idle -= 0 if fresh else 1
        if fresh:
            threading.Thread(target=self._work, args=(job,), name="calls", daemon=True).start()
        else:
            self._jobs.put(job)

    def _work(self, first: _Job) -> None:
        job: _Job | None = first
        while job is not None:
            job.run()
            with self._lock:
                job.returned = True
                self.hung -= job.hung
                self._idle += 1
            job = self._jobs.get()
