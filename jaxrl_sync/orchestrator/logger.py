"""PeriodicLogger: one ``collect()`` per interval gives the progress file and the numbers of that moment.

It also measures the event loop's lag: how much later than asked a short sleep returns. A lag of seconds
says that something blocks the loop, long before anything times out.
"""

from __future__ import annotations

import asyncio
import collections
import math
import resource
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sync.orchestrator.rundir import write_progress
from jaxrl_sync.orchestrator.threads import in_thread

_TICK_S = 0.05
_WRITE_S = 30.0


def percentile(values: Collection[float], q: float) -> float:
    """The nearest-rank percentile, 0 for no values."""
    if not values:
        return 0.0
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, math.ceil(q * len(ordered)) - 1))]


def spread(values: Collection[float]) -> dict[str, float]:
    """median, p99 and max of some seconds."""
    return {
        "median": percentile(values, 0.5),
        "p99": percentile(values, 0.99),
        "max": max(values, default=0.0),
    }


def rss_bytes() -> int:
    """Resident memory of this process; the peak where the system does not tell the present."""
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return pages * resource.getpagesize()


class PeriodicLogger:
    """Calls ``collect`` every ``interval_s`` and writes what it gives to ``progress.json``."""

    def __init__(self, run_dir: Path, interval_s: float, collect: Callable[[], Mapping[str, Any]]) -> None:
        self._run_dir, self._interval_s, self._collect = run_dir, interval_s, collect
        self._lags: collections.deque[float] = collections.deque(maxlen=1200)
        self.lag_max_s = 0.0

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._measure(), name="lag")
            group.create_task(self._report(), name="report")

    def lag(self) -> dict[str, float]:
        """Seconds of event-loop lag over the last minute: median, p90, p99, max."""
        values = list(self._lags)
        return {**spread(values), "p90": percentile(values, 0.9)}

    async def write(self) -> None:
        """Collect and write now."""
        row = dict(self._collect())
        await in_thread(
            write_progress, self._run_dir, row, timeout_s=_WRITE_S, what="progress.json to be written"
        )

    async def _measure(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            asked = loop.time() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lag = max(0.0, loop.time() - asked)
            self._lags.append(lag)
            self.lag_max_s = max(self.lag_max_s, lag)

    async def _report(self) -> None:
        while True:
            await self.write()
            await asyncio.sleep(self._interval_s)
