"""``POST /swap`` of a colocated engine: its versions come by themselves, with the trainer's updates.

Who asks for a version is answered once it serves; the first to ask for one gets its report.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from concurrent.futures import Future
from typing import Any

from jaxrl_sync.inference.errors import NotServingError, SwapTimeoutError
from jaxrl_sync.inference.pending import fail, settle
from jaxrl_sync.inference.request import PauseMode
from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass(frozen=True)
class _Wait:
    version: Version
    deadline: float
    future: Future[dict[str, Any]]


class Arrivals:
    """Thread-safe: ``swap`` is called by the server, the rest by the thread that steps the engine."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._serving: Version | None = None
        self._report: dict[str, Any] | None = None
        self._waiting: list[_Wait] = []
        self._closed = False

    def swap(self, version: Version, timeout_s: float, mode: PauseMode = "keep") -> Future[dict[str, Any]]:
        """The answer of ``/swap`` once ``version`` or a later one of its lineage serves; ``mode`` is the
        config's here (``sync.pause_mode``). SwapTimeoutError after ``timeout_s``."""
        wait = _Wait(version, time.monotonic() + timeout_s, Future())
        with self._lock:
            self._waiting.append(wait)
            ended = self._ended()
        self._settle(ended)
        return wait.future

    def arrived(self, version: Version, report: dict[str, Any]) -> None:
        """``version`` serves from now on; ``report`` is what ``/swap`` answers about it."""
        with self._lock:
            self._serving, self._report = version, report
            ended = self._ended()
        self._settle(ended)

    def expire(self) -> None:
        """Fail those who have waited too long."""
        now = time.monotonic()
        with self._lock:
            late = [w for w in self._waiting if w.deadline <= now]
            self._waiting = [w for w in self._waiting if w.deadline > now]
            serving = self._serving
        for wait in late:
            fail(wait.future, SwapTimeoutError(f"swap to {wait.version}: the trainer is at {serving}"))

    def close(self) -> None:
        """No version comes any more."""
        with self._lock:
            self._closed = True
            waiting, self._waiting = self._waiting, []
        for wait in waiting:
            fail(wait.future, NotServingError("the engine is closing"))

    def _ended(self) -> list[tuple[_Wait, dict[str, Any] | Exception]]:
        """Under the lock: take out those that have an answer."""
        ended: list[tuple[_Wait, dict[str, Any] | Exception]] = []
        for wait in self._waiting:
            if self._closed:
                ended.append((wait, NotServingError("the engine is closing")))
            elif self._serving is not None and _serves(self._serving, wait.version):
                report, self._report = self._report, None
                ended.append((wait, report or swap_answer(self._serving)))
        done = {id(wait) for wait, _ in ended}
        self._waiting = [w for w in self._waiting if id(w) not in done]
        return ended

    @staticmethod
    def _settle(ended: list[tuple[_Wait, dict[str, Any] | Exception]]) -> None:
        for wait, answer in ended:
            if isinstance(answer, Exception):
                fail(wait.future, answer)
            else:
                settle(wait.future, answer)


def swap_answer(
    version: Version,
    *,
    pause_s: float = 0.0,
    step: int = 0,
    copied: int = 0,
    shared: int = 0,
    seconds: float = 0.0,
) -> dict[str, Any]:
    """The ``/swap`` answer for weights that came within the process; ``seconds`` made them."""
    return {
        "lineage": version.lineage,
        "number": version.number,
        "pause_s": pause_s,
        "step": step,
        "bytes": copied,
        "prepare_s": seconds,
        "verify_s": 0.0,
        "transport": "inprocess",
        "payload": "full",
        "coding": "",
        "density": 1.0,
        "moved": {"copied": copied, "shared": shared},
    }


def _serves(found: Version, wanted: Version) -> bool:
    return found == wanted or found.follows(wanted)
