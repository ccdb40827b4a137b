"""A group on its way through the loop: open (members run), ready (scored, waiting for a batch)."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl_sync.orchestrator.flow import Fate, Kind
from jaxrl_sync.orchestrator.source import Draw
from jaxrl_sync.transfer.version import Version

Member = Literal["running", "arrived", "filtered", "dropped", "cancelled", "errored"]


@dataclasses.dataclass(slots=True)
class OpenGroup:
    """One attempt at one prompt, pinned to an engine and to the version that engine held when it was opened.

    ``members[i]`` is where sample i is. ``tag`` belongs to the caller (an evaluation names itself there).
    """

    gid: int
    kind: Kind
    draw: Draw
    attempt: int
    engine: str
    version: Version
    opened_s: float
    timeout_s: float
    members: list[Member]
    tag: Any = None
    completed_version: int = 0
    stood_s: float = 0.0
    """How long its engine had stood still in all when it was opened."""

    def age_s(self, now: float, stood_s: float) -> float:
        """How long it has been open, without the time in which its engine stood still: ``stood_s`` by now."""
        return now - self.opened_s - max(0.0, stood_s - self.stood_s)

    @property
    def size(self) -> int:
        """Samples asked for."""
        return len(self.members)

    @property
    def complete(self) -> bool:
        """Arrived + ended >= group size: no member runs any more."""
        return "running" not in self.members

    def count(self, state: Member) -> int:
        """Members in ``state``."""
        return self.members.count(state)


@dataclasses.dataclass(frozen=True, slots=True)
class ReadyGroup:
    """A complete group with its survivors, ready to be trained."""

    gid: int
    draw: Draw
    attempt: int
    version: Version
    completed_version: int
    samples: int
    size: int
    payload: Any = None
    nbytes: int = 0

    @property
    def order(self) -> tuple[int, int]:
        """Oldest dispatch version first, then the order of the stream."""
        return (self.version.number, self.draw.position)


@dataclasses.dataclass(frozen=True, slots=True)
class EngineView:
    """What admission must know of one engine."""

    name: str
    version: Version
    slots: int
    stood_s: float = 0.0
    """How long it has stood still in all, because its devices were the trainer's."""


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """One cancellation or failure: ``count`` samples of a group ended with ``fate`` for ``reason``."""

    kind: Kind
    gid: int
    count: int
    fate: Fate
    reason: str
