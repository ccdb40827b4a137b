"""One rail of a verbs edge: a port of a device with a completion queue and connected queue pairs."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import secrets
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.errors import PeerLost, ProtocolError
from jaxrl_sync.transfer.verbs import counters
from jaxrl_sync.transfer.verbs.devices import Chosen, Port, choose, rails, scan
from jaxrl_sync.transfer.verbs.errors import PortDown, VerbsError
from jaxrl_sync.transfer.verbs.handshake import MTU_BYTES, Remote
from jaxrl_sync.transfer.verbs.health import HEALTH
from jaxrl_sync.transfer.verbs.opened import OpenDevice, Registered, open_device
from jaxrl_sync.transfer.verbs.regions import Region
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

CLOSE_S = 1.0
GRH_REQUIRED = 1  # of a port's flags: packets need a global route on InfiniBand too
EVENT_S = 0.03  # events come through a thread of their own, a moment after what they cause
_PORT_STATES = {1: "DOWN", 2: "INIT", 3: "ARMED", 4: "ACTIVE", 5: "ACTIVE_DEFER"}

Rows = npt.NDArray[np.uint64]


def pick(settings: VerbsSettings) -> list[Chosen]:
    """The ports and GIDs of an endpoint, one per rail. VerbsError that says why there are too few.

    PortDown where more ports would do if they were ACTIVE. Ports that failed lately come last.
    """
    ports = scan()
    paused = HEALTH.paused()
    if paused:
        include = tuple(name for name in settings.choice.include if name not in paused)
        healthy = [port for port in ports if port.name not in paused]
        if include or not settings.choice.include:
            choice = dataclasses.replace(settings.choice, include=include)
            with contextlib.suppress(VerbsError):  # a port that failed lately is better than none
                return _pick(healthy, dataclasses.replace(settings, choice=choice))
    try:
        return _pick(ports, settings)
    except VerbsError as error:
        if all(port.state == "ACTIVE" for port in ports):
            raise
        _pick([dataclasses.replace(port, state="ACTIVE") for port in ports], settings)
        raise PortDown(0, str(error)) from error


def _pick(ports: Sequence[Port], settings: VerbsSettings) -> list[Chosen]:
    if settings.rails == 1:
        return [choose(ports, settings.choice)]
    return rails(ports, settings.choice, settings.rails)


@dataclasses.dataclass
class Lane:
    """A queue pair with what is on its way: (number, bytes) of the last write of each post."""

    rail: int
    pair: Any
    psn: int
    flights: collections.deque[tuple[int, int]]
    outstanding_bytes: int = 0

    def retire(self, seq: int) -> None:
        """Everything up to work request ``seq`` has completed."""
        while self.flights and self.flights[0][0] <= seq:
            self.outstanding_bytes -= self.flights.popleft()[1]


class Rail:
    """Owns queues, queue pairs and the regions made with ``register``; ``close()`` fences."""

    def __init__(
        self,
        settings: VerbsSettings,
        index: int,
        chosen: Chosen,
        peer: str,
        pairs: int,
        sends: int,
        receives: int,
    ) -> None:
        """Open the port and make queue pairs with receives posted. VerbsError names what is missing."""
        self.chosen, self.index, self._settings, self._peer = chosen, index, settings, peer
        self._regions: list[Registered] = []
        self._opened_at = time.monotonic()
        self._closing = threading.Lock()
        self._given_up = False
        self.lanes: list[Lane] = []
        self.cq: Any = None
        self.device: OpenDevice | None = open_device(settings.backend, chosen.port.device)
        try:
            self._open(self.device, pairs, sends, receives)
        except BaseException:
            self.close()
            raise

    def _open(self, device: OpenDevice, pairs: int, sends: int, receives: int) -> None:
        port = device.context.query_port(self.chosen.port.number)
        self.mtu: int = port["active_mtu"]
        self.largest: int = port["max_message_bytes"]
        self._routed = self.chosen.port.link_layer != "InfiniBand" or bool(
            port.get("flags", 0) & GRH_REQUIRED
        )
        self._counters = self._read_counters()
        limits = device.limits
        receives = min(receives, limits["max_qp_wr"])
        sends = max(8, min(sends, limits["max_qp_wr"], limits["max_cqe"] // pairs - receives))
        self.cq = device.module.CompletionQueue(device.context, pairs * (sends + receives))
        for _ in range(pairs):
            pair = device.module.QueuePair(
                device.context,
                self.cq,
                max_send=sends,
                max_recv=receives,
                max_message_bytes=min(self.largest, 1 << 30),
                peer=self._peer,
            )
            self.lanes.append(Lane(self.index, pair, secrets.randbits(24), collections.deque()))
            pair.to_init(self.chosen.port.number, self.chosen.pkey_index)
            pair.receive(receives)

    @property
    def queue(self) -> Any:
        """The completion queue. PeerLost once the rail was closed, perhaps by another thread."""
        queue = self.cq
        if queue is None or self._given_up:
            raise PeerLost(f"the edge to {self._peer} over {self.chosen.port.name} was closed on this side")
        return queue

    @contextlib.contextmanager
    def in_use(self) -> Iterator[None]:
        """PeerLost for whatever fails below because another thread closes the rail meanwhile."""
        try:
            yield
        except (VerbsError, IndexError):
            _ = self.queue
            raise

    def open_device(self) -> OpenDevice:
        """The device. PeerLost once the rail was closed."""
        device = self.device
        if device is None:
            raise PeerLost(f"the edge to {self._peer} over {self.chosen.port.name} was closed on this side")
        return device

    def register(self, what: memoryview | Region, *, remote_write: bool) -> Registered:
        """Memory of this edge alone, registered until ``close``. VerbsError."""
        part = self._settings.max_region_bytes
        made = Registered(self.open_device().borrow(), what, part, remote_write=remote_write)
        self._regions.append(made)
        return made

    def describe(self) -> dict[str, Any]:
        """What the other side needs to connect; JSON."""
        port = self.chosen.port
        return {
            "device": port.name,
            "gid": self.chosen.gid.raw.hex(),
            "lid": port.lid,
            "link_layer": port.link_layer,
            "mtu": self.mtu,
            "pairs": [[lane.pair.qp_num, lane.psn] for lane in self.lanes],
            "ece": [lane.pair.query_ece() for lane in self.lanes],
        }

    def connect(self, other: dict[str, Any]) -> None:
        """To RTS with every queue pair. ProtocolError if it doesn't fit, VerbsError if refused."""
        settings, port = self._settings, self.chosen.port
        if other["link_layer"] != port.link_layer:
            raise ProtocolError(f"{self._peer}'s {other['device']} is {other['link_layer']}, expected "
                                f"{port.link_layer} as {port.name} is")  # fmt: skip
        if len(other["pairs"]) != len(self.lanes):
            raise ProtocolError(f"{self._peer} has {len(other['pairs'])} queue pairs on {other['device']}, "
                                f"expected {len(self.lanes)}")  # fmt: skip
        mtu = self._mtu(other)
        for lane, (number, psn), ece in zip(self.lanes, other["pairs"], other["ece"], strict=True):
            if ece is not None:
                lane.pair.set_ece(*ece)
            lane.pair.to_rtr(
                number,
                psn,
                mtu,
                port=port.number,
                gid=bytes.fromhex(other["gid"]) if self._routed else None,
                gid_index=self.chosen.gid.index,
                lid=other["lid"],
                hop_limit=settings.hop_limit,
                traffic_class=settings.traffic_class,
                sl=settings.service_level,
                flow_label=(lane.pair.qp_num ^ number) * 0x9E37
                & 0xFFFFF,  # paths of their own where there are any
            )
            timers = {"retries": settings.retries, "rnr_retries": settings.rnr_retries}
            lane.pair.to_rts(lane.psn, timeout=settings.timeout, **timers)

    def _mtu(self, other: dict[str, Any]) -> int:
        """The smaller code of both ports, or the configured one if both have it."""
        both: int = min(self.mtu, other["mtu"])
        wanted = self._settings.mtu
        if wanted == 0:
            return both
        if wanted > MTU_BYTES[both]:
            raise VerbsError(
                0,
                f"sync.verbs.mtu is {wanted}, but {self.chosen.port.name} has {MTU_BYTES[self.mtu]} and "
                f"{other['device']} of {self._peer} {MTU_BYTES[other['mtu']]}: use 0, "
                "or enlarge the MTU of the interface",
            )
        return next(code for code, nbytes in MTU_BYTES.items() if nbytes == wanted)

    def trouble(self, lane: Lane | None = None) -> str:
        """In words what asynchronous events and the port's state say about a failure; empty if nothing."""
        device = self.device
        if device is None:
            return ""
        time.sleep(EVENT_S)
        number = lane.pair.qp_num if lane is not None else -1
        events = device.events(self._opened_at)
        found = [str(event) for event in events if event.kind != "qp" or event.number == number]
        state = 4
        with contextlib.suppress(VerbsError):  # the device is gone, or closed meanwhile: the failure counts
            state = int(device.context.query_port(self.chosen.port.number)["state"])
        if state != 4:
            found.append(f"port {self.chosen.port.name} is {_PORT_STATES.get(state, state)}, expected ACTIVE")
        moved = counters.trouble(counters.moved(self._counters, self._read_counters()))
        if moved:
            told = ", ".join(f"{name} {by}" for name, by in moved.items())
            found.append(f"counted on {self.chosen.port.name} since the edge began: {told}")
        return "; ".join(found)

    def _read_counters(self) -> dict[str, int]:
        return counters.read(self.chosen.port.device, self.chosen.port.number)

    def stats(self) -> dict[str, Any]:
        """Port, completions by status, strays, latencies, and how far the port's counters moved."""
        latencies = [lane.pair.latency() for lane in self.lanes if hasattr(lane.pair, "latency")]
        queue = self.cq  # None when closed, perhaps by another thread just now
        return {
            "port": self.chosen.port.name,
            "statuses": queue.statuses() if hasattr(queue, "statuses") else {},  # closed, or pyverbs
            "strays": getattr(queue, "strays", 0),
            "latency_log2_ns": latencies,
            "counters": counters.moved(self._counters, self._read_counters()),
        }

    def check_events(self) -> None:
        """VerbsError on an event after which nothing of this rail will complete."""
        device = self.device
        if device is None:
            return
        numbers = {lane.pair.qp_num for lane in self.lanes}
        for event in device.events(self._opened_at):
            ours = event.kind in ("device", "cq") or (event.kind == "qp" and event.number in numbers)
            if event.meaning == "fatal" and ours:
                raise VerbsError(0, f"{self.chosen.port.name}: {event}; the edge is given up")

    def close(self) -> None:
        """Queue pairs at once, then memory and device. Idempotent.

        A thread that waits here ends with an error, because the watch of its link tells it. Blocks until it
        is out, for a second at most.
        """
        self._given_up = True
        end = time.monotonic() + CLOSE_S
        while True:
            try:
                with self._closing:  # two threads may give up an edge at once
                    return self._close_now()
            except BufferError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)

    def _close_now(self) -> None:
        queue, self.cq = self.cq, None
        refused: list[VerbsError] = []
        try:
            while queue is not None:
                try:
                    queue.close()  # with its queue pairs
                    break
                except VerbsError as error:
                    refused.append(error)  # of one queue pair, which isn't tried again: the others must go
                    if len(refused) > len(self.lanes) + 1:
                        break
        except BaseException:
            self.cq = queue
            raise
        while self._regions:
            self._regions[-1].close()  # BufferError where writes still read it
            self._regions.pop()
        device, self.device = self.device, None
        if device is not None:
            device.give_back()
        if refused:
            raise refused[0]


def close_all(rails: list[Rail]) -> None:
    """Close every rail, then raise what went wrong first."""
    errors: list[Exception] = []
    for rail in rails:
        try:
            rail.close()
        except (OSError, BufferError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def calls(
    rows: Rows, local_part: int, remote: Remote, rail: int, largest: int
) -> Iterator[tuple[int, int, Rows]]:
    """Cut writes where a region or a message ends: (local part, remote part, rows within both).

    ``rows`` are (local offset, remote offset, bytes) in memory that is registered in parts of ``local_part``
    and ``remote.part_bytes[rail]`` bytes.
    """
    remote_part = remote.part_bytes[rail]
    one_region = len(remote.rkeys[rail]) == 1 and (
        len(rows) == 0 or int((rows[:, 0] + rows[:, 2]).max()) <= local_part
    )
    if one_region and (len(rows) == 0 or int(rows[:, 2].max()) <= largest):
        yield 0, 0, rows
        return
    group: tuple[int, int] | None = None
    cut: list[tuple[int, int, int]] = []
    for row in rows.tolist():
        at, to, left = row
        while left:
            a, b = at // local_part, to // remote_part
            n = min(left, largest, (a + 1) * local_part - at, (b + 1) * remote_part - to)
            if group is not None and group != (a, b):
                yield *group, np.array(cut, np.uint64)
                cut = []
            group = a, b
            cut.append((at - a * local_part, to - b * remote_part, n))
            at, to, left = at + n, to + n, left - n
    if group is not None:
        yield *group, np.array(cut, np.uint64)
