"""A subscriber's decisions as a state machine: which offer to take, into which slot, what to quarantine.

Pure: ``(state, event) -> state``. No I/O, no clock; the subscriber is the shell around it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Literal

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version

Phase = Literal["filling", "prepared"]


@dataclasses.dataclass(frozen=True)
class Offer:
    """A round that the hub offers to this engine: every rank of it is offered the same."""

    round: str
    version: Version
    world: str


@dataclasses.dataclass(frozen=True)
class Filling:
    """The round that this rank takes part in and the slot that it fills (None: it has that version)."""

    offer: Offer
    slot: int | None
    phase: Phase


@dataclasses.dataclass(frozen=True)
class Prepared:
    """What a prepare did: bytes that arrived at this rank, seconds by phase, the transports used.

    ``payload`` is full, frame or both joined by "+"; of frames, ``coding`` names the codings and ``density``
    is the share of elements that changed (1 for a full copy). ``moved``: bytes by how they moved, see
    `transports.base.Moved`.
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


@dataclasses.dataclass
class SubscriberStats:
    """Counters since the start."""

    prepared: int = 0
    installed: int = 0
    failed: int = 0
    quarantined: int = 0
    frames: int = 0
    bytes_received: int = 0
    wire_s: float = 0.0
    verify_s: float = 0.0
    prepare_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class ReceiverState:
    """Slots are numbers below ``slots``. ``quarantined`` ones may be written by an unconfirmed sender."""

    slots: int
    serving: int | None = None
    installed: Version | None = None
    offer: Offer | None = None
    filling: Filling | None = None
    quarantined: frozenset[int] = frozenset()
    over: tuple[str, ...] = ()

    @property
    def free(self) -> list[int]:
        """Slots that neither serve nor are being filled nor are quarantined."""
        used = {self.serving, self.filling.slot if self.filling else None}
        return [s for s in range(self.slots) if s not in used and s not in self.quarantined]


def see(state: ReceiverState, offer: Offer | None) -> ReceiverState:
    """The hub's offer changed."""
    return dataclasses.replace(state, offer=offer)


def wanted(state: ReceiverState) -> Offer | None:
    """The offer to take now, if any.

    An older number of the installed lineage is ignored; the installed version itself is taken only because
    the rest of the engine lacks it, and nothing moves; another lineage is an anchor.
    """
    offer, have = state.offer, state.installed
    if offer is None or offer.round in state.over:
        return None
    if state.filling is not None and state.filling.offer.round == offer.round:
        return None
    if have is not None and have.lineage == offer.version.lineage and offer.version.number < have.number:
        return None
    return offer


def begin(state: ReceiverState, offer: Offer) -> ReceiverState:
    """Start to fill a free slot with an offer. A prepared version that was never swapped in is given up."""
    if state.filling is not None and state.filling.phase == "filling":
        raise TransferError(f"version {state.filling.offer.version} is being received, expected no other")
    state = drop(state) if state.filling is not None else state
    if offer.version == state.installed:
        return dataclasses.replace(state, filling=Filling(offer, None, "filling"))
    free = state.free
    if not free:
        raise TransferError(f"no free slot for version {offer.version}: {len(state.quarantined)} quarantined")
    return dataclasses.replace(state, filling=Filling(offer, free[0], "filling"))


def prepared(state: ReceiverState) -> ReceiverState:
    """The slot holds the whole version and its digest is right."""
    assert state.filling is not None
    return dataclasses.replace(state, filling=dataclasses.replace(state.filling, phase="prepared"))


def swap(state: ReceiverState, offer: Offer) -> ReceiverState:
    """The prepared slot serves, the old one is free; the label advances here and nowhere else."""
    filling = state.filling
    if filling is None or filling.offer != offer or filling.phase != "prepared":
        raise TransferError(f"version {offer.version} isn't prepared, it can't be swapped in")
    over = _with(state.over, offer.round)
    if filling.slot is None:
        return dataclasses.replace(state, filling=None, over=over)
    return dataclasses.replace(state, serving=filling.slot, installed=offer.version, filling=None, over=over)


def fail(state: ReceiverState, unconfirmed: bool) -> ReceiverState:
    """The round failed. With ``unconfirmed`` a sender may still write its slot: it is quarantined."""
    filling = state.filling
    state = drop(state)
    if filling is None or filling.slot is None or not unconfirmed:
        return state
    return dataclasses.replace(state, quarantined=state.quarantined | {filling.slot})


def drop(state: ReceiverState) -> ReceiverState:
    """Give up the round; its offer isn't taken again."""
    if state.filling is None:
        return state
    return dataclasses.replace(state, filling=None, over=_with(state.over, state.filling.offer.round))


def released(state: ReceiverState, slot: int) -> ReceiverState:
    """The memory of a quarantined slot was replaced: no old sender can reach it any more."""
    return dataclasses.replace(state, quarantined=state.quarantined - {slot})


def _with(over: tuple[str, ...], round_id: str) -> tuple[str, ...]:
    return (*over, round_id)[-64:]
