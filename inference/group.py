"""The ranks of one engine: rank 0 leads, the others follow its step plans and run the same jitted steps.

One jax.distributed world; beside it one authenticated TCP connection from every follower to the leader, for
what collectives can't do: plans go down it, and each end says every second that it lives. A rank whose peer
ends, or is silent for ``SILENCE_S``, ends itself with the cause in its last line: a collective that waits for
a dead peer never returns, so nothing gentler would do.

    leader -> follower   {"op": "plan"} + plan bytes | {"op": "prepare"} | {"op": "turn"} | {"op": "stop"} |
                         {"op": "alive"} | {"op": "failed"} + {"cause", "exit_code"} as JSON
    follower -> leader   {"op": "alive"}
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Literal, NoReturn

from jaxrl_sync.inference.errors import RankDiedError
from jaxrl_sync.inference.plan import StepPlan
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import auth, clean
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.reception import Reception
from jaxrl_sync.transfer.refusals import Refusals
from jaxrl_sync.transfer.wire import Connection, dial, is_loopback, listen

ALIVE_S = 1.0
SILENCE_S = 4.0
SEND_S = 4.0
BLAME_S = SILENCE_S + 1.0
_HANDSHAKE_S = 5.0
MAX_PLAN_BYTES = 256 << 20

MAX_CAUSE = 2000
OnDeath = Callable[[str, int], object]
"""What a rank does that can't go on: with the cause, and the exit code that it calls for."""
Order = Literal["turn", "stop"]
log = logging.getLogger("jaxrl_sync.inference.group")


def die(cause: str, exit_code: int) -> NoReturn:
    """End this process now, the cause as its last line; nothing is waited for."""
    print(f"jaxrl-sync: error: {cause}", file=sys.stderr, flush=True)
    sys.stdout.flush()
    clean.remove_mine()  # nobody closes the slots any more
    os._exit(exit_code)


class _Link:
    """One connection between two ranks: a thread sends heartbeats, another receives messages."""

    def __init__(
        self, connection: Connection, on_message: Callable[[str, bytes], None], on_death: OnDeath
    ) -> None:
        self._connection, self._on_message, self._on_death = connection, on_message, on_death
        self._closing = threading.Event()
        self._threads = [
            threading.Thread(target=self._receive, name=f"group-{connection.peer}", daemon=True),
            threading.Thread(target=self._say_alive, name=f"alive-{connection.peer}", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def send(self, op: str, payload: bytes = b"") -> None:
        """Send one message; a peer that can't take it in ``SEND_S`` counts as dead."""
        try:
            self._connection.send({"op": op}, payload, timeout_s=SEND_S)
        except TransferError as error:
            self._lost(error)

    def close(self) -> None:
        """End without calling anybody dead."""
        self._closing.set()
        self._connection.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(2.0)

    def expect_end(self) -> None:
        """From here on the peer may go away."""
        self._closing.set()

    def blame(self, timeout_s: float) -> None:
        """Give the receiving thread time to find that the peer is dead; ``on_death`` is called then."""
        self._threads[0].join(timeout_s)

    def _receive(self) -> None:
        while not self._closing.is_set():
            try:
                header, payload = self._connection.recv(SILENCE_S, MAX_PLAN_BYTES)
                if header.get("op") != "alive":
                    self._on_message(str(header.get("op")), bytes(payload))
            except TransferError as error:
                self._lost(error)
                return
            except Exception as error:  # without this thread nobody would notice that the peer dies
                log.exception("%s sent what can't be read", self._connection.peer)
                self._lost(ProtocolError(f"it sent what can't be read: {type(error).__name__}: {error}"))
                return

    def _say_alive(self) -> None:
        while not self._closing.wait(ALIVE_S):
            try:
                self._connection.send({"op": "alive"}, timeout_s=SEND_S)
            except PeerLost:  # the receiving thread finds out: the peer died, or has said before that it ends
                return
            except TransferError as error:
                self._lost(error)

    def _lost(self, error: TransferError) -> None:
        if not self._closing.is_set():
            self._closing.set()
            cause = f"{self._connection.peer} of this engine died: {error}"
            self._on_death(cause, RankDiedError.exit_code)


class Leader:
    """Rank 0's end: one link per follower. ``close`` tells the followers to stop."""

    def __init__(self, name: str, token: str, host: str, size: int, on_death: OnDeath = die) -> None:
        self._name, self._token, self._size, self._on_death = name, token, size, on_death
        self._listener = listen(host)
        if not is_loopback(host):
            log.warning("%s LEADS ITS RANKS UNENCRYPTED ON %s", name, host)
        self._links: dict[int, _Link] = {}
        self._left = False
        self._arrived = threading.Condition()

    @property
    def address(self) -> tuple[str, int]:
        """Host and port that followers connect to."""
        host, port = self._listener.getsockname()[:2]
        return str(host), int(port)

    def wait(self, timeout_s: float) -> None:
        """Accept every follower; RankDiedError names the ranks that are missing at the deadline."""
        welcoming = Reception(
            self._listener,
            self._token,
            auth.run_id_of(self._token),
            self._welcome,
            refusals=Refusals(log, f"{self._name}'s control port"),
            handshake_s=_HANDSHAKE_S,
            name="group",
        )
        welcoming.start()
        try:
            with self._arrived:
                whole = self._arrived.wait_for(lambda: len(self._links) == self._size - 1, timeout_s)
                missing = sorted(set(range(1, self._size)) - set(self._links))
        finally:
            welcoming.close()
        if not whole:
            raise RankDiedError(f"{self._name}: ranks {missing} did not connect in {timeout_s:g} s")

    def _welcome(self, sock: socket.socket, hello: auth.Hello, answer: dict[str, Any], peer: str) -> None:
        rank = hello.get("rank")
        with self._arrived:
            if type(rank) is not int or not 0 < rank < self._size or rank in self._links:
                raise ProtocolError(f"rank {rank!r}, expected another one from 1 to {self._size - 1}")
            self._links[rank] = self._link(sock, rank)
            self._arrived.notify_all()

    def _link(self, sock: socket.socket, rank: int) -> _Link:
        connection = Connection(sock, f"{self._name} rank {rank}")
        return _Link(connection, lambda op, payload: None, self._on_death)

    def send_plan(self, plan: StepPlan) -> None:
        """Give a plan to every follower, right before this rank executes it."""
        data = plan.to_bytes()
        for link in self._all():
            link.send("plan", data)

    def prepare(self) -> None:
        """Tell the followers to take the version that the hub offers to this engine now."""
        for link in self._all():
            link.send("prepare")

    def turn(self) -> None:
        """After the plans sent so far it is the trainer's turn: colocated ranks sleep and train."""
        for link in self._all():
            link.send("turn")

    def close(self) -> None:
        """Tell the followers to stop, and leave. Idempotent."""
        for link in [] if self._left else self._all():
            link.expect_end()
            link.send("stop")
        self.abandon()

    @contextlib.contextmanager
    def telling(self) -> Iterator[None]:
        """Around what rank 0 does: an error is the followers' too, before anything else is closed for it."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def fail(self, error: BaseException) -> None:
        """Leave because of ``error``: the followers end with it, and with the exit code that it calls for.

        Of an error that names no cause, as one of a collective, a dead follower may be it: it is waited for.
        """
        self._left = True
        if isinstance(error, Exception) and not isinstance(error, UserError):
            deadline = time.monotonic() + BLAME_S
            for link in self._all():
                link.blame(max(0.0, deadline - time.monotonic()))
        cause = " ".join(str(error).split())[:MAX_CAUSE] or type(error).__name__
        code = error.exit_code if isinstance(error, UserError) else 1
        told = json.dumps({"cause": cause, "exit_code": code}).encode()
        for link in self._all():
            link.expect_end()
            link.send("failed", told)
        self.abandon()

    def abandon(self) -> None:
        """Leave without a word: to the followers this rank has died, and so do they. Idempotent."""
        self._left = True
        self._listener.close()
        for link in self._all():
            link.close()

    def _all(self) -> list[_Link]:
        """The links there are now: ``close`` and ``abandon`` may run beside any other call."""
        with self._arrived:
            return list(self._links.values())


class Follower:
    """Another rank's end. Plans wait in a queue; ``on_prepare`` is called on the receiving thread."""

    def __init__(
        self,
        name: str,
        rank: int,
        address: str,
        token: str,
        on_prepare: Callable[[], None],
        on_death: OnDeath = die,
        timeout_s: float = 30.0,
    ) -> None:
        sock = dial(address, timeout_s)
        auth.connect(sock, token, auth.run_id_of(token), {"rank": rank}, timeout_s)
        self._orders: queue.SimpleQueue[StepPlan | Order] = queue.SimpleQueue()
        self._on_prepare, self._on_death, self._leader = on_prepare, on_death, f"{name} rank 0"
        self._link = _Link(Connection(sock, self._leader), self._message, on_death)

    def next_plan(self) -> StepPlan | None:
        """Block until the leader sends a plan; None once it has said stop."""
        order = self._orders.get()
        return order if isinstance(order, StepPlan) else None

    def next_order(self, timeout_s: float) -> StepPlan | Order | None:
        """The leader's next plan or word, in the order of sending; None after ``timeout_s``."""
        try:
            return self._orders.get(timeout=timeout_s)
        except queue.Empty:
            return None

    @contextlib.contextmanager
    def step(self) -> Iterator[None]:
        """Around a step that all ranks run: its collective may fail before the link tells that rank 0 died.

        Then the death is the cause to end with, so an error waits for it, ``SILENCE_S`` and a little more.
        """
        try:
            yield
        except Exception:
            self._link.blame(BLAME_S)
            raise

    def close(self) -> None:
        """Leave."""
        self._link.close()

    def _message(self, op: str, payload: bytes) -> None:
        if op == "plan":
            self._orders.put(StepPlan.from_bytes(payload))
        elif op == "prepare":
            self._on_prepare()
        elif op == "turn":
            self._orders.put("turn")
        elif op == "stop":
            self._link.expect_end()
            self._orders.put("stop")
        elif op == "failed":
            self._link.expect_end()
            self._on_death(*_failure(self._leader, payload))


def _failure(who: str, payload: bytes) -> tuple[str, int]:
    """The cause and the exit code that a leader told with its end."""
    try:
        told = json.loads(payload)
        cause, code = str(told["cause"])[:MAX_CAUSE], int(told["exit_code"])
    except (ValueError, KeyError, TypeError, OverflowError):
        return f"{who} failed, and told no cause: {payload[:80]!r}", RankDiedError.exit_code
    return f"{who} failed: {' '.join(cause.split())}", code if 0 < code < 256 else 1
