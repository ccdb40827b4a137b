"""The data connection: the orchestrator's BatchSender and the trainer process's BatchReceiver.

One step on one connection:

    sender  -> receiver   {"kind": "batch", "step"} and the frame's bytes
    receiver -> sender    {"kind": "alive"} every ``heartbeat_s`` while a step is in work
    receiver -> sender    {"kind": "ack", "step", "version", "metrics"} once the update is committed and
                          published, or {"kind": "refused", "message"}

The sender keeps a step's bytes until they are acknowledged and sends the same bytes again after a
reconnect; the receiver hands every step to the trainer once and acknowledges a committed one again. The
handshake (``transfer.auth``) tells the sender what the trainer has committed.
"""

from __future__ import annotations

import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_sync.batch.frame import PREFIX_BYTES, BatchFrame, FrameError, FrameLimits, decode_batch
from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.errors import (
    DeadlineError,
    PeerLost,
    ProtocolError,
    ResourceError,
    TransferError,
)
from jaxrl_sync.transfer.reception import Reception
from jaxrl_sync.transfer.refusals import Refusals

_POLL_S = 0.5
_MAX_UNPROVEN = 16

logger = logging.getLogger("jaxrl_sync.batch")


class BatchRefused(TransferError):
    """The trainer does not take a batch: wrong step, wrong rank, another lineage or a damaged frame."""


@dataclasses.dataclass(frozen=True, slots=True)
class ConnectionConfig:
    """Bounds of the data connection, in seconds.

    ``heartbeat_s``: between the trainer's signs of life. ``silence_s``: without one for this long the
    connection counts as lost. ``transfer_s``: longest time one frame may take on the wire. ``reconnect_s``:
    longest time without a connection before ``PeerLost``. ``handshake_s``: for dialling and the handshake.
    ``retry_s``: between two attempts. ``breaks``: how often a connection may break on one step.
    """

    heartbeat_s: float = 2.0
    silence_s: float = 30.0
    transfer_s: float = 60.0
    reconnect_s: float = 20.0
    handshake_s: float = 10.0
    retry_s: float = 0.1
    breaks: int = 5


@dataclasses.dataclass(frozen=True, slots=True)
class TrainerState:
    """What a trainer process has committed, and the data cursor saved with it."""

    lineage: str
    number: int
    cursor: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True)
class Ack:
    """The trainer's word that ``step`` is committed and published as version (lineage, number)."""

    step: int
    lineage: str
    number: int
    metrics: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def to_message(self) -> dict[str, Any]:
        """The message of the wire."""
        version = {"lineage": self.lineage, "number": self.number}
        return {"kind": "ack", "step": self.step, "version": version, "metrics": dict(self.metrics)}

    @classmethod
    def of_message(cls, message: Mapping[str, Any]) -> Ack:
        """The acknowledgement in a message; raises ``ProtocolError`` for a malformed one."""
        try:
            version = message["version"]
            return cls(
                int(message["step"]),
                str(version["lineage"]),
                int(version["number"]),
                dict(message["metrics"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as e:
            raise ProtocolError(f"malformed acknowledgement {str(message)[:200]}") from e


class BatchSender:
    """The orchestrator's end towards one trainer process. Owns the connection; used by one thread at a time.

    ``address`` is ``host:port`` or a function that returns the current one (a restarted trainer has a new
    port). ``close()`` may come from any thread and ends a ``send`` in progress with ``PeerLost``.
    """

    def __init__(
        self,
        address: str | Callable[[], str],
        *,
        token: str,
        run_id: str,
        data_rank: int,
        config: ConnectionConfig | None = None,
    ) -> None:
        self._address = address
        self._token, self._run_id, self._data_rank = token, run_id, data_rank
        self._config = config or ConnectionConfig()
        self._connection: wire.Connection | None = None
        self._closed = threading.Event()
        self.state: TrainerState | None = None
        self.resends = 0

    def connect(self) -> TrainerState:
        """Connects unless connected and returns what the trainer has committed.

        Blocks up to ``reconnect_s``; raises ``PeerLost`` with the last cause, ``AuthError`` at once when the
        token is wrong, ``BatchRefused`` when the trainer's lineage is no longer the one first seen.
        """
        deadline = time.monotonic() + self._config.reconnect_s
        while self._connection is None:
            try:
                self._connection = self._dial()
            except (PeerLost, DeadlineError, ProtocolError) as e:
                if time.monotonic() + self._config.retry_s >= deadline:
                    raise PeerLost(
                        f"no connection to trainer data rank {self._data_rank} within"
                        f" {self._config.reconnect_s:g} s: {e}"
                    ) from e
            if self._connection is None and self._closed.wait(self._config.retry_s):
                raise PeerLost(f"the sender to data rank {self._data_rank} was closed")
        assert self.state is not None
        return self.state

    def send(self, step: int, frame: bytes | memoryview, timeout_s: float) -> Ack:
        """Sends one step's frame and waits until the trainer has committed and published it.

        Reconnects and sends the same bytes again if the connection breaks meanwhile. Raises ``PeerLost``
        (trainer gone or silent), ``DeadlineError`` (alive, but not done within ``timeout_s``),
        ``BatchRefused``.
        """
        deadline = time.monotonic() + timeout_s
        breaks = 0
        while True:
            state = self.connect()
            if not step - 1 <= state.number:
                raise BatchRefused(
                    f"data rank {self._data_rank} has committed step {state.number}, expected at least"
                    f" {step - 1} to send step {step}"
                )
            try:
                return self._exchange(step, frame, deadline)
            except PeerLost as e:
                self._drop()
                breaks += 1
                if self._closed.is_set() or time.monotonic() >= deadline or breaks > self._config.breaks:
                    raise
                self.resends += 1
                if self._closed.wait(self._config.retry_s):
                    raise PeerLost(f"the sender to data rank {self._data_rank} was closed") from e

    def close(self) -> None:
        """Closes the connection; idempotent."""
        self._closed.set()
        self._drop()

    def __enter__(self) -> BatchSender:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _dial(self) -> wire.Connection:
        address = self._address if isinstance(self._address, str) else self._address()
        config = self._config
        sock = wire.dial(address, config.handshake_s)
        try:
            hello = {"purpose": "batch", "data_rank": self._data_rank}
            reply = auth.connect(sock, self._token, self._run_id, hello, config.handshake_s)
            try:
                state = TrainerState(str(reply["lineage"]), int(reply["number"]), dict(reply["cursor"]))
            except (KeyError, TypeError, ValueError, OverflowError) as e:
                raise ProtocolError(
                    f"{address} answered {str(reply)[:200]}, expected what it committed"
                ) from e
            if self.state is not None and self.state.lineage != state.lineage:
                raise BatchRefused(
                    f"data rank {self._data_rank} came back with lineage {state.lineage}, expected"
                    f" {self.state.lineage}"
                )
        except BaseException:
            sock.close()
            raise
        self.state = state
        return wire.Connection(sock, f"trainer data rank {self._data_rank} at {address}")

    def _exchange(self, step: int, frame: bytes | memoryview, deadline: float) -> Ack:
        connection, config = self._connection, self._config
        assert connection is not None and self.state is not None
        try:
            connection.send({"kind": "batch", "step": step}, frame, timeout_s=config.transfer_s)
        except DeadlineError as e:
            raise PeerLost(f"{connection.peer} did not take step {step}: {e}") from e
        heard = time.monotonic()
        while True:
            now = time.monotonic()
            if now >= deadline:
                self._drop()  # the acknowledgement may still come: only a fresh connection is in step again
                raise DeadlineError(f"{connection.peer} did not commit step {step} before the deadline")
            if now - heard > config.silence_s:
                raise PeerLost(f"{connection.peer} gave no sign of life for {config.silence_s:g} s")
            if not connection.wait_readable(min(_POLL_S, max(0.001, deadline - now))):
                continue
            try:
                message, _ = connection.recv(timeout_s=config.silence_s)
            except (DeadlineError, ProtocolError) as e:
                raise PeerLost(f"{connection.peer}: {e}") from e
            heard = time.monotonic()
            if message.get("kind") == "refused":
                raise BatchRefused(f"{connection.peer} refused step {step}: {message.get('message')}")
            if message.get("kind") == "ack":
                ack = Ack.of_message(message)
                if ack.step == step:
                    self.state = dataclasses.replace(self.state, number=max(self.state.number, step))
                    return ack

    def _drop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()


class BatchReceiver:
    """A trainer process's end. Owns the listener, its threads and the connection; ``close()`` ends all.

    The training thread calls ``receive`` and ``commit`` in turn. A second authenticated connection
    replaces the first, which is how a sender comes back after a break.
    """

    def __init__(
        self,
        state: TrainerState,
        *,
        token: str,
        run_id: str,
        data_rank: int,
        host: str = "127.0.0.1",
        port: int = 0,
        config: ConnectionConfig | None = None,
        limits: FrameLimits | None = None,
    ) -> None:
        self._data_rank = data_rank
        self._config, self._limits = config or ConnectionConfig(), limits or FrameLimits()
        try:
            self._listener = wire.listen(host, port)
        except OSError as e:
            raise ResourceError(f"can't listen for batches on {host}:{port}: {e.strerror or e}") from e
        if not wire.is_loopback(host):
            logger.warning("BATCHES ARE TAKEN UNENCRYPTED FROM WHO HAS THE RUN TOKEN ON %s", host)
        bound = self._listener.getsockname()
        self.address = f"{bound[0]}:{bound[1]}"
        self._changed = threading.Condition()
        self._state = state
        self._waiting: BatchFrame | None = None
        self._training: int | None = None
        self._last_ack: Ack | None = None
        self._connection: wire.Connection | None = None
        self._lost_at: float | None = None
        self._closed = threading.Event()
        self._reception = Reception(
            self._listener,
            token,
            run_id,
            self._serve,
            reply=self._greet,
            refusals=Refusals(logger, "batch port"),
            handshake_s=self._config.handshake_s,
            name="batch",
            most=_MAX_UNPROVEN,
        )
        self._heartbeat = threading.Thread(target=self._heartbeat_loop, name="batch-heartbeat", daemon=True)
        self._reception.start()
        self._heartbeat.start()

    @property
    def refused_connections(self) -> int:
        """Connections that were refused so far."""
        return sum(self._reception.refused.values())

    def address_towards(self, url: str) -> str:
        """``host:port`` for those who reach ``url``: a listener on every interface has no address itself."""
        return wire.address_of(self._listener, url)

    def pending(self) -> bool:
        """Whether ``receive`` would return a batch at once. Raises what it would raise."""
        with self._changed:
            if self._waiting is None:
                self._check_peer(time.monotonic())
            return self._waiting is not None

    def receive(self, timeout_s: float) -> BatchFrame | None:
        """The next step's batch, or None after ``timeout_s``. Blocks the training thread.

        Raises ``PeerLost`` when the orchestrator was connected and has been gone for ``reconnect_s``.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._waiting is None:
                now = time.monotonic()
                self._check_peer(now)
                if now >= deadline:
                    return None
                self._changed.wait(min(_POLL_S, deadline - now))
            frame, self._waiting = self._waiting, None
            self._training = frame.header.step
            return frame

    def _check_peer(self, now: float) -> None:
        if self._closed.is_set():
            raise PeerLost("the batch receiver was closed")
        if self._lost_at is not None and now - self._lost_at > self._config.reconnect_s:
            raise PeerLost(
                f"the orchestrator closed the data connection {now - self._lost_at:.1f} s ago and did"
                f" not come back within {self._config.reconnect_s:g} s"
            )

    def commit(self, ack: Ack, cursor: Mapping[str, Any]) -> None:
        """Records that the received step is committed and published, and acknowledges it.

        Does not raise when the sender is away: it will send the step again and be told.
        """
        with self._changed:
            if ack.step != self._training or ack.number != ack.step or ack.lineage != self._state.lineage:
                raise ValueError(
                    f"commit of {ack}, expected step {self._training} of lineage {self._state.lineage}"
                )
            self._training = None
            self._state = TrainerState(ack.lineage, ack.number, dict(cursor))
            self._last_ack = ack
            connection = self._connection
        if connection is not None:
            self._say(connection, ack.to_message())

    def close(self) -> None:
        """Ends all threads and closes all sockets; idempotent."""
        self._closed.set()
        with self._changed:
            connection, self._connection = self._connection, None
            self._changed.notify_all()
        if connection is not None:
            connection.close()
        self._reception.close(self._config.handshake_s)
        if self._heartbeat is not threading.current_thread():
            self._heartbeat.join(timeout=self._config.handshake_s + 2 * _POLL_S)

    def __enter__(self) -> BatchReceiver:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _serve(self, sock: socket.socket, hello: auth.Hello, answer: dict[str, Any], peer: str) -> None:
        """Frames of one proven connection until it breaks, is replaced or closed."""
        connection = wire.Connection(sock, "orchestrator")
        with self._changed:
            old, self._connection = self._connection, connection
            self._lost_at = None
        if old is not None:
            old.close()
        try:
            while not self._closed.is_set():
                if connection.wait_readable(_POLL_S):
                    self._take(connection)
        except TransferError:
            pass  # lost, silent or out of step: the sender comes back with a connection of its own
        finally:
            connection.close()
            with self._changed:
                if self._connection is connection:
                    self._connection, self._lost_at = None, time.monotonic()
                    self._changed.notify_all()

    def _greet(self, hello: auth.Hello) -> dict[str, Any]:
        found, wanted = (hello.get("purpose"), hello.get("data_rank")), ("batch", self._data_rank)
        if found != wanted:
            raise ProtocolError(f"a connection for {found} came to {wanted}")
        with self._changed:
            state = self._state
        return {"lineage": state.lineage, "number": state.number, "cursor": dict(state.cursor)}

    def _take(self, connection: wire.Connection) -> None:
        limit = PREFIX_BYTES + self._limits.header_bytes + self._limits.payload_bytes
        try:
            message, payload = connection.recv(self._config.transfer_s, limit)
        except ProtocolError as e:
            self._say(connection, {"kind": "refused", "message": str(e)})
            raise
        if message.get("kind") != "batch":
            raise ProtocolError(f"{connection.peer} sent a {message.get('kind')!r}, expected a batch")
        try:
            frame = decode_batch(payload, self._limits)
        except FrameError as e:
            self._say(connection, {"kind": "refused", "message": str(e)})
            return
        answer = self._place(frame)
        if answer is not None:
            self._say(connection, answer)

    def _place(self, frame: BatchFrame) -> dict[str, Any] | None:
        """Hands a new step to the trainer; what to answer at once to any other frame."""
        header = frame.header
        with self._changed:
            state = self._state
            if header.data_rank != self._data_rank:
                text = f"frame for data rank {header.data_rank}, expected {self._data_rank}"
                return {"kind": "refused", "message": text}
            if header.step <= state.number:
                if self._last_ack is not None and self._last_ack.step == header.step:
                    return self._last_ack.to_message()
                return Ack(header.step, state.lineage, header.step).to_message()
            if header.step != state.number + 1:
                text = f"step {header.step}, expected {state.number + 1}"
                return {"kind": "refused", "message": text}
            if self._waiting is None and self._training is None:
                self._waiting = frame
                self._changed.notify_all()
        return None

    def _heartbeat_loop(self) -> None:
        while not self._closed.wait(self._config.heartbeat_s):
            with self._changed:
                busy = self._waiting is not None or self._training is not None
                connection = self._connection
            if busy and connection is not None:
                self._say(connection, {"kind": "alive"})

    def _say(self, connection: wire.Connection, message: dict[str, Any]) -> None:
        """Sends a message; a connection that does not take it is closed, which its reader notices."""
        try:
            connection.send(message, timeout_s=self._config.handshake_s)
        except (TransferError, OSError):
            connection.close()
