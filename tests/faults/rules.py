"""What the fault proxy does to the connections that a rule names, and when: plain values, no sockets.

A *connection* goes from a host to an address and is of a kind (control: HTTP to the hub; data: weights).
Its direction ``up`` is from the one who dialled, ``down`` is what comes back. A *rule* is in force at once,
or from the byte on that its trigger names: so many bytes of all its connections, or a pattern in a stream.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import re
from typing import Any, Literal, get_args

Direction = Literal["up", "down"]
Action = Literal[
    "rate", "delay", "stall", "partition", "reset", "half_open", "duplicate", "truncate", "flip", "watch"
]
LASTING: frozenset[str] = frozenset({"rate", "delay", "stall", "partition", "half_open"})
WINDOW_BYTES = 4096
"""A pattern is found although it comes in several pieces, if it is no longer than this."""


@dataclasses.dataclass(frozen=True)
class Edge:
    """Who dialled whom, and what for."""

    source: str
    target: str
    kind: str


@dataclasses.dataclass(frozen=True)
class Rule:
    """``value`` is bytes per second of a rate, seconds of a delay, and the length of what is doubled.

    ``source`` and ``target`` are patterns with * and ?. ``up`` and ``down`` say which directions it acts on.
    A stall holds the bytes and keeps them; a partition does so both ways and for connections still to come;
    half_open cuts off the target and leaves the source in the belief that all is well; truncate ends the
    stream in order; flip changes one bit; watch only tells that its trigger was met.
    """

    action: Action
    source: str = "*"
    target: str = "*"
    kind: str = "*"
    up: bool = True
    down: bool = True
    value: float = 0.0
    after_bytes: int | None = None
    pattern: str | None = None

    def __post_init__(self) -> None:
        if self.action not in get_args(Action):
            raise ValueError(f"action {self.action!r}, expected one of {', '.join(get_args(Action))}")
        if self.action in ("rate", "delay", "duplicate") and self.value <= 0:
            raise ValueError(f"{self.action} with value {self.value!r}, expected more than 0")
        if self.after_bytes is not None and self.after_bytes < 0:
            raise ValueError(f"after_bytes={self.after_bytes}, expected at least 0")

    @property
    def triggered(self) -> bool:
        """Whether it waits for something; without a trigger one-time actions take the next byte."""
        return self.after_bytes is not None or self.pattern is not None or self.action not in LASTING

    def concerns(self, edge: Edge) -> bool:
        """Whether it is about this edge."""
        pairs = ((edge.source, self.source), (edge.target, self.target), (edge.kind, self.kind))
        return all(fnmatch.fnmatchcase(name, pattern) for name, pattern in pairs)

    def acts_on(self, direction: Direction) -> bool:
        """Whether it is about bytes in this direction."""
        return self.action == "partition" or (self.up if direction == "up" else self.down)


class Trigger:
    """Looks at the bytes of a rule's connections until it has fired once. One for all its connections."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.fired = not rule.triggered
        self._left = rule.after_bytes or 0
        self._pattern = re.compile(rule.pattern.encode()) if rule.pattern is not None else None
        self._tails: dict[tuple[int, Direction], bytes] = {}

    def find(self, connection: int, direction: Direction, data: memoryview) -> int | None:
        """How many bytes of ``data`` still pass before it fires in them, None when it doesn't."""
        if self.fired or not self.rule.acts_on(direction):
            return None
        if self._pattern is None:
            if len(data) <= self._left:
                self._left -= len(data)
                return None
            return self._left
        return self._search(self._pattern, (connection, direction), data)

    def _search(
        self, pattern: re.Pattern[bytes], stream: tuple[int, Direction], data: memoryview
    ) -> int | None:
        tail = self._tails.get(stream, b"")
        seen = tail + bytes(data)
        found = pattern.search(seen)
        self._tails[stream] = seen[-WINDOW_BYTES:]
        return None if found is None else max(0, found.start() - len(tail))


class Bucket:
    """Bytes at a steady rate, shared by every connection of a rule."""

    def __init__(self, rate: float) -> None:
        self._rate = rate
        self._free_at = 0.0

    def reserve(self, nbytes: int, now: float) -> float:
        """When these bytes are through, on the clock of ``now``."""
        self._free_at = max(self._free_at, now) + nbytes / self._rate
        return self._free_at


def rule_of(fields: dict[str, Any]) -> Rule:
    """The rule that a message describes. ValueError, TypeError for unknown fields."""
    return Rule(**fields)
