"""The sender's memory of one edge: the bits of the newest version, and what changed in those before it.

A chain is kept once per target layout, process of it and transport, however many equal replicas ask. It holds
a snapshot of the packed edge in wire dtype (the baseline) and steps: positions, old and new bits between
versions that were asked for. From any version among them to any later one a frame is the union of the steps
between, with the oldest old bits and the newest new ones; a frame is encoded once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_sync.sharding import CopyTable, Edge
from jaxrl_sync.sharding.digests import add_digests, copies_digest
from jaxrl_sync.transfer.codec import choose, costs, frame, native, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions, bits_dtype
from jaxrl_sync.transfer.payload.places import Places
from jaxrl_sync.transfer.payload.sections import Digests, Section, sections_of
from jaxrl_sync.transfer.payload.settings import PayloadSettings, Seen
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.version import Version

WINDOW_BYTES = 1 << 20
"""Bytes packed and compared at a time: they stay in the cache between the two."""

KEPT_FRAMES = 4
LEAST_ROOM = 1 << 20
"""Bytes of steps, and of frames, that are kept however small the baseline is."""

logger = logging.getLogger("jaxrl_sync.transfer")

Entries = tuple[Positions, Bits, Bits]
"""Positions of one section, new bits, old bits."""


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What changed between two versions, per section; ``digests`` of the edge at ``version``."""

    base: Version
    version: Version
    entries: tuple[Entries, ...]
    digests: Digests

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(p.nbytes + n.nbytes + o.nbytes for p, n, o in self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A frame with what it says: share of changed elements, codings, seconds to compare and to encode."""

    data: bytearray
    digests: Digests
    density: float
    coding: str
    encode_s: float


class Chain:
    """Baseline and steps of one edge. Thread-safe: links of equal replicas share it."""

    def __init__(self, plan: str, edge: Edge, settings: PayloadSettings, threads: int = 1) -> None:
        self.plan = plan
        self.edge = edge
        self.seen = Seen()
        self.encoded = 0
        """Frames that were encoded so far; equal replicas share them."""
        self._settings = settings
        self._threads = threads
        self._lock = threading.Lock()
        self.sections = sections_of(edge.copies)
        self._places = [Places(s) for s in self.sections]
        self._windows = [CopyTable.pack(s.copies).windows(WINDOW_BYTES) for s in self.sections]
        self._head: Version | None = None
        self._baseline: list[Bits] = []
        self._digests: Digests = {}
        self._steps: list[Step] = []
        self._frames: dict[tuple[Version, Version], Encoded] = {}
        self._confirmed: dict[object, Version] = {}

    @property
    def head(self) -> Version | None:
        """The version that the baseline holds."""
        return self._head

    @property
    def baseline_bytes(self) -> int:
        """Bytes of the snapshot, without the steps."""
        return sum(b.nbytes for b in self._baseline)

    @property
    def step_bytes(self) -> int:
        """Bytes of all steps."""
        return sum(s.nbytes for s in self._steps)

    def anchor(self, version: Version, sources: Shards, digests: Digests | None = None) -> None:
        """A full copy of ``version`` was sent: from now on it is a base that frames can start from.

        ``digests`` are the edge's, where they were counted for it. Where those that followed from the changes
        are others, the baseline was not what it was taken for: it is copied again.
        """
        with self._lock:
            self._advance(version, sources, digests)
            if digests and self._head == version and self._digests != digests:
                logger.warning("the baseline of %s was not that version: taken again", version)
                self._restart(version, sources, digests)
            self._forget()

    def frame(self, base: Version | None, version: Version, sources: Shards) -> Encoded | None:
        """The frame from ``base`` to ``version``; None where only an anchor will do.

        That is without a base, with one that isn't remembered, or across lineages.
        """
        with self._lock:
            if base is None or self._head is None or base.lineage != version.lineage:
                return None
            key = base, version
            if key in self._frames:
                return self._frames[key]
            if not self.knows(base):
                return None
            start = time.perf_counter()
            self._advance(version, sources)
            steps = self._between(base, version)
            found = None if steps is None else self._encode(base, version, steps, start)
            self._forget()
            if found is not None:
                self._keep(key, found)
            return found

    def follow(self, version: Version, sources: Shards) -> None:
        """Make ``version`` the head where an older one is it: frames can then start from it, too."""
        with self._lock:
            if self._head is not None:
                self._advance(version, sources)
                self._forget()

    def confirm(self, receiver: object, version: Version) -> None:
        """``receiver`` acknowledged ``version``: steps that no receiver needs any more are let go."""
        with self._lock:
            self._confirmed[receiver] = version
            self._forget()

    def leave(self, receiver: object) -> None:
        """``receiver`` is gone: nothing is kept for it."""
        with self._lock:
            self._confirmed.pop(receiver, None)
            self._forget()

    def knows(self, base: Version) -> bool:
        """Whether frames can start from ``base``."""
        return base == self._head or any(s.base == base for s in self._steps)

    def _between(self, base: Version, version: Version) -> list[Step] | None:
        """The steps from ``base`` to ``version``, none if both are the head; None if there is no way."""
        if base == version:
            return [] if version == self._head else None
        first = next((i for i, s in enumerate(self._steps) if s.base == base), None)
        last = next((i for i, s in enumerate(self._steps) if s.version == version), None)
        if first is None or last is None or last < first:
            return None
        return self._steps[first : last + 1]

    def _advance(self, version: Version, sources: Shards, digests: Digests | None = None) -> None:
        """Make ``version`` the head, by a step where it follows the old one. An older one changes nothing."""
        head = self._head
        if head == version or (head is not None and head.follows(version)):
            return
        if head is None or not version.follows(head):
            self._restart(version, sources, digests)
            return
        entries = tuple(self._compare(i, sources) for i in range(len(self.sections)))
        changes = [
            places.change_of_digests(p, n, o, self._threads)
            for places, (p, n, o) in zip(self._places, entries, strict=True)
        ]
        found = add_digests(self._digests, *changes)
        self._head = None  # until the baseline is whole again
        for bits, (positions, new, _) in zip(self._baseline, entries, strict=True):
            bits[positions] = new
        self._steps.append(Step(head, version, entries, found))
        self._digests, self._head = found, version

    def _restart(self, version: Version, sources: Shards, digests: Digests | None = None) -> None:
        """Take the whole edge: the first version, or one of another lineage."""
        self._steps, self._frames, self._confirmed = [], {}, {}
        self._head = None  # until the baseline is whole
        if not self._baseline:
            self._baseline = [np.zeros(s.elements, bits_dtype(s.itemsize)) for s in self.sections]
        for section, bits, windows in zip(self.sections, self._baseline, self._windows, strict=True):
            at = 0
            for window in windows:
                end = at + window.total_bytes // section.itemsize
                window.execute(sources, bits[at:end])
                at = end
        self._digests = digests or copies_digest(self.edge.copies, sources, "source", self._threads)
        self._head = version

    def _compare(self, number: int, sources: Shards) -> Entries:
        """Pack a section window by window and compare each with the baseline."""
        section, baseline = self.sections[number], self._baseline[number]
        scratch = np.empty(WINDOW_BYTES // section.itemsize, baseline.dtype)
        found: list[Entries] = []
        at = 0
        for window in self._windows[number]:
            size = window.total_bytes // section.itemsize
            packed = scratch[:size]
            window.execute(sources, packed)
            positions, new, old = compare(baseline[at : at + size], packed, self._threads)
            found.append((positions + np.uint32(at), new, old))
            at += size
        return _joined(found, section)

    def _forget(self) -> None:
        """Let go of steps that all receivers are past; of the oldest where they are too many or too large."""
        needed = list(self._confirmed.values())
        while self._steps:
            oldest = self._steps[0].version
            past = bool(needed) and all(v == oldest or v.follows(oldest) for v in needed)
            large = self.step_bytes > self._room_bytes
            if not past and len(self._steps) <= self._settings.history and not large:
                return
            self._steps.pop(0)

    def _keep(self, key: tuple[Version, Version], encoded: Encoded) -> None:
        """Remember the newest frames, for equal replicas; the last one whatever its size."""
        self._frames[key] = encoded
        while len(self._frames) > 1 and (
            len(self._frames) > KEPT_FRAMES
            or sum(len(f.data) for f in self._frames.values()) > self._room_bytes
        ):
            self._frames.pop(next(iter(self._frames)))

    @property
    def _room_bytes(self) -> int:
        """Steps together, and frames together, take no more when nothing is being encoded."""
        return max(self.baseline_bytes // 2, LEAST_ROOM)

    def _encode(self, base: Version, version: Version, steps: Sequence[Step], start: float) -> Encoded:
        self.encoded += 1
        rules, speeds = self._settings.coding_rules, costs.measured()
        changes, codings = list[frame.Changes](), list[frame.Coding]()
        changed = 0
        for number, section in enumerate(self.sections):
            positions, new, old = union([s.entries[number] for s in steps], section)
            changed += positions.size
            delta = choose.Delta(section.elements, positions, new, old)
            head_is_target = version == self._head
            section_rules = rules if head_is_target else dataclasses.replace(rules, whole=False)
            coding = choose.choose(delta, self.seen.rate, speeds, section_rules).coding
            if coding.positions.kind == "all":
                changes.append(frame.Changes(section.elements, None, self._baseline[number], coding.values))
            else:
                codes = values.codes_of(new, old, coding.values)
                changes.append(frame.Changes(section.elements, positions, codes, coding.values))
            codings.append(coding)
        head = frame.Head(self.plan, base, version, self.edge.source_process, self.edge.target_process)
        data = frame.encode(head, changes, codings)
        total = sum(s.elements for s in self.sections)
        digests = steps[-1].digests if steps else dict(self._digests)
        names = ", ".join(sorted({str(c) for c in codings if c.positions.kind != "none"}))
        seconds = time.perf_counter() - start
        return Encoded(data, digests, changed / max(1, total), names, seconds)


def compare(old: Bits, new: Bits, threads: int = 1) -> Entries:
    """Positions where two flat buffers differ in bits, with the new and the old bits. Copies, never views."""
    coders = native.coders()
    if coders is None or old.dtype.itemsize > 4:
        return compare_numpy(old, new)
    room = max(64, old.size // 16)
    while True:
        positions = np.empty(room, np.uint32)
        found, before = np.empty(room, new.dtype), np.empty(room, old.dtype)
        count = coders.delta_compare(old, new, old.dtype.itemsize, positions, found, before, threads)
        if count <= room:
            return positions[:count].copy(), found[:count].copy(), before[:count].copy()
        room = count


def compare_numpy(old: Bits, new: Bits) -> Entries:
    """`compare` in numpy."""
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return positions, new[positions], old[positions]


def _joined(parts: Sequence[Entries], section: Section) -> Entries:
    if not parts:
        empty = np.empty(0, bits_dtype(section.itemsize))
        return np.empty(0, np.uint32), empty, empty
    return (
        np.concatenate([p for p, _, _ in parts]),
        np.concatenate([n for _, n, _ in parts]),
        np.concatenate([o for _, _, o in parts]),
    )


def union(steps: Sequence[Entries], section: Section) -> Entries:
    """One step that does what several do in order, without elements that came back to their old bits."""
    if len(steps) <= 1:
        return steps[0] if steps else _joined([], section)
    positions, new, old = _joined(steps, section)
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    first = np.flatnonzero(np.diff(ordered, prepend=np.int64(-1)))
    last = np.append(first[1:] - 1, ordered.size - 1) if ordered.size else first
    merged: tuple[Any, Any, Any] = ordered[first], new[order[last]], old[order[first]]
    keep = merged[1] != merged[2]
    return merged[0][keep], merged[1][keep], merged[2][keep]
