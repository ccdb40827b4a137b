"""Length-prefixed messages over a stream socket: a JSON header, raw bytes, a deadline on every wait.

A message is ``magic (4) | header length (u32) | payload length (u64) | header JSON | payload``, little
endian. The header is a JSON object; payload bytes are never interpreted here. Sockets are non-blocking and
waits go through ``poll``, so that one thread may send while another receives, each under its own deadline.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import select
import socket
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError, TransferError

Buffer = bytes | bytearray | memoryview

MAX_HEADER_BYTES = 16 << 20
_PREFIX = struct.Struct("<4sIQ")
_MAGIC = b"jxs1"
_IOV_MAX = 512
_POLL_MS = (1 << 31) - 1  # more is no argument of poll(2)


def _wait(sock: socket.socket, event: int, deadline: float, what: str) -> None:
    """Block until ``event`` is ready on the socket; DeadlineError at ``deadline`` (monotonic seconds)."""
    remaining = deadline - time.monotonic()
    if remaining > 0 and _ready(sock, event, max(1, int(remaining * 1000)), what):
        return
    raise DeadlineError(f"{what}: no progress before the deadline")


def _ready(sock: socket.socket, event: int, wait_ms: int, what: str) -> bool:
    poller = select.poll()
    try:
        poller.register(sock, event)
    except (OSError, ValueError) as error:  # another thread closed it: it has no descriptor any more
        raise PeerLost(f"{what}: the connection was closed on this side") from error
    return bool(poller.poll(min(wait_ms, _POLL_MS)))


def send_all(sock: socket.socket, buffers: Sequence[Buffer], deadline: float, peer: str = "peer") -> int:
    """Send every byte of ``buffers`` with scatter/gather calls and return their number.

    Raises PeerLost when the peer is gone and DeadlineError at ``deadline``. Part of the bytes may then be
    on the way: the stream is of no further use.
    """
    views = [v for v in (memoryview(b).cast("B") for b in buffers) if v.nbytes]
    total = sum(v.nbytes for v in views)
    first = 0
    while first < len(views):
        try:
            sent = sock.sendmsg(views[first : first + _IOV_MAX])
        except BlockingIOError:
            _wait(sock, select.POLLOUT, deadline, f"sending to {peer}")
            continue
        except OSError as error:
            raise PeerLost(f"{peer} is gone while sending: {error}") from error
        while sent:
            step = min(sent, views[first].nbytes)
            views[first] = views[first][step:]
            sent -= step
            first += views[first].nbytes == 0
    return total


def recv_exact_into(sock: socket.socket, view: memoryview, deadline: float, peer: str = "peer") -> None:
    """Fill ``view`` (bytes, writable) from the socket. Raises PeerLost on end of stream, DeadlineError."""
    done = 0
    while done < view.nbytes:
        try:
            got = sock.recv_into(view[done:])
        except BlockingIOError:
            _wait(sock, select.POLLIN, deadline, f"receiving from {peer}")
            continue
        except OSError as error:
            raise PeerLost(f"{peer} is gone while receiving: {error}") from error
        if got == 0:
            raise PeerLost(f"{peer} closed the connection after {done} of {view.nbytes} bytes")
        done += got


class Connection:
    """A stream socket that speaks messages. Owns the socket; ``close()`` wakes every thread that waits on it.

    One thread may send while another receives; several senders (or receivers) are serialised by a lock.
    """

    def __init__(self, sock: socket.socket, peer: str) -> None:
        sock.setblocking(False)
        with contextlib.suppress(OSError):  # a socketpair has no such option
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.peer = peer
        self._send_lock = threading.Lock()
        self._recv_lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False

    def send(self, header: dict[str, Any], *payload: Buffer, timeout_s: float) -> None:
        """Send one message; blocks until the kernel took all of it. PeerLost, DeadlineError."""
        deadline = time.monotonic() + timeout_s
        text = json.dumps(header, separators=(",", ":")).encode()
        prefix = _PREFIX.pack(_MAGIC, len(text), sum(memoryview(p).nbytes for p in payload))
        with self._turn(self._send_lock, deadline, "sending to"):
            send_all(self.sock, [prefix + text, *payload], deadline, self.peer)

    def recv(self, timeout_s: float, max_payload_bytes: int = 0) -> tuple[dict[str, Any], bytearray]:
        """Receive one message: (header, payload). ProtocolError above a size limit, PeerLost, DeadlineError.

        After a DeadlineError that came before the first byte the connection may be used again; after any
        other error it may not.
        """
        deadline = time.monotonic() + timeout_s
        with self._turn(self._recv_lock, deadline, "receiving from"):
            header, payload_bytes = self._recv_header(deadline)
            if payload_bytes > max_payload_bytes:
                raise ProtocolError(
                    f"{self.peer} sent a payload of {payload_bytes} bytes, limit {max_payload_bytes}"
                )
            payload = bytearray(payload_bytes)
            recv_exact_into(self.sock, memoryview(payload), deadline, self.peer)
        return header, payload

    def recv_into(self, views: Sequence[memoryview], timeout_s: float) -> dict[str, Any]:
        """Receive one message whose payload fills ``views``; returns the header. ProtocolError."""
        deadline = time.monotonic() + timeout_s
        expected = sum(v.nbytes for v in views)
        with self._turn(self._recv_lock, deadline, "receiving from"):
            header, payload_bytes = self._recv_header(deadline)
            if payload_bytes != expected:
                raise ProtocolError(f"{self.peer} sent {payload_bytes} payload bytes, expected {expected}")
            for view in views:
                recv_exact_into(self.sock, view.cast("B"), deadline, self.peer)
        return header

    def send_header(self, header: dict[str, Any], payload_bytes: int, timeout_s: float) -> None:
        """The start of a message whose payload the caller writes to ``sock``. PeerLost, DeadlineError."""
        text = json.dumps(header, separators=(",", ":")).encode()
        prefix = _PREFIX.pack(_MAGIC, len(text), payload_bytes)
        deadline = time.monotonic() + timeout_s
        with self._turn(self._send_lock, deadline, "sending to"):
            send_all(self.sock, [prefix + text], deadline, self.peer)

    def recv_header(self, timeout_s: float) -> tuple[dict[str, Any], int]:
        """The start of a message whose payload of so many bytes the caller reads from ``sock`` itself."""
        deadline = time.monotonic() + timeout_s
        with self._turn(self._recv_lock, deadline, "receiving from"):
            return self._recv_header(deadline)

    def wait_readable(self, timeout_s: float) -> bool:
        """Whether a message (or the end of the stream) is there within ``timeout_s``; 0 only looks."""
        try:
            return _ready(self.sock, select.POLLIN, max(0, int(timeout_s * 1000)), self.peer)
        except PeerLost:  # the next recv says so
            return True

    def _recv_header(self, deadline: float) -> tuple[dict[str, Any], int]:
        prefix = bytearray(_PREFIX.size)
        recv_exact_into(self.sock, memoryview(prefix), deadline, self.peer)
        magic, header_bytes, payload_bytes = _PREFIX.unpack(prefix)
        if magic != _MAGIC or header_bytes > MAX_HEADER_BYTES:
            raise ProtocolError(
                f"{self.peer} sent {bytes(magic)!r} and a header of {header_bytes} bytes, "
                f"expected {_MAGIC!r} and at most {MAX_HEADER_BYTES}"
            )
        text = bytearray(header_bytes)
        recv_exact_into(self.sock, memoryview(text), deadline, self.peer)
        try:
            header = json.loads(bytes(text))
        except (ValueError, RecursionError) as error:
            raise ProtocolError(f"{self.peer} sent a header that isn't JSON: {error}") from error
        if not isinstance(header, dict):
            raise ProtocolError(
                f"{self.peer} sent a header of type {type(header).__name__}, expected an object"
            )
        return header, payload_bytes

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called on this side."""
        return self._closed

    @contextlib.contextmanager
    def _turn(self, lock: threading.Lock, deadline: float, doing: str) -> Iterator[None]:
        """The lock, on a connection that is open; waiting for another thread's turn has a deadline too."""
        if not lock.acquire(timeout=min(max(0.0, deadline - time.monotonic()), threading.TIMEOUT_MAX)):
            raise DeadlineError(f"{doing} {self.peer}: another thread was at it until the deadline")
        try:
            if self._closed:
                raise PeerLost(f"the connection to {self.peer} was closed on this side")
            yield
        finally:
            lock.release()

    def duplicate(self) -> int:
        """Another descriptor of the socket, for the caller to close: it stays a socket whoever closes this.

        PeerLost where it was closed; TransferError where there are no more descriptors.
        """
        with self._closing:  # or the number were another file's already
            if self._closed:
                raise PeerLost(f"the connection to {self.peer} was closed on this side")
            try:
                return os.dup(self.sock.fileno())
            except OSError as error:
                raise TransferError(f"no descriptor for the connection to {self.peer}: {error}") from error

    def close(self) -> None:
        """Close the socket; waits in other threads end with PeerLost. Idempotent."""
        with self._closing:
            if self._closed:
                return
            self._closed = True
            with contextlib.suppress(OSError):
                self.sock.shutdown(socket.SHUT_RDWR)
            self.sock.close()

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def listen(host: str, port: int = 0, backlog: int = 64) -> socket.socket:
    """A listening TCP socket, without delay, on ``host`` (loopback unless the caller was told otherwise).

    OSError, also for a port or a host that can't be.
    """
    if not 0 <= port <= 65535:
        raise OSError(errno.EINVAL, f"port {port}, expected 0 to 65535")
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except UnicodeError as error:
        raise OSError(errno.EINVAL, f"{host[:200]!r} is no name of a host") from error
    # ``localhost`` is often both; addresses of listeners are handed out as host:port
    family, kind, proto, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Accepted sockets inherit it. An HTTP answer goes out in two writes; without this each waits 40 ms
        # for a delayed acknowledgement (asyncio sets it by itself only where it made the socket).
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.bind(address)
        sock.listen(backlog)
    except OSError:
        sock.close()
        raise
    return sock


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def address_of(listener: socket.socket, towards: str) -> str:
    """``host:port`` under which others reach a listener.

    One that listens on every interface is named by the one that leads to the URL ``towards``.
    """
    host, port = listener.getsockname()[:2]
    if host in ("0.0.0.0", "::"):
        url = urllib.parse.urlsplit(towards)
        with socket.socket(listener.family, socket.SOCK_DGRAM) as probe:
            probe.connect((url.hostname or "localhost", url.port or 80))  # sends nothing
            host = probe.getsockname()[0]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def dial(address: str, timeout_s: float) -> socket.socket:
    """A TCP connection to ``host:port``. PeerLost when nobody answers, DeadlineError when slow."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or len(port) > 5 or int(port) > 65535:
        raise PeerLost(f"can't connect to {address[:200]!r}, expected host:port")
    try:
        return socket.create_connection((host.strip("[]"), int(port)), timeout=timeout_s)
    except TimeoutError as error:
        raise DeadlineError(f"connecting to {address} took more than {timeout_s:g} s") from error
    except (OSError, UnicodeError) as error:  # a host that is no name of one
        raise PeerLost(f"can't connect to {address[:200]}: {error}") from error
