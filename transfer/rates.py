"""How many calls a client may make: token buckets per address and one for all. No clock of its own."""

from __future__ import annotations

import dataclasses
import math


@dataclasses.dataclass(frozen=True)
class Rate:
    """``per_s`` calls per second on average, ``burst`` at once."""

    per_s: float
    burst: float

    def __post_init__(self) -> None:
        if not (self.per_s > 0 and self.burst >= 1 and math.isfinite(self.burst)):
            raise ValueError(f"a rate of {self.per_s} per s with bursts of {self.burst}, expected above 0, 1")


@dataclasses.dataclass(frozen=True)
class RateLimits:
    """Limits of one server: calls per address and in all with the token, the same without it. Strangers have
    a purse of their own: whoever has many addresses would else spend the members'."""

    client: Rate = Rate(2000.0, 4000.0)
    all: Rate = Rate(8000.0, 16000.0)
    stranger: Rate = Rate(50.0, 200.0)
    strangers: Rate = Rate(1000.0, 2000.0)


DEFAULT_LIMITS = RateLimits()


class Buckets:
    """One bucket per key, of which at most ``most`` are remembered. Not thread-safe."""

    def __init__(self, rate: Rate, most: int = 4096) -> None:
        self._rate, self._most = rate, most
        self._levels: dict[str, tuple[float, float]] = {}

    def take(self, key: str, now: float) -> float:
        """0 if one more call may pass at ``now`` (seconds), else the seconds until one may."""
        level, at = self._levels.pop(key, (self._rate.burst, now))
        level = min(self._rate.burst, level + max(0.0, now - at) * self._rate.per_s)
        passes = level >= 1.0
        while len(self._levels) >= self._most:  # the one that called longest ago: its bucket is fullest
            del self._levels[next(iter(self._levels))]
        self._levels[key] = (level - 1.0 if passes else level, now)
        return 0.0 if passes else (1.0 - level) / self._rate.per_s
