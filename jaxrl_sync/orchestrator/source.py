"""The stream of prompts: which item comes at which position, and which positions are consumed.

Position p of the stream is item ``order(epoch)[p mod size]`` of epoch p // size; a pure function of (seed,
size, p), so no generator state has to be saved. The cursor is aligned to *consumed* positions (trained,
filtered or given up), not to yielded ones: after a resume the positions that were in flight come again and
nothing else does.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from jaxrl_sync.orchestrator.errors import EmptyDatasetError, LoopError


@dataclasses.dataclass(frozen=True, slots=True)
class Draw:
    """One prompt of the stream. ``position`` is unique in the run, ``item`` within the data set of ``part``,
    the number of its task in the mix."""

    position: int
    item: int
    epoch: int
    part: int = 0


class CursorError(LoopError):
    """A saved data cursor that does not belong to this data set."""

    exit_code = 2


class Source(Protocol):
    """What the book needs of a stream of prompts."""

    def draw(self) -> Draw | None:
        """The next prompt; None at the end of the data."""
        ...

    @property
    def exhausted(self) -> bool:
        """Whether every prompt has been drawn or was consumed before."""
        ...

    def consume(self, position: int) -> None:
        """This prompt is trained."""
        ...

    def forfeit(self, position: int) -> None:
        """This prompt is done for good without having been trained."""
        ...

    def cursor(self) -> dict[str, Any]:
        """What a checkpoint must keep."""
        ...


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

    def forfeit(self, position: int) -> None:
        """Done for good without having been trained: the same to a stream of one task."""
        self.consume(position)

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


class MixedSource:
    """The streams of several tasks as one, in the ratio of their weights. No I/O, no clock, no randomness.

    The next prompt is of the task that is furthest behind its weight, counting what was drawn except what
    was forfeited: a group that is filtered or given up is replaced by one of its own task, and so the mix of
    what is *trained* keeps its ratios. A task whose data has ended leaves the mix to the others. Position q
    of stream k is position q x n + k of the whole, so that positions of different tasks never meet.
    """

    def __init__(
        self,
        labels: Sequence[str],
        weights: Sequence[float],
        streams: Sequence[DataSource],
        kept: Sequence[int],
    ) -> None:
        self._labels, self._weights = tuple(labels), tuple(weights)
        self._streams, self._kept = tuple(streams), list(kept)
        self._trained = list(kept)

    @classmethod
    def make(
        cls,
        labels: Sequence[str],
        weights: Sequence[float],
        sizes: Sequence[int | None],
        seed: int,
        *,
        epochs: int | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> MixedSource:
        """Fresh streams of these sizes, or those of a saved cursor; ``CursorError`` for another mix's."""
        saved = list((cursor or {}).get("mix", ()))
        if cursor and [s.get("label") for s in saved] != list(labels):
            found = [s.get("label") for s in saved] or "one task"
            raise CursorError(f"the saved data cursor is of {found}, this run has the mix {list(labels)}")
        rows: Sequence[Mapping[str, Any] | None] = saved or [None] * len(labels)
        streams = [
            DataSource(size, seed, epochs=epochs, cursor=row) for size, row in zip(sizes, rows, strict=True)
        ]
        return cls(labels, weights, streams, [int(row["trained"]) if row else 0 for row in rows])

    def draw(self) -> Draw | None:
        """The next prompt of the task that is furthest behind; None when all streams have ended."""
        able = [k for k, stream in enumerate(self._streams) if not stream.exhausted]
        if not able:
            return None
        part = min(able, key=lambda k: ((self._kept[k] + 1) / self._weights[k], k))
        found = self._streams[part].draw()
        assert found is not None
        self._kept[part] += 1
        return self._of_part(found, part)

    def at(self, position: int) -> Draw:
        """The draw of one position."""
        inner, part = divmod(position, len(self._streams))
        return self._of_part(self._streams[part].at(inner), part)

    @property
    def exhausted(self) -> bool:
        """Whether all streams have ended."""
        return all(stream.exhausted for stream in self._streams)

    def consume(self, position: int) -> None:
        """This prompt is trained; raises ``LoopError`` for a second time or for one never drawn."""
        inner, part = divmod(position, len(self._streams))
        self._streams[part].consume(inner)
        self._trained[part] += 1

    def forfeit(self, position: int) -> None:
        """This prompt gave nothing to train on: its task gets another one."""
        inner, part = divmod(position, len(self._streams))
        self._streams[part].consume(inner)
        self._kept[part] -= 1

    def cursor(self) -> dict[str, Any]:
        """What a checkpoint must keep: the cursor of every stream, and how many of its groups trained."""
        rows = zip(self._labels, self._trained, self._streams, strict=True)
        return {"mix": [{"label": name, "trained": n, **stream.cursor()} for name, n, stream in rows]}

    def _of_part(self, draw: Draw, part: int) -> Draw:
        position = draw.position * len(self._streams) + part
        return dataclasses.replace(draw, position=position, part=part)
