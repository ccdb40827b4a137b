"""A subscriber process of the simulation: it takes versions into its slots, and may serve them to others.

The counterpart of ``subscriber.Subscriber`` and ``relay.Relay``: the same steps in the same order around the
product's ``receiving``. What an engine makes of it is in `engine`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from jaxrl_sync.transfer import receiving
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, TransferError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.client import POLL_S, HubRefused
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, version_json
from jaxrl_sync.transfer.inbound import Gone
from jaxrl_sync.transfer.receiving import Offer, ReceiverState
from jaxrl_sync.transfer.subscriber import BACKOFF_S, HUB_GRACE_S
from jaxrl_sync.transfer.version import Version
from jaxrl_sync.transfer.watching import RETRY_S

from .holding import Holding
from .links import Link, Links, Members, Taking
from .serving import Reading, Server
from .shells import MODEL, Client, HubNode, LeaseOf
from .weights import WORDS, Memory
from .world import Network, Signal, Steps, World

if TYPE_CHECKING:
    from .engine import EngineWorld

SLACK_S = HUB_GRACE_S + 2.0
LEAVE_S = 5.0


class SubscriberRank(Server):
    """One subscriber process; `drive` is what its engine does with it."""

    def __init__(self, engine: EngineWorld, world: World, network: Network, hub: HubNode, rank: int) -> None:
        super().__init__(world, network, f"{engine.name}.{rank}", engine.limits)
        self.engine, self.hub, self.rank = engine, hub, rank
        self.positions = [i for i in range(WORDS) if i % engine.size == rank]
        self.holding = Holding(self, 0, self._memory)
        self._reset()

    def _reset(self) -> None:
        self.stall_s = 0.0
        self.state = ReceiverState(self.engine.slots)
        self.inbound = Links(self)
        self.links = {}
        self.history: list[Version] = []
        self.left: Version | None = None
        self.begun_at: dict[str, float] = {}
        self.retry_at = 0.0
        self.failures = 0
        self.changed = Signal()
        self.reports: list[Any] = []
        self.to_report = Signal()
        self.reading: list[Link] = []
        self.ready = False

    def boot(self) -> None:
        """A new process: empty slots, nothing installed."""
        self.start()
        self._reset()
        self.holding = Holding(self, self.engine.slots, self._memory)
        self.client = Client(self, self.hub, self.network, self.limits)
        self.spawn(self._main())

    def kill(self) -> None:
        """Nothing serves from a dead process's memory."""
        super().kill()
        for memory in self.holding.slots:
            memory.serving = None

    def _memory(self) -> Memory:
        return Memory(self.world, self.name, self.positions)

    def memory(self, index: int | None) -> Memory | None:
        """The memory of a slot."""
        return None if index is None else self.holding.slots[index]

    def _set(self, state: ReceiverState) -> None:
        """The next state; a poisoned engine refuses to serve from what it has."""
        self.state = state
        for index, memory in enumerate(self.holding.slots):
            serves = index == state.serving and not state.poisoned
            memory.serving = state.installed if serves else None

    def _lease_as(self, role: str, info: dict[str, Any]) -> LeaseOf:
        return LeaseOf(
            self.client,
            MemberKey(role, self.engine.name, self.rank),
            self.engine.size,
            {"model": MODEL, "site": self.engine.site, **info},
            (lambda: self.state.told) if role == "subscriber" else (lambda: None),
            lambda reason: self.engine.crash(1.0, reason),
        )

    def _main(self) -> Steps:
        engine = self.engine
        about = {"slots": engine.slots, "reliable": engine.reliable, "relay": engine.relay}
        self.relay = self._lease_as("relay", {"address": f"{self.name}#{self.life}", "source_digest": "e"})
        self.lease = self._lease_as("subscriber", about)
        try:
            if engine.relay:
                yield from self.relay.start()
            yield from self.lease.start()
        except TransferError as error:
            reason = str(error)
            self.world.at(0.0, lambda: self.engine.crash(1.0, reason))
            return
        self.ready = True
        self.spawn(self._watch())
        self.spawn(self._report())
        self.spawn(self.drive())

    def drive(self) -> Steps:
        """The engine's own thread."""
        raise AssertionError(f"{self.name} has no engine")

    def want(self, version: Version | None) -> Steps:
        """Ask the hub for one version and no other (evaluation), or for the newest again."""
        self.lease.info["want"] = version_json(version)
        while not self.lease.lost:
            try:
                yield from self.lease.register()
                return
            except TransferError as error:
                self.note("asking for %s: %s", version, error)
                yield 1.0

    def leave(self) -> Steps:
        """As Subscriber.close: a relay waits for its readers, then both leave the directory."""
        if self.engine.relay:
            yield from self.holding.drain(LEAVE_S)
        for lease in (self.relay, self.lease) if self.engine.relay else (self.lease,):
            lease.lost = "left"
            try:
                yield from self.client.call(machine.Leave(lease.key, lease.incarnation), within_s=2.0)
            except TransferError as error:
                self.note("leaving: %s", error)

    # What others read here.

    def holds(self) -> list[int]:
        """This rank's share of the words."""
        return self.positions

    def read(self, version: Version, deadline: float) -> Generator[Any, Any, Reading | str]:
        """The slot that holds a version, wholly or in part so far."""
        return self.holding.read(version, deadline)

    # The watching thread.

    def _watch(self) -> Steps:
        nothing: dict[str, Any] = {"round": None, "publishers": None}
        known, publishers = nothing, Members()
        key, incarnation = self.lease.key, self.lease.incarnation
        while not self.lease.lost:
            limit_s = POLL_S if self.inbound.whole else RETRY_S

            ask = _asking(key, incarnation, known)
            sure = self.engine.eager and self.inbound.whole and not self.state.rejected
            begin = functools.partial(self._begun, known["round"] if sure else ...)
            try:
                seen = yield from self.lease.ask(ask, limit_s, empty={"unchanged": True}, then=begin)
            except TransferError as error:
                self.note("watching the hub: %s", error)
                yield RETRY_S
                known = nothing
                continue
            if not seen.get("unchanged"):
                publishers = seen["publishers"]
                row = seen["offer"]
                known = {
                    "round": row["round"] if row else None,
                    "publishers": [p["incarnation"] for p in publishers],
                }
            yield from self.inbound.update(publishers)
            self.changed.fire()
            if not seen.get("unchanged"):
                self._see(_offer(seen["offer"]) if seen["offer"] else None)

    def _begun(self, known: Any, seen: Any) -> Any:
        """At the hub, as Routes.watch: the round begins with its offer, where the rank asked for that."""
        offer = seen.get("offer") if isinstance(seen, dict) else None
        if known is ... or offer is None or offer["round"] == known:
            return seen
        key, limit_s = self.lease.key, self.engine.limits.timeout_s
        reply = self.hub.apply(machine.Advance(key, self.lease.incarnation, offer["round"], "begun", limit_s))
        return (
            seen
            if isinstance(reply, machine.Refused)
            else {**seen, "offer": {**reply["offer"], "begun": True}}
        )

    def _see(self, offer: Offer | None) -> None:
        self.state = receiving.see(self.state, offer)
        if offer is not None and offer.begun and not receiving.is_taken(self.state, offer):
            self._report_later(functools.partial(self._tell_failed, offer, "it isn't taken here"))
        self.changed.fire()
        if offer is not None and self.engine.size == 1 and offer.version == self.state.told:
            self._report_later(functools.partial(self._tell, offer))

    # The reporting thread.

    def _report_later(self, steps: Callable[[], Steps]) -> None:
        self.reports.append(steps)
        self.to_report.fire()

    def _report(self) -> Steps:
        while True:
            while not self.reports:
                yield self.to_report, math.inf
            while not (yield from self._arrives(self.reports[0])) and not self.lease.lost:
                yield RETRY_S
            self.reports.pop(0)

    def _arrives(self, report: Callable[[], Steps]) -> Generator[Any, Any, bool]:
        try:
            yield from report()
        except TransferError as error:
            self.note("reporting to the hub: %s", error)
            return not isinstance(error, PeerLost | DeadlineError)
        return True

    def _advance(
        self, offer: Offer, to: Any, timeout_s: float | None = None, deadline: float = math.inf
    ) -> Generator[Any, Any, Any]:
        limit_s = timeout_s or self.engine.limits.timeout_s
        within_s = max(0.0, deadline - self.clock()) + HUB_GRACE_S
        event = machine.Advance(self.lease.key, self.lease.incarnation, offer.round, to, limit_s)
        return (yield from self.lease.call(event, within_s))

    def _tell(self, offer: Offer) -> Steps:
        yield from self._advance(offer, "installed")

    # What the engine calls: poll, prepare, swap, discard.

    def _takable(self) -> Offer | None:
        offer = receiving.wanted(self.state)
        if offer is None or self.clock() < self.retry_at or not self.inbound.can_take(offer):
            return None
        return offer

    def poll(self, timeout_s: float) -> Generator[Any, Any, Offer | None]:
        """As Subscriber.poll."""
        deadline = self.clock() + timeout_s
        while True:
            offer = self._takable()
            if offer is not None:
                return offer
            left = deadline - self.clock()
            if left <= 0 or self.lease.lost:
                return None
            pause = self.retry_at - self.clock()
            yield self.changed, min(left, pause) if pause > 0 else left

    def prepare(self, offer: Offer, timeout_s: float) -> Generator[Any, Any, Offer]:
        """As Subscriber._prepare: the offer that lies verified in the shadow slot. Ends by its deadline."""
        start = self.world.now
        jumped = self.offset_s
        life = self.life
        try:
            return (yield from self._prepare(offer, timeout_s))
        finally:
            lost_s = abs(self.offset_s - jumped) + max(0.0, self.stopped_until - start)
            took_s = self.world.now - start - lost_s
            if took_s > timeout_s + SLACK_S and self.alive and self.life == life:
                self.world.violated(
                    f"{self.name} prepared for {took_s:.1f} s, the deadline was {timeout_s:g} s"
                )

    def _prepare(self, offer: Offer, timeout_s: float) -> Generator[Any, Any, Offer]:
        deadline = self.clock() + timeout_s
        self._replace_quarantined()
        self.reading = []
        while True:
            self.begun_at = {offer.round: self.world.now}
            try:
                offer, relays = yield from self._begin_round(offer, timeout_s, deadline)
            except HubRefused as error:
                if error.code not in ("round_over", "unknown_round"):
                    raise
                offer = yield from self._other(offer, deadline, error)
                continue
            try:
                self._set(receiving.begin(self.state, offer, self.holding.busy))
                assert self.state.filling is not None
                self.world.moment("begun", self)
                yield from self._fill(offer, relays, self.state.filling.slot, deadline)
                self.engine.verified[offer.round, self.rank] = offer.version
                self.world.moment("verified", self)
                yield from self._wait_group(offer, deadline)
            except Gone as error:
                self._give_up(offer, error)
                offer = yield from self._other(offer, deadline, error)
                continue
            except TransferError as error:
                self.retry_at = self.clock() + BACKOFF_S[min(self.failures, len(BACKOFF_S) - 1)]
                self.failures += 1
                self._give_up(offer, error)
                raise
            break
        self._set(receiving.prepared(self.state))
        self.world.moment("prepared", self)
        self.failures = 0
        return offer

    def _begin_round(self, offer: Offer, timeout_s: float, deadline: float) -> Generator[Any, Any, Any]:
        """As Subscriber._begin_round."""
        if offer.begun and offer == self.state.offer:
            return dataclasses.replace(offer, begun=False), list(offer.relays)
        answer = yield from self._advance(offer, "begun", timeout_s, deadline)
        row = answer.get("offer")
        return (_offer(row), row["relays"]) if row else (offer, [])

    def _other(self, offer: Offer, deadline: float, cause: TransferError) -> Generator[Any, Any, Offer]:
        useless = offer.version if isinstance(cause, Gone) and offer.role == "publisher" else None
        while True:
            found = receiving.wanted(self.state)
            fresh = found is not None and found.round != offer.round and found.version != useless
            left = deadline - self.clock()
            if left <= 0:
                raise cause
            if found is not None and fresh and self.inbound.can_take(found):
                return found
            yield self.changed, min(left, 1.0)

    def _replace_quarantined(self) -> None:
        for index in sorted(self.state.quarantined):
            kept = self.holding.replace(index)
            self._set(receiving.released(self.state, index, kept))

    def _give_up(self, offer: Offer, error: TransferError) -> None:
        self.note("gives up %s in %s: %s: %s", offer.version, offer.round, type(error).__name__, error)
        touched = any(link.touched for link in self.reading)
        unconfirmed = self.inbound.cut_unconfirmed(tuple(self.reading))
        filling, kept = self.state.filling, False
        if filling is not None and filling.slot is not None:
            kept = self.holding.give_up(filling.slot, offer.version, not isinstance(error, MismatchError))
        self._set(receiving.fail(self.state, unconfirmed, touched or unconfirmed, kept))
        self._report_later(functools.partial(self._tell_failed, offer, f"{type(error).__name__}: {error}"))
        self._replace_quarantined()

    def _tell_failed(self, offer: Offer, reason: str) -> Steps:
        for link in self.inbound.all:
            link.tell({"kind": "gave_up", "version": offer.version, "reason": reason})
        yield from self.lease.call(machine.Fail(self.lease.key, self.lease.incarnation, offer.round, reason))

    def discard(self, offer: Offer, reason: str) -> None:
        """As Subscriber.discard."""
        filling = self.state.filling
        if filling is None or filling.offer != offer:
            return
        self._set(receiving.drop(self.state))
        self._report_later(functools.partial(self._tell_failed, offer, reason))

    def swap(self, offer: Offer, number: int) -> None:
        """As Subscriber.install; TransferError when it isn't prepared."""
        self._set(receiving.swap(self.state, offer))
        self.note("serves %s from step %s", offer.version, number)
        self.engine.check_swap(self, offer, number)
        self.world.moment("swapped", self)
        for link in self.inbound.all:
            link.tell({"kind": "installed", "round": offer.round, "version": offer.version})
        self._report_later(functools.partial(self._tell, offer))

    def rollback(self, number: int) -> None:
        """As Subscriber.rollback; TransferError where the version before isn't there any more."""
        left, before = self.state.installed, self.state.filling
        self._set(receiving.rollback(self.state))
        self.note("goes back from %s to %s at step %s", left, self.state.installed, number)
        if before is not None and self.state.filling is None:
            self._report_later(functools.partial(self._tell_failed, before.offer, "rolled back"))
        self.engine.check_rollback(self, left, number)
        self._report_later(self.lease.register)

    def _wait_group(self, offer: Offer, deadline: float) -> Steps:
        if self.engine.size == 1:
            if offer.role == "relay":
                self._report_later(functools.partial(self._advance, offer, "prepared"))
            return
        yield from self._advance(offer, "prepared", deadline=deadline)

        def ask(state: HubState) -> Any:
            seen = machine.round_status(state, offer.round)
            if isinstance(seen, machine.Refused):
                return seen
            return None if seen["state"] == "open" and not seen["prepared"] else seen

        while (left := deadline - self.clock()) > 0:
            poll_s = min(left, POLL_S)
            empty = {"state": "open", "prepared": False, "reason": ""}
            status = yield from self.client.call(None, ask, poll_s, left + HUB_GRACE_S, empty)
            if status["state"] not in ("open", "committed"):
                raise TransferError(f"version {offer.version} is {status['state']}: {status['reason']}")
            if status["prepared"]:
                return
        raise DeadlineError(f"other ranks weren't prepared for {offer.version} in time")

    def _fill(self, offer: Offer, relays: Members, index: int | None, deadline: float) -> Steps:
        if index is None:
            return
        have = self.holding.prefix(index, offer.version)
        yield from self.inbound.reach(offer, relays)
        self.reading = links = self.inbound.of(offer)
        for link in links:
            link.touched = False
        yield from self.holding.begin(index, offer.version, self.inbound.edges_of(offer), have)
        slot, serving = self.holding.slots[index], self.memory(self.state.serving)
        self.inbound.begins(offer, slot, {m.generation for m in self.holding.slots})
        taking = Taking(offer, slot, serving, have, lambda i: self.holding.arrived(index, i), deadline)
        try:
            yield from self._take_all(links, taking)
            for link in links:
                yield from link.verify(taking)
        finally:
            for link in links:
                if link.in_round and not link.unconfirmed:
                    link.in_round = False
                    self.changed.fire()
        self.holding.verified(index)
        self.inbound.holds(offer, slot)

    def _take_all(self, links: list[Link], taking: Taking) -> Steps:
        """All edges side by side; waits for every one of them, then raises the first error."""
        results: list[TransferError | None] = []
        finished = Signal()

        def take(link: Link) -> Steps:
            try:
                yield from link.take(taking)
                results.append(None)
            except TransferError as error:
                results.append(error)
            finished.fire()

        for link in links:
            self.spawn(take(link))
        while len(results) < len(links):
            yield finished, math.inf
        for error in results:
            if error is not None:
                raise error


def _offer(row: dict[str, Any]) -> Offer:
    version = Version(row["version"]["lineage"], row["version"]["number"])
    begun, relays = row.get("begun") is True, tuple(row.get("relays") or ())
    return Offer(row["round"], version, row["sources"], row["role"], begun, relays)


def _asking(key: MemberKey, incarnation: str, known: dict[str, Any]) -> Callable[[HubState], Any]:
    """What a long poll asks of the hub: whatever differs from what is known."""

    def ask(state: HubState) -> Any:
        found = machine.watch(state, key, incarnation)
        if isinstance(found, machine.Refused):
            return found
        offered = found["offer"]["round"] if found["offer"] else None
        now = [p["incarnation"] for p in found["publishers"]]
        return found if (offered, now) != (known["round"], known["publishers"]) else None

    return ask
