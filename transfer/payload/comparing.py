"""Where a publisher finds out what changed between its exports: chosen once, by config or by its devices."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import Any

import jax

from jaxrl_sync.transfer.delta.shards import ShardEncoders
from jaxrl_sync.transfer.exports import Exported, Shards, shards_of
from jaxrl_sync.transfer.lazy import DeviceShards, Reads
from jaxrl_sync.transfer.payload.differences import Differences
from jaxrl_sync.transfer.payload.marks import Marks
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.version import Version

logger = logging.getLogger("jaxrl_sync.transfer")


class Comparing:
    """Gives out the shards of exports. Thread-safe.

    On CPUs these are views of the exports' own memory, unless they are compared by jitted encoders. Else they
    stay on their devices until somebody reads one, and no later export may take their buffers over.
    """

    def __init__(self, settings: PayloadSettings, devices: Collection[int], threads: int) -> None:
        """``devices``: ids of those that the exports lie on. Says in the log what was chosen, and why."""
        platforms = {str(d.platform) for d in jax.local_devices() if d.id in devices}
        self.form, reason = settings.compare_on(platforms)
        self._apart = bool(platforms - {"cpu"})
        self.lazy = self.form == "device" or self._apart
        self._settings = settings
        self._threads = threads
        self._reads: dict[str, Reads] = {}
        self._marks = Marks()
        self._lock = threading.Lock()
        self._kinds: dict[str, Differences] = {}
        if settings.kind != "full":
            logger.info("versions are compared on the %s: %s", self.form, reason)

    def host_exports(self, keep_versions: int) -> int:
        """At most so many exports lie in host memory: kept ones, one being made, one compared with.

        Where accelerators compare, exports stay there, and one is read for who takes everything.
        """
        if self.form == "device" and self._apart:
            return 1
        return keep_versions + 1 + int(self.form == "device")

    def tree(self, version: Version, given: Any) -> Any:
        """The tree of what ``publish`` was given; marks are used where devices compare, else let go."""
        if self.form == "device":
            return self._marks.take(version, given)
        return Marks().take(version, given)

    def shards(self, version: Version, kind: str, exported: Exported) -> Shards:
        """The shards of one kind of export of a version."""
        if not self.lazy:
            return shards_of(exported)
        with self._lock:
            reads = self._reads.setdefault(kind, Reads())
        shards = DeviceShards(version, exported, self._differences(kind), reads)
        if self.form == "host":  # what was read of versions before will be asked for again
            shards.start(list(reads.keys))
        return shards

    def _differences(self, kind: str) -> Differences | None:
        if self.form == "host":
            return None
        with self._lock:
            if kind not in self._kinds:
                encoders = ShardEncoders(self._threads)
                self._kinds[kind] = Differences(encoders, self._settings.history, self._threads, self._marks)
            return self._kinds[kind]

    def stats(self) -> dict[str, float]:
        """Whether devices compare, how often they did and for how long; shards that were read from them."""
        with self._lock:
            kinds, reads = list(self._kinds.values()), list(self._reads.values())
        return {
            "compare_on_device": float(self.form == "device"),
            "device_compares": sum(d.compares for d in kinds),
            "marked_compares": sum(d.marked for d in kinds),
            "device_compare_s": sum(d.compare_s for d in kinds),
            "shards_read": sum(r.shards for r in reads),
            "shards_read_bytes": sum(r.nbytes for r in reads),
        }
