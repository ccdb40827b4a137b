"""Several ranks of one reader take the same version, all or none: rank 0 chooses, the others follow.

WORLD-3-lead       by rank 0: the version of the third preparation
WORLD-3-rank-1     by rank 1: prepared, or why not
WORLD-3-took-1     by rank 1: swapped in; rank 0 prepares no other version before that
"""

from __future__ import annotations

import threading
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError
from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import ChannelError, NoVersion
from jaxrl_sync.transfer.files.turns import wait_for
from jaxrl_sync.transfer.version import Version

MAX_GROUP_BYTES = 1 << 16


class Group:
    """The ranks of one reader. Used by one thread of each at a time."""

    def __init__(self, channel: Channel, world: str, rank: int, size: int, stop: threading.Event) -> None:
        self._folder = channel["groups"]
        self._seal = channel.seal
        self._world, self._rank, self._size = names.check(world), rank, size
        self._stop = stop
        self.number = 0
        self._swapped = 0

    def lead(self, version: Version) -> None:
        """Rank 0 begins to prepare ``version``."""
        self.number += 1
        self._say(self._name(self.number, "lead"), {"version": [version.lineage, version.number]})
        for kind in ("lead", *(f"{k}-{r}" for r in range(1, self._size) for k in ("rank", "took"))):
            self._folder.remove(self._name(self.number - 2, kind))

    def follow(self) -> tuple[int, Version] | None:
        """Another rank: the newest preparation that this rank hasn't taken part in, and its version."""
        start, end = f"{self._world}-", "-lead"
        found = [n for n in self._folder.names() if n.startswith(start) and n.endswith(end)]
        numbers = [int(n) for n in (n[len(start) : -len(end)] for n in found) if n.isdigit()]
        newest = max(numbers, default=0)
        if newest <= self.number:
            return None
        value = self._read(self._name(newest, "lead"))
        return None if value is None else (newest, Version(*value["version"]))

    def report(self, number: int, failed: str | None) -> None:
        """Another rank: the version is prepared here, or in words why not."""
        self.number = max(self.number, number)
        self._say(self._name(number, f"rank-{self._rank}"), {"failed": failed})

    def gather(self, deadline: float) -> None:
        """Rank 0 waits until every rank is prepared. DeadlineError, ChannelError name the rank that isn't."""
        for rank in range(1, self._size):
            name = self._name(self.number, f"rank-{rank}")
            value = wait_for(lambda name=name: self._read(name), deadline, self._stop)  # type: ignore[misc]
            if value is None:
                raise DeadlineError(f"rank {rank} of {self._size} wasn't prepared in time")
            if value["failed"] is not None:
                raise ChannelError(f"rank {rank} of {self._size}: {str(value['failed'])[:500]}")

    def led(self) -> None:
        """Rank 0 has swapped in what was prepared last."""
        self._swapped = self.number

    def took(self, number: int) -> None:
        """Another rank has swapped in the version of a preparation."""
        self._say(self._name(number, f"took-{self._rank}"), {})

    @property
    def settled(self) -> bool:
        """Rank 0: whether every rank has swapped in what this one has: they may prepare another version."""
        took = (self._name(self._swapped, f"took-{r}") for r in range(1, self._size))
        if self._swapped and all(self._folder.mtime_s(name) is not None for name in took):
            self._swapped = 0
        return not self._swapped

    def close(self) -> None:
        """Rank 0 removes what is left."""
        if self._rank == 0:
            for name in self._folder.names():
                if name.startswith(f"{self._world}-"):
                    self._folder.remove(name)

    def _name(self, number: int, kind: str) -> str:
        return f"{self._world}-{number}-{kind}"

    def _say(self, name: str, value: dict[str, Any]) -> None:
        self._folder.commit(name, self._seal.document("group", value), sync=False)

    def _read(self, name: str) -> dict[str, Any] | None:
        try:
            data = self._folder.read(name, MAX_GROUP_BYTES)
        except NoVersion:
            return None
        return self._seal.open("group", data, f"{self._folder.where}/{name}")
