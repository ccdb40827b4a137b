"""What has arrived of the version that a slot is being filled with: which tensors are complete."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Sequence

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost
from jaxrl_sync.transfer.transports.base import remaining
from jaxrl_sync.transfer.version import Version


class Progress:
    """Tensors of one version in one slot. Thread-safe: edges report, readers of a relay wait.

    A tensor is complete when each edge that holds a part of it has reported it. Complete isn't verified: that
    is known at the ``end``.
    """

    def __init__(
        self, version: Version, edges: Sequence[Iterable[str]], have: frozenset[str] = frozenset()
    ) -> None:
        """``edges``: the tensors that each edge brings. Those in ``have`` are there from the start."""
        self.version = version
        self._missing = collections.Counter(p for edge in edges for p in edge if p not in have)
        self._complete = set(have)
        self._ok: bool | None = None
        self._changed = threading.Condition()

    @property
    def complete(self) -> frozenset[str]:
        """Tensors that are wholly in the slot."""
        with self._changed:
            return frozenset(self._complete)

    @property
    def verified(self) -> bool:
        """Whether the whole version is there and its digests are right."""
        return self._ok is True

    @property
    def failed(self) -> bool:
        """Whether no more of it will come into this slot."""
        return self._ok is False

    def edge(self, paths: Iterable[str]) -> Callable[[Iterable[str]], None]:
        """What one edge reports by: each of its ``paths`` counts once, whatever a sender repeats."""
        left = set(paths)

        def arrived(told: Iterable[str]) -> None:
            with self._changed:
                fresh = left.intersection(told)
                left.difference_update(fresh)
                self.arrived(fresh)

        return arrived

    def arrived(self, paths: Iterable[str]) -> None:
        """An edge has brought its parts of these tensors."""
        with self._changed:
            for path in paths:
                self._missing[path] -= 1
                if self._missing[path] <= 0:
                    self._complete.add(path)
            self._changed.notify_all()

    def end(self, ok: bool) -> None:
        """The version was verified, or given up. The first end counts."""
        with self._changed:
            if self._ok is None:
                self._ok = ok
            self._changed.notify_all()

    def wait(self, paths: Iterable[str], deadline: float) -> None:
        """Block until these tensors are complete. PeerLost when they won't be, DeadlineError."""
        wanted = set(paths)
        self._wait(lambda: wanted <= self._complete or self.verified, deadline, f"{len(wanted)} tensors")

    def wait_verified(self, deadline: float) -> None:
        """Block until the version is verified. PeerLost when it won't be, DeadlineError."""
        self._wait(lambda: self.verified, deadline, "the verification")

    def _wait(self, true: Callable[[], bool], deadline: float, what: str) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: true() or self.failed, remaining(deadline))
            if self.failed:
                raise PeerLost(f"version {self.version} was given up here while it was still arriving")
            if not done:
                raise DeadlineError(f"version {self.version}: {what} hadn't arrived here in time")
