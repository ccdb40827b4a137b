"""uvicorn's HTTP/1.1 protocol with the deadlines that it lacks; every HTTP server of a run speaks it."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import resource
import socket
import ssl
from collections.abc import Callable
from typing import Any

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.h11_impl import H11Protocol

from jaxrl_sync.transfer.guard import PROVEN
from jaxrl_sync.transfer.lobby import Lobby
from jaxrl_sync.transfer.refusals import Refusals

HEADERS_DEADLINE_S = 20.0
SEND_DEADLINE_S = 60.0
KEEP_ALIVE_S = 75.0
MAX_HEADER_BYTES = 64 << 10
MAX_UNPROVEN = 1024
BACKLOG = 1024
ACCEPTS = 32
"""So many connections are accepted before those that are open get their turn to prove themselves."""

_LOGGER = logging.getLogger("jaxrl_sync.http")
_LOGGER.setLevel(logging.ERROR)


class Door(socket.socket):
    """A listening socket whose connections are in a lobby from the moment that they are accepted: before
    their TLS handshake, and so before any protocol knows of them. Takes the descriptor of ``listener``."""

    def __init__(self, listener: socket.socket, lobby: Lobby) -> None:
        super().__init__(fileno=listener.detach())
        self._lobby = lobby
        self._numbers: dict[Any, int] = {}

    def listen(self, backlog: int = BACKLOG, /) -> None:
        """asyncio's backlog is also how many connections it accepts at a time; the kernel may keep more."""
        super().listen(max(backlog, BACKLOG))

    def accept(self) -> tuple[socket.socket, Any]:
        """The next connection."""
        connection, address = super().accept()
        self._numbers[address[:2]] = self._lobby.enter(address[0], functools.partial(_end, connection))
        while len(self._numbers) > 2 * self._lobby.most:  # of those that never got through a handshake
            del self._numbers[next(iter(self._numbers))]
        return connection, address

    def number(self, peer: tuple[str, int]) -> int | None:
        """The number that the connection from ``peer`` has in the lobby; tells it once."""
        return self._numbers.pop(peer, None)


def _end(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it has ended by itself
        connection.shutdown(socket.SHUT_RDWR)


def server(
    app: ASGIApp,
    refusals: Refusals,
    listener: socket.socket,
    *,
    tls: ssl.SSLContext | None = None,
    **settings: Any,
) -> tuple[uvicorn.Server, Door]:
    """A uvicorn server that believes no header about who calls, ends who dawdles, speaks TLS with ``tls``;
    and the socket that it must be given in place of ``listener``."""
    descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    lobby = Lobby(min(MAX_UNPROVEN, descriptors // 2))
    door = Door(listener, lobby)
    own = {"lobby": lobby, "door": door, "refusals": refusals}
    config = uvicorn.Config(
        app,
        loop="asyncio",  # it accepts by calling the door
        backlog=ACCEPTS,
        http=type("Impatient", (ImpatientProtocol,), own),
        ws="none",
        log_config=None,
        access_log=False,
        proxy_headers=False,  # else whoever calls from loopback chooses the address that we log and limit
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        **settings,
    )
    config.load()
    config.ssl = tls
    return uvicorn.Server(config), door


class ImpatientProtocol(H11Protocol):
    """Ends a connection, unsent bytes included, that does not finish a request's headers in
    ``HEADERS_DEADLINE_S`` (an idle one may stay ``KEEP_ALIVE_S`` longer), and one whose reader lets its
    answer stand for ``SEND_DEADLINE_S``. Until it has proven the token it waits in the ``lobby``."""

    lobby: Lobby
    door: Door
    refusals: Refusals
    _stalled: asyncio.TimerHandle | None = None
    _leave: Callable[[], None] | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Give the first request its time."""
        super().connection_made(transport)
        self.logger = _LOGGER  # uvicorn's own writes a line for every request that is none
        self._headers_due = self.loop.call_later(HEADERS_DEADLINE_S, self._end_idle)
        number = self.door.number(self.client) if self.client is not None else None
        if number is not None:
            self._leave = functools.partial(self.lobby.leave, self._address(), number)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is due any more."""
        self._headers_due.cancel()
        self._proven()
        self._reading_again()
        super().connection_lost(exc)

    def handle_events(self) -> None:
        """Let the guard of the application say that this connection has proven the token."""
        super().handle_events()
        if self.scope is not None:
            self.scope[PROVEN] = self._proven  # type: ignore[literal-required]

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        self.refusals.note(self._address(), "protocol", msg)
        super().send_400_response(msg)

    def _address(self) -> str:
        return self.client[0] if self.client else "unknown"

    def _proven(self) -> None:
        leave, self._leave = self._leave, None
        if leave is not None:
            leave()

    def on_response_complete(self) -> None:
        """Give the next request its time, on top of the time that a connection may idle."""
        super().on_response_complete()
        self._headers_due.cancel()
        self._headers_due = self.loop.call_later(HEADERS_DEADLINE_S + KEEP_ALIVE_S, self._end_idle)

    def pause_writing(self) -> None:
        """The transport's buffer is full: from now on the reader is on the clock."""
        super().pause_writing()
        self._stalled = self.loop.call_later(SEND_DEADLINE_S, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader took enough of it."""
        self._reading_again()
        super().resume_writing()

    def _reading_again(self) -> None:
        if self._stalled is not None:
            self._stalled.cancel()
            self._stalled = None

    def _end_idle(self) -> None:
        busy = self.cycle is not None and not self.cycle.response_complete
        if not busy:
            self.transport.abort()
