"""Peers as processes that cost nothing to start: a process with everything imported forks one per order.

``python -m tests.verbs.zygote`` obeys JSON lines on stdin (see `Order`). The child connects to the port and
plays one side of one verbs edge once; a sender does ``act`` to itself before its ``at``-th post: ``kill``,
``stop``, or nothing. The zygote answers {"pid"} and, when the child is through, {"done": pid, "outcome"}:
``ok`` or the error in words.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import Edge, SlotLayout
from jaxrl_sync.sharding.rank_plan import Copy
from jaxrl_sync.sharding.slots import SlotEntry
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.memory import PrivateMemory
from jaxrl_sync.transfer.transports.verbs import VerbsReceiver, VerbsSender
from jaxrl_sync.transfer.verbs.endpoint import Endpoint
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.wire import Connection
from tests.verbs.soft import LONG_S, settings_for

ROOT = Path(__file__).parents[2]


@dataclasses.dataclass(frozen=True)
class Order:
    """One transfer of ``runs`` pieces of ``piece`` bytes that swap places; ``seed`` makes the data."""

    role: str
    port: int
    device: str
    piece: int
    runs: int
    seed: int = 0
    act: str = ""
    at: int = 0
    options: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes in all."""
        return self.piece * self.runs


def edge_and_slot(order: Order) -> tuple[Edge, SlotLayout]:
    """Piece i goes to the place of the i-th piece from the end."""
    n, last = order.piece, order.runs - 1
    copies = tuple(
        Copy(0, "w", 0, "w", 1, (n,), i * n, (1,), (last - i) * n, (1,), 0, (0,), i * n, (1,))
        for i in range(order.runs)
    )
    entry = SlotEntry(0, "w", 0, order.size, (order.size,), "uint8")
    total = -(-order.size // 4096) * 4096
    return Edge(0, 0, copies), SlotLayout((entry,), total, {(0, "w"): entry})


def data(order: Order) -> npt.NDArray[np.uint8]:
    """What a sender sends."""
    return np.random.default_rng(order.seed).integers(0, 256, order.size, dtype=np.uint8)


def moved(order: Order) -> npt.NDArray[np.uint8]:
    """What lies in the slot afterwards."""
    return data(order).reshape(order.runs, order.piece)[::-1].reshape(-1)


def slot_of(order: Order) -> Any:
    """A slot as far as a receiver looks at it."""
    return types.SimpleNamespace(memory=PrivateMemory(edge_and_slot(order)[1].total_bytes))


def strike_here(number: signal.Signals) -> None:
    """Kill or stop this process at this very line: of a signal to the process this thread may hear late."""
    signal.pthread_kill(threading.get_ident(), number)


def killed(pid: int) -> None:
    """Kill a process and wait until it is gone, and with it all it had open; until then its card answers."""
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + LONG_S
    with contextlib.suppress(ProcessLookupError):  # children of the zygote are reaped by the kernel
        while time.monotonic() < deadline:
            os.kill(pid, 0)
            time.sleep(0.01)
        raise TimeoutError(f"child {pid} is still there {LONG_S:g} s after it was killed")


class Death:
    """When a process ended, noted by a thread."""

    def __init__(self, pid: int) -> None:
        self._at: list[float] = []
        self._thread = threading.Thread(target=self._watch, args=(os.pidfd_open(pid),))
        self._thread.start()

    def _watch(self, fd: int) -> None:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        if poll.poll(LONG_S * 1000):
            self._at.append(time.monotonic())
        os.close(fd)

    def at(self) -> float:
        """On the monotonic clock."""
        self._thread.join()
        assert self._at, f"the process is still there after {LONG_S:g} s"
        return self._at[0]


def stopped(pid: int) -> bool:
    """Whether a process stands still."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def at_once() -> None:
    """Nothing to wait for."""


@contextlib.contextmanager
def posts_counted(at: int, act: Any) -> Iterator[None]:
    """``act()`` before the ``at``-th post of this process."""
    real, lock, posts = Endpoint.write, threading.Lock(), [0]

    def write(self: Endpoint, *args: Any, **options: Any) -> Any:
        with lock:
            posts[0] += 1
            now = posts[0] == at
        if now:
            act()
        return real(self, *args, **options)

    Endpoint.write = write  # type: ignore[method-assign]
    try:
        yield
    finally:
        Endpoint.write = real  # type: ignore[method-assign]


def send(order: Order, connection: Connection, limit_s: float, act: Any = None) -> None:
    """The sender's side of one transfer."""
    edge, slot = edge_and_slot(order)
    offer, _ = connection.recv(LONG_S)
    sender = VerbsSender(edge, settings_for(order.device, **order.options), offer["verbs"], connection, slot)
    try:
        connection.send({"kind": "opened", "verbs": sender.describe()}, timeout_s=LONG_S)
        ready, _ = connection.recv(LONG_S)
        with posts_counted(order.at if act else 0, act):
            sender.send(ready, {(0, "w"): data(order)}, time.monotonic() + limit_s)
        connection.send({"kind": "done"}, timeout_s=LONG_S)
    finally:
        sender.close()


def receive(
    order: Order,
    connection: Connection,
    slot: Any,
    limit_s: float,
    wait: Callable[[], None] = at_once,
) -> None:
    """The receiver's side of one transfer, into ``slot``. ``limit_s`` begins once ``wait()`` returns."""
    edge, layout = edge_and_slot(order)
    receiver = VerbsReceiver(edge, settings_for(order.device, **order.options), connection, [slot])
    try:
        connection.send({"kind": "open", "verbs": receiver.describe()}, timeout_s=LONG_S)
        opened, _ = connection.recv(LONG_S)
        receiver.connect(opened["verbs"])
        connection.send({"kind": "ready", **receiver.ready(slot)}, timeout_s=LONG_S)
        wait()
        deadline = time.monotonic() + limit_s
        receiver.receive(layout.views(slot.memory.data), deadline)
        connection.recv(limit_s)
    finally:
        receiver.close()


def play(order: Order) -> str:
    """The child: one side of one transfer."""
    connection = Connection(socket.create_connection(("127.0.0.1", order.port), LONG_S), "the test")
    kinds = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}
    act = (lambda: strike_here(kinds[order.act])) if order.act else None
    try:
        if order.role == "send":
            send(order, connection, LONG_S, act)
        else:
            receive(order, connection, slot_of(order), LONG_S)
    except (TransferError, VerbsError) as error:
        return f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return "ok"


def serve() -> None:
    """Fork a child per line."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    os.write(1, b'{"ready": 1}\n')
    for line in sys.stdin:
        order = Order(**json.loads(line))
        pid = os.fork()
        if pid == 0:
            outcome = play(order)
            os.write(1, (json.dumps({"done": os.getpid(), "outcome": outcome}) + "\n").encode())
            os._exit(0)
        os.write(1, (json.dumps({"pid": pid}) + "\n").encode())


class Zygote:
    """The test's handle on it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "tests.verbs.zygote"]
        self._process = subprocess.Popen(
            command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._children: set[int] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.settimeout(LONG_S)
        self.port: int = self._listener.getsockname()[1]
        self.expect("ready")

    def expect(self, key: str) -> Any:
        """The value in its next message, which must have this key."""
        assert self._process.stdout is not None
        message = json.loads(self._process.stdout.readline())
        return message if key == "done" else message[key]

    def start(self, order: Order) -> tuple[int, Connection]:
        """A child at work: its process id and the connection to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(order)) + "\n")
        self._process.stdin.flush()
        pid = self.expect("pid")
        self._children.add(pid)
        return pid, Connection(self._listener.accept()[0], f"child {pid}")

    def close(self) -> None:
        """End it and every child that is left."""
        for pid in self._children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._listener.close()
        self._process.kill()
        self._process.communicate()


if __name__ == "__main__":
    serve()
