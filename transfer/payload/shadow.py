"""The receiver's side of frames on one edge: what each slot holds, and how a slot gets to the next version.

A slot that is filled is one or more versions behind the one that serves. It catches up by the kept changes of
the versions between, or where those don't reach, by a copy of this edge's part of the serving slot; then the
frame is applied. Old bits are always those of exactly the frame's base, and each slot's content is known by
version or not at all, so that XOR and ulp codings are applied once.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Protocol

from jaxrl_sync.sharding import Copy, CopyTable, Edge, SlotLayout
from jaxrl_sync.sharding.digests import add_digests, copies_digest
from jaxrl_sync.transfer.codec import frame, native
from jaxrl_sync.transfer.codec.bits import Bits
from jaxrl_sync.transfer.codec.errors import FrameError
from jaxrl_sync.transfer.payload.places import Index, Places, slot_origin
from jaxrl_sync.transfer.payload.sections import (
    Digests,
    Section,
    bits_of_memory,
    sections_of,
    subtract_digests,
)
from jaxrl_sync.transfer.payload.settings import receiver_room_bytes
from jaxrl_sync.transfer.version import Version


class SlotLike(Protocol):
    """What is needed of a slot: its memory, the arrays over it, and a number that no other memory has."""

    memory: Any
    views: Any
    generation: int


@dataclasses.dataclass(frozen=True, eq=False)
class Kept:
    """Changes that were applied, per section: elements of the slot (None: all, packed) and their new bits.

    ``paths`` are the tensors that have some.
    """

    base: Version
    version: Version
    entries: tuple[tuple[Index | None, Bits], ...]
    paths: frozenset[str]

    @property
    def nbytes(self) -> int:
        """Memory that they take."""
        return sum((0 if i is None else i.nbytes) + b.nbytes for i, b in self.entries)


@dataclasses.dataclass(frozen=True)
class Applied:
    """What a frame brought: its keyed sums where they follow from the changes, the share of elements.

    ``paths``: the tensors that were written in the slot, by the frame or to catch up.
    """

    digests: Digests | None
    density: float
    codings: tuple[str, ...]
    paths: frozenset[str] = frozenset()


class Shadow:
    """Contents of the slots as far as one edge goes. Used by one thread at a time."""

    def __init__(self, plan: str, edge: Edge, slot: SlotLayout, recount_every: int = 16) -> None:
        self._plan = plan
        self._edge = edge
        self._slot = slot
        self._recount_every = recount_every
        self._since = 0
        self._content: dict[int, Version] = {}
        self._digests: dict[Version, Digests] = {}
        self._kept: list[Kept] = []
        self._caught: dict[int, frozenset[str]] = {}
        self.doubt = False
        """Set where contents can't be trusted: nothing but an anchor is taken until one is verified."""
        self.copied = 0
        """Times that a slot had to be copied from the serving one."""

    @property
    def nbytes(self) -> int:
        """Bytes of the edge."""
        return self._edge.total_bytes

    @functools.cached_property
    def _sections(self) -> tuple[Section, ...]:
        return sections_of(self._edge.copies)

    @functools.cached_property
    def _places(self) -> list[Places]:
        origin = slot_origin(self._slot.offset)
        return [Places(s, origin) for s in self._sections]

    @functools.cached_property
    def _scatter(self) -> list[CopyTable]:
        return [CopyTable.scatter(s.copies) for s in self._sections]

    @functools.cached_property
    def _within(self) -> CopyTable:
        return CopyTable.direct([_inside(c) for c in self._edge.copies])

    def base(self, serving: SlotLike | None) -> Version | None:
        """The version that a frame may start from; None asks for an anchor."""
        if self.doubt or serving is None:
            return None
        return self._content.get(serving.generation)

    def filled(self, slot: SlotLike, version: Version, digests: Digests | None) -> None:
        """A full copy lies in ``slot``; its digests where they were counted."""
        self._content[slot.generation] = version
        self._digests = {} if digests is None else {version: digests}
        self._kept = []
        self._since = 0
        self.doubt = False

    def spoiled(self, slot: SlotLike) -> None:
        """The content of ``slot`` isn't known any more."""
        self._content.pop(slot.generation, None)

    def holds(self, generation: int, version: Version) -> None:
        """A slot holds a verified version that came another way: a frame may start from it."""
        self._content[generation] = version

    def forget(self, live: set[int]) -> None:
        """Slots whose memory was given up hold nothing."""
        self._content = {k: v for k, v in self._content.items() if k in live}
        self._caught = {k: v for k, v in self._caught.items() if k in live}

    def catch_up(self, slot: SlotLike, serving: SlotLike | None) -> None:
        """Bring ``slot`` to what serves, as `apply` would: while a frame on that is still on its way."""
        base = self.base(serving)
        if base is None or serving is None:
            return
        before = self._content.get(slot.generation)
        self.spoiled(slot)
        self._caught[slot.generation] = self._catch_up(slot, serving, before, base)
        self._content[slot.generation] = base

    def apply(
        self, data: bytes | bytearray | memoryview, slot: SlotLike, serving: SlotLike, version: Version
    ) -> Applied:
        """Bring ``slot`` from the serving version to ``version`` by a frame.

        Everything about the frame is checked before the slot is written. FrameError, WrongBase, WrongPlan;
        what the slot held is then still known. Any other error leaves it unknown, the serving slot untouched.
        """
        base = self.base(serving)
        found = frame.decode(data)
        found.check(self._plan, self._edge.source_process, self._edge.target_process)
        found.check_versions(base, version)
        assert base is not None
        changes = found.sections([s.key for s in self._sections])
        if any(c.positions is None and c.kind != "overwrite" for c in changes):
            raise FrameError("a section of every element says what to change, expected the new bits")
        before = self._content.get(slot.generation)
        self.spoiled(slot)
        behind = self._catch_up(slot, serving, before, base) | self._caught.pop(slot.generation, frozenset())
        digests = self._digests.get(base)
        entries = []
        for number, change in enumerate(changes):
            index, new, changed = self._write(number, change, slot)
            entries.append((index, new))
            digests = None if digests is None else add_digests(digests, changed)
        paths = [self._places[i].paths(change.positions) for i, change in enumerate(changes)]
        self._keep(Kept(base, version, tuple(entries), frozenset[str]().union(*paths)))
        self._since += 1
        if self._since >= self._recount_every:
            digests, self._since = None, 0
        sections = found.head.sections
        names = tuple(sorted({str(s.coding) for s in sections if s.count}))
        elements = sum(s.elements for s in sections)
        density = frame.num_changed(changes) / max(1, elements)
        return Applied(digests, density, names, behind.union(*paths))

    def verified(self, slot: SlotLike, version: Version, digests: Digests | None) -> None:
        """The digests of what `apply` wrote are those of the sender: the slot holds ``version``."""
        self._content[slot.generation] = version
        self._digests = {v: d for v, d in self._digests.items() if v in self._content.values()}
        if digests is not None:
            self._digests[version] = digests

    def recount(self, slot: SlotLike, threads: int) -> Digests:
        """The edge's digests from every element of the slot."""
        return copies_digest(self._edge.copies, slot.views, "target", threads)

    def _write(
        self, number: int, change: frame.Changes, slot: SlotLike
    ) -> tuple[Index | None, Bits, Digests]:
        """Apply one section: (elements, new bits, what the digests change by)."""
        if change.positions is None:
            copies = self._sections[number].copies
            before, codes = copies_digest(copies, slot.views, "target"), native.aligned(change.codes)
            self._scatter[number].execute(codes, slot.views)
            after = copies_digest(copies, slot.views, "target")
            return None, codes, subtract_digests(after, before)
        memory = bits_of_memory(slot.memory.data, change.itemsize)
        return self._places[number].apply(change.positions, change.codes, change.kind, memory)

    def _catch_up(
        self, slot: SlotLike, serving: SlotLike, before: Version | None, base: Version
    ) -> frozenset[str]:
        """To what serves; the tensors that were written."""
        path = self._path(before, base)
        if path is None:
            self._within.execute(serving.views, slot.views)
            self.copied += 1
            return frozenset(c.target_path for c in self._edge.copies)
        for kept in path:
            for number, (index, new) in enumerate(kept.entries):
                if index is None:
                    self._scatter[number].execute(new, slot.views)
                else:
                    bits_of_memory(slot.memory.data, new.dtype.itemsize)[index] = new
        return frozenset[str]().union(*(kept.paths for kept in path))

    def _path(self, before: Version | None, base: Version) -> list[Kept] | None:
        """The kept changes from ``before`` to ``base`` in order; None where they don't reach."""
        path: list[Kept] = []
        at = base
        while at != before:
            step = next((k for k in self._kept if k.version == at), None)
            if before is None or step is None or len(path) > len(self._kept):
                return None
            path.append(step)
            at = step.base
        return path[::-1]

    def _keep(self, step: Kept) -> None:
        """Keep the changes for the slots that are behind, as long as they are few."""
        kept = [k for k in self._kept if k.version != step.version]
        kept.append(step)
        held = set(self._content.values())
        first = next((i for i, k in enumerate(kept) if k.base in held), len(kept))
        kept = kept[first:]
        limit = receiver_room_bytes(self._edge.total_bytes)
        self._kept = kept if sum(k.nbytes for k in kept) <= limit else []


def _inside(copy: Copy) -> Copy:
    """The copy of the same elements from one slot to another of the same layout."""
    return dataclasses.replace(
        copy,
        source_device=copy.target_device,
        source_path=copy.target_path,
        source_offset=copy.target_offset,
        source_strides=copy.target_strides,
    )
