"""A subscriber process of the simulation: it takes versions into slots over links.

The counterpart of ``subscriber.Subscriber`` with ``links`` and ``inbound``: the same steps in the same order
around the product's ``receiving``. What an engine makes of it is in `engine`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Generator
from typing import TYPE_CHECKING, Any

from jaxrl_sync.transfer import receiving
from jaxrl_sync.transfer.codec.errors import WrongBase
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.client import POLL_S, HubRefused
from jaxrl_sync.transfer.hub.state import HubState, MemberKey
from jaxrl_sync.transfer.inbound import Gone
from jaxrl_sync.transfer.payload.shadow import Shadow
from jaxrl_sync.transfer.receiving import Offer, ReceiverState
from jaxrl_sync.transfer.subscriber import BACKOFF_S, HUB_GRACE_S
from jaxrl_sync.transfer.version import Version
from jaxrl_sync.transfer.watching import RETRY_S

if TYPE_CHECKING:
    from .engine import EngineWorld

from .shells import MODEL, Client, HubNode, LeaseOf, receive
from .trainer import TrainerRank
from .weights import WORDS, Memory
from .world import Network, Node, Pipe, Signal, Steps, World

SLACK_S = HUB_GRACE_S + 2.0


@dataclasses.dataclass(eq=False)
class Link:
    """The receiver's end of one link, as Inbound."""

    pipe: Pipe
    peer: str
    incarnation: str
    mode: str
    shadow: Shadow
    unconfirmed: bool = False
    in_round: bool = False

    def closed(self, name: str) -> bool:
        """Whether this side closed it."""
        return self.pipe.ends[name].closed


class SubscriberRank(Node):
    """One subscriber process; `drive` is what its engine does with it."""

    def __init__(self, engine: EngineWorld, world: World, network: Network, hub: HubNode, rank: int) -> None:
        super().__init__(world, f"{engine.name}.{rank}")
        self.engine, self.network, self.hub, self.rank = engine, network, hub, rank
        self._reset()

    def _reset(self) -> None:
        self.state = ReceiverState(2)
        self.slots: list[Memory] = []
        self.links: dict[tuple[str, int], Link] = {}
        self.shadows: dict[int, Shadow] = {}
        self.publishers: list[dict[str, Any]] = []
        self.history: list[Version] = []
        self.paired = False
        self.retry_at = 0.0
        self.failures = 0
        self.changed = Signal()
        self.reports: list[Any] = []
        self.to_report = Signal()
        self.orders: list[tuple[str, int, Version | None]] = []
        self.ordered = Signal()
        self.held: Offer | None = None
        self.taken = 0

    def boot(self) -> None:
        """A new process: empty slots, nothing installed."""
        self.start()
        self._reset()
        self.slots = [self._memory(), self._memory()]
        self.client = Client(self, self.hub, self.network, self.engine.limits)
        self.lease = LeaseOf(
            self.client,
            MemberKey("subscriber", self.engine.name, self.rank),
            self.engine.size,
            {"model": MODEL},
            lambda: self.state.installed,
            lambda reason: self.engine.crash(1.0, reason),
        )
        self.spawn(self._main())

    def _memory(self) -> Memory:
        mine = [i for i in range(WORDS) if i % self.engine.size == self.rank]
        return Memory(self.world, self.name, mine)

    def memory(self, index: int | None) -> Memory | None:
        """The memory of a slot."""
        return None if index is None else self.slots[index]

    def _main(self) -> Steps:
        try:
            yield from self.lease.start()
        except TransferError as error:
            reason = str(error)
            self.world.at(0.0, lambda: self.engine.crash(1.0, reason))
            return
        self.spawn(self._watch())
        self.spawn(self._report())
        self.spawn(self.drive())

    def drive(self) -> Steps:
        """The engine's own thread."""
        raise AssertionError(f"{self.name} has no engine")

    # The watching thread.

    def _watch(self) -> Steps:
        nothing: dict[str, Any] = {"round": None, "publishers": None}
        known = nothing
        publishers: list[dict[str, Any]] = []
        key, incarnation = self.lease.key, self.lease.incarnation
        while not self.lease.lost:
            limit_s = POLL_S if self._whole() else RETRY_S

            def ask(state: HubState, known: dict[str, Any] = known) -> Any:
                seen = machine.watch(state, key, incarnation)
                if isinstance(seen, machine.Refused):
                    return seen
                offered = seen["offer"]["round"] if seen["offer"] else None
                now = [p["incarnation"] for p in seen["publishers"]]
                return seen if (offered, now) != (known["round"], known["publishers"]) else None

            try:
                seen = yield from self.lease.ask(ask, limit_s, empty={"unchanged": True})
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
            yield from self._update_links(publishers)
            self.changed.fire()
            if not seen.get("unchanged"):
                self._see(seen["offer"])

    def _see(self, row: dict[str, Any] | None) -> None:
        offer = None
        if row is not None:
            version = Version(row["version"]["lineage"], row["version"]["number"])
            offer = Offer(row["round"], version, row["sources"])
        self.state = receiving.see(self.state, offer)
        self.changed.fire()
        if offer is not None and self.engine.size == 1 and offer.version == self.state.installed:
            self._report_later(self._advance(offer, "installed"))

    def _whole(self) -> bool:
        return bool(self.publishers) and all(self._alive(p) for p in self.publishers)

    def _alive(self, publisher: dict[str, Any]) -> bool:
        link = self.links.get((publisher["name"], publisher["rank"]))
        if link is None or link.incarnation != publisher["incarnation"] or link.closed(self.name):
            return False
        end = link.pipe.ends[self.name]
        return link.in_round or not (end.eof or end.inbox)

    def _update_links(self, publishers: list[dict[str, Any]]) -> Steps:
        """As Links.update: close what is old and idle, open what is missing."""
        self.publishers = publishers
        current = {p["incarnation"] for p in publishers}
        try:
            if publishers and not self.paired:
                self.lease.info["target"] = "t"
                yield from self.lease.register()
                self.paired = True
            for key, link in list(self.links.items()):
                if link.incarnation not in current and not link.in_round:
                    self.links.pop(key).pipe.close(self.name)
            for publisher in publishers:
                if not self._alive(publisher):
                    yield from self._connect(publisher)
        except TransferError as error:
            self.note("no link yet: %s", error)

    def _connect(self, publisher: dict[str, Any]) -> Steps:
        key = (publisher["name"], publisher["rank"])
        old = self.links.get(key)
        if old is not None:
            old.pipe.close(self.name)
        node_name, _, life = publisher["info"]["address"].partition("#")
        node = self.world.nodes[node_name]
        yield self.network.delay(self.name, node_name)
        deadline = self.clock() + self.engine.limits.handshake_s
        while self.network.weather.cut(self.name, node_name):
            if self.clock() > deadline:
                raise DeadlineError(f"no connection to {node_name} in time")
            yield 0.5
        if not node.alive or node.life != int(life):
            raise PeerLost(f"{node_name} refused the connection")
        assert isinstance(node, TrainerRank)
        pipe = Pipe(self.network, self, node)
        mode = self.engine.modes[publisher["rank"] % len(self.engine.modes)]
        node.accept(pipe, (self.engine.name, self.rank), mode)
        pipe.send(self.name, {"kind": "open"})
        try:
            yield from receive(pipe, self, deadline)
        except TransferError:
            pipe.close(self.name)
            raise
        shadow = self.shadows.setdefault(publisher["rank"], Shadow("plan", None, None))  # type: ignore[arg-type]
        self.links[key] = Link(pipe, node_name, publisher["incarnation"], mode, shadow)

    def _links_of(self, offer: Offer) -> list[Link]:
        size = max((p["size"] for p in self.publishers if p["name"] == offer.world), default=0)
        links = [self.links.get((offer.world, r)) for r in range(size)]
        found = [x for x in links if x is not None and not x.closed(self.name)]
        if not found or len(found) != size:
            raise PeerLost(f"no link to {offer.world}, which has {offer.version}")
        return found

    def _can_take(self, offer: Offer) -> bool:
        try:
            return bool(self._links_of(offer))
        except PeerLost:
            return False

    # The reporting thread.

    def _report_later(self, steps: Steps) -> None:
        self.reports.append(steps)
        self.to_report.fire()

    def _report(self) -> Steps:
        while True:
            while not self.reports:
                yield self.to_report, math.inf
            try:
                yield from self.reports.pop(0)
            except TransferError as error:
                self.note("reporting to the hub: %s", error)

    def _advance(
        self, offer: Offer, to: Any, timeout_s: float | None = None, deadline: float = math.inf
    ) -> Steps:
        limit_s = timeout_s or self.engine.limits.timeout_s
        within_s = max(0.0, deadline - self.clock()) + HUB_GRACE_S
        event = machine.Advance(self.lease.key, self.lease.incarnation, offer.round, to, limit_s)
        yield from self.lease.call(event, within_s)

    def _tell(self, message: dict[str, Any]) -> None:
        for link in self.links.values():
            try:
                link.pipe.send(self.name, message)
            except PeerLost:
                link.pipe.close(self.name)

    # What the engine calls: poll, prepare, swap, discard.

    def _takable(self) -> Offer | None:
        offer = receiving.wanted(self.state)
        if offer is None or self.clock() < self.retry_at or not self._can_take(offer):
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
        while True:
            try:
                yield from self._advance(offer, "begun", timeout_s, deadline)
            except HubRefused as error:
                if error.code not in ("round_over", "unknown_round"):
                    raise
                offer = yield from self._other(offer, deadline, error)
                continue
            try:
                self.state = receiving.begin(self.state, offer)
                assert self.state.filling is not None
                self.world.moment("begun", self)
                yield from self._fill(offer, self.state.filling.slot, deadline)
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
        self.state = receiving.prepared(self.state)
        self.world.moment("prepared", self)
        self.failures = 0
        return offer

    def _other(self, offer: Offer, deadline: float, cause: TransferError) -> Generator[Any, Any, Offer]:
        useless = offer.version if isinstance(cause, Gone) else None
        while True:
            found = receiving.wanted(self.state)
            fresh = found is not None and found.round != offer.round and found.version != useless
            if found is not None and fresh and self._can_take(found):
                return found
            left = deadline - self.clock()
            if left <= 0:
                raise cause
            yield self.changed, min(left, 1.0)

    def _replace_quarantined(self) -> None:
        for index in sorted(self.state.quarantined):
            self.slots[index] = self._memory()
            self.state = receiving.released(self.state, index)

    def _give_up(self, offer: Offer, error: TransferError) -> None:
        self.note("gives up %s in %s: %s: %s", offer.version, offer.round, type(error).__name__, error)
        suspects = [x for x in self.links.values() if x.unconfirmed]
        for link in suspects:
            link.pipe.close(self.name)
            link.unconfirmed = link.in_round = False
        self.state = receiving.fail(self.state, unconfirmed=bool(suspects))
        self._report_later(self._tell_failed(offer, f"{type(error).__name__}: {error}"))
        self._replace_quarantined()

    def _tell_failed(self, offer: Offer, reason: str) -> Steps:
        self._tell({"kind": "gave_up", "version": offer.version, "reason": reason})
        yield from self.lease.call(machine.Fail(self.lease.key, self.lease.incarnation, offer.round, reason))

    def discard(self, offer: Offer, reason: str) -> None:
        """As Subscriber._discard."""
        filling = self.state.filling
        if filling is None or filling.offer != offer:
            return
        self.state = receiving.drop(self.state)
        self._report_later(self._tell_failed(offer, reason))

    def swap(self, offer: Offer, number: int) -> None:
        """As Subscriber._swap; TransferError when it isn't prepared."""
        old = self.memory(self.state.serving)
        self.state = receiving.swap(self.state, offer)
        new = self.memory(self.state.serving)
        if old is not None:
            old.serving = None
        if new is not None:
            new.serving = offer.version
        self.note("serves %s from step %s", offer.version, number)
        self.engine.check_swap(self, offer, number)
        self.world.moment("swapped", self)
        self._tell({"kind": "installed", "round": offer.round, "version": offer.version})
        self._report_later(self._advance(offer, "installed"))

    def _wait_group(self, offer: Offer, deadline: float) -> Steps:
        if self.engine.size == 1:
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

    # Taking a version over the links.

    def _fill(self, offer: Offer, index: int | None, deadline: float) -> Steps:
        if index is None:
            return
        slot = self.slots[index]
        serving = self.memory(self.state.serving)
        links = self._links_of(offer)
        for shadow in self.shadows.values():
            shadow.forget({m.generation for m in self.slots})
        results: list[TransferError | None] = []
        finished = Signal()

        def take(link: Link) -> Steps:
            try:
                yield from self._take(link, offer, slot, serving, deadline)
                results.append(None)
            except TransferError as error:
                results.append(error)
            finished.fire()

        for link in links:
            self.spawn(take(link))
        try:
            while len(results) < len(links):
                yield finished, math.inf
            for error in results:
                if error is not None:
                    raise error
            for link in links:
                yield from self._verify(link, offer, slot, deadline)
        finally:
            for link in links:
                if link.in_round and not link.unconfirmed:
                    link.in_round = False
                    self.changed.fire()

    def _take(self, link: Link, offer: Offer, slot: Memory, serving: Memory | None, deadline: float) -> Steps:
        while link.in_round:
            left = deadline - self.clock()
            if left <= 0:
                raise DeadlineError(f"the link to {link.peer} is busy")
            yield self.changed, min(left, 0.5)
        link.in_round = link.unconfirmed = True
        base = link.shadow.base(serving)  # type: ignore[arg-type]
        ready = {
            "kind": "ready",
            "round": offer.round,
            "version": offer.version,
            "memory": slot,
            "base": base,
        }
        link.pipe.send(self.name, {**ready, "timeout_s": max(0.0, deadline - self.clock())})
        answer = yield from self._next(link, offer, deadline)
        if answer["kind"] == "refused":
            link.unconfirmed = False
            raise Gone(f"{link.peer} has no {offer.version}")
        if answer["kind"] != "begin":
            raise ProtocolError(f"{link.peer} said {answer['kind']}, expected begin")
        self.world.moment("receiving", self)
        frame = answer["payload"] == "frame"
        if frame:
            answer = yield from self._next(link, offer, deadline)
            changed, frame_base = answer["changed"], answer["base"]
        else:
            link.shadow.spoiled(slot)  # type: ignore[arg-type]
        while (answer := (yield from self._next(link, offer, deadline)))["kind"] == "chunk":
            slot.write(answer["at"], answer["word"], link.peer)
        if answer["kind"] != "done" or answer["version"] != offer.version:
            raise ProtocolError(f"{link.peer} said {answer['kind']}, expected done")
        link.unconfirmed = False
        if frame:
            self._apply(link, slot, serving, frame_base, changed)

    def _apply(
        self, link: Link, slot: Memory, serving: Memory | None, base: Version, changed: dict[int, Any]
    ) -> None:
        """As Shadow.apply: only from the version that serves here, into a copy of it."""
        if serving is None or link.shadow.base(serving) != base:  # type: ignore[arg-type]
            link.shadow.doubt = True
            raise WrongBase(f"a frame from {base}")
        link.shadow.spoiled(slot)  # type: ignore[arg-type]
        node = self.world.nodes[link.peer]
        assert isinstance(node, TrainerRank)
        for i in node.positions:
            if i in slot.words:
                slot.words[i] = serving.words[i]
        for i, word in changed.items():
            slot.write(i, word, link.peer)

    def _verify(self, link: Link, offer: Offer, slot: Memory, deadline: float) -> Steps:
        sums = yield from self._next(link, offer, deadline)
        if sums["kind"] != "sums":
            raise ProtocolError(f"{link.peer} said {sums['kind']}, expected sums")
        if self.engine.verify and any(slot.words[i] != word for i, word in sums["words"].items()):
            link.shadow.doubt = True
            raise MismatchError(f"bits from {link.peer} differ from those sent")
        link.shadow.filled(slot, offer.version, None)  # type: ignore[arg-type]

    def _next(self, link: Link, offer: Offer, deadline: float) -> Generator[Any, Any, dict[str, Any]]:
        message = yield from receive(link.pipe, self, deadline)
        while message["kind"] == "sums" and message["round"] != offer.round:
            message = yield from receive(link.pipe, self, deadline)
        if message["round"] != offer.round:
            raise ProtocolError(f"{link.peer} speaks of round {message['round']}, expected {offer.round}")
        return message

    def kill(self) -> None:
        """Nothing serves from a dead process's memory."""
        super().kill()
        for memory in self.slots:
            memory.serving = None
