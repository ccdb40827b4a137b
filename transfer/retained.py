"""The versions that a publisher holds: export buffers of the newest, copies in host memory of pinned ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from jaxrl_sync.transfer.errors import ResourceError
from jaxrl_sync.transfer.exports import Held, Spare
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.retention import Decision, Stock, decide
from jaxrl_sync.transfer.version import Version


class RetentionFull(ResourceError):
    """Pinned versions fill the room for copies: nothing can be published until a pin is released."""


class Retained:
    """Thread-safe. The training thread adds versions, another thread tells pins and makes copies."""

    def __init__(self, keep: int, limit_bytes: int | None) -> None:
        """Keep the newest ``keep`` versions, and copies of pinned ones of at most ``limit_bytes`` in all."""
        self._keep = keep
        self._limit_bytes = limit_bytes
        self._changed = threading.Condition()
        self._held: list[Held] = []
        self._pinned: frozenset[Version] = frozenset()

    @property
    def versions(self) -> list[Version]:
        """What is held, in order of publishing."""
        with self._changed:
            return [h.version for h in self._held]

    @property
    def pinned(self) -> frozenset[Version]:
        """The versions that somebody wants kept, held or not."""
        return self._pinned

    @property
    def copied_bytes(self) -> int:
        """Host memory that copies of pinned versions take."""
        with self._changed:
            return sum(h.nbytes for h in self._held if h.copied)

    def find(self, version: Version) -> Held | None:
        """A held version."""
        with self._changed:
            return next((h for h in self._held if h.version == version), None)

    def _decide(self, coming: tuple[Stock, ...] = ()) -> Decision:
        stocks = [Stock(h.version, h.nbytes, h.copied, h.exported) for h in self._held]
        return decide([*stocks, *coming], self._pinned, self._keep, self._limit_bytes)

    def wait_room(self, version: Version, timeout_s: float, open: Callable[[], bool]) -> None:
        """Block until ``version`` may be added: until every pinned version that makes way has its copy.

        RetentionFull after ``timeout_s``, or at once when no longer ``open``.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while waiting := self._decide((Stock(version, 0),)).wait:
                left = deadline - time.monotonic()
                if left <= 0 or not open():
                    names = ", ".join(map(str, waiting))
                    limit = "any" if self._limit_bytes is None else f"{self._limit_bytes}"
                    need = sum(h.nbytes for h in self._held if h.version in waiting)
                    raise RetentionFull(
                        f"version {version} isn't published: pinned {names} ({need} bytes) found no room in "
                        f"host memory (limit {limit} bytes) and no pin was released within {timeout_s:g} s"
                    )
                self._changed.wait(min(left, 0.5))

    def add(self, held: Held) -> Spare:
        """Hold one more version; export buffers of versions that went, for a later one to take over."""
        with self._changed:
            self._held.append(held)
            return self._tidy()

    def pin(self, versions: Collection[Version]) -> Spare:
        """Other versions are pinned now; what nobody needs any more goes (see ``add``)."""
        with self._changed:
            self._pinned = frozenset(versions)
            return self._tidy()

    def _tidy(self) -> Spare:
        decision = self._decide()
        spare: Spare = {}
        for held in self._held:
            if held.version in decision.retire:
                spare = held.retire() or spare
            elif held.version in decision.shed:
                spare = held.shed() or spare
        self._held = [h for h in self._held if not h.retired]
        self._changed.notify_all()
        return spare

    @property
    def uncopied(self) -> bool:
        """Whether a pinned version has no copy in host memory, and there is room for one."""
        with self._changed:
            return bool(self._decide().copy)

    def copy_pinned(self) -> Spare:
        """Copy pinned versions to host memory, as far as they fit. Blocks while it copies."""
        while True:
            with self._changed:
                wanted = self._decide().copy
                held = next((h for h in self._held if h.version in wanted), None)
            if held is None:
                break
            held.copy()  # nothing where it has just gone
        with self._changed:
            return self._tidy()

    def drop(self, version: Version) -> Spare:
        """No longer hold a version, whatever is pinned."""
        with self._changed:
            found = [h for h in self._held if h.version == version]
            self._held = [h for h in self._held if h.version != version]
            self._changed.notify_all()
        return found[0].retire() if found else {}

    def to_json(self) -> list[dict[str, Any]]:
        """Everything held, as the hub is told: version, published or offloaded, whether kept for a pin."""
        with self._changed:
            return [
                {
                    **(version_json(h.version) or {}),
                    "state": "published" if h.exported else "offloaded",
                    "pinned": h.version in self._pinned,
                }
                for h in self._held
            ]

    def close(self) -> None:
        """Hold nothing."""
        with self._changed:
            self._held = []
            self._changed.notify_all()
