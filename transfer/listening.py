"""The listening half of whoever serves versions: accepts connections, checks the token, keeps the links."""

from __future__ import annotations

import logging
import secrets
import socket
import threading
from typing import Any

from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError, ResourceError, TransferError
from jaxrl_sync.transfer.outbound import Outbound, keep_alive
from jaxrl_sync.transfer.owner import Owner
from jaxrl_sync.transfer.reception import Reception
from jaxrl_sync.transfer.refusals import Refusals

logger = logging.getLogger("jaxrl_sync.transfer")


class Listening:
    """Owns the listening socket, its thread and the links: ``close()`` ends them all."""

    def __init__(self, owner: Owner, token: str, name: str) -> None:
        """Listen where the owner's config says; nobody is welcomed before ``start``. ResourceError."""
        self._owner = owner
        self._name = name
        self._lock = threading.Lock()
        self._links: dict[str, Outbound] = {}
        self._closed = False
        host, port = owner.config.host, owner.config.port
        try:
            self._listener = wire.listen(host, port)
        except OSError as error:
            raise ResourceError(f"can't listen on {host}:{port}: {error.strerror}") from error
        if not wire.is_loopback(host):
            logger.warning("WEIGHTS ARE SENT UNENCRYPTED TO WHO HAS THE RUN TOKEN ON %s", host)
        self._reception = Reception(
            self._listener,
            token,
            owner.run_id,
            self._welcome,
            reply=lambda hello: {"link": secrets.token_hex(8)},
            refusals=Refusals(logger, name),
            handshake_s=owner.config.handshake_timeout_s,
            name=name,
        )

    def start(self) -> None:
        """Welcome who comes."""
        self._reception.start()

    @property
    def refused(self) -> dict[str, int]:
        """Connections that were refused so far, by the kind of reason."""
        return self._reception.refused

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

    def _welcome(self, sock: socket.socket, hello: auth.Hello, answer: dict[str, Any], peer: str) -> None:
        """Hand a proven connection to its link."""
        keep_alive(sock)
        connection = wire.Connection(sock, f"{hello.get('engine')}.{hello.get('rank')} at {peer}")
        self._hand_over(connection, hello, answer["link"])

    def _hand_over(self, connection: wire.Connection, hello: dict[str, Any], link: str) -> None:
        if hello.get("purpose") == "weights":
            outbound = Outbound(self._owner, connection, hello, link)
            with self._lock:
                if self._closed:
                    raise PeerLost(f"the {self._name} is closing")
                self._links[link] = outbound
            try:
                outbound.start()
            except RuntimeError as error:  # no more threads: a later one may get its
                self.forget(outbound)
                raise TransferError(f"no thread for the link of {connection.peer}: {error}") from error
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
        self._reception.close()
        for link in links:
            link.close()
            link.join(5.0)
