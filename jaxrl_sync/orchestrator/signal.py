"""Waiting on the event loop for a predicate, always with a deadline."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from jaxrl_sync.orchestrator.errors import DeadlineError


class Signal:
    """Wakes everyone who waits for a predicate over the loop's state.

    The predicate is tested before each wait with no await in between, so a change that comes first is not
    lost; it is tested again after each wake-up, so a stale wake-up does no harm.
    """

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()
        self.count = 0

    def notify(self) -> None:
        """Something changed: wake all waiters. Only on the event loop's thread."""
        self.count += 1
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def until(
        self, predicate: Callable[[], bool], timeout_s: float, what: Callable[[], str] | str
    ) -> None:
        """Return once ``predicate()`` holds; raise ``DeadlineError`` naming ``what`` after ``timeout_s``."""
        if not await self.holds(predicate, timeout_s):
            text = what if isinstance(what, str) else what()
            raise DeadlineError(f"waited {timeout_s:g} s for {text}")

    async def holds(self, predicate: Callable[[], bool], timeout_s: float) -> bool:
        """Whether ``predicate()`` came to hold within ``timeout_s``."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while not predicate():
            remaining = deadline - loop.time()
            if remaining <= 0:
                return False
            waiter: asyncio.Future[None] = loop.create_future()
            self._waiters.add(waiter)
            try:
                await asyncio.wait([waiter], timeout=remaining)
            finally:
                self._waiters.discard(waiter)
                waiter.cancel()
        return True

    async def changed(self, since: int, timeout_s: float) -> bool:
        """Whether a ``notify`` came since ``count`` was ``since``; waits up to ``timeout_s`` for one."""
        return await self.holds(lambda: self.count != since, timeout_s)
