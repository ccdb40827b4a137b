"""RDMA WRITEs between two processes, in the manner of perftest: what the hardware and this extension can do.

The client posts and times; the server's memory is written and compared. For the comparison both sides make
the same bytes and the same table of writes out of the seed.
"""

from __future__ import annotations

import collections
import mmap
import secrets
import time
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.bench.shape import BenchError, Result, Shape, percentiles
from jaxrl_sync.transfer.errors import DeadlineError, ProtocolError
from jaxrl_sync.transfer.verbs import counters
from jaxrl_sync.transfer.verbs.devices import Choice, choose, scan
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.native import native
from jaxrl_sync.transfer.verbs.records import SUCCESS, new_records, opcode_name
from jaxrl_sync.transfer.wire import Connection

Rows = npt.NDArray[np.uint64]
WAIT_S = 0.25
SIGNAL_EVERY = 64
RECEIVES = 16
TIMEOUT = 17
"""3.8 s until a silent peer is an error: soft-RoCE sends again what is merely slow (docs/rdma.md)."""


class Side:
    """A port, registered memory and queue pairs. ``close()`` gives all of it up."""

    def __init__(self, shape: Shape, choice: Choice, peer: str) -> None:
        """Open the chosen port. VerbsError says why there is none."""
        self.shape = shape
        self.chosen = choose(scan(), choice)
        module = native()
        self._map = mmap.mmap(-1, shape.memory_bytes)
        self.memory = np.frombuffer(self._map, np.uint8)
        self.memory[:: mmap.PAGESIZE] = 0
        self.context = module.Context(self.chosen.port.device)
        try:
            port = self.context.query_port(self.chosen.port.number)
            if shape.size_bytes > port["max_message_bytes"]:
                most = port["max_message_bytes"]
                raise VerbsError(0, f"{self.chosen.port.name} takes messages of at most {most} bytes")
            self.mtu: int = port["active_mtu"]
            self.region = module.MemoryRegion(self.context, self._map, remote_write=True)
            self.cq = module.CompletionQueue(self.context, shape.qps * (shape.depth + RECEIVES + 1))
            self.pairs: list[Any] = []
            for _ in range(shape.qps):
                pair = module.QueuePair(
                    self.context, self.cq, max_send=shape.depth + 1, max_recv=RECEIVES, peer=peer
                )
                pair.to_init(self.chosen.port.number, self.chosen.pkey_index)
                pair.receive(RECEIVES)
                self.pairs.append(pair)
        except BaseException:
            self.context.close()
            raise
        self._psns = [secrets.randbits(24) for _ in self.pairs]
        self._records = new_records(256)
        self._arrived: collections.deque[int] = collections.deque()
        self.remote = (0, 0, 0)
        self.expecting = False  # messages of the peer

    def describe(self) -> dict[str, Any]:
        """What the other side connects to; JSON."""
        return {
            "device": self.chosen.port.name,
            "gid": self.chosen.gid.raw.hex(),
            "lid": self.chosen.port.lid,
            "link_layer": self.chosen.port.link_layer,
            "mtu": self.mtu,
            "pairs": [[p.qp_num, psn] for p, psn in zip(self.pairs, self._psns, strict=True)],
            "memory": [self.region.address, self.region.nbytes, self.region.rkey],
        }

    def connect(self, other: Any) -> None:
        """To RTS with every queue pair. ProtocolError where the description can't be."""
        try:
            gid, lid, mtu = bytes.fromhex(other["gid"]), int(other["lid"]), int(other["mtu"])
            address, nbytes, rkey = (int(v) for v in other["memory"])
            numbers = [(int(number), int(psn)) for number, psn in other["pairs"]]
            layer = other["link_layer"]
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"the other side describes itself as {str(other)[:200]!r}") from error
        if len(gid) != 16 or len(numbers) != len(self.pairs) or nbytes != self.region.nbytes:
            raise ProtocolError(f"the other side describes itself as {str(other)[:200]!r}")
        port = self.chosen.port
        if layer != port.link_layer:
            raise BenchError(f"{port.name} is {port.link_layer}, {other.get('device')} {layer}")
        for pair, own, (number, psn) in zip(self.pairs, self._psns, numbers, strict=True):
            pair.to_rtr(
                number,
                psn,
                min(self.mtu, mtu),
                port=port.number,
                gid=gid if layer != "InfiniBand" else None,
                gid_index=self.chosen.gid.index,
                lid=lid,
            )
            pair.to_rts(own, timeout=TIMEOUT)
        self.remote = (address, nbytes, rkey)

    def table(self, count: int, seed: int, *, apart: bool) -> Rows:
        """``count`` writes to the offset they come from: one after the other, or anywhere; ``apart``: none
        twice (at most as many as fit)."""
        size, room = self.shape.size_bytes, self.shape.memory_bytes
        rng, places = np.random.default_rng(seed), room // size
        if not self.shape.scattered and not apart:
            at = np.arange(count) % places * size
        elif apart:
            count = min(count, places)
            gaps = np.sort(rng.integers(0, room - count * size + 1, count))
            at = rng.permutation(gaps + np.arange(count) * size)
        else:
            at = rng.integers(0, room - size + 1, count)
        return np.stack([at, at, np.full(len(at), size)], axis=1).astype(np.uint64)

    def write_all(self, rows: Rows, deadline: float) -> None:
        """Post everything and wait until all of it is at the peer. BenchError, DeadlineError."""
        shares = [np.ascontiguousarray(rows[i :: len(self.pairs)]) for i in range(len(self.pairs))]
        work = list(zip(self.pairs, shares, [pair.retired for pair in self.pairs], strict=True))
        at = [0] * len(shares)
        every = max(1, min(SIGNAL_EVERY, self.shape.depth // 2))
        while any(pair.retired - before < len(share) for pair, share, before in work):
            for i, (pair, share, _) in enumerate(work):
                if at[i] < len(share):
                    at[i] += pair.write(self.region, share, *self.remote, start=at[i], signal_every=every)
            self._wait(deadline)

    def _wait(self, deadline: float) -> None:
        """Take completions, at least one. BenchError for one that failed."""
        while not self.cq.wait(min(WAIT_S, max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise DeadlineError(f"nothing completed on {self.chosen.port.name} before the deadline")
        found = self._records
        while len(found) == len(self._records):  # all there are: what has failed counts as through too
            found = self._records[: self.cq.poll(self._records)]
            failed = found[found["status"] != SUCCESS]
            if len(failed):
                self._fail(failed[0])
            if self.expecting:
                self._arrived.extend(found["imm"][found["receive"] == 1].tolist())

    def _fail(self, first: np.void) -> NoReturn:
        status, what = int(first["status"]), opcode_name(int(first["opcode"]))
        text = f"{native().status_text(status)} ({status})"
        raise BenchError(f"{what} {first['seq']} on {self.chosen.port.name} failed: {text}")

    def ping(self, imm: int, deadline: float) -> None:
        """A message with an immediate behind it, on the first queue pair."""
        self.expecting = True
        row, done = np.array([[0, 0, self.shape.size_bytes]], np.uint64), 0
        while done < 2:
            done += self.pairs[0].write(self.region, row, *self.remote, start=done, imm=imm)
            if done < 2:
                self._wait(deadline)

    def await_ping(self, imm: int, deadline: float) -> None:
        """Until the peer's message is here. BenchError for another one than expected."""
        self.expecting = True
        while not self._arrived:
            self._wait(deadline)
        found = self._arrived.popleft()
        self.pairs[0].receive(1)
        if found != imm:
            raise BenchError(f"message {found} arrived, expected {imm}")

    def close(self) -> None:
        """Queue pairs first. Idempotent."""
        self.context.close()

    def __enter__(self) -> Side:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()


def fill(memory: npt.NDArray[np.uint8], seed: int) -> None:
    """Bytes that follow from the seed, none of them 0."""
    memory[:] = np.random.default_rng(seed).integers(1, 256, len(memory), dtype=np.uint8)


def expect(connection: Connection, kind: str, timeout_s: float) -> dict[str, Any]:
    """The next message of the other side. ProtocolError for another kind, BenchError for its failure."""
    message, _ = connection.recv(timeout_s)
    if message.get("kind") == "failed":
        raise BenchError(f"{connection.peer}: {str(message.get('reason'))[:500]}")
    if message.get("kind") != kind:
        raise ProtocolError(f"{connection.peer} says {str(message)[:200]!r}, expected {kind!r}")
    return message


def serve(connection: Connection, shape: Shape, described: object, choice: Choice) -> None:
    """The server's part of one measurement."""
    timeout_s = shape.timeout_s
    with Side(shape, choice, connection.peer) as side:
        side.connect(described)
        connection.send({"kind": "opened", "side": side.describe()}, timeout_s=timeout_s)
        before = counters.read(side.chosen.port.device, side.chosen.port.number)
        while True:
            message, _ = connection.recv(timeout_s)
            kind, seed = message.get("kind"), int(message.get("seed") or 0)
            if kind == "clear":
                side.memory[:] = 0
                connection.send({"kind": "cleared"}, timeout_s=timeout_s)
            elif kind == "compare":
                connection.send({"kind": "compared", **_compare(side, seed)}, timeout_s=timeout_s)
            elif kind == "pings":
                connection.send({"kind": "go"}, timeout_s=timeout_s)
                _answer(side, int(message.get("count") or 0))
            elif kind == "end":
                after = counters.read(side.chosen.port.device, side.chosen.port.number)
                facts = {"moved": counters.moved(before, after), "reason": side.chosen.reason}
                connection.send({"kind": "ended", **facts}, timeout_s=timeout_s)
                return
            else:
                raise ProtocolError(f"{connection.peer} asks for {kind!r}, which isn't done here")


def _compare(side: Side, seed: int) -> dict[str, int]:
    """This memory against what the client wrote into zeros. BenchError names the first byte that differs."""
    source = np.empty_like(side.memory)
    fill(source, seed)
    wanted = np.zeros_like(side.memory)
    rows = side.table(side.shape.checked, seed, apart=True)
    for start, _, nbytes in rows.tolist():
        wanted[start : start + nbytes] = source[start : start + nbytes]
    differ = np.flatnonzero(wanted != side.memory)
    if len(differ):
        first = int(differ[0])
        found = f"{side.memory[first]}, expected {wanted[first]}"
        raise BenchError(f"{len(differ)} bytes differ, the first at {first}: {found}")
    return {"messages": len(rows), "bytes": len(wanted)}


def _answer(side: Side, count: int) -> None:
    deadline = time.monotonic() + side.shape.timeout_s
    for number in range(count):
        side.await_ping(number, deadline)
        side.ping(number, deadline)


def measure(connection: Connection, shape: Shape, choice: Choice) -> Result:
    """The client's part: compare, then time bandwidth, then latency, then compare again."""
    timeout_s = shape.timeout_s
    with Side(shape, choice, connection.peer) as side:
        opening = {"kind": "open", "shape": shape.to_json(), "side": side.describe()}
        connection.send(opening, timeout_s=timeout_s)
        side.connect(expect(connection, "opened", timeout_s).get("side"))
        port = side.chosen.port
        before = counters.read(port.device, port.number)
        compared = _write_and_compare(connection, side, shape.seed)
        rows = side.table(shape.iters, shape.seed + 1, apart=False)
        side.write_all(rows[: min(len(rows), 2 * shape.qps)], time.monotonic() + timeout_s)
        started = time.perf_counter()
        side.write_all(rows, time.monotonic() + timeout_s)
        seconds = time.perf_counter() - started
        latency = _pings(connection, side)
        again = _write_and_compare(connection, side, shape.seed + 2)
        moved = counters.moved(before, counters.read(port.device, port.number))
        connection.send({"kind": "end"}, timeout_s=timeout_s)
        ended = expect(connection, "ended", timeout_s)
        details = {
            "reason": side.chosen.reason,
            "peer": ended.get("reason"),
            "trouble": counters.trouble(moved),
            "peer_trouble": counters.trouble(ended.get("moved") or {}),
            "registrations": side.context.registrations,
            "doorbells": sum(pair.post_calls for pair in side.pairs),
            "histograms_log2_ns": side.pairs[0].latency(),
        }
        total = {name: compared[name] + again[name] for name in ("messages", "bytes")}
        return Result(shape, len(rows), seconds, latency, total, details)


def _write_and_compare(connection: Connection, side: Side, seed: int) -> dict[str, int]:
    timeout_s = side.shape.timeout_s
    fill(side.memory, seed)
    connection.send({"kind": "clear"}, timeout_s=timeout_s)
    expect(connection, "cleared", timeout_s)
    side.write_all(side.table(side.shape.checked, seed, apart=True), time.monotonic() + timeout_s)
    connection.send({"kind": "compare", "seed": seed}, timeout_s=timeout_s)
    found = expect(connection, "compared", timeout_s)
    return {name: int(found[name]) for name in ("messages", "bytes")}


def _pings(connection: Connection, side: Side) -> dict[str, float]:
    """Half of a round trip of one message each way."""
    timeout_s, samples = side.shape.timeout_s, []
    connection.send({"kind": "pings", "count": side.shape.pings}, timeout_s=timeout_s)
    expect(connection, "go", timeout_s)
    deadline = time.monotonic() + timeout_s
    for number in range(side.shape.pings):
        started = time.perf_counter()
        side.ping(number, deadline)
        side.await_ping(number, deadline)
        samples.append((time.perf_counter() - started) * 0.5e6)
    return percentiles(samples)
