"""The slots of one receiver rank: their memory, what they hold, and who reads them while others are filled.

A slot that holds a version, or a part of one that is still arriving, may be read by other engines (a relay).
It isn't filled under a reader: who reads is waited for, and after that the slot gets new memory while the
reader keeps the old one to its end.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Sequence

import numpy as np

from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import ResourceError
from jaxrl_sync.transfer.memory import SHM_DIR, PrivateMemory, SharedMemory
from jaxrl_sync.transfer.owner import Reading
from jaxrl_sync.transfer.passing import Passed, Passing, Wish
from jaxrl_sync.transfer.payload.sections import Digests
from jaxrl_sync.transfer.progress import Progress
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.version import Version

APPEAR_S = 2.0
"""A reader may be sent here a moment before the version that it wants begins to arrive."""

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(eq=False)
class _Content:
    """What lies in a slot, and how many read it."""

    slot: Slot
    progress: Progress
    passing: Passing
    since: float
    readers: int = 0


class _SlotReading(Reading):
    """A reader of a slot that may still be filled."""

    def __init__(self, holding: Holding, content: _Content) -> None:
        super().__init__(content.slot.views, lambda: holding._left(content))
        self._progress = content.progress
        self._passing = content.passing
        self.partial = not content.progress.verified

    def wait(self, paths: Sequence[str], deadline: float) -> None:
        self._progress.wait(paths, deadline)

    def confirm(self, deadline: float) -> None:
        self._progress.wait_verified(deadline)

    def frames(self, wish: Wish, deadline: float) -> list[Passed] | None:
        return self._passing.wait(wish, deadline)

    @property
    def digests(self) -> Digests:
        return self._passing.digests


class Holding:
    """Owns the slots; ``close()`` frees them. The engine's thread fills, threads of links read."""

    def __init__(self, target: Target, config: SubscriberConfig, run_id: str) -> None:
        """No slot is made before ``allocate``."""
        self.slots: list[Slot] = []
        self._target = target
        self._config = config
        self._run_id = run_id
        self._changed = threading.Condition()
        self._contents: dict[int, _Content] = {}
        self._prefixes: dict[int, tuple[Version, frozenset[str]]] = {}
        self._serving_ended = False
        self._closed = False

    def allocate(self) -> None:
        """Make all slots. ResourceError when they don't fit."""
        for _ in range(self._config.slots):
            self.slots.append(self._slot())

    def _memory(self) -> SharedMemory | PrivateMemory:
        nbytes = self._target.slot.total_bytes
        wanted = self._config.transport
        if wanted in ("tcp", "verbs") or (wanted == "auto" and not SHM_DIR.is_dir()):
            return PrivateMemory(nbytes)
        return SharedMemory(self._run_id, nbytes)

    def _slot(self) -> Slot:
        """A slot with memory of its own, which goes where jax makes no arrays over it."""
        memory = self._memory()
        try:
            return Slot(self._target, memory)
        except BaseException:
            memory.close()
            raise

    # The engine's thread.

    @property
    def busy(self) -> frozenset[int]:
        """Slots that others read."""
        with self._changed:
            return frozenset(i for i, c in self._contents.items() if c.readers)

    def prefix(self, index: int, version: Version) -> frozenset[str]:
        """Tensors of ``version`` that an interrupted round left in the slot."""
        found, paths = self._prefixes.get(index, (None, frozenset[str]()))
        return paths if found == version else frozenset()

    def begin(
        self, index: int, version: Version, edges: Sequence[Iterable[str]], have: frozenset[str]
    ) -> frozenset[str]:
        """The slot is going to be filled: nobody new reads what it held, and who does is waited for.

        After ``config.drain_s`` it gets new memory instead, as does one that found none the last time.
        Returns what of ``have`` is there still. ResourceError when there is no memory.
        """
        self._prefixes.pop(index, None)
        with self._changed:
            old = self._contents.pop(index, None)
            drained = old is None or self._changed.wait_for(
                lambda: not old.readers or self._closed, self._config.drain_s
            )
        if not drained:
            assert old is not None
            logger.warning(
                "%d readers of %s stay: its slot gets new memory", old.readers, old.progress.version
            )
        if not drained or self.slots[index].closed:
            have = have if self.replace(index, have) else frozenset()
            self._prefixes.pop(index, None)
        progress = Progress(version, edges, have)
        with self._changed:
            bring = len(edges) if self._config.relay else 0  # nobody else is handed anything on
            passing = Passing(bring, self._target.slot.total_bytes)
            self._contents[index] = _Content(self.slots[index], progress, passing, time.monotonic())
            self._changed.notify_all()
        return have

    def progress(self, index: int) -> Progress:
        """Of the version that the slot is being filled with."""
        return self._contents[index].progress

    def passing(self, index: int) -> Passing:
        """What those who read that version may be handed on as it is."""
        return self._contents[index].passing

    def verified(self, index: int) -> None:
        """The slot holds its version: readers needn't wait for anything any more."""
        self._contents[index].progress.end(True)

    def adopt(self, index: int, version: Version) -> None:
        """The slot was filled by the engine itself."""
        self.begin(index, version, [], frozenset())
        self.verified(index)

    def give_up(self, index: int, version: Version, keep: bool) -> bool:
        """The round of the slot failed; with ``keep`` the tensors that are complete are remembered.

        Readers are told, unless it was verified; the next round in this slot waits until they have left it.
        Returns whether something is kept.
        """
        with self._changed:
            content = self._contents.get(index)
        if content is not None and content.progress.version == version:
            content.progress.end(False)
            content.passing.refuse()
            complete = content.progress.complete
            if keep and complete:
                self._prefixes[index] = version, complete
        return bool(self.prefix(index, version))

    def replace(self, index: int, have: frozenset[str] | None = None) -> bool:
        """New memory for a slot: whoever still maps the old one writes into nothing.

        What is complete of an interrupted version moves along if there is room for both. Returns whether it
        did. ResourceError when there is no room at all: the slot is then closed, and may be replaced again.
        """
        old, fresh = self.slots[index], None
        keep = have if have is not None else self._prefixes.get(index, (None, frozenset[str]()))[1]
        with self._changed:
            self._contents.pop(index, None)  # who reads it keeps the old memory
        if keep and not old.closed:
            fresh = self._copied(old, keep)
        kept = fresh is not None
        if not kept:
            self._prefixes.pop(index, None)
        old.close()
        fresh = fresh or self._slot()
        with self._changed:
            if not self._closed:
                self.slots[index] = fresh
                return kept
        fresh.close()  # close() ran meanwhile and saw only the old one
        return False

    def _copied(self, old: Slot, keep: frozenset[str]) -> Slot | None:
        """Another slot with these tensors of the old one; None where there is no room for both."""
        try:
            fresh = self._slot()
        except ResourceError as full:
            logger.info("nothing of the interrupted version is kept: %s", full)
            return None
        for key, view in old.views.items():
            if key[1] in keep:
                np.copyto(fresh.views[key], view)
        return fresh

    # Threads of links.

    def read(self, version: Version, deadline: float) -> Reading | str:
        """The slot that holds ``version``, or in words why none does. The caller closes the reading."""
        limit = min(deadline, time.monotonic() + APPEAR_S)
        with self._changed:
            while True:
                if self._closed or self._serving_ended:
                    return "the engine is leaving"
                for content in self._contents.values():
                    if content.progress.version == version and not content.progress.failed:
                        content.readers += 1
                        return _SlotReading(self, content)
                if not self._changed.wait(max(0.0, limit - time.monotonic())) and time.monotonic() >= limit:
                    contents = [c.progress for c in self._contents.values()]
                    held = ", ".join(str(p.version) for p in contents if not p.failed)
                    return f"version {version} isn't here, but {held or 'none'}"

    def _left(self, content: _Content) -> None:
        with self._changed:
            content.readers -= 1
            self._changed.notify_all()

    def since(self, version: Version) -> float:
        """Seconds since ``version`` began to arrive; 0 where it isn't here."""
        with self._changed:
            contents = [c for c in self._contents.values() if not c.progress.failed]
            found = [c.since for c in contents if c.progress.version == version]
        return time.monotonic() - found[0] if found else 0.0

    def drain(self, timeout_s: float) -> bool:
        """Refuse new readers and wait for those that are there; whether they were through in time."""
        with self._changed:
            self._serving_ended = True
            self._changed.notify_all()
            return self._changed.wait_for(
                lambda: not any(c.readers for c in self._contents.values()), timeout_s
            )

    def close(self) -> None:
        """Free all slots. Idempotent."""
        with self._changed:
            self._closed = True
            slots = list(self.slots)
            contents = list(self._contents.values())
            self._changed.notify_all()
        for content in contents:
            content.progress.end(False)
            content.passing.refuse()
        for slot in slots:
            slot.close()
