"""Connections that have not proven the run token yet: few at a time, and who waits longest goes first.

A peer that knows the token needs milliseconds to prove it. Whoever opens connections and stays silent (a slow
loris) therefore only ever pushes out his own: when the lobby is full, the oldest connection of the address
that has most of them is ended, and the newcomer is let in.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable


class Lobby:
    """At most ``most`` unproven connections. Thread-safe; ``evicted`` counts those that had to go."""

    def __init__(self, most: int = 256) -> None:
        if most < 1:
            raise ValueError(f"most={most}, expected at least 1")
        self.most = most
        self.evicted = 0
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._waiting: dict[str, dict[int, Callable[[], None]]] = {}

    def __len__(self) -> int:
        with self._lock:
            return self._count()

    def enter(self, address: str, end: Callable[[], None]) -> int:
        """Let a connection of ``address`` in and return its number; ``end`` ends it and may run in another
        thread. Where the lobby is full another one is ended first."""
        pushed: Callable[[], None] | None = None
        with self._lock:
            if self._count() >= self.most:
                pushed = self._push_out()
            number = next(self._numbers)
            self._waiting.setdefault(address, {})[number] = end
        if pushed is not None:
            pushed()
        return number

    def leave(self, address: str, number: int) -> None:
        """A connection has proven itself or is gone. Idempotent."""
        with self._lock:
            mine = self._waiting.get(address, {})
            mine.pop(number, None)
            if not mine:
                self._waiting.pop(address, None)

    def _count(self) -> int:
        return sum(map(len, self._waiting.values()))

    def _push_out(self) -> Callable[[], None]:
        address = max(self._waiting, key=lambda a: len(self._waiting[a]))
        mine = self._waiting[address]
        end = mine.pop(next(iter(mine)))
        if not mine:
            del self._waiting[address]
        self.evicted += 1
        return end
