"""A reader's picture of the stored boxes that it needs: loaded from an anchor, moved on by frames.

Boxes are reserved whole, but only slabs that the reader needs are read and touched. Everything is checked
before it gets in: pieces of anchors and frames by their digests, frames against base and version; and at the
end the state digests decide. Whatever goes wrong leaves the content unknown until an anchor is loaded.
"""

from __future__ import annotations

import contextlib
import dataclasses
import mmap
import threading
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Copy
from jaxrl_sync.sharding.digests import CopySums
from jaxrl_sync.sharding.layout import dtype_of
from jaxrl_sync.transfer.codec import frame, native, values
from jaxrl_sync.transfer.files.chains import Chain, cheapest
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import BrokenObject, ChannelError, NoVersion
from jaxrl_sync.transfer.files.folder import File, Folder
from jaxrl_sync.transfer.files.leases import ReaderLease
from jaxrl_sync.transfer.files.manifest import FrameRow, Manifest, Table
from jaxrl_sync.transfer.files.part import bits_of
from jaxrl_sync.transfer.files.stored import Key, Slab, Stored
from jaxrl_sync.transfer.version import Version

TRIES = 5
FRAME_FACTOR = 2
FRAME_ROOM = 1 << 16
"""No frame needs more bytes than so many times those of its elements, and a head."""


@dataclasses.dataclass
class Read:
    """What was read so far: bytes by kind, and of frames how many elements changed, and the codings."""

    anchor_bytes: int = 0
    delta_bytes: int = 0
    changed: int = 0
    elements: int = 0
    codings: set[str] = dataclasses.field(default_factory=set)


class Image:
    """The boxes of one schema. Used by one thread at a time; ``boxes`` alias the image."""

    def __init__(
        self,
        channel: Channel,
        stored: Stored,
        wanted: Iterable[Slab],
        threads: int = 1,
        stop: threading.Event | None = None,
    ) -> None:
        """``wanted``: the slabs to hold. Memory is reserved now and taken as slabs are read. ``stop`` ends
        what reads, with a ChannelError.
        """
        self._stop = stop or threading.Event()
        self._channel = channel
        self.stored = stored
        self._threads = threads
        self.slabs = tuple(sorted(wanted, key=lambda s: s.number))
        self._wanted = {s.number for s in self.slabs}
        self._sums = CopySums.of(stored.copies(self.slabs), "source")
        self.version: Version | None = None
        self.boxes: dict[Key, npt.NDArray[Any]] = {}
        for slab in self.slabs:
            if slab.key not in self.boxes:
                shape, dtype = stored.box_shape(slab.key), dtype_of(stored.layout[slab.tensor].dtype)
                nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
                memory = mmap.mmap(-1, max(1, nbytes), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
                flat = np.frombuffer(memory, np.uint8)[:nbytes]
                self.boxes[slab.key] = flat.view(dtype).reshape(shape)

    def load(self, manifest: Manifest, read: Read) -> None:
        """Fill every slab from the anchor of a version. BrokenObject, UnsafePath, NoVersion."""
        self.version = None
        assert manifest.anchor is not None
        with self._channel["anchors"].child(manifest.anchor) as folder:
            for rank, slabs in self._by_rank(manifest):
                table = self._table(manifest, rank)
                if table.digests is None:
                    raise BrokenObject(f"{folder.where}: rank {rank} wrote no digests of it")
                self._load_rank(folder, slabs, table.digests, read)
        self.version = manifest.version

    def _load_rank(self, folder: Folder, slabs: Sequence[Slab], digests: Sequence[str], read: Read) -> None:
        by_box: dict[Key, list[tuple[Slab, str]]] = {}
        for slab, digest in zip(slabs, digests, strict=True):
            if slab.number in self._wanted:
                by_box.setdefault(slab.key, []).append((slab, digest))
        for key, pieces in by_box.items():
            name = self.stored.tensors[key[1]].folder
            with folder.child(name) as below, below.open(pieces[0][0].chunk) as file:
                expected = self.boxes[key].nbytes
                if file.nbytes != expected:
                    raise BrokenObject(f"{file.where} has {file.nbytes} bytes, expected {expected}")
                for slab, digest in pieces:
                    self._check_wanted(file)
                    into = bits_of(self.boxes[key], slab)
                    file.read_into(into.view(np.uint8), slab.offset)
                    self._channel.seal.check_object(into.view(np.uint8), digest, file.where)
                    read.anchor_bytes += slab.nbytes

    def apply(self, manifest: Manifest, read: Read) -> None:
        """Move on from the base of a version to it. BrokenObject, FrameError and its kinds, WrongBase."""
        base, self.version = self.version, None
        for rank, slabs in self._by_rank(manifest):
            if not any(s.number in self._wanted for s in slabs):
                continue
            table = self._table(manifest, rank)
            if table.frames_object is None:
                raise BrokenObject(f"version {manifest.version}: rank {rank} wrote no frames")
            with self._channel["objects"].open(table.frames_object) as file:
                for number, row in enumerate(table.frames):
                    group = slabs[row.first : row.first + row.count]
                    if any(s.number in self._wanted for s in group):
                        self._check_wanted(file)
                        data = self._frame(file, row, group)
                        found = frame.decode(data)
                        found.check(self.stored.digest, rank, number)
                        found.check_versions(base, manifest.version)
                        self._write(found, group, read)
                        read.delta_bytes += row.nbytes
        self.version = manifest.version

    def _check_wanted(self, file: File) -> None:
        if self._stop.is_set():
            raise ChannelError(f"{file.where} isn't read on: the reader is closed")

    def _frame(self, file: File, row: FrameRow, group: Sequence[Slab]) -> bytearray:
        limit = FRAME_FACTOR * sum(s.nbytes for s in group) + FRAME_ROOM * len(group)
        if row.nbytes > limit or row.offset + row.nbytes > file.nbytes:
            raise BrokenObject(
                f"{file.where}: a frame of {row.nbytes} bytes at {row.offset}, expected at most {limit} "
                f"in a file of {file.nbytes}"
            )
        data = file.read(row.nbytes, row.offset)
        self._channel.seal.check_object(data, row.digest, file.where)
        return data

    def _write(self, found: frame.Frame, group: Sequence[Slab], read: Read) -> None:
        wanted = [s.number in self._wanted for s in group]
        changes = found.some_sections([(s.elements, s.itemsize) for s in group], wanted)
        for slab, change, section in zip(group, changes, found.head.sections, strict=True):
            if change is None:
                continue
            into = bits_of(self.boxes[slab.key], slab)
            codes = native.aligned(change.codes)
            if change.positions is None:
                into[:] = values.bits_from(codes, into, change.kind)
            else:
                into[change.positions] = values.bits_from(codes, into[change.positions], change.kind)
            read.changed += section.count
            read.elements += section.elements
            if section.count:
                read.codings.add(str(section.coding))

    def verify(self, manifest: Manifest) -> None:
        """Count the state digests of every slab here; BrokenObject unless they are the version's."""
        pairs = self._sums.execute(self.boxes, self._threads) if self.slabs else {}
        for rank, slabs in self._by_rank(manifest):
            sums = self._table(manifest, rank).sums
            for slab, expected in zip(slabs, sums, strict=True):
                if slab.number in self._wanted and pairs[str(slab.number)] != expected:
                    self.version = None
                    raise BrokenObject(
                        f"version {manifest.version}: {slab.tensor!r} has state digest "
                        f"{pairs[str(slab.number)]}, expected {expected}"
                    )

    def _by_rank(self, manifest: Manifest) -> list[tuple[int, tuple[Slab, ...]]]:
        """(rank, its slabs) of all ranks that own something; BrokenObject where one has no part."""
        there = {p.rank for p in manifest.parts}
        found = []
        for rank in self.stored.processes:
            if rank not in there:
                raise BrokenObject(f"version {manifest.version} has no part of rank {rank}")
            found.append((rank, self.stored.of_rank(rank)))
        return found

    def _table(self, manifest: Manifest, rank: int) -> Table:
        part = next(p for p in manifest.parts if p.rank == rank)
        return self._channel.table(part, len(self.stored.of_rank(rank)))


def needed(stored: Stored, copies: Iterable[Copy]) -> tuple[Slab, ...]:
    """The slabs that these copies read: a copy's span of its box, from its first element to its last."""
    spans: dict[str, list[tuple[Copy, int, int]]] = {}
    for copy in copies:
        if copy.num_elements:
            reach = [(n - 1) * s for n, s in zip(copy.shape, copy.source_strides, strict=True)]
            low = copy.source_offset + sum(min(0, r) for r in reach)
            high = copy.source_offset + sum(max(0, r) for r in reach)
            spans.setdefault(copy.source_path, []).append((copy, low, high))
    return tuple(
        slab
        for slab in stored.slabs
        if any(
            copy.source_device == slab.device and low < slab.start + slab.elements and high >= slab.start
            for copy, low, high in spans.get(slab.tensor, ())
        )
    )


def bring(image: Image, chain: Chain, read: Read) -> None:
    """Load and apply a chain; `Image.verify` must follow."""
    if chain.anchor is not None:
        image.load(chain.anchor, read)
    for delta in chain.deltas:
        image.apply(delta, read)


def leased_chain(
    channel: Channel, lease: ReaderLease, version: Version, image: Image | None
) -> tuple[Manifest, Chain]:
    """The manifest of ``version`` and the cheapest chain to it, under a lease from before they were read for
    the last time: the collector leaves their files. NoVersion.
    """
    for _ in range(TRIES):
        manifest = channel.manifest(version)
        held = image.version if image is not None and image.stored.digest == manifest.schema else None
        chain = cheapest(channel.manifests(), version, held, manifest.schema)
        lease.hold([*chain.manifests, manifest])
        with contextlib.suppress(NoVersion):
            if all(channel.read_manifest(m.version) == m for m in (*chain.manifests, manifest)):
                return manifest, chain
    raise NoVersion(f"version {version}: what its chain stands on was collected while it was looked up")
