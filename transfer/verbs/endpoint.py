"""One side of a verbs edge: a device, a ring of chunks in registered memory, and connected queue pairs.

The handshake is a JSON object each way over the link's authenticated connection: each side describes itself
(``describe``) and connects to what the other described (``connect``). Receives for immediates are posted
before anything is described, and kept posted: an immediate never waits for the application.
"""

from __future__ import annotations

import mmap
import secrets
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.errors import DeadlineError, ProtocolError
from jaxrl_sync.transfer.verbs.devices import Chosen, choose, scan
from jaxrl_sync.transfer.verbs.errors import CompletionError, VerbsError
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.records import FLUSHED, SUCCESS, new_records, opcode_name
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

if TYPE_CHECKING:
    from jaxrl_sync.transfer import _verbs

PROTOCOL = 1
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
WATCH_S = 0.25
SPIN_S = 20e-6
_NOTHING = np.zeros((0, 3), np.uint64)


def pick(settings: VerbsSettings) -> Chosen:
    """The port and GID for an endpoint. VerbsError that says why there is none."""
    return choose(scan(), settings.choice)


class Endpoint:
    """Owns device, memory, queues. ``close()`` fences: nothing is written here or from here afterwards."""

    def __init__(self, settings: VerbsSettings, peer: str, chunk_bytes: int, ring: int, pairs: int) -> None:
        """Open the chosen device and register the ring. VerbsError names what is missing."""
        self.settings, self.peer, self.chunk_bytes, self.ring = settings, peer, chunk_bytes, ring
        self.chosen = pick(settings)
        module = backend(settings.backend)
        self._status_text: Callable[[int], str] = module.status_text
        self._map = mmap.mmap(-1, ring * chunk_bytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        np.frombuffer(self._map, np.uint8)[:: mmap.PAGESIZE] = 0  # touched now, not in the first transfer
        self.memory = memoryview(self._map)
        self._context: _verbs.Context = module.Context(self.chosen.port.device)
        try:
            self._open(module, pairs)
        except BaseException:
            self.close()
            raise

    def _open(self, module: Any, pairs: int) -> None:
        port = self._context.query_port(self.chosen.port.number)
        if self.chunk_bytes > port["max_message_bytes"]:
            raise VerbsError(
                0,
                f"chunk_bytes={self.chunk_bytes}, {self.chosen.port.name} takes {port['max_message_bytes']}",
            )
        self.mtu = port["active_mtu"]
        self.region: _verbs.MemoryRegion = module.MemoryRegion(self._context, self._map, remote_write=True)
        depth = 2 * self.ring + 2
        self._cq: _verbs.CompletionQueue = module.CompletionQueue(self._context, pairs * (depth + self.ring))
        self._records = new_records(64)
        self.pairs: list[_verbs.QueuePair] = []
        for _ in range(pairs):
            pair = module.QueuePair(
                self._context, self._cq, max_send=depth, max_recv=self.ring, peer=self.peer
            )
            pair.to_init(self.chosen.port.number)
            pair.receive(self.ring)
            self.pairs.append(pair)
        self._by_token = {pair.token: pair for pair in self.pairs}
        self._psns = [secrets.randbits(24) for _ in self.pairs]
        self._remote = (0, 0, 0)

    def describe(self) -> dict[str, Any]:
        """What the other side needs to connect; JSON."""
        return {
            "protocol": PROTOCOL,
            "device": self.chosen.port.device,
            "gid": self.chosen.gid.raw.hex(),
            "lid": self.chosen.port.lid,
            "link_layer": self.chosen.port.link_layer,
            "mtu": self.mtu,
            "pairs": [[p.qp_num, psn] for p, psn in zip(self.pairs, self._psns, strict=True)],
            "address": self.region.address,
            "nbytes": self.region.nbytes,
            "rkey": self.region.rkey,
            "chunk_bytes": self.chunk_bytes,
            "ring": self.ring,
        }

    def connect(self, other: dict[str, Any]) -> None:
        """To RTS with every queue pair. ProtocolError if the description can't be, VerbsError if refused."""
        check_description(other, self.chosen.port.link_layer, len(self.pairs))
        if (other["chunk_bytes"], other["ring"]) != (self.chunk_bytes, self.ring):
            raise ProtocolError(
                f"{self.peer} has {other['ring']} chunks of {other['chunk_bytes']} bytes, "
                f"expected {self.ring} of {self.chunk_bytes}"
            )
        settings, port = self.settings, self.chosen.port
        for pair, own_psn, (number, psn) in zip(self.pairs, self._psns, other["pairs"], strict=True):
            pair.to_rtr(
                number,
                psn,
                min(self.mtu, other["mtu"]),
                port=port.number,
                gid=bytes.fromhex(other["gid"]) if port.link_layer != "InfiniBand" else None,
                gid_index=self.chosen.gid.index,
                lid=other["lid"],
                hop_limit=settings.hop_limit,
                traffic_class=settings.traffic_class,
                sl=settings.service_level,
            )
            pair.to_rts(
                own_psn,
                timeout=settings.timeout,
                retries=settings.retries,
                rnr_retries=settings.rnr_retries,
            )
        self._remote = (other["address"], other["nbytes"], other["rkey"])

    def chunk(self, index: int, nbytes: int) -> memoryview:
        """The place of a chunk in the ring."""
        start = index % self.ring * self.chunk_bytes
        return self.memory[start : start + nbytes]

    def write_chunk(self, index: int, nbytes: int, imm: int, deadline: float) -> tuple[int, int]:
        """Post a chunk to the same place at the peer, and ``imm`` behind it; (token, number) to wait for."""
        at = index % self.ring * self.chunk_bytes
        return self._post(index, np.array([[at, at, nbytes]], np.uint64), imm, deadline)

    def say(self, index: int, imm: int, deadline: float) -> None:
        """Post an immediate alone, on the queue pair of a chunk."""
        self._post(index, _NOTHING, imm, deadline)

    def _post(
        self, index: int, entries: npt.NDArray[np.uint64], imm: int, deadline: float
    ) -> tuple[int, int]:
        pair = self.pairs[index % len(self.pairs)]
        done = 0
        while True:
            done += pair.write(self.region, entries, *self._remote, start=done, signal_every=1, imm=imm)
            if done == len(entries) + 1:
                return pair.token, pair.posted
            self._cq.wait(0.001)
            if time.monotonic() > deadline:
                raise DeadlineError(f"the queue to {self.peer} stayed full until the deadline")

    def events(self, deadline: float, watch: Callable[[], None], what: str) -> npt.NDArray[np.void]:
        """Completions, at least one; used receives are posted again. Blocks, without the GIL.

        ``watch`` is called now and then and may raise. CompletionError on the first failed one, DeadlineError
        that names ``what`` was awaited.
        """
        while not self._cq.wait(min(WATCH_S, max(0.0, deadline - time.monotonic())), SPIN_S):
            watch()
            if time.monotonic() >= deadline:
                raise DeadlineError(f"{what} with {self.peer} over {self.chosen.port.name}: deadline passed")
        found = self._records[: self._cq.poll(self._records)]
        for record in found[found["status"] != SUCCESS]:
            raise self._error(record)
        for token in found["token"][found["receive"] == 1].tolist():
            self._by_token[token].receive(1)
        return found

    def _error(self, record: np.void) -> CompletionError:
        status = int(record["status"])
        why = self._status_text(status)
        if status == FLUSHED:
            events = [text for _, text, _, _ in self._context.async_events()]
            why += f" ({'; '.join(events) or 'the queue pair was already in error'})"
        return CompletionError(
            peer=self.peer,
            device=self.chosen.port.name,
            qp_num=int(record["qp_num"]),
            opcode=opcode_name(int(record["opcode"])),
            status=status,
            text=why,
            seq=int(record["seq"]),
            vendor_err=int(record["vendor_err"]),
        )

    def close(self) -> None:
        """Queue pairs at once, then memory and device. Idempotent.

        A thread that waits here ends with an error, because the watch of its link tells it. Blocks until it
        is out, for a second at most.
        """
        end = time.monotonic() + 4 * WATCH_S
        while True:
            try:
                return self._context.close()
            except BufferError:
                if time.monotonic() > end:
                    raise
                time.sleep(0.002)


def check_description(other: object, link_layer: str, pairs: int) -> None:
    """ProtocolError naming the first field of a peer's description that can't be right."""
    if not isinstance(other, dict):
        raise ProtocolError(f"the peer describes itself as {str(other)[:100]!r}, expected an object")
    limits = {
        "protocol": (PROTOCOL, PROTOCOL),
        "lid": (0, 0xFFFF),
        "mtu": (1, 5),
        "address": (1, 2**64 - 1),
        "nbytes": (1, 2**48),
        "rkey": (0, 2**32 - 1),
        "chunk_bytes": (1, 2**31),
        "ring": (1, 2**16),
    }
    for name, (low, high) in limits.items():
        value = other.get(name)
        if type(value) is not int or not low <= value <= high:
            raise ProtocolError(f"the peer's {name} is {value!r}, expected {low} to {high}")
    if other["ring"] * other["chunk_bytes"] != other["nbytes"]:
        raise ProtocolError(f"the peer's ring has {other['nbytes']} bytes, expected ring * chunk_bytes")
    gid = other.get("gid")
    if not isinstance(gid, str) or len(gid) != 32 or set(gid) - set("0123456789abcdef"):
        raise ProtocolError(f"the peer's gid is {gid!r}, expected 32 hexadecimal digits")
    if other.get("link_layer") != link_layer:
        raise ProtocolError(f"the peer's link layer is {other.get('link_layer')!r}, expected {link_layer!r}")
    numbers = other.get("pairs")
    if not isinstance(numbers, list) or len(numbers) != pairs or not all(_is_pair(n) for n in numbers):
        raise ProtocolError(
            f"the peer's queue pairs are {str(numbers)[:100]}, expected {pairs} of [qpn, psn]"
        )


def _is_pair(value: object) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(v) is int and 0 <= v < 1 << 24 for v in value)
    )
