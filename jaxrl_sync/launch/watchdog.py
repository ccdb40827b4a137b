"""When a run that still lives makes no progress: pure bookkeeping over what the supervisor observes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_PROGRESS_KEYS = ("step", "samples", "version")


class Watchdog:
    """Remembers when progress was last seen. ``now`` is any monotonic clock in seconds; it reads none."""

    def __init__(self, now: float, start_timeout_s: float, stuck_timeout_s: float) -> None:
        self._start_timeout_s = start_timeout_s
        self._stuck_timeout_s = stuck_timeout_s
        self._since = now
        self._last: tuple[Any, ...] | None = None
        self._progress: Mapping[str, Any] = {}

    def observe(self, now: float, progress: Mapping[str, Any] | None) -> None:
        """Take note of the newest ``progress.json``; it counts when step, samples or version changed."""
        if progress is None:
            return
        self._progress = progress
        seen = tuple(progress.get(key) for key in _PROGRESS_KEYS)
        if seen != self._last:
            self._last, self._since = seen, now

    def stuck(self, now: float) -> str | None:
        """One line that says for how long nothing moved and where, once that is longer than allowed."""
        moving = self._last is not None and any(self._last)
        allowed = self._stuck_timeout_s if moving else self._start_timeout_s + self._stuck_timeout_s
        if now - self._since <= allowed:
            return None
        if self._last is None:
            return f"no progress reported within {allowed:g} s of the start"
        step, phase = self._progress.get("step"), self._progress.get("phase", "unknown")
        idle_s = now - self._since
        return f"no progress for {idle_s:.0f} s (allowed: {allowed:g} s) at step {step}, phase {phase}"


class StopWatch:
    """Finds processes that stay stopped (SIGSTOP) for longer than ``allowed_s``."""

    def __init__(self, allowed_s: float) -> None:
        self._allowed_s = allowed_s
        self._since: dict[int, float] = {}

    def overdue(self, now: float, stopped: Mapping[int, bool]) -> list[int]:
        """The pids among ``stopped`` (pid -> stopped now) that have been stopped too long."""
        self._since = {pid: self._since.get(pid, now) for pid, is_stopped in stopped.items() if is_stopped}
        return [pid for pid, since in self._since.items() if now - since > self._allowed_s]
