"""The pairings of whoever serves versions, one per pair of blobs that its subscribers told the hub."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

from jaxrl_sync.sharding import Correspondence, Layout
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.hub.client import HubClient, HubRefused
from jaxrl_sync.transfer.pairing import Pairing, compare_layouts

KEPT_PAIRINGS = 32
"""Links keep theirs; of others so many are remembered."""


Key = tuple[str, str]


@dataclasses.dataclass
class _Turn:
    """Who makes one pairing, and how many want it."""

    lock: threading.Lock
    wanted: int = 0


class Pairings:
    """Plans each pairing once. Thread-safe: equal replicas ask at the same time, and who asks for blobs that
    the hub doesn't have keeps no other waiting.

    ``source`` is the layout that this world of ``size`` processes holds; ``convert`` evaluates computed
    leaves, where there are any.
    """

    def __init__(
        self,
        hub: HubClient,
        source: Layout,
        size: int,
        convert: Callable[[Any], Any] | None,
        blob_timeout_s: float,
    ) -> None:
        self._hub = hub
        self._source = source
        self._size = size
        self._convert = convert
        self._blob_timeout_s = blob_timeout_s
        self._lock, self._planning = threading.Lock(), threading.Lock()
        self._turns: dict[Key, _Turn] = {}
        self._pairings: dict[Key, Pairing] = {}

    def get(self, target: str, correspondence: str) -> Pairing:
        """The pairing of a subscriber's blobs, planned the first time. MismatchError, MappingError."""
        key = target, correspondence
        with self._turn(key):
            found = self._pairings.get(key) or self._pair(target, correspondence)
        with self._lock:
            self._pairings.pop(key, None)
            self._pairings[key] = found  # the last one used is the last to be forgotten
            for old in list(self._pairings)[:-KEPT_PAIRINGS]:
                del self._pairings[old]
        return found

    @contextlib.contextmanager
    def _turn(self, key: Key) -> Iterator[None]:
        with self._lock:
            mine = self._turns.setdefault(key, _Turn(threading.Lock()))
            mine.wanted += 1
        try:
            with mine.lock:
                yield
        finally:
            with self._lock:
                mine.wanted -= 1
                if not mine.wanted:
                    del self._turns[key]

    def _pair(self, target: str, correspondence: str) -> Pairing:
        layout = Layout.from_bytes(self._blob(target))
        theirs = Correspondence.from_bytes(self._blob(correspondence))
        with self._planning:
            return self._plan(layout, theirs)

    def _plan(self, layout: Layout, theirs: Correspondence) -> Pairing:
        if theirs.source is None:
            raise MismatchError("the subscriber's correspondence names no source layout")
        compare_layouts(self._source, theirs.source, "the source layout that the subscriber planned with")
        computed = [leaf for leaf in theirs.leaves if leaf.kind == "computed"]
        if self._size > 1 and computed:
            raise MismatchError(
                f"the conversion computes leaves, and this trainer world has {self._size} processes: their "
                "program may need all at once, but subscribers come at any time; convert before publishing"
            )
        if self._convert is not None:  # computed leaves are evaluated by a function that never travels
            theirs = theirs.bind(self._convert, self._source, layout)
        elif computed:
            path, why = computed[0].name.partition("#")[0], computed[0].reason
            raise MismatchError(
                f"the conversion computes {path!r} ({why}), and the publisher was made without `convert`, "
                "the function that would have to be evaluated there"
            )
        return Pairing.of(layout, theirs)

    def _blob(self, digest: str) -> bytes:
        """A blob from the hub; waits a little while its owner registers it (again)."""
        deadline = time.monotonic() + self._blob_timeout_s
        while True:
            try:
                return self._hub.get_blob(digest)
            except HubRefused:
                if time.monotonic() > deadline:
                    raise
            time.sleep(0.1)
