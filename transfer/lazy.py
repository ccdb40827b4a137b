"""Shards of an export that stay on their devices until somebody reads one."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.transports.pinned import Key, Pinned, Places
from jaxrl_sync.transfer.version import Version

if TYPE_CHECKING:
    import jax

    from jaxrl_sync.transfer.payload.differences import Differences


@dataclasses.dataclass
class Reads:
    """Shards of one kind of export that were read to the host so far, of any version, and their bytes."""

    shards: int = 0
    nbytes: int = 0
    keys: set[Key] = dataclasses.field(default_factory=set)


class DeviceShards(Pinned):
    """(device, path) -> one shard of ``version``, read to the host when it is first asked for, then kept.

    It keeps the arrays alive: nobody may donate them meanwhile. Thread-safe. Only look-ups and ``in`` know
    the shards that weren't read yet; iterating shows those that were.

    ``differences`` finds what changed between versions on the devices; None: nobody does.
    """

    def __init__(
        self,
        version: Version,
        exported: Mapping[str, jax.Array],
        differences: Differences | None = None,
        reads: Reads | None = None,
    ) -> None:
        super().__init__({})
        self.version = version
        self.differences = differences
        self.parts: dict[Key, jax.Array] = {
            (shard.device.id, path): shard.data
            for path, array in exported.items()
            for shard in array.addressable_shards
        }
        """The shards where they lie, replicas among them."""
        self._reads = reads or Reads()
        self._lock = threading.Lock()

    def __contains__(self, key: object) -> bool:
        return key in self.parts

    def __missing__(self, key: Key) -> npt.NDArray[Any]:
        with self._lock:
            found: npt.NDArray[Any] | None = self.get(key)
            if found is None:
                found = np.ascontiguousarray(np.asarray(self.parts[key]))
                self._at[key] = found.__array_interface__["data"][0], found.nbytes
                self[key] = found
                self._reads.shards += 1
                self._reads.nbytes += found.nbytes
                self._reads.keys.add(key)
        return found

    def read(self, keys: Iterable[Key]) -> None:
        """Have these on the host; their transfers run side by side."""
        missing = [key for key in keys if key not in self._at]
        self.start(missing)
        for key in missing:
            self[key]

    def start(self, keys: Iterable[Key]) -> None:
        """Begin to read these, and return at once."""
        for key in keys:
            if key in self.parts and key not in self._at:
                self.parts[key].copy_to_host_async()

    def places(self, keys: tuple[Key, ...]) -> Places:
        """As `Pinned.places`; reads what isn't on the host yet."""
        self.read(keys)
        return super().places(keys)
