"""A TCP proxy that breaks connections as it is told: ``python -m tests.faults.proxy CONTROL_SOCKET``.

One process, one thread, no dependency. Each connection is two pipes; a pipe reads pieces, judges them by the
rules (see rules.py), holds them for a while and writes them. Commands come as JSON lines over a Unix socket,
which crosses network namespaces; see ``proxy_client.py`` for them. Bytes are counted as they are delivered.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import os
import socket
import struct
import sys
import time
from collections import defaultdict
from typing import Any

from tests.faults.rules import Bucket, Direction, Edge, Rule, Trigger, rule_of

READ_BYTES = 256 << 10
RATE_PIECE_BYTES = 16 << 10
HELD_BYTES = 1 << 20
"""A pipe holds at most so much of what is under way: twice what 100 Mb/s carry in 40 ms."""

PREAMBLE_S = 10.0
DIAL_S = 10.0
_RESET = struct.pack("ii", 1, 0)


@dataclasses.dataclass
class Enforced:
    """A rule, its trigger and its bucket; ``event`` says where it fired."""

    rule: Rule
    trigger: Trigger
    bucket: Bucket | None
    event: dict[str, Any] | None = None

    def holds(self, edge: Edge, direction: Direction) -> bool:
        """Whether it is in force for this direction of an edge."""
        return self.trigger.fired and self.rule.concerns(edge) and self.rule.acts_on(direction)


class Proxy:
    """Rules, counters and open connections."""

    def __init__(self) -> None:
        self.rules: dict[int, Enforced] = {}
        self.connections: dict[int, Passage] = {}
        self.counts: dict[Edge, dict[Direction, int]] = defaultdict(lambda: {"up": 0, "down": 0})
        self.opened: dict[Edge, int] = defaultdict(int)
        self.changed = asyncio.Event()
        self._next = 0
        self._servers: list[asyncio.Server | asyncio.Task[None]] = []
        self._listeners: list[socket.socket] = []

    def number(self) -> int:
        """Another id."""
        self._next += 1
        return self._next

    def notify(self) -> None:
        """Wake whatever waits for a change of the rules."""
        self.changed.set()
        self.changed = asyncio.Event()

    # Rules.

    def enforce(self, rule: Rule) -> int:
        """Put a rule in force; one without a trigger acts at once."""
        number = self.number()
        bucket = Bucket(rule.value) if rule.action == "rate" else None
        self.rules[number] = Enforced(rule, Trigger(rule), bucket)
        if rule.action in ("reset", "half_open") and rule.after_bytes is None and rule.pattern is None:
            self.fire(number, None, "up")
        self.notify()
        return number

    def fire(self, number: int, passage: Passage | None, direction: Direction) -> None:
        """The trigger of a rule was met on a connection (or it has none)."""
        entry = self.rules[number]
        entry.trigger.fired = True
        entry.event = {"direction": direction, "t": time.time()}
        if passage is not None:
            entry.event |= {"connection": passage.number, **dataclasses.asdict(passage.edge)}
        for other in list(self.connections.values()):
            if entry.rule.concerns(other.edge):
                if entry.rule.action == "reset":
                    other.reset()
                elif entry.rule.action == "half_open":
                    other.cut_target()
        self.notify()

    def clear(self, number: int | None) -> None:
        """Lift one rule or all; connections that were left half open are reset now."""
        for key in [number] if number is not None else list(self.rules):
            self.rules.pop(key, None)
        half = [e.rule for e in self.rules.values() if e.rule.action == "half_open"]
        for passage in list(self.connections.values()):
            if passage.half_open and not any(r.concerns(passage.edge) for r in half):
                passage.reset()
        self.notify()

    def held(self, edge: Edge, direction: Direction) -> bool:
        """Whether bytes of this direction must wait now."""
        actions = ("stall", "partition")
        return any(e.rule.action in actions and e.holds(edge, direction) for e in self.rules.values())

    def delay_s(self, edge: Edge, direction: Direction) -> float:
        """How much later than read bytes are delivered."""
        rules = [e for e in self.rules.values() if e.rule.action == "delay" and e.holds(edge, direction)]
        return sum(e.rule.value for e in rules)

    def buckets(self, edge: Edge, direction: Direction) -> list[Bucket]:
        """The rates that apply."""
        return [e.bucket for e in self.rules.values() if e.bucket is not None and e.holds(edge, direction)]

    # Listeners.

    async def listen(self, host: str, port: int, edge: Edge | None) -> int:
        """Accept connections of one edge, or (without) of the edge that their first line names."""
        sock = socket.create_server((host, port), backlog=256)
        sock.setblocking(False)
        self._listeners.append(sock)
        self._servers.append(asyncio.create_task(self._accept(sock, edge)))
        return int(sock.getsockname()[1])

    async def _accept(self, listener: socket.socket, edge: Edge | None) -> None:
        loop, tasks = asyncio.get_running_loop(), set()
        while True:
            sock, _ = await loop.sock_accept(listener)
            sock.setblocking(False)
            task = asyncio.create_task(self._welcome(sock, edge))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _welcome(self, sock: socket.socket, edge: Edge | None) -> None:
        try:
            if edge is None:
                edge = await asyncio.wait_for(_preamble(sock), PREAMBLE_S)
            while self.held(edge, "up"):
                await self.changed.wait()
            target = await _dial(edge.target)
        except (OSError, ValueError, TimeoutError):
            _abort(sock)
            return
        self.opened[edge] += 1
        passage = Passage(self, self.number(), edge, sock, target)
        self.connections[passage.number] = passage
        try:
            await passage.run()
        finally:
            self.connections.pop(passage.number, None)


async def _preamble(sock: socket.socket) -> Edge:
    """The first line of a connection through the door, read byte by byte: what follows is the stream's."""
    loop, line = asyncio.get_running_loop(), b""
    while not line.endswith(b"\n"):
        byte = await loop.sock_recv(sock, 1)
        if not byte or len(line) > 4096:
            raise ValueError("no preamble")
        line += byte
    fields = json.loads(line)
    return Edge(fields["source"], fields["target"], fields["kind"])


async def _dial(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    sock = socket.socket()
    sock.setblocking(False)
    try:
        await asyncio.wait_for(asyncio.get_running_loop().sock_connect(sock, (host, int(port))), DIAL_S)
    except BaseException:
        sock.close()
        raise
    return sock


def _abort(sock: socket.socket) -> None:
    """Close with a reset."""
    with contextlib.suppress(OSError):
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
    _close(sock)


def _close(sock: socket.socket) -> None:
    """The loop forgets its number first: a socket that is made in the same turn may get it."""
    if sock.fileno() >= 0:
        loop = asyncio.get_running_loop()
        loop.remove_reader(sock)
        loop.remove_writer(sock)
    sock.close()


class Passage:
    """One proxied connection. Owns both sockets."""

    def __init__(
        self, proxy: Proxy, number: int, edge: Edge, source: socket.socket, target: socket.socket
    ) -> None:
        self.proxy, self.number, self.edge = proxy, number, edge
        self.source, self.target = source, target
        self.half_open = False
        self._tasks: list[asyncio.Task[None]] = []
        self._over = asyncio.Event()
        for sock in (source, target):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for entry in proxy.rules.values():
            if entry.rule.action == "half_open" and entry.trigger.fired and entry.rule.concerns(edge):
                self.cut_target()

    async def run(self) -> None:
        """Until both directions have ended, or a reset."""
        if not self.half_open:
            pipes = [
                Pipe(self, "up", self.source, self.target),
                Pipe(self, "down", self.target, self.source),
            ]
            self._tasks = [asyncio.create_task(call) for p in pipes for call in (p.read(), p.write())]
            over = asyncio.create_task(self._over.wait())
            done = asyncio.create_task(_all_of(self._tasks))
            await asyncio.wait({done, over}, return_when=asyncio.FIRST_COMPLETED)
            over.cancel()
        if self.half_open and not self._over.is_set():
            await self._swallow()
        for task in self._tasks:
            task.cancel()
        for sock in (self.source, self.target):
            _close(sock)

    def reset(self) -> None:
        """Both ends see a reset."""
        for task in self._tasks:
            task.cancel()
        _abort(self.source)
        _abort(self.target)
        self._over.set()

    def cut_target(self) -> None:
        """The target sees a reset, the source sees nothing."""
        self.half_open = True
        for task in self._tasks:
            task.cancel()
        _abort(self.target)

    async def _swallow(self) -> None:
        """Take what the source sends, as if somebody were there."""
        loop = asyncio.get_running_loop()
        read = asyncio.create_task(self._read_away(loop))
        over = asyncio.create_task(self._over.wait())
        await asyncio.wait([read, over], return_when=asyncio.FIRST_COMPLETED)
        read.cancel()
        over.cancel()

    async def _read_away(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.suppress(OSError):
            while await loop.sock_recv(self.source, READ_BYTES):
                pass


async def _all_of(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)


class Pipe:
    """One direction of a connection: a reader that judges, a writer that delivers."""

    def __init__(
        self, passage: Passage, direction: Direction, source: socket.socket, target: socket.socket
    ) -> None:
        self.passage = passage
        self.direction: Direction = direction
        self.source, self.target = source, target
        self._queue: asyncio.Queue[tuple[float, bytes | None]] = asyncio.Queue()
        self._queued_bytes = 0
        self._room = asyncio.Event()
        self._double_bytes = 0
        self._flip = False

    @property
    def proxy(self) -> Proxy:
        """Whose rules apply."""
        return self.passage.proxy

    async def read(self) -> None:
        """Read, judge, queue; the end of the stream too."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                data = await loop.sock_recv(self.source, READ_BYTES)
            except OSError:
                self.passage.reset()
                return
            if not data:
                await self._put(None)
                return
            if await self._judge(memoryview(data)):
                await self._put(None)
                return

    async def _judge(self, data: memoryview) -> bool:
        """Pass the bytes on up to where a rule fires, fire it, go on; whether the stream was ended."""
        while data:
            cut, number = len(data), None
            for key, entry in self.proxy.rules.items():
                if not entry.rule.concerns(self.passage.edge):
                    continue
                found = entry.trigger.find(self.passage.number, self.direction, data)
                if found is not None and (number is None or found < cut):
                    cut, number = found, key
            if cut:
                await self._put(bytes(data[:cut]))
            data = data[cut:]
            if number is None:
                continue
            action, value = self.proxy.rules[number].rule.action, self.proxy.rules[number].rule.value
            self.proxy.fire(number, self.passage, self.direction)
            if action == "truncate":
                return True
            if action == "duplicate":
                self._double_bytes = int(value)
            self._flip = action == "flip"
        return False

    async def _put(self, data: bytes | None) -> None:
        """Queue what was read; held bytes wait here, so those before the cut still arrive."""
        while self.proxy.held(self.passage.edge, self.direction):
            await self.proxy.changed.wait()
        while data is not None and self._queued_bytes > HELD_BYTES:
            self._room.clear()
            await self._room.wait()
        due = time.monotonic() + self.proxy.delay_s(self.passage.edge, self.direction)
        if data is None:
            self._queue.put_nowait((due, None))
        elif data:
            data = self._altered(data)
            self._queued_bytes += len(data)
            self._queue.put_nowait((due, data))

    def _altered(self, data: bytes) -> bytes:
        """One bit changed, or a stretch said twice, where a rule asked for it."""
        if self._flip:
            self._flip = False
            data = bytes([data[0] ^ 1]) + data[1:]
        if self._double_bytes:
            again = data[: self._double_bytes]
            self._double_bytes -= len(again)
            data = again + data
        return data

    async def write(self) -> None:
        """Deliver what is due, at the rates that apply."""
        edge, loop = self.passage.edge, asyncio.get_running_loop()
        while True:
            due, data = await self._queue.get()
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            if data is None:
                with contextlib.suppress(OSError):
                    self.target.shutdown(socket.SHUT_WR)
                return
            for piece in self._pieces(data):
                for bucket in self.proxy.buckets(edge, self.direction):
                    now = time.monotonic()
                    await asyncio.sleep(max(0.0, bucket.reserve(len(piece), now) - now))
                try:
                    await loop.sock_sendall(self.target, piece)
                except OSError:
                    self.passage.reset()
                    return
                self.proxy.counts[edge][self.direction] += len(piece)
                self._queued_bytes -= len(piece)
                self._room.set()

    def _pieces(self, data: bytes) -> list[memoryview]:
        """Small ones where a rate applies, so that connections share it fairly."""
        view = memoryview(data)
        if not self.proxy.buckets(self.passage.edge, self.direction):
            return [view]
        return [view[i : i + RATE_PIECE_BYTES] for i in range(0, len(view), RATE_PIECE_BYTES)]


class Control:
    """Answers the commands of one test."""

    def __init__(self, proxy: Proxy) -> None:
        self._proxy = proxy

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One JSON object per line, one answer each."""
        while line := await reader.readline():
            try:
                answer = await self._answer(json.loads(line))
            except (ValueError, TypeError, KeyError, OSError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            writer.write(json.dumps(answer).encode() + b"\n")
            await writer.drain()
        writer.close()

    async def _answer(self, command: dict[str, Any]) -> dict[str, Any]:
        proxy = self._proxy
        match command.pop("do"):
            case "listen":
                edge = Edge(**command["edge"]) if command.get("edge") else None
                return {"port": await proxy.listen(command["host"], command["port"], edge)}
            case "enforce":
                return {"id": proxy.enforce(rule_of(command))}
            case "clear":
                proxy.clear(command.get("id"))
                return {}
            case "fired":
                return {"event": await self._fired(command["id"], command["timeout_s"])}
            case "counts":
                rows = [{**dataclasses.asdict(edge), **both} for edge, both in proxy.counts.items()]
                return {"counts": rows}
            case "opened":
                return {"opened": [dataclasses.asdict(e) | {"times": n} for e, n in proxy.opened.items()]}
            case "connections":
                return {"connections": [dataclasses.asdict(p.edge) for p in proxy.connections.values()]}
            case other:
                raise ValueError(f"unknown command {other!r}")

    async def _fired(self, number: int, timeout_s: float) -> dict[str, Any] | None:
        """The event of a rule, waiting for it."""
        deadline = time.monotonic() + timeout_s
        while (entry := self._proxy.rules[number]).event is None:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._proxy.changed.wait(), left)
        return entry.event


async def main(path: str) -> None:
    """Serve until standard input ends."""
    server = await asyncio.start_unix_server(Control(Proxy()).serve, path)
    os.chmod(path, 0o600)
    print("ready", flush=True)
    async with server:
        await asyncio.get_running_loop().run_in_executor(None, sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
