"""What one rank writes of a version: its boxes as chunks of the anchor, or frames of what changed.

The rank remembers the bits of the newest *committed* version; one that wasn't committed leaves no trace.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.digests import CopySums
from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.transfer.codec import choose, costs, frame, positions, values
from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype
from jaxrl_sync.transfer.files import anchors
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import FileWriterConfig
from jaxrl_sync.transfer.files.manifest import FrameRow, Part, Table
from jaxrl_sync.transfer.files.stored import Key, Slab, Stored
from jaxrl_sync.transfer.payload.entries import Entries, compare
from jaxrl_sync.transfer.version import Version

Boxes = Mapping[Key, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Order:
    """What rank 0 decided: ``version`` under this name, as frames on ``base``, with an anchor or not."""

    turn: int
    version: Version
    base: Version | None
    anchor: bool
    stem: str


@dataclasses.dataclass(frozen=True)
class Written:
    """A rank's part: where its table is, bytes by kind, and how many elements changed of how many."""

    part: Part
    anchor_bytes: int
    delta_bytes: int
    changed: int
    elements: int

    def to_json(self) -> dict[str, Any]:
        """For rank 0."""
        p = self.part
        return {**dataclasses.asdict(self), "part": [p.rank, p.table, p.nbytes, p.digest]}

    @classmethod
    def of_json(cls, data: Mapping[str, Any]) -> Written:
        """From another rank of the same writer, sealed."""
        numbers = (data["anchor_bytes"], data["delta_bytes"], data["changed"], data["elements"])
        return cls(Part(*data["part"]), *map(int, numbers))


class PartWriter:
    """One rank's slabs and the baseline of them. Used by one thread."""

    def __init__(self, channel: Channel, stored: Stored, rank: int, config: FileWriterConfig) -> None:
        self._channel = channel
        self._stored = stored
        self._rank = rank
        self._config = config
        self._slabs = stored.of_rank(rank)
        self._sums = CopySums.of(stored.copies(self._slabs), "source")
        self._baseline: dict[Key, Bits] = {}
        self._base: Version | None = None
        self._found: dict[int, Entries] = {}
        self._changed = 0

    @property
    def base(self) -> Version | None:
        """The version whose bits are remembered."""
        return self._base

    @property
    def baseline_bytes(self) -> int:
        """Memory that they take."""
        return sum(b.nbytes for b in self._baseline.values())

    def write(self, order: Order, boxes: Boxes) -> Written:
        """Write the part; `committed` or `discarded` must follow. OSError, ChannelError."""
        self._found, self._changed = {}, 0
        prefix = f"{order.stem}-r{self._rank}"
        sync, digests, anchor_bytes, delta_bytes = self._config.fsync, None, 0, 0
        if order.anchor:
            with self._channel["anchors"].child(order.stem, create=True) as folder:
                digests, anchor_bytes = anchors.write_chunks(
                    folder, self._stored, self._slabs, boxes, self._channel.seal, sync
                )
        rows: list[FrameRow] = []
        if order.base is not None:
            frames = self._frames(order, boxes, rows)
            delta_bytes = self._channel["objects"].write(f"{prefix}-frames", frames, sync=sync)
        pairs = self._sums.execute(boxes, self._config.threads) if self._slabs else {}
        sums = tuple(pairs[str(s.number)] for s in self._slabs)
        name = f"{prefix}-frames" if order.base is not None else None
        table = Table(self._rank, sums, digests, name, tuple(rows))
        data = json.dumps(table.to_json(), separators=(",", ":")).encode()
        self._channel["objects"].write(f"{prefix}-table", [data], sync=sync)
        if sync:
            self._channel["objects"].sync()
        part = Part(self._rank, f"{prefix}-table", len(data), self._channel.seal.of_object(data))
        elements = sum(s.elements for s in self._slabs)
        return Written(part, anchor_bytes, delta_bytes + len(data), self._changed, elements)

    def _frames(self, order: Order, boxes: Boxes, rows: list[FrameRow]) -> Iterator[bytearray]:
        """Frame after frame; a row each is added to ``rows``."""
        assert order.base is not None
        offset = 0
        for number, group in enumerate(_groups(self._slabs, self._config.frame_bytes)):
            changes, codings = list[frame.Changes](), list[frame.Coding]()
            for slab in group:
                change, coding = self._encode(slab, order.base, boxes)
                changes.append(change)
                codings.append(coding)
            head = frame.Head(self._stored.digest, order.base, order.version, self._rank, number)
            data = frame.encode(head, changes, codings)
            first = sum(r.count for r in rows)
            digest = self._channel.seal.of_object(data)
            rows.append(FrameRow(offset, len(data), first, len(group), digest))
            offset += len(data)
            yield data

    def _encode(self, slab: Slab, base: Version, boxes: Boxes) -> tuple[frame.Changes, frame.Coding]:
        new = bits_of(boxes[slab.key], slab)
        if self._base != base:  # not sure what this rank's bits were then: all of them
            self._changed += slab.elements
            whole = frame.Coding(positions.Coding("all"), "overwrite", self._config.rules.zstd == "on")
            return frame.Changes(slab.elements, None, new), whole
        old = self._baseline[slab.key][slab.start : slab.start + slab.elements]
        found = compare(old, new, self._config.threads)
        places, after, before = found
        self._found[slab.number] = found
        self._changed += places.size
        delta = choose.Delta(slab.elements, places, after, before)
        coding = choose.choose(delta, self._config.rate_bytes_s, costs.measured(), self._config.rules).coding
        if coding.positions.kind == "all":
            return frame.Changes(slab.elements, None, new, coding.values), coding
        codes = values.codes_of(after, before, coding.values)
        return frame.Changes(slab.elements, places, codes, coding.values), coding

    def committed(self, order: Order, boxes: Boxes) -> None:
        """The version exists: its bits are what the next one is compared with."""
        known = self._base is not None and self._base == order.base
        self._base = None  # until the baseline is whole again
        for slab in self._slabs:
            if slab.key not in self._baseline:
                size = int(np.prod(self._stored.box_shape(slab.key), dtype=np.int64))
                self._baseline[slab.key] = np.empty(size, bits_dtype(slab.itemsize))
            into = self._baseline[slab.key][slab.start : slab.start + slab.elements]
            if known and slab.number in self._found:
                places, after, _ = self._found[slab.number]
                into[places] = after
            else:
                into[:] = bits_of(boxes[slab.key], slab)
        self._base, self._found = order.version, {}

    def discarded(self) -> None:
        """The version doesn't exist: what was written for it is garbage."""
        self._found = {}

    def forget(self) -> None:
        """Nothing is sure any more: the next version is written whole."""
        self._base, self._found = None, {}


def bits_of(box: npt.NDArray[Any], slab: Slab) -> Bits:
    """A slab of a box as unsigned integers, without a copy."""
    flat = flat_bytes(box)
    return flat[slab.offset : slab.offset + slab.nbytes].view(bits_dtype(slab.itemsize))


def _groups(slabs: tuple[Slab, ...], frame_bytes: int) -> Iterator[list[Slab]]:
    """Consecutive slabs that share a frame."""
    group: list[Slab] = []
    for slab in slabs:
        if group and sum(s.nbytes for s in group) + slab.nbytes > frame_bytes:
            yield group
            group = []
        group.append(slab)
    if group:
        yield group
