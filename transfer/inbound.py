"""The subscriber's end of one link to a publisher or relay: opens it, takes versions into a slot."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jaxrl_sync.sharding import Edge, UserError
from jaxrl_sync.sharding.digests import add_digests
from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.brought import Brought, applied_together, moved_of, seconds_of
from jaxrl_sync.transfer.codec.errors import FrameError, WrongBase
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.hub.client import Member
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.memory import SharedMemory
from jaxrl_sync.transfer.outbound import keep_alive, numbered
from jaxrl_sync.transfer.passing import Passed, parted
from jaxrl_sync.transfer.payload.settings import FRAME
from jaxrl_sync.transfer.payload.shadow import Applied, Shadow
from jaxrl_sync.transfer.placement import FULL, Terms
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.slots import Slot
from jaxrl_sync.transfer.taking import Gone as Gone
from jaxrl_sync.transfer.taking import Taking
from jaxrl_sync.transfer.transports.base import remaining
from jaxrl_sync.transfer.transports.parts import Flow
from jaxrl_sync.transfer.transports.shm import PIECES, ShmReceiver
from jaxrl_sync.transfer.transports.tcp import TcpReceiver
from jaxrl_sync.transfer.transports.verbs import VerbsReceiver, has_port
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.version import Version
from jaxrl_sync.transfer.wire import Connection

Digests = dict[str, tuple[int, int]]
Arrived = Callable[[Iterable[str]], None]

FRAME_FACTOR = 6
FRAME_ROOM = 1 << 20
"""A frame is at most so many times the edge, and its head: 32-bit positions of elements of one byte."""

RELAY_PARTS = 32
"""A relay has what comes over shared memory told in so many parts, to hand them on."""

LAST_WORDS_S = 0.2

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True)
class Opening:
    """What a link needs to be opened: the token, the blobs that the hub has, the plan, the edge."""

    token: str
    run_id: str
    target: str
    correspondence: str
    plan_digest: str
    edge: Edge
    shadow: Shadow
    paths: list[str]


class Inbound:
    """One open link. Owns its connections; ``close()`` fences: nothing more arrives through it."""

    def __init__(
        self, publisher: Member, opening: Opening, config: SubscriberConfig, slots: list[Slot]
    ) -> None:
        """Connect, prove the token, compare plans, agree on a transport. Blocks.

        MismatchError when the publisher refuses for good, AuthError, PeerLost, DeadlineError, TransferError.
        """
        self.incarnation = publisher.incarnation
        self.peer = f"{publisher.name}.{publisher.rank}"
        self.edge = opening.edge
        self.shadow = opening.shadow
        self.brought = Brought(FULL, opening.edge.total_bytes)
        self.unconfirmed = False
        self.touched = False
        """Whether the last round may have written the slot."""
        self._told: dict[str, float] = {}
        self._applied: list[tuple[Shadow, Applied]] = []
        self._times_of, self._times = "", dict[str, float]()
        self._round_lock = threading.Lock()
        self._in_round = self._out_of_step = False
        self._config = config
        self._opening = opening
        self._address = str(publisher.info.get("address"))
        self._lanes: list[Connection] = []
        self._link = ""
        self._connection = self._connect({"purpose": "weights"})
        try:
            self._receiver: ShmReceiver | TcpReceiver | VerbsReceiver = self._open(config.transport, slots)
        except BaseException:
            self.close()
            raise

    @property
    def resumes(self) -> bool:
        """Whether it leaves out what is there already: chunks of verbs don't end where tensors do."""
        return not isinstance(self._receiver, VerbsReceiver)

    @property
    def transport(self) -> str:
        """shm, verbs or tcp."""
        return self._receiver.name

    def _connect(self, hello: dict[str, Any]) -> Connection:
        config = self._config
        sock = wire.dial(self._address, config.handshake_timeout_s)
        try:
            hello = {**hello, "engine": config.engine, "rank": config.rank, "size": config.size}
            reply = auth.connect(
                sock, self._opening.token, self._opening.run_id, hello, config.handshake_timeout_s
            )
            keep_alive(sock)
        except BaseException:
            sock.close()
            raise
        self._link = self._link or str(reply.get("link"))
        return Connection(sock, self.peer)

    def _open(self, transport: str, slots: list[Slot]) -> ShmReceiver | TcpReceiver | VerbsReceiver:
        """Offer what this side can do and set up what the publisher chose."""
        verbs = None
        if transport == "verbs":
            verbs = VerbsReceiver(self.edge, self._config.verbs, self._connection, slots)
        try:
            chosen = self._negotiate(transport, slots, verbs)
        except BaseException:
            if verbs is not None:
                verbs.close()
            raise
        if verbs is not None and chosen is not verbs:
            verbs.close()
        return chosen

    def _open_verbs_or_tcp(self, slots: list[Slot]) -> ShmReceiver | TcpReceiver | VerbsReceiver:
        """Both ends have a port: register memory now, and take tcp after all where that fails."""
        try:
            return self._open("verbs", slots)
        except (MismatchError, PeerLost, DeadlineError):
            raise
        except (TransferError, VerbsError) as error:
            logger.warning("edge from %s: no verbs after all, tcp instead: %s", self.peer, error)
            return self._open("tcp", slots)

    def _negotiate(
        self, transport: str, slots: list[Slot], verbs: VerbsReceiver | None
    ) -> ShmReceiver | TcpReceiver | VerbsReceiver:
        memories = [s.memory for s in slots if isinstance(s.memory, SharedMemory) and s.memory.linked]
        message = {
            "kind": "open",
            "target": self._opening.target,
            "correspondence": self._opening.correspondence,
            "plan": self._opening.plan_digest,
            "process": self.edge.target_process,
            "transport": transport,
            "segments": [m.describe() for m in memories],
            "verbs": verbs.describe() if verbs is not None else None,
            "payloads": [FULL, FRAME],
            "verbs_port": transport == "auto" and has_port(self._config.verbs),
        }
        opened = self._ask(message, "opened", self._config.hub_timeout_s)
        self.terms = terms = Terms.from_json(opened.get("terms"))
        if terms.transport == "shm":
            if memories and memories[0].answered_with(str(opened.get("answer"))):
                logger.info("edge from %s: shm (%s)", self.peer, terms.reason)
                return ShmReceiver()
            if transport == "shm":
                raise TransferError(
                    f"{self.peer} wrote its nonce into other memory than ours: shm can't be used"
                )
            return self._open("tcp", slots)
        if terms.transport == "verbs" and transport == "auto":
            return self._open_verbs_or_tcp(slots)
        if terms.transport == "verbs" and verbs is not None:
            verbs.connect(opened.get("verbs"))
            logger.info("edge from %s: verbs (%s, %s)", self.peer, terms.reason, verbs.reason)
            return verbs
        if terms.transport != "tcp":
            raise ProtocolError(f"{self.peer} chose transport {terms.transport!r}, which isn't offered here")
        logger.info("edge from %s: tcp (%s)", self.peer, terms.reason)
        return self._open_lanes(terms)

    def _open_lanes(self, terms: Terms) -> TcpReceiver:
        count = min(self._config.connections, max(1, -(-self.edge.total_bytes // terms.chunk_bytes)))
        for index in range(count):
            self._lanes.append(self._connect({"purpose": "lane", "link": self._link, "lane": index}))
        self._ask({"kind": "lanes", "count": count}, "lanes_ready", self._config.handshake_timeout_s)
        return TcpReceiver(self.edge, self._lanes, terms)

    def _ask(self, message: dict[str, Any], expected: str, timeout_s: float) -> dict[str, Any]:
        self._connection.send(message, timeout_s=timeout_s)
        answer, _ = self._connection.recv(timeout_s)
        if answer.get("kind") == "refused":
            kind = MismatchError if answer.get("fatal") else TransferError
            raise kind(f"{self.peer} refused: {answer.get('reason')}")
        if answer.get("kind") != expected:
            raise ProtocolError(f"{self.peer} answered {answer.get('kind')!r}, expected {expected!r}")
        return answer

    def take(self, taking: Taking) -> None:
        """Bring the edge of one version into the slot; ``verify`` and then ``end`` must follow.

        A frame starts from what the serving slot holds. ``unconfirmed`` is True while the sender may write
        the slot. Gone, PeerLost, DeadlineError, ProtocolError; FrameError, WrongBase and WrongPlan ask for
        an anchor next time.
        """
        offer, slot, serving, deadline = taking.offer, taking.slot, taking.serving, taking.deadline
        if not self._round_lock.acquire(timeout=remaining(deadline)):
            raise DeadlineError(f"the link to {self.peer} is busy")
        self._in_round, self.touched, self.unconfirmed = True, True, True
        self._applied = []
        start, self._times_of, self._times = time.monotonic(), offer.round, {}
        base = self.shadow.base(serving) if not taking.have else None
        self._connection.send(self._ready(taking, base), timeout_s=remaining(deadline))
        answer = self._next(offer, deadline)
        if answer.get("kind") == "refused":
            self.touched = self.unconfirmed = False
            raise Gone(f"{self.peer}: {answer.get('reason')}")
        self._expect(answer, "begin")
        if isinstance(self._receiver, TcpReceiver):
            self._receiver.expect(offer.round)
        if answer.get("payload") not in self.terms.payloads:
            raise ProtocolError(
                f"{self.peer} sends payload {answer.get('payload')!r}, agreed on {self.terms.payloads}"
            )
        frames, shadows = list[Passed](), dict[int, Shadow]()
        arrived = taking.progress.edge({c.target_path for c in self.edge.copies if c.num_elements})
        if answer.get("payload") == FRAME:
            shadows = self._shadows_for(answer, taking, base)
            frames = self._receive_frames(answer, taking, base, shadows)
            taking.passing.put(frames)
        else:
            taking.passing.refuse()
            self.shadow.spoiled(slot)
            self._receive_full(taking, arrived)
        done = self._parts(taking, arrived)
        self._expect(done, "done")
        if done.get("version") != version_json(offer.version):
            raise ProtocolError(f"{self.peer} sent version {done.get('version')}, expected {offer.version}")
        self.unconfirmed = False
        moved = {**moved_of(done.get("moved")), **({} if taking.have else self._receiver.moved)}
        resumed = sum(c.total_bytes for c in self.edge.copies if c.target_path in taking.have)
        self.brought = Brought(FULL, self.edge.total_bytes - resumed, moved=moved, resumed=resumed)
        if frames:
            self._apply(frames, shadows, taking)
        self._times["round_s"] = time.monotonic() - start

    def _ready(self, taking: Taking, base: Version | None) -> dict[str, Any]:
        numbers = {p: n for n, p in enumerate(self._opening.paths)}
        return {
            "kind": "ready",
            "round": taking.offer.round,
            "version": version_json(taking.offer.version),
            "timeout_s": remaining(taking.deadline),
            "segments": taking.segments,
            "base": version_json(base) if base is not None else None,
            "passed": wish.to_json() if (wish := taking.wish) is not None else None,
            "have": sorted(numbers[p] for p in taking.have),
            "parts": RELAY_PARTS if self._config.relay else PIECES,
            **self._receiver.ready(taking.slot),
        }

    def _receive_full(self, taking: Taking, arrived: Arrived) -> None:
        flow, start = Flow(taking.have, arrived=arrived), time.monotonic()
        try:
            self._receiver.receive(taking.slot.views, taking.deadline, flow)
        except PeerLost as error:
            raise PeerLost(self._last_words() or str(error)) from error
        if isinstance(self._receiver, TcpReceiver):  # with the others it is the sender that writes
            self._times["arrive_s"] = time.monotonic() - start

    def times(self, offer: Offer) -> dict[str, float]:
        """Seconds of this round: until its bytes were in (tcp, frames), and from `ready` until verified."""
        return dict(self._times) if self._times_of == offer.round else {}

    def _last_words(self) -> str:
        """Why the sender ended the round, where it still said so."""
        end = time.monotonic() + LAST_WORDS_S
        try:
            while (left_s := end - time.monotonic()) > 0 and self._connection.wait_readable(left_s):
                message, _ = self._connection.recv(LAST_WORDS_S)
                if message.get("kind") == "failed":
                    return f"{self.peer} gave up: {message.get('reason')}"
        except TransferError:
            pass
        return ""

    def _parts(self, taking: Taking, arrived: Arrived) -> dict[str, Any]:
        """The next word of the sender that isn't about parts that it has put in place."""
        while True:
            message = self._next(taking.offer, taking.deadline)
            if message.get("kind") != "part":
                return message
            arrived(numbered(message.get("paths"), self._opening.paths))
            if time.monotonic() > taking.deadline:  # however much there is to read
                raise DeadlineError(f"{self.peer} was still telling parts when the round ended")

    def _shadows_for(self, begin: dict[str, Any], taking: Taking, base: Version | None) -> dict[int, Shadow]:
        """What frames are applied by, per source process: this edge's, or those that a relay hands on."""
        if begin.get("passed") is None:
            if base is None:
                raise ProtocolError(
                    f"{self.peer} sends a frame for {taking.offer.version}, but no base was named"
                )
            return {self.edge.source_process: self.shadow}
        if taking.wish is None or taking.origin is None:
            raise ProtocolError(f"{self.peer} hands frames on, but none were wished for")
        self.shadow.spoiled(taking.slot)
        if taking.was is not None:
            for shadow in taking.origin.shadows.values():
                shadow.holds(taking.slot.generation, taking.was)
        return dict(taking.origin.shadows)

    def _receive_frames(
        self, begin: dict[str, Any], taking: Taking, base: Version | None, shadows: Mapping[int, Shadow]
    ) -> list[Passed]:
        """One frame per shadow; while they are on their way, the slot catches up with what serves."""
        for shadow in shadows.values():
            shadow.catch_up(taking.slot, taking.serving)
        start = time.monotonic()
        data = self._receive_frame(begin.get("bytes"), taking.deadline)
        self._times["arrive_s"] = time.monotonic() - start
        told, wish = begin.get("passed"), taking.wish
        if told is not None and wish is not None:
            return parted(told, data, wish.plan, wish.base, sorted(shadows))
        assert base is not None
        return [Passed(self._opening.plan_digest, self.edge.source_process, base, data)]

    def _receive_frame(self, nbytes: object, deadline: float) -> bytearray:
        """A frame of so many bytes; none needs more than positions and values of every element."""
        limit = FRAME_FACTOR * self.edge.total_bytes + FRAME_ROOM
        if not isinstance(nbytes, int) or not 0 < nbytes <= limit:
            raise ProtocolError(f"{self.peer} announces a frame of {nbytes!r} bytes, expected 1 to {limit}")
        if isinstance(self._receiver, (TcpReceiver, VerbsReceiver)):
            data = bytearray(nbytes)
            self._receiver.receive_frame(data, deadline)
            return data
        header, data = self._connection.recv(remaining(deadline), nbytes)
        self._expect(header, "frame")
        return data

    def _apply(self, frames: Sequence[Passed], shadows: Mapping[int, Shadow], taking: Taking) -> None:
        start, version, serving = time.monotonic(), taking.offer.version, taking.serving
        try:
            if serving is None:
                raise WrongBase(f"{self.peer} sent a frame for {version}, but no version serves here")
            for frame in frames:
                shadow = shadows[frame.source]
                self._applied.append((shadow, shadow.apply(frame.data, taking.slot, serving, version)))
        except TransferError as error:
            self._out_of_step = isinstance(error, FrameError) and isinstance(self._receiver, TcpReceiver)
            for shadow in shadows.values():
                shadow.doubt = True
            raise
        applied = applied_together([(shadow.nbytes, a) for shadow, a in self._applied])
        nbytes = sum(len(f.data) for f in frames)
        self.brought = Brought(FRAME, nbytes, applied, time.monotonic() - start)

    def verify(self, taking: Taking) -> None:
        """The state digest decides: what lies in the slot must be what the sender read. MismatchError."""
        offer, slot, deadline = taking.offer, taking.slot, taking.deadline
        copies, start, rows = self.edge.copies, time.monotonic(), self._counted(slot)
        known = [digests for _, digests in rows if digests is not None]
        found = add_digests(*known) if len(known) == len(rows) else None
        sent = self.sums(offer, deadline)
        if self._config.verify and found is not None and (sent or not copies):
            wrong = sorted(p for p in found if found[p] != sent.get(p))
            if wrong or len(found) != len(sent):
                for shadow, _ in rows:
                    shadow.doubt = True
                self._out_of_step = isinstance(self._receiver, TcpReceiver)  # a lane may have bytes left
                where = f"{self.peer} over {self.transport} differ from those sent in"
                raise MismatchError(f"bits from {where}: {', '.join(wrong[:5]) or 'other tensors'}")
        for shadow, digests in rows:
            (shadow.verified if self._applied else shadow.filled)(slot, offer.version, digests)
        self.shadow.holds(slot.generation, offer.version)
        taking.passing.verified(found or {})
        seconds = {**self._told, "verify": time.monotonic() - start}
        self._times["round_s"] += seconds["verify"]
        self.brought = dataclasses.replace(self.brought, seconds=seconds)

    def _counted(self, slot: Slot) -> list[tuple[Shadow, Digests | None]]:
        """What this round brought, by shadow, with its sums where they are known or must be counted."""
        rows = [(shadow, applied.digests) for shadow, applied in self._applied] or [(self.shadow, None)]
        if not self._config.verify:
            return rows
        return [(s, s.recount(slot, self._config.threads) if d is None else d) for s, d in rows]

    def sums(self, offer: Offer, deadline: float) -> Digests:
        """The sender's digests of what ``take`` brought: it computes them while we recount ours."""
        message = self._next(offer, deadline)
        self._expect(message, "sums")
        self._told = seconds_of(message.get("seconds"))
        digests = message.get("digests")
        if not isinstance(digests, dict) or not all(_is_pair(d) for d in digests.values()):
            raise ProtocolError(f"{self.peer} sent sums {str(digests)[:200]}, expected pairs by tensor")
        return {p: (d[0], d[1]) for p, d in digests.items()}

    def end(self) -> None:
        """The round is over on this link, however it went; nothing if it never began here.

        A link whose sender may still write stays busy, and so in its place, until `cut` closes it.
        """
        if self._in_round and not self.unconfirmed:
            self._in_round = False
            self._round_lock.release()

    def cut(self) -> None:
        """Close a link whose sender did not confirm; its slot then needs new memory."""
        self.close()
        self.unconfirmed = False
        self.end()

    def _next(self, offer: Offer, deadline: float) -> dict[str, Any]:
        message, _ = self._connection.recv(remaining(deadline))
        while message.get("kind") == "sums" and message.get("round") != offer.round:
            message, _ = self._connection.recv(remaining(deadline))  # of a round that we gave up
        if message.get("round") != offer.round:
            raise ProtocolError(
                f"{self.peer} speaks of round {message.get('round')!r}, expected {offer.round!r}"
            )
        if message.get("kind") == "failed":
            raise PeerLost(f"{self.peer} gave up: {message.get('reason')}")
        return message

    def _expect(self, message: dict[str, Any], kind: str) -> None:
        if message.get("kind") != kind:
            raise ProtocolError(f"{self.peer} said {message.get('kind')!r}, expected {kind!r}")

    def tell(self, message: dict[str, Any], timeout_s: float) -> None:
        """Report to the publisher; a link that is gone, or closed here because it is stuck, needs none."""
        try:
            self._connection.send(message, timeout_s=timeout_s)
        except UserError as error:
            logger.info("no report to %s: %s", self.peer, error)
            self._connection.close()  # half a message may be on the way
        if self._out_of_step:
            self.close()

    @property
    def closed(self) -> bool:
        """Whether this side closed it."""
        return self._connection.closed

    @property
    def busy(self) -> bool:
        """Whether a round is under way on it."""
        return self._round_lock.locked()

    @property
    def alive(self) -> bool:
        """Whether neither side has closed it: between rounds the other side never speaks first."""
        if self.closed or not self._round_lock.acquire(blocking=False):
            return not self.closed
        try:
            return not self._connection.wait_readable(0.0)
        finally:
            self._round_lock.release()

    def close(self) -> None:
        """Close all connections. Idempotent. What a device refuses to give up is logged.

        That breaks no fence: memory that a sender may still write is never used again.
        """
        self._connection.close()
        for lane in self._lanes:
            lane.close()
        receiver = getattr(self, "_receiver", None)
        try:
            if receiver is not None:
                receiver.close()
        except (UserError, OSError, BufferError) as error:
            logger.warning("the edge from %s isn't wholly closed: %s", self.peer, error)


def take_all(pool: concurrent.futures.Executor, links: Sequence[Inbound], taking: Taking) -> None:
    """All edges side by side; waits for every one of them, then raises the first error."""
    takes = [pool.submit(link.take, taking) for link in links[1:]]
    try:
        if links:
            links[0].take(taking)
    finally:
        concurrent.futures.wait(takes)
    while takes:  # none stays in this frame, which its error's traceback holds
        takes.pop(0).result()


def _is_pair(value: object) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(isinstance(v, int) for v in value)
