"""What the next version of an edge is compared with: bits on the host, or an export on its devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import numpy as np

from jaxrl_sync.sharding import CopyTable
from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype
from jaxrl_sync.transfer.lazy import DeviceShards
from jaxrl_sync.transfer.payload.entries import Entries, compare, joined, union
from jaxrl_sync.transfer.payload.inverse import Inverse
from jaxrl_sync.transfer.payload.sections import Section
from jaxrl_sync.transfer.payload.settings import Form
from jaxrl_sync.transfer.transports.base import Shards

if TYPE_CHECKING:
    from jaxrl_sync.transfer.payload.differences import Differences

WINDOW_BYTES = 1 << 20
"""Bytes packed and compared at a time: they stay in the cache between the two."""


class Packing:
    """How the sections of an edge are packed from its shards, window by window."""

    def __init__(self, sections: Sequence[Section]) -> None:
        self.sections = tuple(sections)
        self.windows = [CopyTable.pack(s.copies).windows(WINDOW_BYTES) for s in self.sections]

    def pack(self, number: int, sources: Shards, into: Bits) -> None:
        """One section whole."""
        at = 0
        for window in self.windows[number]:
            end = at + window.total_bytes // self.sections[number].itemsize
            window.execute(sources, into[at:end])
            at = end


class Baseline(Protocol):
    """One version of an edge, and what is other in the next one. Calls come from one thread at a time."""

    form: Form

    @property
    def nbytes(self) -> int:
        """Host memory of the version's bits."""
        ...

    def suits(self, sources: Shards) -> bool:
        """Whether `take` can take them."""
        ...

    def take(self, sources: Shards) -> None:
        """Become the version of these shards, whatever was before."""

    def changes(self, sources: Shards) -> tuple[Entries, ...] | None:
        """Per section what is other in these shards; None where that isn't known: `take` has to follow."""
        ...

    def advance(self, entries: tuple[Entries, ...]) -> None:
        """Become the version whose changes were told last."""

    def whole(self, number: int, sources: Shards) -> Bits:
        """All elements of one section; ``sources`` are the shards of this version."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""


class HostBaseline:
    """A copy of the packed edge in host memory; shards are packed and compared with it in one pass."""

    form: Form = "host"

    def __init__(self, packing: Packing, threads: int) -> None:
        self.bits: list[Bits] = []
        self._packing = packing
        self._threads = threads

    @property
    def nbytes(self) -> int:
        """That of the copy."""
        return sum(b.nbytes for b in self.bits)

    def suits(self, sources: Shards) -> bool:
        """Unless they are compared on their devices."""
        return not _on_devices(sources)

    def take(self, sources: Shards) -> None:
        """Copy the edge."""
        if not self.bits:
            self.bits = [np.zeros(s.elements, bits_dtype(s.itemsize)) for s in self._packing.sections]
        for number, bits in enumerate(self.bits):
            self._packing.pack(number, sources, bits)

    def changes(self, sources: Shards) -> tuple[Entries, ...]:
        """Pack every section window by window and compare each with the copy."""
        return tuple(self._compare(number, sources) for number in range(len(self.bits)))

    def _compare(self, number: int, sources: Shards) -> Entries:
        section, baseline = self._packing.sections[number], self.bits[number]
        scratch = np.empty(WINDOW_BYTES // section.itemsize, baseline.dtype)
        found: list[Entries] = []
        at = 0
        for window in self._packing.windows[number]:
            size = window.total_bytes // section.itemsize
            packed = scratch[:size]
            window.execute(sources, packed)
            positions, new, old = compare(baseline[at : at + size], packed, self._threads)
            found.append((positions + np.uint32(at), new, old))
            at += size
        return joined(found, section)

    def advance(self, entries: tuple[Entries, ...]) -> None:
        """Write the changes into the copy."""
        for bits, (positions, new, _) in zip(self.bits, entries, strict=True):
            bits[positions] = new

    def whole(self, number: int, sources: Shards) -> Bits:
        """The copy of the section."""
        return self.bits[number]

    def close(self) -> None:
        """Free the copy."""
        self.bits = []


class DeviceBaseline:
    """An export that stays where it is; changed elements of its shards are put in the order of the edge."""

    form: Form = "device"
    nbytes = 0

    def __init__(self, packing: Packing, differences: Differences) -> None:
        self._packing = packing
        self._differences = differences
        self._inverses = [Inverse(s) for s in packing.sections]
        self._keys = frozenset[tuple[int, str]]().union(*(i.keys for i in self._inverses))

    def suits(self, sources: Shards) -> bool:
        """If they are compared by what this one asks."""
        return isinstance(sources, DeviceShards) and sources.differences is self._differences

    def take(self, sources: Shards) -> None:
        """Follow the shards that the edge reads from this version on; nothing is read to the host."""
        assert isinstance(sources, DeviceShards)
        self._differences.follow(self, self._keys, sources)

    def changes(self, sources: Shards) -> tuple[Entries, ...] | None:
        """What the devices found, as entries of the sections."""
        if not isinstance(sources, DeviceShards) or not self.suits(sources):
            return None
        steps = self._differences.since(self, sources)
        if steps is None:
            return None
        return tuple(
            union([inverse.entries(changes) for changes in steps], section)
            for inverse, section in zip(self._inverses, self._packing.sections, strict=True)
        )

    def advance(self, entries: tuple[Entries, ...]) -> None:
        """Nothing to do: `changes` said what it said once and for all."""

    def whole(self, number: int, sources: Shards) -> Bits:
        """Packed from the shards, which are read to the host for it."""
        section = self._packing.sections[number]
        bits = np.empty(section.elements, bits_dtype(section.itemsize))
        self._packing.pack(number, sources, bits)
        return bits

    def close(self) -> None:
        """Follow nothing any more."""
        self._differences.leave(self)


def _on_devices(sources: Shards) -> bool:
    return isinstance(sources, DeviceShards) and sources.differences is not None


def baseline_for(sources: Shards, packing: Packing, threads: int) -> Baseline:
    """One that can take these shards."""
    if isinstance(sources, DeviceShards) and sources.differences is not None:
        return DeviceBaseline(packing, sources.differences)
    return HostBaseline(packing, threads)
