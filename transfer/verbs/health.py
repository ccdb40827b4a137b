"""Which ports failed lately while the peer was alive: new edges avoid them for a while, if others would do.

A burst of failures counts once; every further one doubles the pause; a round that went well clears the port.
When the pause is over the next edge that wants the port is the probe.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable

PAUSE_S = 2.0
LONGEST_S = 120.0


@dataclasses.dataclass
class _Record:
    failures: int
    until: float


class Health:
    """Pauses of ports by name. Thread-safe; ``clock`` is monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._ports: dict[str, _Record] = {}

    def failed(self, port: str) -> None:
        """A work request failed on the port's account."""
        with self._lock:
            now, record = self._clock(), self._ports.setdefault(port, _Record(0, 0.0))
            if now >= record.until:  # else part of the burst that began the pause
                record.failures += 1
                record.until = now + min(LONGEST_S, PAUSE_S * 2.0 ** min(record.failures - 1, 32))

    def well(self, port: str) -> None:
        """A round went well over the port."""
        with self._lock:
            self._ports.pop(port, None)

    def paused(self) -> tuple[str, ...]:
        """Ports to be avoided now."""
        with self._lock:
            now = self._clock()
            return tuple(sorted(name for name, record in self._ports.items() if now < record.until))


HEALTH = Health()
"""Of this process."""
