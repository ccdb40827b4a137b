"""Where data connections come in: each proves the run token in a thread of its own before anyone talks to it.

Unproven connections wait in a lobby, so that silent ones can't keep others out; refused ones are logged once
and counted.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.lobby import Lobby
from jaxrl_sync.transfer.refusals import Refusals

MAX_UNPROVEN = 256
_POLL_S = 0.5

Answer = dict[str, Any]
Welcome = Callable[[socket.socket, auth.Hello, Answer, str], None]
"""From the socket, the hello, our reply to it and ``host:port`` of the peer; takes the socket over. A
TransferError refuses the connection."""


class Reception:
    """Owns a listening socket and the threads that welcome; ``close()`` ends both, not what was welcomed."""

    def __init__(
        self,
        listener: socket.socket,
        token: str,
        run_id: str,
        welcome: Welcome,
        *,
        refusals: Refusals,
        handshake_s: float,
        name: str,
        reply: Callable[[auth.Hello], Mapping[str, Any]] = lambda hello: {},
        most: int = MAX_UNPROVEN,
    ) -> None:
        """``reply`` answers a hello that came with the token, or refuses it with a TransferError. Nobody is
        let in before ``start``."""
        self._listener, self._token, self._run_id = listener, token, run_id
        self._welcome, self._reply = welcome, reply
        self._refusals, self._handshake_s, self._name = refusals, handshake_s, name
        self._lobby = Lobby(most)
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were refused so far, by the kind of reason."""
        return self._refusals.counts()

    def start(self) -> None:
        """Let them in."""
        self._thread.start()

    def _accept(self) -> None:
        self._listener.settimeout(_POLL_S)
        while not self._closed.is_set():
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed.is_set():
                    return
                self._refusals.note("everyone", "error", f"can't accept: {error}")
                self._closed.wait(_POLL_S)  # out of descriptors: a later round may do better
                continue
            name = f"{self._name}-welcome"
            number = self._lobby.enter(address[0], functools.partial(_end, sock))
            arguments = sock, address[:2], number
            try:
                threading.Thread(target=self._receive, args=arguments, name=name, daemon=True).start()
            except RuntimeError as error:  # no more threads: a later one may be let in
                self._refusals.note(address[0], "error", str(error))
                self._lobby.leave(address[0], number)
                sock.close()

    def _receive(self, sock: socket.socket, address: tuple[str, int], number: int) -> None:
        answer: Answer = {}

        def reply(hello: auth.Hello) -> Mapping[str, Any]:
            answer.update(self._reply(hello))
            return answer

        try:
            try:
                hello = auth.accept(sock, self._token, self._run_id, self._handshake_s, reply)
            finally:
                self._lobby.leave(address[0], number)
            self._welcome(sock, hello, answer, f"{address[0]}:{address[1]}")
        except (TransferError, OSError) as error:
            if not self._closed.is_set():
                self._refusals.note_error(address[0], error)
            sock.close()

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop to listen; waits for the accepting thread. Idempotent."""
        self._closed.set()
        _end(self._listener)
        self._listener.close()
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
