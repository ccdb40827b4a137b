"""The publisher's end of one link: a thread that writes versions to one subscriber rank as it asks."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

from jaxrl_sync.sharding import Edge, MappingError, SlotLayout, UserError
from jaxrl_sync.sharding.digests import copies_digest
from jaxrl_sync.transfer.brought import seconds_of
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.hub.state import version_json, version_of
from jaxrl_sync.transfer.outcome import RankKey, RankOutcome
from jaxrl_sync.transfer.owner import Owner, Reading
from jaxrl_sync.transfer.passing import Passed, Wish
from jaxrl_sync.transfer.payload.chain import Encoded
from jaxrl_sync.transfer.payload.chains import Use
from jaxrl_sync.transfer.payload.settings import FRAME
from jaxrl_sync.transfer.placement import ALL_PLACED, ALL_STAGED, FULL, Terms
from jaxrl_sync.transfer.transports.base import Sender, remaining
from jaxrl_sync.transfer.transports.parts import Flow, Paths
from jaxrl_sync.transfer.transports.shm import ShmSender
from jaxrl_sync.transfer.transports.tcp import TcpSender
from jaxrl_sync.transfer.transports.verbs import VerbsSender
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.rail import pick
from jaxrl_sync.transfer.version import Version
from jaxrl_sync.transfer.wire import Connection

if TYPE_CHECKING:
    from jaxrl_sync.transfer.pairing import Pairing

LANES_TIMEOUT_S = 10.0
MAX_LANES = 64
PAYLOADS = (FULL, FRAME)

logger = logging.getLogger("jaxrl_sync.transfer")


def keep_alive(sock: socket.socket) -> None:
    """Notice a peer whose machine vanished within about 20 s although nothing is being sent."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 3), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, option):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


class Outbound:
    """One link to one subscriber rank. Owns connection, lanes and mappings; ``close()`` ends it."""

    def __init__(self, owner: Owner, connection: Connection, hello: dict[str, Any], link: str) -> None:
        engine, rank = hello.get("engine"), hello.get("rank")
        if not isinstance(engine, str) or not isinstance(rank, int):
            raise ProtocolError(
                f"a subscriber says engine {engine!r} and rank {rank!r}, expected text and integer"
            )
        self.key: RankKey = (engine, rank)
        self.link = link
        self._owner = owner
        self._connection = connection
        self._lanes: dict[int, Connection] = {}
        self._lanes_changed = threading.Condition()
        self._edge: Edge | None = None
        self.terms: Terms | None = None
        self._pairing: Pairing | None = None
        self._sender: Sender | None = None
        self._sent: dict[str, RankOutcome] = {}
        self.unconfirmed: Version | None = None
        """A version that was sent in whole and of which the receiver hasn't said what became of it."""
        self._queue_s = 0.0
        self._use_of_chain: Use | None = None
        self._thread = threading.Thread(target=self._run, name=f"link-{engine}.{rank}", daemon=True)

    def start(self) -> None:
        """Serve the link from its own thread."""
        self._thread.start()

    def add_lane(self, connection: Connection, index: object) -> None:
        """Another connection of the same subscriber for chunks; lanes may be proven in any order."""
        with self._lanes_changed:
            if not isinstance(index, int) or index in self._lanes or not 0 <= index < MAX_LANES:
                raise ProtocolError(f"lane {index!r}, expected another one from 0 to {MAX_LANES - 1}")
            if self._connection.closed:
                raise PeerLost(f"a lane of the link {self.link}, which was closed")
            self._lanes[index] = connection
            self._lanes_changed.notify_all()

    def _run(self) -> None:
        reason = "the publisher closed the link"
        try:
            while not self._owner.closing:
                if self._connection.wait_readable(1.0):
                    message, _ = self._connection.recv(self._owner.config.handshake_timeout_s)
                    self._take(message)
        except UserError as error:
            reason = str(error)
        except Exception as error:
            logger.exception("link to %s.%d failed", *self.key)
            reason = f"{type(error).__name__}: {error}"
        finally:
            self.close()
            self._owner.link_ended(self, reason)

    def _take(self, message: dict[str, Any]) -> None:
        match message.get("kind"):
            case "open":
                self._say(self._open(message))
            case "lanes":
                self._say(self._use_lanes(message))
            case "ready":
                self._serve(message)
            case "installed":
                version = self._confirmed(message)
                sent = self._sent.pop(str(message.get("round")), RankOutcome())
                seconds = {**sent.seconds, **seconds_of(message.get("seconds"))}
                result = dataclasses.replace(sent, state="installed", seconds=seconds)
                if self._use_of_chain is not None:
                    self._use_of_chain.confirmed(version, sent.nbytes, seconds_of(message.get("times")))
                self._owner.installed(self.key, version, result)
            case "gave_up":
                detail = str(message.get("reason"))
                self._owner.gave_up(self.key, self._confirmed(message), RankOutcome("aborted", detail))
            case kind:
                raise ProtocolError(f"{self._connection.peer} sent a message {kind!r} that isn't known here")

    def _confirmed(self, message: dict[str, Any]) -> Version:
        """The version of which the receiver says what became of it; word of an older one may come late."""
        version = _version(message)
        if version == self.unconfirmed:
            self.unconfirmed = None
        return version

    def _say(self, message: dict[str, Any]) -> None:
        self._connection.send(message, timeout_s=self._owner.config.timeout_s)

    def _open(self, message: dict[str, Any]) -> dict[str, Any]:
        """Pair the layouts, compare plans, choose the transport. A refusal says why in words."""
        try:
            pairing = self._owner.pairing(str(message.get("target")), str(message.get("correspondence")))
            if message.get("plan") != pairing.digest:
                raise MismatchError(f"plan digest {message.get('plan')!r}, expected {pairing.digest!r} here")
            process = message.get("process")
            if not isinstance(process, int):
                raise ProtocolError(f"open names process {process!r}, expected an integer")
            self._edge = pairing.edge(self._owner.rank, process)
            self._pairing = pairing
            opened = self._choose(message, SlotLayout.of(pairing.target, process))
        except PeerLost:
            raise
        except UserError as error:
            logger.warning("refused a link to %s.%d: %s", *self.key, error)
            fatal = isinstance(error, (MismatchError, MappingError))
            return {"kind": "refused", "reason": str(error), "fatal": fatal}
        self._owner.link_opened(self, pairing)
        return opened

    def _choose(self, message: dict[str, Any], slot: SlotLayout) -> dict[str, Any]:
        """shm where a nonce in the receiver's memory can be read here, else verbs, else tcp; and why."""
        assert self._edge is not None
        config = self._owner.config
        wanted = {config.transport, str(message.get("transport"))} - {"auto"}
        if len(wanted) > 1:
            raise MismatchError(f"publisher and subscriber ask for different transports: {sorted(wanted)}")
        choice = wanted.pop() if wanted else "auto"
        opened: dict[str, Any] = {"kind": "opened", "answer": ""}
        theirs = message.get("payloads")
        payloads = tuple(k for k in PAYLOADS if isinstance(theirs, list) and k in theirs)
        reasons = []
        for name, attempt in (("shm", self._try_shm), ("verbs", self._try_verbs)):
            if choice not in (name, "auto"):
                continue
            try:
                opened |= attempt(message, slot)
                break
            except (TransferError, VerbsError) as error:
                if choice == name:
                    raise
                reasons.append(str(error))
        else:
            opened |= {"transport": "tcp", "reason": "; ".join(reasons) or "as configured"}
        chosen, why = opened.pop("transport"), opened.pop("reason")
        border = {"shm": ALL_PLACED, "tcp": config.placed_run_bytes}.get(chosen, ALL_STAGED)
        self.terms = Terms(chosen, why, border, config.chunk_bytes, payloads)
        self._owner.chains.close(self.link)
        self._use_of_chain = None
        if FRAME in payloads:
            plan = str(message.get("plan"))
            self._use_of_chain = self._owner.chains.open(self.link, plan, self._edge, chosen)
        logger.info("edge to %s.%d: %s (%s), %d bytes", *self.key, chosen, why, self._edge.total_bytes)
        return opened | {"terms": self.terms.to_json()}

    def _try_shm(self, message: dict[str, Any], slot: SlotLayout) -> dict[str, Any]:
        assert self._edge is not None
        sender = ShmSender(self._edge, slot, self._owner.run_id, self._owner.config.threads)
        try:
            segments = message.get("segments")
            if not isinstance(segments, list) or not segments or not isinstance(segments[0], dict):
                raise TransferError("the subscriber offers no shared memory")
            answer = sender.map(segments[0]).answer().hex()
        except TransferError:
            sender.close()
            raise
        self._use(sender)
        reason = f"its nonce in {segments[0]['name']} is readable here"
        return {"transport": "shm", "answer": answer, "reason": reason}

    def _try_verbs(self, message: dict[str, Any], slot: SlotLayout) -> dict[str, Any]:
        assert self._edge is not None
        config, offer = self._owner.config, message.get("verbs")
        if offer is None and message.get("verbs_port"):
            why = " and ".join(chosen.reason for chosen in pick(config.verbs))
            return {"transport": "verbs", "reason": f"both ends have a port, here {why}"}
        if offer is None:
            raise TransferError("the subscriber has no usable RDMA port")
        sender = VerbsSender(self._edge, config.verbs, offer, self._connection, slot, config.threads)
        self._use(sender)
        return {"transport": "verbs", "verbs": sender.describe(), "reason": sender.reason}

    def _use(self, sender: Sender) -> None:
        if self._sender is not None:
            self._sender.close()
        self._sender = sender

    def _use_lanes(self, message: dict[str, Any]) -> dict[str, Any]:
        """All connections of a tcp edge are there: make its sender."""
        count = message.get("count")
        if self._edge is None or not isinstance(count, int) or not 0 < count <= MAX_LANES:
            raise ProtocolError(f"{self._connection.peer} says {count!r} lanes, or before the link is open")
        wanted = range(count)
        with self._lanes_changed:
            if not self._lanes_changed.wait_for(
                lambda: all(i in self._lanes for i in wanted), LANES_TIMEOUT_S
            ):
                raise DeadlineError(f"{len(self._lanes)} of {count} connections after {LANES_TIMEOUT_S:g} s")
            lanes = [self._lanes[i] for i in wanted]
        assert self.terms is not None
        self._use(TcpSender(self._edge, lanes, self.terms))
        return {"kind": "lanes_ready"}

    def _serve(self, ready: dict[str, Any]) -> None:
        """Write one version into the slot that the receiver has ready, and confirm."""
        version, round_id = _version(ready), str(ready.get("round"))
        if self._sender is None or self._edge is None or self._pairing is None:
            raise ProtocolError(f"{self._connection.peer} is ready before the link is open")
        self._queue_s = self._owner.since_published(version)
        deadline = time.monotonic() + given_s(ready.get("timeout_s"), self._owner.config.timeout_s)
        reading = self._owner.read(version, self._pairing, deadline)
        if isinstance(reading, str):
            self._say({"kind": "refused", "round": round_id, "reason": reading})
            return
        try:
            sent = self._send(ready, version, reading, deadline)
        except TransferError as error:
            reason = f"{type(error).__name__}: {error}"
            with contextlib.suppress(TransferError):  # the link ends; who can still hear it is told why
                self._connection.send({"kind": "failed", "round": round_id, "reason": reason}, timeout_s=0.5)
            raise
        finally:
            reading.close()
        sent = dataclasses.replace(sent, seconds={**sent.seconds, "queue": self._queue_s})
        self._sent, self.unconfirmed = {round_id: sent}, version
        self._owner.count_sent(sent.nbytes, sent.seconds["wire"], frame=sent.payload == FRAME)

    def _send(
        self, ready: dict[str, Any], version: Version, reading: Reading, deadline: float
    ) -> RankOutcome:
        """A frame where the receiver's version is a base for one, else everything.

        A version that is still arriving here is waited for then: a relay has no whole version to send before
        it has one, and what changed is sent faster.
        """
        use, base = self._use_of_chain, _base(ready)
        if (passed := self._passed(ready, reading, deadline)) is not None:
            return self._send_passed(ready, version, reading, passed, deadline)
        encoded = None
        if use is not None and (not reading.partial or use.may_follow(base, version)):
            reading.confirm(deadline)
            encoded = use.frame(base, version, reading.shards)
        if encoded is None:
            return self._send_full(ready, version, reading, deadline)
        return self._send_frame(ready, version, encoded, deadline)

    def _passed(self, ready: dict[str, Any], reading: Reading, deadline: float) -> list[Passed] | None:
        """The frames by which the version came here, where the reader can apply them as they are."""
        wish = Wish.from_json(ready.get("passed"))
        assert self._edge is not None and self.terms is not None
        same = self._edge.source_process == self._edge.target_process and FRAME in self.terms.payloads
        if wish is None or not same or self._owner.config.payload.kind == "full":
            return None
        if self._use_of_chain is not None and self._use_of_chain.anchor_due:
            return None
        return reading.frames(wish, deadline)

    def _flow(self, ready: dict[str, Any], reading: Reading, deadline: float) -> Flow:
        """What the receiver has already, what may be read when, and whom to tell what is in place."""
        assert self._pairing is not None
        round_id, paths = ready.get("round"), sorted(self._pairing.target)
        numbers = {p: n for n, p in enumerate(paths)}
        flow = Flow(numbered(ready.get("have"), paths))
        if reading.partial:
            flow = dataclasses.replace(flow, gate=lambda part: reading.wait(part, deadline))
        if "parts" not in ready:
            return flow

        def tell(part: Paths) -> None:
            self._say({"kind": "part", "round": round_id, "paths": [numbers[p] for p in part]})

        return dataclasses.replace(flow, arrived=tell)

    def _send_full(
        self, ready: dict[str, Any], version: Version, reading: Reading, deadline: float
    ) -> RankOutcome:
        """Every element of the edge that isn't there yet, then the sums of all.

        Afterwards the version is a base for frames.
        """
        assert self._sender is not None and self._edge is not None
        round_id, config, sources = str(ready.get("round")), self._owner.config, reading.shards
        flow = self._flow(ready, reading, deadline)
        nbytes = sum(c.total_bytes for c in self._edge.copies if c.target_path not in flow.have)
        self._say({"kind": "begin", "round": round_id, "payload": FULL})
        start = time.monotonic()
        self._sender.send(ready, sources, deadline, flow)
        wire_s = time.monotonic() - start
        done = {"kind": "done", "round": round_id, "version": version_json(version)}
        self._say({**done, "moved": {} if flow.have else self._sender.moved})
        reading.confirm(deadline)
        digests = copies_digest(self._edge.copies, sources, "source", config.threads) if config.verify else {}
        seconds = {"wire": wire_s, "pack": self._sender.pack_s, "queue": self._queue_s}
        self._say({"kind": "sums", "round": round_id, "digests": digests, "seconds": seconds})
        if self._use_of_chain is not None:
            self._use_of_chain.sent_full(version, sources, nbytes, wire_s, digests or None)
        return RankOutcome("pending", "", self._sender.name, nbytes, seconds)

    def _send_frame(
        self, ready: dict[str, Any], version: Version, encoded: Encoded, deadline: float
    ) -> RankOutcome:
        """What changed since the receiver's version: over the lanes of tcp, else over the link itself."""
        assert self._sender is not None and self._use_of_chain is not None
        round_id, size = str(ready.get("round")), len(encoded.data)
        wire_s = self._move_frame(ready, version, encoded.data, {}, deadline)
        digests = encoded.digests if self._owner.config.verify else {}
        seconds = {"wire": wire_s, "encode": encoded.encode_s, "queue": self._queue_s}
        seconds["compare"] = encoded.compare_s
        self._say({"kind": "sums", "round": round_id, "digests": digests, "seconds": seconds})
        self._use_of_chain.sent_frame(version, encoded, wire_s)
        name, density = self._sender.name, encoded.density
        outcome = RankOutcome("pending", "", name, size, seconds, FRAME, encoded.coding, density)
        return dataclasses.replace(outcome, compared=encoded.compared)

    def _send_passed(
        self,
        ready: dict[str, Any],
        version: Version,
        reading: Reading,
        passed: list[Passed],
        deadline: float,
    ) -> RankOutcome:
        """The frames that brought the version here, and its sums once they are verified here."""
        assert self._sender is not None
        data = bytearray().join(f.data for f in passed)
        about = {"passed": [[f.source, len(f.data)] for f in passed]}
        wire_s = self._move_frame(ready, version, data, about, deadline)
        reading.confirm(deadline)
        digests = reading.digests if self._owner.config.verify else {}
        if self._use_of_chain is not None:
            self._use_of_chain.handed_on(version)
        seconds = {"wire": wire_s, "queue": self._queue_s}
        self._say({"kind": "sums", "round": ready.get("round"), "digests": digests, "seconds": seconds})
        return RankOutcome("pending", "", self._sender.name, len(data), seconds, FRAME)

    def _move_frame(
        self,
        ready: dict[str, Any],
        version: Version,
        data: bytearray,
        about: dict[str, Any],
        deadline: float,
    ) -> float:
        """From begin to done; the seconds that it took."""
        round_id = ready.get("round")
        self._say({"kind": "begin", "round": round_id, "payload": FRAME, "bytes": len(data), **about})
        start = time.monotonic()
        if isinstance(self._sender, (TcpSender, VerbsSender)):
            self._sender.send_frame(ready, data, deadline)
        else:
            header = {"kind": "frame", "round": round_id}
            self._connection.send(header, data, timeout_s=remaining(deadline))
        wire_s = time.monotonic() - start
        self._say({"kind": "done", "round": round_id, "version": version_json(version)})
        return wire_s

    def close(self) -> None:
        """Close the connection, the lanes and the mappings. Idempotent; the thread ends by itself."""
        with self._lanes_changed:
            self._connection.close()
            lanes = list(self._lanes.values())
        for lane in lanes:
            lane.close()
        try:
            if threading.current_thread() is self._thread and self._sender is not None:
                self._sender.close()
        except (UserError, OSError, BufferError) as error:
            logger.warning("the edge to %s.%d isn't wholly closed: %s", *self.key, error)

    def join(self, timeout_s: float) -> None:
        """Wait for the thread to end."""
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout_s)


def _base(ready: dict[str, Any]) -> Version | None:
    """The version that the receiver says its serving slot holds."""
    try:
        return version_of(ready.get("base"))
    except ValueError as error:
        raise ProtocolError(str(error)) from error


def _version(message: dict[str, Any]) -> Version:
    try:
        version = version_of(message.get("version"))
    except ValueError as error:
        raise ProtocolError(str(error)) from error
    if version is None:
        raise ProtocolError(f"message {message.get('kind')!r} names no version")
    return version


def given_s(wish: object, most_s: float) -> float:
    """How long a version may take: as the receiver says, where that is a number and not more than we give."""
    known = isinstance(wish, (int, float)) and not isinstance(wish, bool)
    return float(wish) if known and wish < most_s else most_s  # type: ignore[arg-type, operator]


def numbered(numbers: object, paths: list[str]) -> frozenset[str]:
    """Tensors by their numbers in the sorted list of all. ProtocolError for numbers that name none."""
    if numbers is None:
        return frozenset()
    if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < len(paths) for n in numbers):
        raise ProtocolError(f"tensors {str(numbers)[:200]}, expected numbers from 0 to {len(paths) - 1}")
    return frozenset(paths[n] for n in numbers)
