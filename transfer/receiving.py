"""A subscriber's decisions as a state machine: which offer to take, into which slot, what to quarantine.

Pure: ``(state, event) -> state``. No I/O, no clock; the subscriber is the shell around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version

Phase = Literal["filling", "prepared"]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A round that the hub offers to this engine: every rank of it is offered the same.

    ``begun``: the hub has begun it for this rank with the offer, so that ``world`` is the source that counts,
    and ``relays`` are its members where its role is relay.
    """

    round: str
    version: Version
    world: str
    role: str = "publisher"
    begun: bool = dataclasses.field(default=False, compare=False)
    relays: tuple[Any, ...] = dataclasses.field(default=(), compare=False, repr=False)

    @property
    def source(self) -> str:
        """Who it comes from, as role.name."""
        return f"{self.role}.{self.world}"


@dataclasses.dataclass(frozen=True)
class Filling:
    """The round that this rank takes part in and the slot that it fills (None: it has that version).

    ``was`` is what the slot held before.
    """

    offer: Offer
    slot: int | None
    phase: Phase
    was: Version | None = None


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a prepare did: bytes that arrived at this rank, seconds by phase, the transports used.

    ``payload`` is full, frame or both joined by "+"; of frames, ``coding`` names the codings and ``density``
    is the share of elements that changed (1 for a full copy). ``moved``: bytes by how they moved, see
    `transports.base.Moved`. ``source`` is who sent it, as role.name; ``resumed_bytes`` had arrived in an
    interrupted round before and didn't travel again. ``seconds`` by phase: wire, verify, apply, and fill
    where devices don't alias the slot (`filling`; then ``moved`` has the bytes put there as ``devices``).
    """

    version: Version
    nbytes: int
    wire_s: float
    verify_s: float
    prepare_s: float
    transport: str
    payload: str = "full"
    coding: str = ""
    density: float = 1.0
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict)
    source: str = ""
    resumed_bytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    edges: tuple[Mapping[str, Any], ...] = ()
    """A row per edge for the hub's trace, see `brought.edge_row`."""


@dataclasses.dataclass
class SubscriberStats:
    """Counters since the start."""

    prepared: int = 0
    installed: int = 0
    failed: int = 0
    quarantined: int = 0
    frames: int = 0
    resumed: int = 0
    rollbacks: int = 0
    bytes_received: int = 0
    resumed_bytes: int = 0
    wire_s: float = 0.0
    verify_s: float = 0.0
    prepare_s: float = 0.0

    def count(self, report: Prepared) -> None:
        """A version was prepared."""
        self.prepared += 1
        self.frames += "frame" in report.payload
        self.resumed += report.resumed_bytes > 0
        self.resumed_bytes += report.resumed_bytes
        self.bytes_received += report.nbytes
        self.wire_s += report.wire_s
        self.verify_s += report.verify_s
        self.prepare_s += report.prepare_s


@dataclasses.dataclass(frozen=True)
class ReceiverState:
    """Slots are numbers below ``slots``. ``quarantined`` ones may be written by an unconfirmed sender.

    ``contents`` are the whole, verified versions in slots. ``previous`` is the slot and version that served
    before (`rollback`). ``prefix``: a slot with complete tensors of a version whose round was interrupted.
    ``poisoned``: the serving slot was overwritten in place and not by a whole version; the engine must refuse
    to serve until a swap. ``rejected`` versions were rolled back and aren't taken again.
    """

    slots: int
    serving: int | None = None
    installed: Version | None = None
    offer: Offer | None = None
    filling: Filling | None = None
    quarantined: frozenset[int] = frozenset()
    over: tuple[str, ...] = ()
    contents: tuple[tuple[int, Version], ...] = ()
    previous: tuple[int, Version] | None = None
    prefix: tuple[int, Version] | None = None
    poisoned: bool = False
    rejected: tuple[Version, ...] = ()

    @property
    def free(self) -> list[int]:
        """Slots that neither serve nor are being filled nor are quarantined. A slot alone is always free."""
        used = {self.serving if self.slots > 1 else None, self.filling.slot if self.filling else None}
        return [s for s in range(self.slots) if s not in used and s not in self.quarantined]

    @property
    def told(self) -> Version | None:
        """What the hub is told that is installed: a poisoned engine has nothing that serves."""
        return None if self.poisoned else self.installed

    def holds(self, slot: int) -> Version | None:
        """The whole version in a slot."""
        return dict(self.contents).get(slot)


def see(state: ReceiverState, offer: Offer | None) -> ReceiverState:
    """The hub's offer changed."""
    return dataclasses.replace(state, offer=offer)


def wanted(state: ReceiverState) -> Offer | None:
    """The offer to take now, if any.

    An older number of the installed lineage is ignored, as is what was rolled back; the installed version
    itself is taken only because the rest of the engine lacks it, and nothing moves, or to repair a poisoned
    slot; another lineage is an anchor.
    """
    offer, have = state.offer, state.installed
    if offer is None or offer.round in state.over or offer.version in state.rejected:
        return None
    if state.filling is not None and state.filling.offer.round == offer.round:
        return None
    if have is not None and have.lineage == offer.version.lineage and offer.version.number < have.number:
        return None
    return offer


def is_taken(state: ReceiverState, offer: Offer) -> bool:
    """Whether an offer is being taken, or will be, or what became of it was told."""
    filling = state.filling is not None and state.filling.offer.round == offer.round
    return filling or offer.round in state.over or wanted(dataclasses.replace(state, offer=offer)) is not None


def begin(state: ReceiverState, offer: Offer, read: frozenset[int] = frozenset()) -> ReceiverState:
    """Start to fill a free slot with an offer. A prepared version that was never swapped in is given up.

    The slot with an interrupted round's prefix of the same version goes on; otherwise one that nobody
    ``read``s and that isn't the previous version's is taken where there is one. One slot alone is poisoned
    by this as soon as something serves.
    """
    if state.filling is not None and state.filling.phase == "filling":
        raise TransferError(f"version {state.filling.offer.version} is being received, expected no other")
    state = drop(state) if state.filling is not None else state
    if offer.version == state.installed and not state.poisoned:
        return dataclasses.replace(state, filling=Filling(offer, None, "filling"))
    free = state.free
    if not free:
        raise TransferError(f"no free slot for version {offer.version}: {len(state.quarantined)} quarantined")
    previous = state.previous[0] if state.previous is not None else None
    slot = min(free, key=lambda s: (s in read, s == previous, s))
    if state.prefix is not None and state.prefix[1] == offer.version and state.prefix[0] in free:
        slot = state.prefix[0]
    filling = Filling(offer, slot, "filling", state.holds(slot))
    poisoned = state.poisoned or slot == state.serving
    contents = _without(state.contents, slot)
    return dataclasses.replace(state, filling=filling, contents=contents, prefix=None, poisoned=poisoned)


def prepared(state: ReceiverState) -> ReceiverState:
    """The slot holds the whole version, its digest is right. TransferError where a rollback ended that."""
    filling = state.filling
    if filling is None:
        raise TransferError("the round was given up while its ranks waited for each other")
    state = dataclasses.replace(state, filling=dataclasses.replace(filling, phase="prepared"))
    if filling.slot is None:
        return state
    contents = (*_without(state.contents, filling.slot), (filling.slot, filling.offer.version))
    return dataclasses.replace(state, contents=contents)


def swap(state: ReceiverState, offer: Offer) -> ReceiverState:
    """The prepared slot serves, the old one is free; the label advances here and nowhere else."""
    filling = state.filling
    if filling is None or filling.offer != offer or filling.phase != "prepared":
        raise TransferError(f"version {offer.version} isn't prepared, it can't be swapped in")
    over = _with(state.over, offer.round)
    if filling.slot is None:
        return dataclasses.replace(state, filling=None, over=over)
    previous = state.previous
    if state.serving is not None and state.installed is not None:
        previous = state.serving, state.installed
    return dataclasses.replace(
        state,
        serving=filling.slot,
        installed=offer.version,
        filling=None,
        over=over,
        previous=previous,
        poisoned=False,
        rejected=(),
    )


def rollback(state: ReceiverState) -> ReceiverState:
    """The version that served before serves again; the one that served isn't taken again.

    A round that brought nothing, because that one was installed already, is given up. TransferError where
    the slot of the version before doesn't hold it any more.
    """
    if state.previous is None or state.serving is None or state.installed is None:
        raise TransferError(f"there is no version before {state.installed} to roll back to")
    slot, version = state.previous
    if state.holds(slot) != version or slot in state.quarantined:
        raise TransferError(
            f"can't roll back to version {version}: its slot was reused (holds {state.holds(slot)}), "
            f"{state.installed} goes on; more sync.slots keep older versions"
        )
    left, brings = state.installed, state.filling is None or state.filling.slot is not None
    return dataclasses.replace(
        state if brings else drop(state),
        serving=slot,
        installed=version,
        previous=(state.serving, left),
        rejected=(left,),
    )


def adopt(state: ReceiverState, version: Version) -> ReceiverState:
    """The engine filled the first slot itself with a version that it had."""
    if state.installed is not None or state.filling is not None:
        raise TransferError(f"version {version} can't be adopted: {state.installed} is installed")
    return dataclasses.replace(state, serving=0, installed=version, contents=((0, version),))


def fail(state: ReceiverState, unconfirmed: bool, touched: bool = True, kept: bool = False) -> ReceiverState:
    """The round failed. With ``unconfirmed`` a sender may still write its slot: it is quarantined.

    A slot that wasn't ``touched`` still holds what it did. ``kept``: complete tensors in it are of use.
    """
    filling = state.filling
    state = drop(state)
    if filling is None or filling.slot is None:
        return state
    slot = filling.slot
    if kept:
        state = dataclasses.replace(state, prefix=(slot, filling.offer.version))
    if unconfirmed:
        return dataclasses.replace(state, quarantined=state.quarantined | {slot})
    if not touched and filling.was is not None and filling.phase == "filling":
        contents = (*_without(state.contents, slot), (slot, filling.was))
        clean = slot == state.serving and filling.was == state.installed
        return dataclasses.replace(state, contents=contents, poisoned=state.poisoned and not clean)
    return state


def drop(state: ReceiverState) -> ReceiverState:
    """Give up the round; its offer isn't taken again."""
    if state.filling is None:
        return state
    return dataclasses.replace(state, filling=None, over=_with(state.over, state.filling.offer.round))


def released(state: ReceiverState, slot: int, kept: bool = False) -> ReceiverState:
    """The memory of a quarantined slot was replaced: no old sender can reach it any more.

    ``kept``: the complete tensors of its interrupted round moved along.
    """
    prefix = state.prefix if kept or state.prefix is None or state.prefix[0] != slot else None
    return dataclasses.replace(state, quarantined=state.quarantined - {slot}, prefix=prefix)


def _with(over: tuple[str, ...], round_id: str) -> tuple[str, ...]:
    return (*over, round_id)[-64:]


def _without(contents: tuple[tuple[int, Version], ...], slot: int) -> tuple[tuple[int, Version], ...]:
    return tuple(c for c in contents if c[0] != slot)
