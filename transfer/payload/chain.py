"""The sender's memory of one edge: the bits of the newest version, and what changed in those before it.

A chain is kept once per target layout, process of it and transport, however many equal replicas ask. It has
a baseline, which finds what is other in a later version (in `payload.baseline`: a snapshot of the packed edge
on the host, or the export itself on its devices), and steps: positions, old and new bits between versions
that were asked for. From any version among them to any later one a frame is the union of the steps
between, with the oldest old bits and the newest new ones; a frame is encoded once.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Sequence

from jaxrl_sync.sharding import Edge
from jaxrl_sync.sharding.digests import add_digests, copies_digest
from jaxrl_sync.transfer.codec import choose, costs, frame, values
from jaxrl_sync.transfer.payload.baseline import Baseline, Packing, baseline_for
from jaxrl_sync.transfer.payload.entries import Entries, union
from jaxrl_sync.transfer.payload.places import Places
from jaxrl_sync.transfer.payload.sections import Digests, sections_of
from jaxrl_sync.transfer.payload.seen import Seen
from jaxrl_sync.transfer.payload.settings import Form, PayloadSettings, sender_room_bytes
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.version import Version

KEPT_FRAMES = 4

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True, eq=False)
class Step:
    """What changed between two versions, per section; ``digests`` of the edge at ``version``."""

    base: Version
    version: Version
    entries: tuple[Entries, ...]
    digests: Digests
    compared: Form = "host"

    @property
    def nbytes(self) -> int:
        """Memory that it takes."""
        return sum(p.nbytes + n.nbytes + o.nbytes for p, n, o in self.entries)


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """A frame with what it says: share of changed elements, codings.

    ``encode_s`` are the seconds to compare and to encode, ``compare_s`` those to compare, on ``compared``.
    """

    data: bytearray
    digests: Digests
    density: float
    coding: str
    encode_s: float
    compare_s: float = 0.0
    compared: Form = "host"


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
        self._packing = Packing(self.sections)
        self._edge_bytes = sum(s.nbytes for s in self.sections)
        self._head: Version | None = None
        self._baseline: Baseline | None = None
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
        """Host memory of the snapshot, without the steps; none where devices compare."""
        baseline = self._baseline
        return 0 if baseline is None else baseline.nbytes

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
            if not self._advance(version, sources):
                self._restart(version, sources, digests)
            if digests and self._head == version and self._digests != digests:
                logger.warning("the baseline of %s was not that version: taken again", version)
                self._restart(version, sources, digests)
            self._forget()

    def frame(self, base: Version | None, version: Version, sources: Shards) -> Encoded | None:
        """The frame from ``base`` to ``version``; None where only an anchor will do.

        That is without a base, with one that isn't remembered, or across lineages.
        """
        if base is not None and (made := self._frames.get((base, version))) is not None:
            return made  # while those for others are being made
        with self._lock:
            return self._frame(base, version, sources)

    def _frame(self, base: Version | None, version: Version, sources: Shards) -> Encoded | None:
        if base is None or self._head is None or base.lineage != version.lineage:
            return None
        key = base, version
        if key in self._frames:
            return self._frames[key]
        if not self.knows(base):
            return None
        start = time.perf_counter()
        if not self._advance(version, sources):
            return None
        compare_s = time.perf_counter() - start
        steps = self._between(base, version)
        found = None if steps is None else self._encode(base, version, steps, sources)
        if found is not None:
            seconds = time.perf_counter() - start
            found = dataclasses.replace(found, encode_s=seconds, compare_s=compare_s)
        self._forget()
        if found is not None:
            self._keep(key, found)
        return found

    def follow(self, version: Version, sources: Shards) -> None:
        """Make ``version`` the head where an older one is it: frames can then start from it, too."""
        with self._lock:
            if self._head is not None:
                if not self._advance(version, sources):
                    self._restart(version, sources)
                self._forget()

    def ahead(self, version: Version, sources: Shards) -> None:
        """Make the frames to ``version`` from what receivers have confirmed, newest first, while they ask."""
        with self._lock:
            known = {v for v in self._confirmed.values() if version.follows(v) and self.knows(v)}
        for base in sorted(known, key=lambda v: -v.number)[:KEPT_FRAMES]:
            with self._lock:  # anew for each: who asks for a frame that is made gets in between
                self._frame(base, version, sources)

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

    def close(self) -> None:
        """No link uses the chain any more: its baseline goes."""
        with self._lock:
            if self._baseline is not None:
                self._baseline.close()
            self._head, self._baseline, self._steps, self._frames = None, None, [], {}

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

    def _advance(self, version: Version, sources: Shards) -> bool:
        """Make ``version`` the head by a step; an older one changes nothing. False: it takes a restart."""
        head, baseline = self._head, self._baseline
        if head is None or baseline is None or version.lineage != head.lineage:
            return False
        if not version.follows(head):
            return True
        # A baseline that has moved on without its step is none: what fails here asks for an anchor.
        self._head = None
        entries = baseline.changes(sources)
        if entries is None:
            self._head = head
            return False
        changes = [
            places.change_of_digests(p, n, o, self._threads)
            for places, (p, n, o) in zip(self._places, entries, strict=True)
        ]
        found = add_digests(self._digests, *changes)
        if baseline.suits(sources):
            baseline.advance(entries)
        else:  # a copy in host memory had stood for an export: from here on the devices compare again
            self._take(sources)
        self._steps.append(Step(head, version, entries, found, baseline.form))
        self._digests, self._head = found, version
        return True

    def _restart(self, version: Version, sources: Shards, digests: Digests | None = None) -> None:
        """Take the whole edge: the first version, or one that no step leads to."""
        self._steps, self._frames, self._confirmed = [], {}, {}
        self._head = None  # until the baseline is whole
        self._take(sources)
        self._digests = digests or copies_digest(self.edge.copies, sources, "source", self._threads)
        self._head = version

    def _take(self, sources: Shards) -> None:
        """The baseline becomes the version of these shards, another one where it can't take them."""
        if self._baseline is not None and not self._baseline.suits(sources):
            self._baseline.close()
            self._baseline = None
        if self._baseline is None:
            self._baseline = baseline_for(sources, self._packing, self._threads)
        self._baseline.take(sources)

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
        return sender_room_bytes(self._edge_bytes)

    def _encode(self, base: Version, version: Version, steps: Sequence[Step], sources: Shards) -> Encoded:
        assert self._baseline is not None
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
                whole = self._baseline.whole(number, sources)
                changes.append(frame.Changes(section.elements, None, whole, coding.values))
            else:
                codes = values.codes_of(new, old, coding.values)
                changes.append(frame.Changes(section.elements, positions, codes, coding.values))
            codings.append(coding)
        head = frame.Head(self.plan, base, version, self.edge.source_process, self.edge.target_process)
        data = frame.encode(head, changes, codings)
        total = sum(s.elements for s in self.sections)
        digests = steps[-1].digests if steps else dict(self._digests)
        names = ", ".join(sorted({str(c) for c in codings if c.positions.kind != "none"}))
        form = steps[-1].compared if steps else self._baseline.form
        return Encoded(data, digests, changed / max(1, total), names, 0.0, compared=form)
