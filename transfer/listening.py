"""The listening half of whoever serves versions: accepts connections, checks the token, keeps the links."""

from __future__ import annotations

import contextlib
import logging
import secrets
import socket
import threading
import time
from typing import Any

from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, ResourceError, TransferError
from jaxrl_sync.transfer.outbound import Outbound, keep_alive
from jaxrl_sync.transfer.owner import Owner

MAX_HANDSHAKES = 64

logger = logging.getLogger("jaxrl_sync.transfer")


class Listening:
    """Owns the listening socket, its thread and the links: ``close()`` ends them all."""

    def __init__(self, owner: Owner, token: str, name: str) -> None:
        """Listen where the owner's config says; nobody is welcomed before ``start``. ResourceError."""
        self._owner = owner
        self._token = token
        self._name = name
        self._lock = threading.Lock()
        self._links: dict[str, Outbound] = {}
        self._handshakes = threading.BoundedSemaphore(MAX_HANDSHAKES)
        self._closed = False
        host, port = owner.config.host, owner.config.port
        try:
            self._listener = wire.listen(host, port)
        except OSError as error:
            raise ResourceError(f"can't listen on {host}:{port}: {error.strerror}") from error
        if not wire.is_loopback(host):
            logger.warning("WEIGHTS ARE SENT UNENCRYPTED TO WHO HAS THE RUN TOKEN ON %s", host)
        self._thread = threading.Thread(target=self._accept, name=f"{name}-accept", daemon=True)

    def start(self) -> None:
        """Welcome who comes."""
        self._thread.start()

    def address(self, towards: str) -> str:
        """``host:port`` under which others reach it; ``towards`` is a URL of the network that they are on."""
        return wire.address_of(self._listener, towards)

    @property
    def links(self) -> list[Outbound]:
        """The links that haven't ended."""
        with self._lock:
            return list(self._links.values())

    def forget(self, link: Outbound) -> bool:
        """A link has ended; whether another one of the same rank took its place."""
        with self._lock:
            self._links.pop(link.link, None)
            return any(other.key == link.key for other in self._links.values())

    def _accept(self) -> None:
        self._listener.settimeout(0.5)
        while not self._closed:
            try:
                sock, address = self._listener.accept()
            except TimeoutError:
                continue
            except OSError as error:
                if self._closed:
                    return
                logger.warning("can't accept a subscriber's connection: %s", error)
                time.sleep(0.5)  # out of descriptors: a later round may do better
                continue
            peer = f"{address[0]}:{address[1]}"
            if not self._handshakes.acquire(blocking=False):
                logger.warning("connection from %s: %d others are still unproven", peer, MAX_HANDSHAKES)
                sock.close()
                continue
            name = f"{self._name}-welcome"
            threading.Thread(target=self._welcome, args=(sock, peer), name=name, daemon=True).start()

    def _welcome(self, sock: socket.socket, peer: str) -> None:
        """Check the token of a new connection and hand it to its link."""
        link = secrets.token_hex(8)
        limit_s = self._owner.config.handshake_timeout_s
        try:
            hello = auth.accept(sock, self._token, self._owner.run_id, limit_s, reply={"link": link})
            keep_alive(sock)
            connection = wire.Connection(sock, f"{hello.get('engine')}.{hello.get('rank')} at {peer}")
            self._hand_over(connection, hello, link)
        except (TransferError, OSError) as error:
            logger.warning("connection from %s: %s", peer, error)
            sock.close()
        finally:
            self._handshakes.release()

    def _hand_over(self, connection: wire.Connection, hello: dict[str, Any], link: str) -> None:
        if hello.get("purpose") == "weights":
            outbound = Outbound(self._owner, connection, hello, link)
            with self._lock:
                if self._closed:
                    raise PeerLost(f"the {self._name} is closing")
                self._links[link] = outbound
            outbound.start()
        elif hello.get("purpose") == "lane":
            with self._lock:
                found = self._links.get(str(hello.get("link")))
            if found is None:
                raise ProtocolError(f"a lane of the unknown link {hello.get('link')!r}")
            found.add_lane(connection, hello.get("lane"))
        else:
            raise ProtocolError(f"purpose {hello.get('purpose')!r}, expected weights or lane")

    def close(self) -> None:
        """Stop to listen, end the links and wait some seconds for their threads. Idempotent."""
        with self._lock:
            self._closed = True
            links = list(self._links.values())
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in links:
            link.close()
            link.join(5.0)
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join(5.0)
