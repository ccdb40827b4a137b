"""What lies in the slots of a simulated engine rank, and who reads it while others are filled.

The counterpart of ``holding.Holding`` (with the product's own ``progress.Progress``): words are the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost
from jaxrl_sync.transfer.holding import APPEAR_S
from jaxrl_sync.transfer.progress import Progress
from jaxrl_sync.transfer.version import Version

from .serving import Reading
from .weights import Memory, Word
from .world import Node, Signal, Steps

DRAIN_S = 4.0


@dataclasses.dataclass(eq=False)
class Content:
    """What lies in a slot, and how many read it."""

    memory: Memory
    progress: Progress
    readers: int = 0


class SlotReading(Reading):
    """A reader of a slot that may still be filled."""

    def __init__(self, holding: Holding, content: Content) -> None:
        self._holding, self._content = holding, content
        self.partial = not content.progress.verified

    def word(self, position: int) -> Word:
        word = self._content.memory.words[position]
        return ("nothing", position) if word is None else word

    def wait(self, position: int, deadline: float) -> Steps:
        progress = self._content.progress
        yield from self._until(lambda: str(position) in progress.complete or progress.verified, deadline)

    def confirm(self, deadline: float) -> Steps:
        yield from self._until(lambda: self._content.progress.verified, deadline)

    def _until(self, true: Callable[[], bool], deadline: float) -> Steps:
        node, progress = self._holding.node, self._content.progress
        while not progress.failed and not true():
            left = deadline - node.clock()
            if left <= 0:
                raise DeadlineError(f"version {progress.version} hadn't arrived here in time")
            yield self._holding.changed, left
        if progress.failed:
            raise PeerLost(f"version {progress.version} was given up here while it was still arriving")

    def close(self) -> None:
        self._content.readers -= 1
        self._holding.changed.fire()


class Holding:
    """The slots of one rank."""

    def __init__(self, node: Node, slots: int, make: Callable[[], Memory]) -> None:
        self.node, self._make = node, make
        self.changed = Signal()
        self.slots = [make() for _ in range(slots)]
        self.contents: dict[int, Content] = {}
        self._prefixes: dict[int, tuple[Version, frozenset[str]]] = {}
        self._leaving = False

    @property
    def busy(self) -> frozenset[int]:
        """Slots that others read."""
        return frozenset(i for i, c in self.contents.items() if c.readers)

    def prefix(self, index: int, version: Version) -> frozenset[str]:
        """Words of ``version`` that an interrupted round left in the slot."""
        found, paths = self._prefixes.get(index, (None, frozenset[str]()))
        return paths if found == version else frozenset()

    def begin(self, index: int, version: Version, edges: list[set[str]], have: frozenset[str]) -> Steps:
        """The slot is going to be filled: who reads what it held is waited for, then it gets new memory."""
        self._prefixes.pop(index, None)
        old = self.contents.pop(index, None)
        limit = self.node.clock() + DRAIN_S
        while old is not None and old.readers and self.node.clock() < limit:
            yield self.changed, limit - self.node.clock()
        if old is not None and old.readers:
            self.replace(index, have)
            self._prefixes.pop(index, None)
        self.contents[index] = Content(self.slots[index], Progress(version, edges, have))
        self.changed.fire()

    def arrived(self, index: int, position: int) -> None:
        """A word is in place."""
        self.contents[index].progress.arrived([str(position)])
        self.changed.fire()

    def verified(self, index: int) -> None:
        """The slot holds its version."""
        self.contents[index].progress.end(True)
        self.changed.fire()

    def give_up(self, index: int, version: Version, keep: bool) -> bool:
        """The round of the slot failed; complete words are remembered. Returns whether some are."""
        content = self.contents.get(index)
        if content is not None and content.progress.version == version:
            content.progress.end(False)
            if keep and content.progress.complete:
                self._prefixes[index] = version, content.progress.complete
            self.changed.fire()
        return bool(self.prefix(index, version))

    def replace(self, index: int, have: frozenset[str] | None = None) -> bool:
        """New memory for a slot: whoever still refers to the old one writes into nothing."""
        keep = have if have is not None else self._prefixes.get(index, (None, frozenset[str]()))[1]
        self.contents.pop(index, None)
        old, fresh = self.slots[index], self._make()
        for path in keep:
            fresh.words[int(path)] = old.words[int(path)]
        if not keep:
            self._prefixes.pop(index, None)
        old.serving = None
        self.slots[index] = fresh
        return bool(keep)

    def read(self, version: Version, deadline: float) -> Generator[Any, Any, Reading | str]:
        """The slot that holds ``version``, or in words why none does."""
        limit = min(deadline, self.node.clock() + APPEAR_S)
        while True:
            if self._leaving:
                return "the engine is leaving"
            for content in self.contents.values():
                if content.progress.version == version and not content.progress.failed:
                    content.readers += 1
                    return SlotReading(self, content)
            left = limit - self.node.clock()
            if left <= 0:
                return f"version {version} isn't here"
            yield self.changed, left

    def drain(self, timeout_s: float) -> Steps:
        """Refuse new readers and wait for those that are there."""
        self._leaving = True
        self.changed.fire()
        limit = self.node.clock() + timeout_s
        while any(c.readers for c in self.contents.values()) and self.node.clock() < limit:
            yield self.changed, limit - self.node.clock()
