"""Shards of an export that stay where they lie until somebody reads one."""

from __future__ import annotations

import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.transports.pinned import Key, Pinned, Places
from jaxrl_sync.transfer.version import Version

if TYPE_CHECKING:
    from jaxrl_sync.transfer.payload.differences import Differences


@dataclasses.dataclass
class Reads:
    """Shards of one kind of export that were read to the host so far, of any version, and their bytes."""

    shards: int = 0
    nbytes: int = 0
    keys: set[Key] = dataclasses.field(default_factory=set)


@functools.cache
def _whole_bytes(dtype: Any) -> bool:
    """Whether an element lies in memory as numpy has it: integers of 2 and 4 bits are packed by some."""
    if jnp.issubdtype(dtype, jnp.integer):
        bits = int(jnp.iinfo(dtype).bits)
    elif jnp.issubdtype(dtype, jnp.floating):
        bits = int(jnp.finfo(dtype).bits)
    else:
        return True
    return bits == 8 * int(dtype.itemsize)


def _in_host_memory(array: Any) -> bool:
    """Whether the bytes of its shards lie in the memory of this process as in a C-contiguous array."""
    if {d.platform for d in array.sharding.device_set} != {"cpu"} or not _whole_bytes(array.dtype):
        return False
    layout = array.format.layout
    return layout is not None and tuple(layout.major_to_minor) == tuple(range(array.ndim))


class LazyShards(Pinned):
    """(device, path) -> one shard as an array on the host, made when it is first asked for, then kept.

    On CPUs an array is a view, and the addresses are known without one, even while the export is still being
    computed: who reads by address keeps this alive, and the export's buffers are given to a later one only
    when nobody does. Thread-safe.
    """

    def __init__(self, exported: Mapping[str, jax.Array]) -> None:
        super().__init__({})
        self.parts: dict[Key, jax.Array] = {
            (shard.device.id, path): shard.data
            for path, array in exported.items()
            for shard in array.addressable_shards
        }
        """The shards where they lie, replicas among them."""
        self._lock = threading.Lock()

    @classmethod
    def of_host(cls, exported: Mapping[str, jax.Array]) -> LazyShards:
        """With the addresses of all that lies in host memory. Doesn't wait for what is being computed."""
        shards = cls(exported)
        near = {path for path, array in exported.items() if _in_host_memory(array)}
        shards._at = {
            key: (part.unsafe_buffer_pointer(), part.nbytes)
            for key, part in shards.parts.items()
            if key[1] in near
        }
        return shards

    def __iter__(self) -> Iterator[Key]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)

    def __contains__(self, key: object) -> bool:
        return key in self.parts

    def __getitem__(self, key: Key) -> npt.NDArray[Any]:
        found = self._arrays.get(key)
        if found is None:
            with self._lock:
                found = self._arrays.get(key)
                if found is None:
                    self._arrays[key] = found = self._made(key)
        return found

    def _made(self, key: Key) -> npt.NDArray[Any]:
        array = np.ascontiguousarray(np.asarray(self.parts[key]))
        self._at[key] = array.__array_interface__["data"][0], array.nbytes
        return array

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


class DeviceShards(LazyShards):
    """The shards of ``version``, read to the host as they are asked for, and counted.

    It keeps the arrays alive: nobody may donate them meanwhile. ``differences`` finds what changed between
    versions on the devices; None: nobody does.
    """

    def __init__(
        self,
        version: Version,
        exported: Mapping[str, jax.Array],
        differences: Differences | None = None,
        reads: Reads | None = None,
    ) -> None:
        super().__init__(exported)
        self.version = version
        self.differences = differences
        self._reads = reads or Reads()

    def _made(self, key: Key) -> npt.NDArray[Any]:
        array = super()._made(key)
        self._reads.shards += 1
        self._reads.nbytes += array.nbytes
        self._reads.keys.add(key)
        return array
