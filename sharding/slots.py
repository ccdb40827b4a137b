"""Where each shard of a process lies in a slot: one flat piece of memory for one whole version."""

from __future__ import annotations

import dataclasses
import mmap
from typing import Any

import numpy as np

from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout, dtype_of

ALIGN_BYTES = 64
"""Every tensor starts at a multiple of this: jax aliases an aligned host buffer and copies any other."""

PAGE_BYTES = mmap.PAGESIZE


@dataclasses.dataclass(frozen=True, slots=True)
class SlotEntry:
    """One shard in the slot: ``nbytes`` bytes of row-major elements at ``offset`` bytes from its start."""

    device: int
    path: str
    offset: int
    nbytes: int
    shape: tuple[int, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class SlotLayout:
    """The entries of one process in order of their offset: devices ascending, paths ascending in each.

    A tensor starts at a multiple of 64 bytes, a device at a page. ``total_bytes`` is a whole number of pages
    (at least one).
    """

    entries: tuple[SlotEntry, ...]
    total_bytes: int
    _index: dict[tuple[int, str], SlotEntry] = dataclasses.field(repr=False, compare=False)

    @classmethod
    def of(cls, layout: Layout, process: int) -> SlotLayout:
        """The slot of what ``process`` holds of ``layout``. A process that holds nothing is an error."""
        held: dict[int, list[str]] = {}
        for path, tensor in layout.items():
            for shard in tensor.shards:
                if shard.process == process:
                    held.setdefault(shard.device, []).append(path)
        if not held:
            raise MappingError(
                f"process {process} holds nothing in this layout; it has processes "
                f"{sorted(set(layout.devices.values()))}"
            )
        entries, at = [], 0
        for device in sorted(held):
            at = -(-at // PAGE_BYTES) * PAGE_BYTES
            for path in held[device]:
                tensor = layout[path]
                box = tensor.placement.by_device[device].box
                nbytes = box.volume * tensor.itemsize
                entries.append(SlotEntry(device, path, at, nbytes, box.shape, tensor.dtype))
                at = -(-(at + nbytes) // ALIGN_BYTES) * ALIGN_BYTES
        total = max(PAGE_BYTES, -(-at // PAGE_BYTES) * PAGE_BYTES)
        return cls(tuple(entries), total, {(e.device, e.path): e for e in entries})

    def __getitem__(self, key: tuple[int, str]) -> SlotEntry:
        try:
            return self._index[key]
        except KeyError:
            raise MappingError(f"no shard of tensor {key[1]!r} on device {key[0]} in this slot") from None

    def offset(self, device: int, path: str) -> int:
        """Byte offset of one shard."""
        return self[device, path].offset

    def views(self, memory: Any) -> dict[tuple[int, str], np.ndarray[Any, np.dtype[Any]]]:
        """(device, path) -> array over its place in ``memory`` (a buffer of at least ``total_bytes``).

        No copy: the arrays keep ``memory`` alive, and are writable if it is.
        """
        flat = np.frombuffer(memory, np.uint8)
        if flat.nbytes < self.total_bytes:
            raise MappingError(f"a slot needs {self.total_bytes} bytes, this memory has {flat.nbytes}")
        return {
            (e.device, e.path): flat[e.offset : e.offset + e.nbytes].view(dtype_of(e.dtype)).reshape(e.shape)
            for e in self.entries
        }
