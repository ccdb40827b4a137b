"""Stop strings on a stream of text, wherever the boundaries between tokens lie."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Passes text through until the earliest stop string; never hands out a part of one.

    ``stopped`` is set once a stop string was found; what follows it is dropped. Text that may be the
    beginning of a stop string is held back until it is decided, or until ``flush``.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(s for s in stops if s)
        self._held = ""
        self.stopped = False

    def push(self, text: str) -> str:
        """What of the text so far can be given out."""
        if self.stopped:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.stopped = True
            out, self._held = self._held[: min(found)], ""
            return out
        keep = self._undecided_chars()
        out = self._held[: len(self._held) - keep]
        self._held = self._held[len(out) :]
        return out

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        out, self._held = self._held, ""
        return out

    def _undecided_chars(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max((len(s) for s in self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            end = self._held[-size:]
            if any(stop.startswith(end) for stop in self._stops):
                return size
        return 0
