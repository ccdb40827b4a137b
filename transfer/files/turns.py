"""How the ranks of one writer agree, through small files: rank 0 decides, all write, rank 0 commits.

    e3-t17-order      by rank 0: which version, on which base, with an anchor or not
    e3-t17-part-1     by rank 1: its part is written, or why not
    e3-t17-done       by rank 0: committed, or why not

Every wait has a deadline; a turn that isn't complete by then isn't committed, and the next one is free.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError
from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import BrokenObject, ChannelError, NoVersion
from jaxrl_sync.transfer.files.part import Order, Written
from jaxrl_sync.transfer.version import Version

MAX_TURN_BYTES = 1 << 20
LOOK_S = 0.02
KEPT_TURNS = 2


class Turns:
    """The turns of one epoch. Used by one thread of each rank."""

    def __init__(
        self, channel: Channel, epoch: int, rank: int, size: int, stop: threading.Event, timeout_s: float
    ) -> None:
        self._folder = channel["ranks"]
        self._seal = channel.seal
        self.epoch, self._rank, self._size = epoch, rank, size
        self._stop, self._timeout_s = stop, timeout_s

    # Rank 0.

    def order(self, order: Order) -> None:
        """Tell the other ranks what to write."""
        if self._size > 1:
            base = order.base
            row = dataclasses.asdict(order) | {
                "version": [order.version.lineage, order.version.number],
                "base": [base.lineage, base.number] if base else None,
            }
            self._say(order.turn, "order", row)

    def gather(self, turn: int, own: Written) -> list[Written]:
        """Every rank's part. DeadlineError names ranks that didn't answer, ChannelError one that failed."""
        parts, deadline = [own], time.monotonic() + self._timeout_s
        for rank in range(1, self._size):
            found = self._wait(turn, f"part-{rank}", deadline)
            if found is None:
                raise DeadlineError(
                    f"rank {rank} of {self._size} wrote no part of turn {turn} within {self._timeout_s:g} s"
                )
            if "failed" in found:
                raise ChannelError(f"rank {rank} of {self._size}: {str(found['failed'])[:500]}")
            parts.append(Written.of_json(found))
        return parts

    def done(self, turn: int, failed: str | None) -> None:
        """Tell the other ranks what became of the turn; forget old turns."""
        if self._size > 1:
            self._say(turn, "done", {"failed": failed})
            kinds = ("order", "done", *(f"part-{r}" for r in range(1, self._size)))
            for kind in kinds:
                self._folder.remove(self._name(turn - KEPT_TURNS, kind))

    # Other ranks.

    def next(self, at_least: int, wait_s: float) -> Order | None:
        """What to write in this turn, or in a later one where this rank came too late; None: nothing yet."""
        turn = at_least
        row = self._wait(turn, "order", time.monotonic() + wait_s)
        if row is None:
            start, end = f"e{self.epoch}-t", "-order"
            found = [n for n in self._folder.names() if n.startswith(start) and n.endswith(end)]
            numbers = [n[len(start) : -len(end)] for n in found]
            turn = max((int(n) for n in numbers if n.isascii() and n.isdecimal()), default=0)
            row = self._wait(turn, "order", 0.0) if turn >= at_least else None
        if row is None:
            return None
        base = row["base"]
        return Order(
            turn,
            Version(*row["version"]),
            Version(*base) if base else None,
            bool(row["anchor"]),
            names.check(row["stem"]),
        )

    def report(self, turn: int, part: Written | str) -> None:
        """The part is written, or in words why not."""
        self._say(
            turn, f"part-{self._rank}", part.to_json() if isinstance(part, Written) else {"failed": part}
        )

    def outcome(self, turn: int) -> str | None:
        """Why the turn was not committed, None if it was. DeadlineError when rank 0 doesn't say."""
        found = self._wait(turn, "done", time.monotonic() + self._timeout_s)
        if found is None:
            raise DeadlineError(f"rank 0 didn't end turn {turn} within {self._timeout_s:g} s")
        return None if found["failed"] is None else str(found["failed"])

    # Both.

    def _name(self, turn: int, kind: str) -> str:
        return f"e{self.epoch}-t{turn}-{kind}"

    def _say(self, turn: int, kind: str, value: dict[str, Any]) -> None:
        self._folder.commit(self._name(turn, kind), self._seal.document("turn", value), sync=False)

    def _wait(self, turn: int, kind: str, deadline: float) -> dict[str, Any] | None:
        name = self._name(turn, kind)

        def look() -> dict[str, Any] | None:
            try:
                data = self._folder.read(name, MAX_TURN_BYTES)
            except NoVersion:
                return None
            return self._seal.open("turn", data, f"{self._folder.where}/{name}")

        return wait_for(look, deadline, self._stop)


def wait_for(
    look: Callable[[], dict[str, Any] | None], deadline: float, stop: threading.Event
) -> dict[str, Any] | None:
    """What ``look`` finds, looking again until the deadline or ``stop``. A torn file isn't there yet."""
    while True:
        last = time.monotonic() >= deadline or stop.is_set()
        try:
            found = look()
        except BrokenObject:
            if last:
                raise
            found = None
        if found is not None or last:
            return found
        stop.wait(LOOK_S)
