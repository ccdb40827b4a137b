"""The stream of prompts: which item comes at which position, and which positions are consumed.

Position p of the stream is item ``order(epoch)[p mod size]`` of epoch p // size; a pure function of (seed,
size, p), so no generator state has to be saved. The cursor is aligned to *consumed* positions (trained,
filtered or given up), not to yielded ones: after a resume the positions that were in flight come again and
nothing else does.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping
from typing import Any

from jaxrl_sync.orchestrator.errors import EmptyDatasetError, LoopError


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One prompt of the stream. ``position`` is unique in the run, ``item`` within the data set."""

    position: int
    item: int
    epoch: int


class CursorError(LoopError):
    """A saved data cursor that does not belong to this data set."""

    exit_code = 2


class DataSource:
    """Yields draws in stream order and keeps the cursor. No I/O, no clock.

    ``size`` None means a task that can make any item: item = position, one endless epoch. ``epochs`` bounds
    the passes over a finite set; without it the stream wraps for ever.
    """

    def __init__(
        self,
        size: int | None,
        seed: int,
        *,
        epochs: int | None = None,
        shuffle: bool = True,
        cursor: Mapping[str, Any] | None = None,
    ) -> None:
        if size is not None and size < 1:
            raise EmptyDatasetError(f"the task has {size} training prompts, expected at least 1")
        self._size, self._seed, self._shuffle = size, seed, shuffle
        self._end = None if size is None or epochs is None else size * epochs
        self._watermark = 0
        self._consumed: set[int] = set()
        self._order: tuple[int, list[int]] = (-1, [])
        if cursor:
            self._restore(cursor)
        self._next = self._watermark

    def draw(self) -> Draw | None:
        """The next position that is not consumed yet; None at the end of the data."""
        if self.exhausted:
            return None
        position = self._next
        self._next += 1
        return self.at(position)

    def at(self, position: int) -> Draw:
        """The draw of one position."""
        if self._size is None:
            return Draw(position, position, 0)
        epoch, offset = divmod(position, self._size)
        return Draw(position, self._epoch_order(epoch)[offset], epoch)

    @property
    def exhausted(self) -> bool:
        """Whether every position of the stream has been drawn or was consumed before."""
        while self._next in self._consumed:
            self._next += 1
        return self._end is not None and self._next >= self._end

    def consume(self, position: int) -> None:
        """This position is done for good; raises ``LoopError`` for a second time or for one never drawn."""
        if position < self._watermark or position in self._consumed or position >= self._next:
            raise LoopError(f"prompt at position {position} consumed twice or before it was drawn")
        self._consumed.add(position)
        while self._watermark in self._consumed:
            self._consumed.remove(self._watermark)
            self._watermark += 1

    def cursor(self) -> dict[str, Any]:
        """What a checkpoint must keep: positions below ``position`` and those in ``consumed`` are done."""
        return {
            "position": self._watermark,
            "consumed": sorted(self._consumed),
            "epoch": self._watermark // self._size if self._size else 0,
            "seed": self._seed,
            "size": self._size,
        }

    def _restore(self, cursor: Mapping[str, Any]) -> None:
        for key, have in (("seed", self._seed), ("size", self._size)):
            if cursor.get(key) != have:
                raise CursorError(
                    f"the saved data cursor has {key}={cursor.get(key)!r}, this run has {have!r}"
                )
        self._watermark = int(cursor["position"])
        self._consumed = {int(p) for p in cursor["consumed"]}

    def _epoch_order(self, epoch: int) -> list[int]:
        if self._order[0] != epoch:
            order = list(range(self._size or 0))
            if self._shuffle:
                random.Random(f"{self._seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1]
