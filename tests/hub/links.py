"""The receiver's end of links in the simulation: one per edge, to publishers and to relays.

The counterpart of ``links.Links`` and ``inbound.Inbound``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from jaxrl_sync.transfer.codec.errors import WrongBase
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.inbound import Gone
from jaxrl_sync.transfer.payload.shadow import Shadow
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.version import Version

from .serving import Server
from .shells import receive
from .weights import Memory
from .world import Pipe, Steps

if TYPE_CHECKING:
    from .subscriber import SubscriberRank

Members = list[dict[str, Any]]
PUBLISHER = "publisher"


@dataclasses.dataclass(frozen=True)
class Taking:
    """What a round asks of each of its links."""

    offer: Offer
    slot: Memory
    serving: Memory | None
    have: frozenset[str]
    arrived: Callable[[int], None]
    deadline: float


@dataclasses.dataclass(eq=False)
class Link:
    """One open link. ``unconfirmed`` while its sender may write a slot of ours."""

    pipe: Pipe
    peer: Server
    incarnation: str
    me: SubscriberRank
    shadow: Shadow
    unconfirmed: bool = False
    touched: bool = False
    in_round: bool = False

    @property
    def closed(self) -> bool:
        """Whether this side closed it."""
        return self.pipe.ends[self.me.name].closed

    @property
    def alive(self) -> bool:
        """Whether neither side has closed it."""
        end = self.pipe.ends[self.me.name]
        return not end.closed and (self.in_round or not (end.eof or end.inbox))

    def close(self) -> None:
        """Nothing more arrives through it."""
        self.pipe.close(self.me.name)

    def tell(self, message: dict[str, Any]) -> None:
        """Report to the other side; a link that is gone needs none."""
        try:
            self.pipe.send(self.me.name, message)
        except PeerLost:
            self.close()

    def take(self, taking: Taking) -> Steps:
        """As Inbound.take."""
        me, slot, deadline = self.me, taking.slot, taking.deadline
        while self.in_round:
            left = deadline - me.clock()
            if left <= 0:
                raise DeadlineError(f"the link to {self.peer.name} is busy")
            yield me.changed, min(left, 0.5)
        self.in_round = self.touched = self.unconfirmed = True
        base = self.shadow.base(taking.serving) if not taking.have else None  # type: ignore[arg-type]
        self.pipe.send(
            me.name,
            {
                "kind": "ready",
                "round": taking.offer.round,
                "version": taking.offer.version,
                "memory": slot,
                "base": base,
                "have": {int(path) for path in taking.have},
                "timeout_s": max(0.0, deadline - me.clock()),
            },
        )
        answer = yield from self._next(taking)
        if answer["kind"] == "refused":
            self.touched = self.unconfirmed = False
            raise Gone(f"{self.peer.name}: {answer['reason']}")
        self._expect(answer, "begin")
        me.world.moment("receiving", me)
        frame = None
        if answer["payload"] == "frame":
            frame = yield from self._next(taking)
            self._expect(frame, "frame")
        else:
            self.shadow.spoiled(slot)  # type: ignore[arg-type]
        done = yield from self._words(taking)
        self._expect(done, "done")
        if done["version"] != taking.offer.version:
            raise ProtocolError(f"{self.peer.name} sent {done['version']}, expected {taking.offer.version}")
        self.unconfirmed = False
        if frame is not None:
            self._apply(taking, frame["base"], frame["changed"])

    def _words(self, taking: Taking) -> Generator[Any, Any, dict[str, Any]]:
        """The next message that isn't about words that arrive."""
        while True:
            message = yield from self._next(taking)
            match message["kind"]:
                case "failed":
                    raise PeerLost(f"{self.peer.name} gave up: {message['reason']}")
                case "chunk":
                    taking.slot.write(message["at"], message["word"], self.peer.name)
                    taking.arrived(message["at"])
                case "part":
                    taking.arrived(message["at"])
                case _:
                    return message

    def _apply(self, taking: Taking, base: Version, changed: dict[int, Any]) -> None:
        """As Shadow.apply: only from the version that serves here, into a copy of it."""
        serving, slot = taking.serving, taking.slot
        if serving is None or self.shadow.base(serving) != base:  # type: ignore[arg-type]
            self.shadow.doubt = True
            raise WrongBase(f"a frame from {base}")
        self.shadow.spoiled(slot)  # type: ignore[arg-type]
        for i in self.peer.holds():
            if i in slot.words:
                slot.words[i] = serving.words[i]
        for i, word in changed.items():
            slot.write(i, word, self.peer.name)

    def verify(self, taking: Taking) -> Steps:
        """As Inbound.verify: what lies in the slot must be what the sender read."""
        sums = yield from self._next(taking)
        if sums["kind"] == "failed":
            raise PeerLost(f"{self.peer.name} gave up: {sums['reason']}")
        self._expect(sums, "sums")
        if self.me.engine.verify and any(taking.slot.words[i] != w for i, w in sums["words"].items()):
            self.shadow.doubt = True
            raise MismatchError(f"bits from {self.peer.name} differ from those sent")
        self.shadow.filled(taking.slot, taking.offer.version, None)  # type: ignore[arg-type]

    def _next(self, taking: Taking) -> Generator[Any, Any, dict[str, Any]]:
        message = yield from receive(self.pipe, self.me, taking.deadline)
        while message["kind"] == "sums" and message["round"] != taking.offer.round:
            message = yield from receive(self.pipe, self.me, taking.deadline)
        if message["round"] != taking.offer.round:
            raise ProtocolError(f"{self.peer.name} speaks of round {message['round']}")
        return message

    def _expect(self, message: dict[str, Any], kind: str) -> None:
        if message["kind"] != kind:
            raise ProtocolError(f"{self.peer.name} said {message['kind']}, expected {kind}")


class Links:
    """All links of one subscriber rank."""

    def __init__(self, me: SubscriberRank) -> None:
        self._me = me
        self.publishers: Members = []
        self._links: dict[tuple[str, str, int], Link] = {}
        self._shadows: dict[tuple[str, str, int], Shadow] = {}
        self._worlds: dict[tuple[str, str], Members] = {}
        self._paired = False

    @property
    def all(self) -> list[Link]:
        """Every link that isn't closed."""
        return [link for link in self._links.values() if not link.closed]

    @property
    def whole(self) -> bool:
        """Whether each publisher that we know has its links, each alive."""
        return bool(self.publishers) and all(
            (link := self._links.get((PUBLISHER, p["name"], p["rank"]))) is not None and link.alive
            for p in self.publishers
        )

    def update(self, publishers: Members) -> Steps:
        """As Links.update: close what is old and idle, open what is missing."""
        me, self.publishers = self._me, publishers
        current = {p["incarnation"] for p in publishers}
        try:
            if publishers and not self._paired:
                me.lease.info["target"] = "t"
                yield from me.lease.register()
                self._paired = True
            for key, link in list(self._links.items()):
                if key[0] == PUBLISHER and link.incarnation not in current and not link.in_round:
                    self._links.pop(key).close()
            for name in {p["name"] for p in publishers}:
                self._worlds[PUBLISHER, name] = [p for p in publishers if p["name"] == name]
            for publisher in publishers:
                yield from self._link(PUBLISHER, publisher)
        except TransferError as error:
            me.note("no link yet: %s", error)

    def reach(self, offer: Offer, relays: Members) -> Steps:
        """Link to every relay rank that the round reads from."""
        if relays:
            self._worlds[offer.role, offer.world] = relays
        for relay in relays:
            yield from self._link(offer.role, relay)

    def _server(self, member: dict[str, Any]) -> tuple[Server, int]:
        name, _, life = member["info"]["address"].partition("#")
        node = self._me.world.nodes[name]
        assert isinstance(node, Server)
        return node, int(life)

    def _link(self, role: str, member: dict[str, Any]) -> Steps:
        me, key = self._me, (role, member["name"], member["rank"])
        old = self._links.get(key)
        if old is not None and old.incarnation == member["incarnation"] and old.alive:
            return
        node, life = self._server(member)
        if old is not None:
            old.close()
        yield me.network.delay(me.name, node.name)
        deadline = me.clock() + me.limits.handshake_s
        while me.network.weather.cut(me.name, node.name):
            if me.clock() > deadline:
                raise DeadlineError(f"no connection to {node.name} in time")
            yield 0.5
        if not node.alive or node.life != life:
            raise PeerLost(f"{node.name} refused the connection")
        pipe = Pipe(me.network, me, node)
        node.accept(pipe, (me.engine.name, me.rank), me.engine.modes[member["rank"] % len(me.engine.modes)])
        pipe.send(me.name, {"kind": "open"})
        try:
            yield from receive(pipe, me, deadline)
        except TransferError:
            pipe.close(me.name)
            raise
        shadow = self._shadows.setdefault(key, Shadow("plan", None, None))  # type: ignore[arg-type]
        self._links[key] = link = Link(pipe, node, member["incarnation"], me, shadow)
        if role == PUBLISHER and me.state.told is not None:
            link.tell({"kind": "installed", "round": "", "version": me.state.told})

    def of(self, offer: Offer) -> list[Link]:
        """The links that an offer comes over. PeerLost when one is missing."""
        mine, found = set(self._me.positions), []
        members = self._worlds.get((offer.role, offer.world), [])
        for member in members:
            if not mine.intersection(self._server(member)[0].holds()):
                continue
            link = self._links.get((offer.role, offer.world, member["rank"]))
            if link is None or link.closed:
                break
            found.append(link)
        else:
            if found and len(members) == members[0]["size"]:
                return found
        raise PeerLost(f"no link to {offer.source}, which has {offer.version}")

    def can_take(self, offer: Offer) -> bool:
        """A publisher must be linked, relays are reached afterwards."""
        if offer.role != PUBLISHER:
            return True
        try:
            return bool(self.of(offer))
        except PeerLost:
            return False

    def edges_of(self, offer: Offer) -> list[set[str]]:
        """The words that each edge of an offer brings."""
        mine = set(self._me.positions)
        return [{str(i) for i in mine.intersection(link.peer.holds())} for link in self.of(offer)]

    def cut_unconfirmed(self, reading: tuple[Link, ...] = ()) -> bool:
        """Close every link whose sender may still write a slot of ours; whether there was one."""
        links = {id(link): link for link in [*self._links.values(), *reading]}
        suspects = [link for link in links.values() if link.unconfirmed]
        for link in suspects:
            link.close()
            link.unconfirmed = link.in_round = False
        return bool(suspects)

    def begins(self, offer: Offer, slot: Memory, live: set[int]) -> None:
        """A round fills ``slot``: what edges of other sources know of its content is void."""
        for key, shadow in self._shadows.items():
            shadow.forget(live)
            if key[:2] != (offer.role, offer.world):
                shadow.spoiled(slot)  # type: ignore[arg-type]

    def holds(self, offer: Offer, slot: Memory) -> None:
        """``slot`` holds a verified version, which edges of other sources can start from too."""
        for key, shadow in self._shadows.items():
            if key[:2] != (offer.role, offer.world):
                shadow.holds(slot.generation, offer.version)
