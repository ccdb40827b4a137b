"""Refused peers: each is logged once per reason and a while, and all are counted.

Whoever may connect may also be refused as often as he likes; he must not fill a disk with it. The count of
lines is limited per peer and in all, the counters are not.
"""

from __future__ import annotations

import collections
import logging
import threading
import time
from collections.abc import Callable

from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, ProtocolError

AGAIN_S = 600.0
MAX_LINES = 256
_SHOWN = 500


class Refusals:
    """What a listener called ``what`` refuses. Thread-safe."""

    def __init__(
        self, logger: logging.Logger, what: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logger, self._what, self._clock = logger, what, clock
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], tuple[float, int]] = {}
        self._counts: collections.Counter[str] = collections.Counter()

    def note(self, address: str, kind: str, detail: object) -> None:
        """A peer at ``address`` (without its port) was refused: ``kind`` names the reason in a word.

        The first time, and again after ``AGAIN_S`` with the number of those in between, this is a warning.
        """
        now, key = self._clock(), (address, kind)
        with self._lock:
            self._counts[kind] += 1
            since, hidden = self._said.get(key, (-AGAIN_S, 0))
            fresh = now - since >= AGAIN_S
            if fresh and key not in self._said and not self._room(now):
                return
            self._said[key] = (now, 0) if fresh else (since, hidden + 1)
        if fresh:
            text = " ".join(str(detail).split())[:_SHOWN]
            more = f", after {hidden} like it" if hidden else ""
            self._logger.warning(
                "%s refused %s: %s%s (logged once in %g s)", self._what, address, text, more, AGAIN_S
            )

    def note_error(self, address: str, error: BaseException) -> None:
        """The same for an error of a handshake."""
        self.note(address, kind_of(error), error)

    def counts(self) -> dict[str, int]:
        """Refused connections and requests since the start, by kind."""
        with self._lock:
            return dict(self._counts)

    def _room(self, now: float) -> bool:
        """Whether another peer may get a line: those that were named long ago are forgotten."""
        if len(self._said) >= MAX_LINES:
            self._said = {k: v for k, v in self._said.items() if now - v[0] < AGAIN_S}
        return len(self._said) < MAX_LINES


def kind_of(error: BaseException) -> str:
    """The word for an error of a handshake: token, protocol, slow, gone or error."""
    for kind, word in ((AuthError, "token"), (ProtocolError, "protocol"), (DeadlineError, "slow")):
        if isinstance(error, kind):
            return word
    return "gone" if isinstance(error, (PeerLost, OSError)) else "error"
