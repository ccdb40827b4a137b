"""The accounting of samples: a value that can't exist unless every identity holds.

Each sample that is dispatched is counted once in ``submitted`` and is, at every observable point, in
exactly one place: running, or settled with one fate. ``Flow`` checks that at construction, so every
transition checks it. Retries are new submissions: the lost attempt keeps its fate.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.orchestrator.errors import FlowError

Kind = Literal["train", "eval"]
Fate = Literal["accepted", "filtered", "dropped", "cancelled", "errored"]
FATES: tuple[Fate, ...] = ("accepted", "filtered", "dropped", "cancelled", "errored")


@dataclasses.dataclass(frozen=True, slots=True)
class Flow:
    """Counters of one kind of samples, since the start of the process.

    accepted = queued + shipped; a queued sample that grows too old moves from accepted to dropped.
    """

    submitted: int = 0
    running: int = 0
    accepted: int = 0
    filtered: int = 0
    dropped: int = 0
    cancelled: int = 0
    errored: int = 0
    queued: int = 0
    shipped: int = 0

    def __post_init__(self) -> None:
        settled = self.accepted + self.filtered + self.dropped + self.cancelled + self.errored
        if self.submitted != settled + self.running:
            raise FlowError(
                f"submitted {self.submitted} != settled {settled} + running {self.running}: {self}"
            )
        if self.accepted != self.queued + self.shipped:
            raise FlowError(f"accepted {self.accepted} != queued {self.queued} + shipped {self.shipped}")
        below = [f.name for f in dataclasses.fields(self) if getattr(self, f.name) < 0]
        if below:
            raise FlowError(f"{below[0]} is {getattr(self, below[0])}, expected at least 0")

    def submit(self, n: int) -> Flow:
        """``n`` samples are dispatched."""
        return dataclasses.replace(self, submitted=self.submitted + n, running=self.running + n)

    def settle(self, fate: Fate, n: int) -> Flow:
        """``n`` running samples end with ``fate``; accepted ones are queued."""
        counts = {fate: getattr(self, fate) + n, "running": self.running - n}
        if fate == "accepted":
            counts["queued"] = self.queued + n
        return dataclasses.replace(self, **counts)

    def ship(self, n: int) -> Flow:
        """``n`` queued samples leave in a batch."""
        return dataclasses.replace(self, queued=self.queued - n, shipped=self.shipped + n)

    def drop_queued(self, n: int) -> Flow:
        """``n`` queued samples grew too old: they were accepted and are dropped now."""
        return dataclasses.replace(
            self, queued=self.queued - n, accepted=self.accepted - n, dropped=self.dropped + n
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Permits:
    """Sample slots shared by training and evaluation: held = acquired - released, within 0 and ``cap``."""

    cap: int
    acquired: int = 0
    released: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.held <= self.cap:
            raise FlowError(f"{self.held} permits held, expected 0 to {self.cap}")

    @property
    def held(self) -> int:
        """Permits out now."""
        return self.acquired - self.released

    @property
    def free(self) -> int:
        """Permits that can be acquired now."""
        return self.cap - self.held

    def acquire(self, n: int) -> Permits:
        """Take ``n``; raises ``FlowError`` above the cap."""
        return dataclasses.replace(self, acquired=self.acquired + n)

    def release(self, n: int) -> Permits:
        """Return ``n``; raises ``FlowError`` if fewer are out."""
        return dataclasses.replace(self, released=self.released + n)
