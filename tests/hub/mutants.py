"""Seeded mistakes in the machines: each must be found by the simulation, or the simulation proves nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

from jaxrl_sync.transfer import receiving
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub import fleet, machine, outcomes
from jaxrl_sync.transfer.hub import state as hub_state
from jaxrl_sync.transfer.hub.state import HubState, Member, MemberKey, RankState, Round, Tag
from jaxrl_sync.transfer.receiving import Filling, Offer, ReceiverState
from jaxrl_sync.transfer.retention import Decision, decide
from jaxrl_sync.transfer.version import Version

from . import trainer
from .engine import EngineRank
from .holding import Holding, SlotReading
from .subscriber import SubscriberRank
from .trainer import TrainerRank

Patch = contextlib.AbstractContextManager[Any]


def _patch(where: object, name: str, mistake: Callable[..., Any]) -> Callable[[], Patch]:
    return lambda: mock.patch.object(where, name, mistake)


# The receiver.


def _no_quarantine(state: ReceiverState, *_: object, **__: object) -> ReceiverState:
    return receiving.drop(state)


def _into_the_serving_slot(state: ReceiverState, offer: Offer, *_: object) -> ReceiverState:
    slot = 0 if state.serving is None else state.serving
    return dataclasses.replace(state, filling=Filling(offer, slot, "filling"))


def _swap_unprepared(state: ReceiverState, offer: Offer) -> ReceiverState:
    filling = state.filling
    slot = state.serving if filling is None else filling.slot
    return dataclasses.replace(state, serving=slot, installed=offer.version, filling=None)


@contextlib.contextmanager
def _memory_kept_after_doubt() -> Iterator[None]:
    """A quarantined slot is released although its memory was not replaced."""

    def mistake(self: EngineRank) -> None:
        for index in sorted(self.state.quarantined):
            self._set(receiving.released(self.state, index))

    with mock.patch.object(EngineRank, "_replace_quarantined", mistake):
        yield


def _no_wait(self: EngineRank, offer: Offer, deadline: float) -> Any:
    yield from self._advance(offer, "prepared", deadline=deadline)


# The hub.


def _number_alone(installed: Version | None, offered: Version) -> bool:
    return installed is None or offered.number > installed.number


def _prepared_by_some(self: Round, states: tuple[str, ...]) -> bool:
    return any(s in states for s in self.ranks.values())


_broken, _register, _announce = machine._broken, machine._register, machine._announce


def _no_deadline(state: HubState, entry: Round, now: float) -> Any:
    return _broken(state, dataclasses.replace(entry, deadline=None), now)


def _no_loss(state: HubState, entry: Round, now: float) -> Any:
    late = entry.deadline is not None and entry.deadline <= now
    return ("aborted", "the deadline passed", "reoffer") if late else None


def _dead_source(state: HubState, tag: Tag, engine: str, ranks: dict[int, Member]) -> Any:
    """As if the publisher's lease never ended."""
    newest = state.newest.get(tag.model)
    found = _choose(state, tag, engine, ranks)
    if found is not None or newest is None or not newest.told:
        return found
    ghost = {0: Member(MemberKey("publisher", newest.world, 0), 1, "gone", {}, 1.0, 1.0)}
    return fleet.Holder(fleet.Source("publisher", newest.world), ghost, True, True, "", 0)


_choose = fleet.choose


def _weights_survive(state: HubState, event: machine.Register, now: float) -> Any:
    kept = event.installed or state.installed.get(event.key)
    return _register(state, dataclasses.replace(event, installed=kept), now)


def _leases_forever(state: HubState, now: float) -> tuple[HubState, tuple[str, ...]]:
    return state, ()


def _newest_may_go_back(state: HubState, event: machine.Announce) -> Any:
    return _announce(dataclasses.replace(state, newest={}), event)


@contextlib.contextmanager
def _first_rank_publishes() -> Iterator[None]:
    """A version is published once one rank of its world holds it."""
    publisher = fleet._publisher

    def mistake(state: HubState, tag: Tag, name: str, ranks: dict[int, Member]) -> Any:
        some = {r: m for r, m in ranks.items() if tag in state.holdings.get(m.key, {})}
        alone = {0: dataclasses.replace(next(iter(some.values())), size=1)} if some else {}
        return publisher(state, tag, name, alone) if alone else None

    with mock.patch.object(fleet, "_publisher", mistake):
        yield


def _install_of_anyone(state: HubState, key: MemberKey, entry: Round) -> HubState:
    ranks: dict[int, RankState] = dict.fromkeys(entry.ranks, "installed")
    ranks[key.rank] = "prepared"
    return _installed(state, key, dataclasses.replace(entry, ranks=ranks))


_installed = outcomes.installed


@contextlib.contextmanager
def _withdrawn_is_served() -> Iterator[None]:
    """A version that its publisher withdraws gets new readers."""
    publisher = fleet._publisher

    def mistake(state: HubState, *args: Any) -> Any:
        held = {k: {t: hub_state.Holding() for t in tags} for k, tags in state.holdings.items()}
        return publisher(dataclasses.replace(state, holdings=held), *args)

    with mock.patch.object(fleet, "_publisher", mistake):
        yield


_unpublish = machine._unpublish


def _gives_up_at_once(state: HubState, event: machine.Unpublish) -> Any:
    state, outcome = _unpublish(state, event)
    assert isinstance(outcome, machine.Done)
    return state, machine.Done(outcome.log, {**outcome.reply, "drained": True})


_is_last = fleet.is_last_reliable


def _engines_keep_what_is_pinned(state: HubState, tag: Tag, key: MemberKey) -> bool:
    """An engine's copy counts as one, though a later version overwrites it."""
    pins = {t: owners for t, owners in state.pins.items() if t != tag}
    return _is_last(dataclasses.replace(state, pins=pins), tag, key)


# Rollback.


def _whatever_its_slot_holds(state: ReceiverState) -> ReceiverState:
    if state.previous is None or state.serving is None or state.installed is None:
        raise TransferError("nothing before")
    slot, version = state.previous
    previous, left = (state.serving, state.installed), (state.installed,)
    return dataclasses.replace(state, serving=slot, installed=version, previous=previous, rejected=left)


_rollback = receiving.rollback


def _takes_it_again(state: ReceiverState) -> ReceiverState:
    return dataclasses.replace(_rollback(state), rejected=())


# Relays, resuming, one slot.


def _prefix_of_any_version(self: Holding, index: int, version: Version) -> frozenset[str]:
    return self._prefixes.get(index, (None, frozenset[str]()))[1]


def _sums_at_once(self: SlotReading, deadline: float) -> Any:
    yield from ()


def _no_gate(self: SlotReading, position: int, deadline: float) -> Any:
    yield from ()


def _serves_poisoned(self: SubscriberRank, state: ReceiverState) -> None:
    self.state = state
    for index, memory in enumerate(self.holding.slots):
        memory.serving = state.installed if index == state.serving else None


# The publisher.


def _drops_pinned(held: Any, pinned: Any, keep: int, limit_bytes: int | None = None) -> Decision:
    return decide(held, (), keep, limit_bytes)


@contextlib.contextmanager
def _buffers_used_while_read() -> Iterator[None]:
    """The next export goes into a buffer that a transfer still reads."""
    publish = TrainerRank.publish

    def mistake(self: TrainerRank, version: Version) -> Any:
        readers = [(b, b.readers) for b in self.spare]
        for buffer, _ in readers:
            buffer.readers = 0
        yield from publish(self, version)
        for buffer, count in readers:
            buffer.readers += count

    with mock.patch.object(TrainerRank, "publish", mistake):
        yield


MUTANTS: dict[str, Callable[[], Patch]] = {
    "fencing is off": _patch(receiving, "fail", _no_quarantine),
    "a quarantined slot keeps its memory": _memory_kept_after_doubt,
    "the serving slot is filled": _patch(receiving, "begin", _into_the_serving_slot),
    "a version that isn't prepared is swapped in": _patch(receiving, "swap", _swap_unprepared),
    "a rank does not wait for the others": _patch(EngineRank, "_wait_group", _no_wait),
    "the lineage is ignored": _patch(machine, "accepts", _number_alone),
    "committed before every rank is prepared": _patch(Round, "all_at_least", _prepared_by_some),
    "committed when one rank installed it": _patch(outcomes, "installed", _install_of_anyone),
    "the deadline never fires": _patch(machine, "_broken", _no_deadline),
    "a round outlives its members": _patch(machine, "_broken", _no_loss),
    "a dead source is chosen": _patch(fleet, "choose", _dead_source),
    "a restarted engine is taken to hold its old weights": _patch(machine, "_register", _weights_survive),
    "leases never run out": _patch(machine, "_expire", _leases_forever),
    "the newest version may go back": _patch(machine, "_announce", _newest_may_go_back),
    "one rank publishes for all": _first_rank_publishes,
    "words of another version are a resumed prefix": _patch(Holding, "prefix", _prefix_of_any_version),
    "a relay sends what has not arrived": _patch(SlotReading, "wait", _no_gate),
    "a poisoned engine serves": _patch(SubscriberRank, "_set", _serves_poisoned),
    "a withdrawn version gets new readers": _withdrawn_is_served,
    "a withdrawn version is given up while it is read": _patch(machine, "_unpublish", _gives_up_at_once),
    "an engine's copy of a pinned version counts as one": _patch(
        fleet, "is_last_reliable", _engines_keep_what_is_pinned
    ),
    "a rollback serves whatever its slot holds": _patch(receiving, "rollback", _whatever_its_slot_holds),
    "what was rolled back is taken again": _patch(receiving, "rollback", _takes_it_again),
    "a pinned version is dropped": _patch(trainer, "decide", _drops_pinned),
    "export buffers are used again while they are read": _buffers_used_while_read,
}
