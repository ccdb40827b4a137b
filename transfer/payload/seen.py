"""What rounds of one edge cost their receivers: by that `auto` chooses between a frame and everything.

A round costs the time from the receiver's `ready` until its slot is verified. That holds what the sender does
only then, what it has done ahead not, and what overlaps counts once.

The first frame after a full copy is dearer than those after it: the slot to fill first becomes equal to the
serving one, by a copy of the edge. So a trial of frames is two versions in a row, of which the second counts,
unless the first took so long that a copy of the edge can't be why.

A receiver whose first version came another way has never been sent everything from here: that is tried as
what lost is, and until it was timed frames are taken to be faster.
"""

from __future__ import annotations

import dataclasses
import math
import threading

from jaxrl_sync.transfer.version import Version

RETRY = 16
"""Versions after which ``auto`` looks again at a payload that keeps losing."""

FIRST_RETRY = 4
"""The same the first time; the span doubles up to `RETRY`."""

STAY = 1.05
"""Whatever is being sent stays until the other one is better by this factor."""

COLD = 2.0
"""A first frame that takes so many times as long as a full copy doesn't do so because of the slot's copy."""


@dataclasses.dataclass(frozen=True)
class Cost:
    """Seconds of one kind of round; ``warm`` where they are those of rounds in a row."""

    seconds: float = math.nan
    warm: bool = False

    @property
    def known(self) -> bool:
        """Whether there was such a round."""
        return not math.isnan(self.seconds)

    def then(self, seconds: float) -> Cost:
        """With one more warm round: a mean that forgets with 1/4 per round."""
        return Cost(_mean(self.seconds if self.warm else math.nan, seconds), True)


class Seen:
    """Costs of one edge's rounds and the rate of its link. Links of equal replicas share it; thread-safe."""

    def __init__(self) -> None:
        self._frame = Cost()
        self._full = Cost()
        self._rate_bytes_s = math.nan
        self._timed = False
        self._frames = True  # what the last decision was
        self._since = 0
        self._span = FIRST_RETRY
        self._trial = 0
        self._asked: Version | None = None
        self._answer = True
        self._lock = threading.Lock()

    def sent(self, nbytes: int, wire_s: float) -> None:
        """So long did the sender take for so many bytes; of use until a receiver has said how long."""
        if nbytes >= 1 << 16 and not self._timed:
            self._rate_bytes_s = _mean(self._rate_bytes_s, nbytes / max(wire_s, 1e-6))

    def arrived(self, nbytes: int, seconds: float) -> None:
        """So long did they come in over there; the sender's time ends when buffers on the way have them."""
        if nbytes >= 1 << 16:
            known = self._rate_bytes_s if self._timed else math.nan
            self._rate_bytes_s, self._timed = _mean(known, nbytes / max(seconds, 1e-6)), True

    def full(self, seconds: float, first: bool = False) -> None:
        """A receiver had everything after so long; ``first``: buffers were touched for the first time."""
        with self._lock:
            if first:
                self._full = self._full if self._full.known else Cost(seconds)
            else:
                self._full = (Cost() if self._frames else self._full).then(seconds)

    def frame(self, seconds: float, after_full: bool = False) -> None:
        """A receiver had applied a frame after so long; ``after_full``: its round before wasn't a frame."""
        with self._lock:
            if not after_full:
                self._frame = self._frame.then(seconds)
            elif not (self._frame.warm and self._prefers_frames(STAY)):
                self._frame = Cost(seconds)

    @property
    def rate(self) -> float:
        """Bytes per second of the link; 1e9 before anything was measured."""
        return 1e9 if math.isnan(self._rate_bytes_s) else self._rate_bytes_s

    @property
    def base_wanted(self) -> bool:
        """Whether `frame_pays` may be true next time, so that a base is of use then."""
        with self._lock:
            due = self._since + 1 >= self._span
            return due or self._trial > 0 or self._unsettled or self._prefers_frames(STAY)

    def frame_pays(self, version: Version) -> bool:
        """Whether a frame should take less time than a full round; the loser is tried now and then.

        Whoever asks for one version gets one answer.
        """
        with self._lock:
            asked = self._asked
            if asked is None or (asked != version and not asked.follows(version)):
                self._asked, self._answer = version, self._decide()
            return self._answer

    @property
    def _hopeless(self) -> bool:
        return not self._frame.warm and self._frame.seconds >= COLD * self._full.seconds

    @property
    def _unsettled(self) -> bool:
        """Whether more frames have to be seen before the two can be compared."""
        return not self._frame.warm and not self._hopeless

    def _prefers_frames(self, stay: float) -> bool:
        if not self._full.known:
            return True
        return self._frame.seconds < self._full.seconds * (stay if self._frames else 1 / stay)

    def _decide(self) -> bool:
        if self._trial and not self._hopeless:
            self._trial -= 1
            return True
        self._trial = 0
        if self._unsettled:
            self._frames = True
            return True
        self._frames = self._prefers_frames(STAY)
        self._since += 1
        if self._since < self._span:
            return self._frames
        self._since, self._span = 0, min(2 * self._span, RETRY)
        self._trial = 0 if self._frames else 1
        return not self._frames


def _mean(old: float, new: float) -> float:
    return new if math.isnan(old) else old + (new - old) / 4
