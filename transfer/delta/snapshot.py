"""Baselines: what the receivers of a layout have installed, in the wire dtype, on the host or on the devices.

A baseline moves on only when a version is acknowledged. Until then its encoded changes are kept, not its
weights: committing applies them. There is one baseline per target layout, whatever the number of equal
receivers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.layout import dtype_of
from jaxrl_sync.sharding.slots import SlotLayout
from jaxrl_sync.transfer.delta import sparse
from jaxrl_sync.transfer.delta.bits import CHUNK_ELEMENTS, DeltaError, chunks
from jaxrl_sync.transfer.delta.decode import Applier
from jaxrl_sync.transfer.delta.encode import Encoded, Encoder, Tree
from jaxrl_sync.transfer.delta.sparse import Delta
from jaxrl_sync.transfer.version import Version

Bits = npt.NDArray[Any]


class BaselineError(DeltaError):
    """A change was made against another version than the one that the baseline holds."""


def _check_base(found: Version | None, held: Version | None) -> None:
    if held is None:
        raise BaselineError("the baseline holds no version yet: send the whole tree and seed it")
    if found is not None and found != held:
        raise BaselineError(f"changes against version {found}, but the baseline holds {held}")


@dataclasses.dataclass(frozen=True, eq=False)
class HostChanges:
    """A version's changes against ``base``: region -> delta per chunk; regions as in
    `HostSnapshot.regions`.
    """

    base: Version
    version: Version
    deltas: Mapping[int, list[Delta]]

    @property
    def count(self) -> int:
        """Changed elements in all."""
        return sum(d.count for parts in self.deltas.values() for d in parts)


@dataclasses.dataclass(frozen=True)
class Region:
    """A run of a slot whose tensors have one element width: compared as one flat buffer."""

    offset: int
    nbytes: int
    itemsize: int

    @property
    def elements(self) -> int:
        """Elements, with the padding between tensors (which never changes)."""
        return self.nbytes // self.itemsize

    def view(self, memory: npt.NDArray[np.uint8]) -> Bits:
        """The region in a slot's memory as unsigned elements."""
        return memory[self.offset : self.offset + self.nbytes].view(f"u{self.itemsize}")


def regions_of(layout: SlotLayout) -> list[Region]:
    """Neighbouring tensors of one width, as few regions as possible: thousands of small tensors are one
    compare.
    """
    found: list[Region] = []
    for entry in sorted((e for e in layout.entries if e.nbytes), key=lambda e: e.offset):
        width = dtype_of(entry.dtype).itemsize
        size = width if width in (1, 2, 4) else 4
        end = entry.offset + entry.nbytes
        if found and found[-1].itemsize == size:
            found[-1] = dataclasses.replace(found[-1], nbytes=end - found[-1].offset)
        else:
            found.append(Region(entry.offset, entry.nbytes, size))
    return found


class HostSnapshot:
    """A baseline in host memory, laid out like a receiver's slot. Owns one slot's worth of bytes until
    `close`.

    ``memory`` of each call is a slot of the same layout. Calls come from one thread at a time.
    """

    def __init__(self, layout: SlotLayout, *, threads: int = 1, chunk_elements: int = CHUNK_ELEMENTS) -> None:
        self.regions = regions_of(layout)
        self.version: Version | None = None
        self._threads = threads
        self._chunk_elements = chunk_elements
        self._memory: npt.NDArray[np.uint8] | None = np.zeros(layout.total_bytes, np.uint8)
        self._fraction = 1 / 64

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        """The baseline's bytes. BaselineError after `close`."""
        if self._memory is None:
            raise BaselineError("the baseline is closed")
        return self._memory

    def seed(self, memory: npt.NDArray[np.uint8], version: Version) -> None:
        """Takes a whole acknowledged version: the first one, after an anchor, after a restore. Copies."""
        np.copyto(self.memory, memory)
        self.version = version

    def encode(
        self, memory: npt.NDArray[np.uint8], version: Version, *, keep_old: bool = False
    ) -> HostChanges:
        """The changes from the baseline to ``memory``; the baseline stays. Blocks, in C without the GIL."""
        _check_base(None, self.version)
        assert self.version is not None
        deltas: dict[int, list[Delta]] = {}
        for index, region in enumerate(self.regions):
            base, new = region.view(self.memory), region.view(memory)
            deltas[index] = [
                sparse.compare(
                    base[at : at + n], new[at : at + n],
                    keep_old=keep_old, room=int(n * self._fraction * 1.25), threads=self._threads,
                )
                for at, n in chunks(region.elements, self._chunk_elements)
            ]  # fmt: skip
        changes = HostChanges(self.version, version, deltas)
        self._fraction = max(1e-4, changes.count / max(1, sum(r.elements for r in self.regions)))
        return changes

    def commit(self, changes: HostChanges) -> None:
        """The version was acknowledged: it becomes the baseline. BaselineError if another one came in
        between.
        """
        _check_base(changes.base, self.version)
        apply_changes(self.regions, self.memory, changes, self._chunk_elements, self._threads)
        self.version = changes.version

    def close(self) -> None:
        """Frees the memory; idempotent."""
        self._memory = None
        self.version = None


def apply_changes(
    regions: list[Region],
    memory: npt.NDArray[np.uint8],
    changes: HostChanges,
    chunk_elements: int = CHUNK_ELEMENTS,
    threads: int = 1,
) -> None:
    """Writes host changes into a slot of the same layout."""
    for index, parts in changes.deltas.items():
        flat = regions[index].view(memory)
        for (at, n), delta in zip(chunks(regions[index].elements, chunk_elements), parts, strict=True):
            sparse.apply_into(flat[at : at + n], delta, threads=threads)


@dataclasses.dataclass(frozen=True, eq=False)
class DeviceChanges:
    """A version's changes on the devices; ``dense`` holds the tensors that are too dense, whole."""

    base: Version
    version: Version
    deltas: Mapping[str, list[Encoded]]
    dense: Mapping[str, jax.Array]


class DeviceSnapshot:
    """A baseline on the devices, sharded like the tree it is compared with. Owns those arrays."""

    def __init__(self, encoder: Encoder, applier: Applier) -> None:
        self.version: Version | None = None
        self.tree: dict[str, jax.Array] = {}
        self._encoder = encoder
        self._applier = applier

    def seed(self, tree: Tree, version: Version) -> None:
        """Takes a whole acknowledged version, as a copy: the caller may donate ``tree`` afterwards."""
        self.tree = {path: jnp.copy(leaf) for path, leaf in tree.items()}
        self.version = version

    def encode(self, tree: Tree, version: Version) -> DeviceChanges:
        """The changes from the baseline to ``tree``; the baseline stays. Waits for the counts.

        Dense tensors are kept by reference: the caller does not donate them before `commit` or the last use.
        """
        _check_base(None, self.version)
        assert self.version is not None
        found = self._encoder.encode(self.tree, tree)
        sparse_parts = {path: parts for path, parts in found.items() if parts is not None}
        dense = {path: tree[path] for path, parts in found.items() if parts is None}
        return DeviceChanges(self.version, version, sparse_parts, dense)

    def commit(self, changes: DeviceChanges) -> None:
        """The version was acknowledged: it becomes the baseline, in place. BaselineError as
        `HostSnapshot.commit`.
        """
        _check_base(changes.base, self.version)
        copies = {path: jnp.copy(leaf) for path, leaf in changes.dense.items()}
        self.tree = {**self._applier.apply(self.tree, changes.deltas), **copies}
        self.version = changes.version

    def close(self) -> None:
        """Lets go of the arrays; idempotent."""
        self.tree = {}
        self.version = None
