"""The HTTP servers of a run, for tests that attack them."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest

from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.transfer import Version, auth, impatient, tls
from jaxrl_sync.transfer.hub.server import run_hub

OTHER_TOKEN = "cd" * 32
FEW = 128
"""Unproven connections that the servers of some tests take."""


class Server(NamedTuple):
    """An HTTP server, a call of it that needs the token, and one that takes a body."""

    url: str
    token: str
    call: str
    post: str


@contextlib.contextmanager
def running_hub(token_file: Path, **options: Any) -> Iterator[str]:
    """A hub in a thread; its URL."""
    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    options |= {"stop": stop, "announce": announce}
    thread = threading.Thread(target=run_hub, args=("127.0.0.1", 0, token_file), kwargs=options)
    thread.start()
    try:
        assert ready.wait(60)
        yield urls[0]
    finally:
        stop.set()
        thread.join(60)


def front() -> Any:
    """As much of an engine as its server asks for here."""
    stats = SimpleNamespace(to_json=lambda: {"state": "ready"})
    return SimpleNamespace(version=Version("a", 3), state="ready", stats=lambda: stats, abort=lambda ids: 0)


@contextlib.contextmanager
def running_engine(token: str, config: ServerConfig | None = None) -> Iterator[EngineServer]:
    server = EngineServer(front(), token=token, config=config)
    try:
        yield server
    finally:
        server.close(0.0)


@contextlib.contextmanager
def small_lobby() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(impatient, "MAX_UNPROVEN", FEW)
        yield


@contextlib.contextmanager
def a_server(kind: str, token_file: Path, own: tls.ServerTls | None) -> Iterator[Server]:
    token = auth.load_token(token_file)
    if kind == "hub":
        with running_hub(token_file, tls=own) as url:
            yield Server(url, token, "/v1/status", "/v1/members")
    else:
        with running_engine(token) as engine:
            yield Server(engine.url, token, "/stats", "/abort")


def serves(server: Server) -> bool:
    base, trust = tls.split_url(server.url)
    headers, verify = auth.bearer_headers(server.token), trust.context() if trust.fingerprint else True
    return httpx.get(base + server.call, headers=headers, timeout=60, verify=verify).status_code == 200


def dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), 60)


def refused_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if " refused 127.0.0.1: " in r.getMessage()]
