"""One side of a verbs edge: rails with connected queue pairs, and what is on its way over them.

Receives for immediates are posted before anything is described to the peer, and kept posted: an immediate
never waits for the application. While nothing is on its way, a write of eight bytes to the peer's doorbell
page asks now and then whether the peer's adapter still answers.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.verbs.errors import CompletionError, completion_error
from jaxrl_sync.transfer.verbs.handshake import PROTOCOL, Remote, check_common, remote_of
from jaxrl_sync.transfer.verbs.health import HEALTH
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.opened import Registered
from jaxrl_sync.transfer.verbs.rail import Lane, Rail, Rows, calls, close_all, pick
from jaxrl_sync.transfer.verbs.records import FLUSHED, SUCCESS, new_records, opcode_name
from jaxrl_sync.transfer.verbs.regions import Region
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

logger = logging.getLogger("jaxrl_sync.transfer")
WATCH_S = 0.25
LOOKS = 10
PORT_STATUSES = {2, 12, 19, 20}  # local operation, retries, fatal, timeout: not of keys, lengths or programs
SPIN_S = 20e-6
TURN_S = 0.002  # with several rails each is slept on in turn
PAGE_BYTES = 4096
BATCH = 64
NOTHING: Rows = np.zeros((0, 3), np.uint64)
_DOORBELL: Rows = np.array([[0, 0, 8]], np.uint64)

Ticket = tuple[int, int]
"""Queue pair (its token) and number of a work request."""


class Memory:
    """Memory of this process registered on every rail of an endpoint, which owns the registrations."""

    def __init__(self, buffer: memoryview, regions: Sequence[Registered]) -> None:
        self.buffer, self.regions = buffer, list(regions)

    def ready(self) -> None:
        """Blocks until what computes the content is through."""
        self.regions[0].region.ready()

    def flush(self) -> None:
        """Blocks until what peers have written is seen by who uses the memory next."""
        self.regions[0].region.flush()

    def describe(self) -> dict[str, Any]:
        """What the peer needs to write here; JSON."""
        first = self.regions[0]
        return {
            "address": first.address,
            "nbytes": first.nbytes,
            "rails": [r.describe() for r in self.regions],
        }


def touched(nbytes: int) -> memoryview:
    """Fresh zeroed memory whose pages are there now, not in the first transfer."""
    made = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError, AttributeError):  # fewer entries in the device's table of pages
        made.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(made, np.uint8)[:: mmap.PAGESIZE] = 0
    return memoryview(made)


class Endpoint:
    """Owns rails and memory. ``close()`` fences: nothing is written here or from here afterwards."""

    def __init__(self, settings: VerbsSettings, peer: str, *, pairs: int, sends: int, receives: int) -> None:
        """Open the chosen ports, ``pairs`` queue pairs on each. VerbsError names what is missing."""
        self.settings, self.peer = settings, peer
        self.watch: Callable[[], None] = lambda: None
        self._status_text: Callable[[int], str] = backend(settings.backend).status_text
        self.rails: list[Rail] = []
        self._held: list[npt.NDArray[np.void]] = []
        self._records = new_records(BATCH)
        self._turn = 0
        self._probed_at = time.monotonic()
        self._remote_doorbell: Remote | None = None
        try:
            for index, chosen in enumerate(pick(settings)):
                self.rails.append(Rail(settings, index, chosen, peer, pairs, sends, receives))
            self.lanes = [lane for rail in self.rails for lane in rail.lanes]
            self._by_token = {lane.pair.token: lane for lane in self.lanes}
            self._doorbell = self.register(touched(PAGE_BYTES), remote_write=True)
        except BaseException:
            self.close()
            raise
        self._rates = [rail.chosen.port.rate_gbps or 1.0 for rail in self.rails]

    @property
    def reason(self) -> str:
        """Which ports were chosen, and why."""
        return " and ".join(rail.chosen.reason for rail in self.rails)

    @property
    def names(self) -> str:
        """The ports, for messages."""
        return "+".join(rail.chosen.port.name for rail in self.rails)

    def register(self, what: memoryview | Region, *, remote_write: bool) -> Memory:
        """Register memory of this edge alone on every rail, until ``close``. VerbsError."""
        buffer = what if isinstance(what, memoryview) else memoryview(b"")
        return Memory(buffer, [rail.register(what, remote_write=remote_write) for rail in self.rails])

    def describe(self) -> dict[str, Any]:
        """What the other side needs to connect; JSON."""
        return {
            "protocol": PROTOCOL,
            "byte_order": sys.byteorder,
            "rails": [rail.describe() for rail in self.rails],
            "doorbell": self._doorbell.describe(),
        }

    def connect(self, other: object) -> None:
        """To RTS with every queue pair. ProtocolError if the description can't be, VerbsError if refused."""
        found = check_common(other)
        if len(found["rails"]) != len(self.rails):
            theirs = "+".join(rail["device"] for rail in found["rails"])
            raise ProtocolError(
                f"{self.peer} has {len(found['rails'])} rails ({theirs}), this side {len(self.rails)} "
                f"({self.names}): sync.verbs.rails must be equal, sync.verbs.devices in the same order"
            )
        for rail, theirs in zip(self.rails, found["rails"], strict=True):
            rail.connect(theirs)
        self._remote_doorbell = remote_of(found["doorbell"], len(self.rails), "the peer's doorbell")

    # Posting.

    def lightest(self, nbytes: int) -> Lane:
        """The queue pair on which ``nbytes`` more would be through first: bytes by rate of the port."""
        return min(self.lanes, key=lambda lane: (lane.outstanding_bytes + nbytes) / self._rates[lane.rail])

    def lane(self, token: int) -> Lane:
        """The queue pair of a completion."""
        return self._by_token[token]

    def write(
        self, lane: Lane, source: Memory, rows: Rows, remote: Remote, deadline: float, imm: int | None = None
    ) -> Ticket:
        """Post writes (local offset, remote offset, bytes) and ``imm`` behind them; the last one's ticket.

        Waits for what computes the source's content first.
        Cut where a message or a region ends. Blocks while the queue is full. DeadlineError, CompletionError,
        PeerLost where ``watch`` says so or another thread closed this side.
        """
        source.ready()
        rail = self.rails[lane.rail]
        region = source.regions[lane.rail]
        cut = list(calls(rows, region.part_bytes, remote, lane.rail, rail.largest))
        for index, (local, part, some) in enumerate(cut):
            start = part * remote.part_bytes[lane.rail]
            where = (
                remote.address + start,
                min(remote.nbytes - start, remote.part_bytes[lane.rail]),
                remote.rkeys[lane.rail][part],
            )
            last = imm if index == len(cut) - 1 else None
            with rail.in_use():
                self._post(lane, region.parts[local], some, where, last, deadline)
        nbytes = int(rows[:, 2].sum())
        lane.flights.append((lane.pair.posted, nbytes))
        lane.outstanding_bytes += nbytes
        return lane.pair.token, lane.pair.posted

    def say(self, lane: Lane, imm: int, deadline: float) -> Ticket:
        """Post an immediate alone."""
        assert self._remote_doorbell is not None
        return self.write(lane, self._doorbell, NOTHING, self._remote_doorbell, deadline, imm)

    def _post(
        self, lane: Lane, part: Any, rows: Rows, where: tuple[int, int, int], imm: int | None, deadline: float
    ) -> None:
        done, total, looked = 0, len(rows) + (imm is not None), time.monotonic()
        while done < total:
            done += lane.pair.write(part, rows, *where, start=done, imm=imm)
            if done < total:
                self.rails[lane.rail].queue.wait(TURN_S)
                self._collect()
                now = time.monotonic()
                if now - looked >= WATCH_S or now >= deadline:
                    looked = now
                    self._look()
                    for rail in self.rails:
                        rail.check_events()
                if now >= deadline:
                    raise DeadlineError(
                        f"the queue to {self.peer} over {self.names} stayed full until the deadline"
                    )

    # Completions.

    def events(self, deadline: float, what: str) -> npt.NDArray[np.void]:
        """Completions, at least one; used receives are posted again. Blocks, without the GIL.

        ``watch`` is called now and then and may raise PeerLost. CompletionError on the first failed one
        (PeerUnreachable where the peer is gone), VerbsError when a device fails, DeadlineError that names
        ``what`` was awaited.
        """
        looked = time.monotonic()
        with self.rails[0].in_use():  # the first to be closed
            while not self._held and not self._collect():
                now = time.monotonic()
                if now - looked >= WATCH_S or now >= deadline:
                    looked = now
                    self._look()
                    for rail in self.rails:
                        rail.check_events()
                    self._probe(now)
                if now >= deadline:
                    raise DeadlineError(f"{what} with {self.peer} over {self.names}: deadline passed")
                self._sleep(min(WATCH_S, deadline - now))
        return self._held.pop(0)

    def _look(self) -> None:
        try:
            self.watch()
        except PeerLost as error:
            numbers = ", ".join(f"0x{lane.pair.qp_num:06x}" for lane in self.lanes)
            on_way = sum(lane.outstanding_bytes for lane in self.lanes)
            raise PeerLost(
                f"{error} (queue pairs {numbers} over {self.names}, {on_way} bytes not acknowledged)"
            ) from error

    def _sleep(self, limit_s: float) -> None:
        """Until something completes, on one rail or, for a moment each, on all in turn."""
        self._turn = (self._turn + 1) % len(self.rails)
        self.rails[self._turn].queue.wait(limit_s if len(self.rails) == 1 else min(limit_s, TURN_S), SPIN_S)

    def _collect(self) -> bool:
        """Take what has completed; whether there was anything. CompletionError."""
        before = len(self._held)
        for rail in self.rails:
            found = self._records[: rail.queue.poll(self._records)]
            if not len(found):
                continue
            for record in found[found["status"] != SUCCESS]:
                raise self._error(rail, record)
            receive = found["receive"] == 1
            for token in found["token"][receive].tolist():
                self._by_token[token].pair.receive(1)
            for record in found[~receive]:
                self._by_token[int(record["token"])].retire(int(record["seq"]))
            self._held.append(found.copy())
        return len(self._held) > before

    def _probe(self, now: float) -> None:
        """Ask a peer of whom nothing is awaited by us for a sign of life; an error comes as a completion."""
        if self._remote_doorbell is None or now - self._probed_at < WATCH_S:
            return
        self._probed_at = now
        for rail in self.rails:
            lane = rail.lanes[0]
            if lane.pair.posted == lane.pair.retired:
                self.write(lane, self._doorbell, _DOORBELL, self._remote_doorbell, now + WATCH_S)

    def _error(self, rail: Rail, record: np.void) -> CompletionError:
        status = int(record["status"])
        detail = rail.trouble(self._by_token[int(record["token"])])
        if status == FLUSHED and not detail:
            detail = "the queue pair was already in error"
        gone = self._peer_gone()
        if not gone and status in PORT_STATUSES:
            HEALTH.failed(rail.chosen.port.name)
        return completion_error(
            status,
            bool(gone),
            peer=self.peer,
            device=rail.chosen.port.name,
            qp_num=int(record["qp_num"]),
            opcode=opcode_name(int(record["opcode"])),
            text=self._status_text(status),
            seq=int(record["seq"]),
            vendor_err=int(record["vendor_err"]),
            detail="; ".join(words for words in (detail, gone) if words),
        )

    def well(self) -> None:
        """A round went well over every rail."""
        for rail in self.rails:
            HEALTH.well(rail.chosen.port.name)

    def _peer_gone(self) -> str:
        """Why the peer is lost, if it is: of a process that dies, memory may go before its connections do.

        It looks so often, not for so long: who is stopped between two looks leaves the other no time to die.
        """
        for look in range(LOOKS + 1):
            if look:
                time.sleep(WATCH_S / LOOKS)
            try:
                self.watch()
            except PeerLost as error:
                return str(error)
        return ""

    def close(self) -> None:
        """Queue pairs at once, then memory and devices; a slot's registration stays. Idempotent.

        A thread that waits here ends with an error, because the watch of its link tells it. Blocks until it
        is out, for a second per rail at most. VerbsError.
        """
        if logger.isEnabledFor(logging.DEBUG):
            for rail in self.rails:
                logger.debug("edge to %s: %s", self.peer, rail.stats())
        close_all(self.rails)
