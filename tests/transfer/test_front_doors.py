"""Attacks on the HTTP servers of a run: refused, logged once, service unharmed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from jaxrl_sync.transfer import auth, tls
from tests.transfer.servers import (
    FEW,
    OTHER_TOKEN,
    Server,
    a_server,
    dial,
    refused_lines,
    serves,
    small_lobby,
)


@pytest.fixture(params=["hub", "engine"])
def server(request: pytest.FixtureRequest, token_file: Path) -> Iterator[Server]:
    with a_server(request.param, token_file, None) as made:
        yield made


@pytest.fixture(params=["hub", "engine", "hub with tls"])
def any_server(request: pytest.FixtureRequest, token_file: Path, tmp_path: Path) -> Iterator[Server]:
    own = tls.of_run(tmp_path) if "tls" in request.param else None
    with contextlib.ExitStack() as stack:
        with small_lobby():
            made = stack.enter_context(a_server(request.param.partition(" ")[0], token_file, own))
        yield made


@pytest.fixture(scope="module", params=["hub", "engine"])
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with a small lobby, for many tests that count nothing."""
    token_file = tmp_path_factory.mktemp("shared") / "token"
    auth.create_token(token_file)
    with contextlib.ExitStack() as stack:
        with small_lobby():
            made = stack.enter_context(a_server(request.param, token_file, None))
        yield made


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": f"Bearer {OTHER_TOKEN}"},
        {"Authorization": "Bearer"},
        {"Authorization": f"Basic {OTHER_TOKEN}"},
        {"Authorization": f"Bearer {OTHER_TOKEN}", "X-Forwarded-For": "10.1.2.3"},
    ],
    ids=["none", "wrong", "empty", "basic", "forwarded"],
)
def test_strangers_are_refused_and_logged_once(
    server: Server, headers: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    for path in (server.call, server.call, "/no/such/call"):
        answer = httpx.get(server.url + path, headers=headers, timeout=60)
        assert answer.status_code == 401 and answer.headers["connection"] == "close"
    assert len(refused_lines(caplog)) == 1
    assert serves(server)
    assert server.token not in caplog.text and OTHER_TOKEN not in caplog.text


def test_two_tokens_in_one_request_prove_nothing(shared: Server) -> None:
    right = f"Bearer {shared.token}".encode()
    given = [(b"Authorization", f"Bearer {OTHER_TOKEN}".encode()), (b"Authorization", right)]
    assert httpx.get(shared.url + shared.call, headers=given, timeout=60).status_code == 401
    assert serves(shared)


def test_the_body_of_a_stranger_is_not_read(shared: Server) -> None:
    """A request that announces a gigabyte is answered at once, and its connection is closed."""
    with dial(shared.url) as sock:
        head = f"POST {shared.post} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n"
        sock.sendall(head.encode() + b"x" * 1000)
        sock.settimeout(60)
        answer = b""
        with contextlib.suppress(ConnectionError):
            while part := sock.recv(4096):
                answer += part
    assert answer.startswith(b"HTTP/1.1 401")
    assert serves(shared)


def test_bodies_and_headers_over_the_limit_are_refused(shared: Server) -> None:
    headers = auth.bearer_headers(shared.token)
    body = b'{"a": "' + b"x" * (9 << 20) + b'"}'
    with contextlib.suppress(httpx.WriteError):  # the answer may come before all of it is sent
        answer = httpx.post(shared.url + shared.post, content=body, headers=headers, timeout=60)
        assert answer.status_code in (400, 413)
    with dial(shared.url) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * (1 << 18))
        sock.settimeout(60)
        with contextlib.suppress(ConnectionError):
            assert sock.recv(4096).startswith(b"HTTP/1.1 400")
    assert serves(shared)


@pytest.mark.parametrize(
    "path",
    [
        "/v1/blob/../../../../etc/passwd",
        "/v1/blob/%2e%2e%2f%2e%2e%2fetc%2fpasswd",
        "/v1/blob/..%5c..%5ctoken",
        "/v1/models/../../../etc/passwd",
        "/v1/models/%2fetc%2fpasswd",
        "//etc/passwd",
        "/../token",
        "/v1/event/../status",
    ],
)
def test_no_path_leads_out_of_the_calls(shared: Server, path: str, caplog: pytest.LogCaptureFixture) -> None:
    """The path is sent as it is: httpx would tidy it up."""
    with dial(shared.url) as sock:
        request = (
            f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\nAuthorization: Bearer {shared.token}"
        )
        sock.sendall(request.encode() + b"\r\n\r\n")
        sock.settimeout(60)
        answer = b""
        while part := sock.recv(4096):
            answer += part
    assert answer.split(b" ")[1] in (b"404", b"405", b"400") and b"root:" not in answer
    assert serves(shared) and not any(r.exc_info for r in caplog.records)


@pytest.mark.parametrize("beginning", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_slow_clients_keep_nobody_out(any_server: Server, beginning: bytes) -> None:
    """More connections than the lobby takes, silent, half begun or idle: the oldest go, the service stays.

    Where TLS is spoken they don't even begin a handshake.
    """
    silent = []
    for _ in range(FEW + 40):
        silent.append(dial(any_server.url))
        silent[-1].sendall(beginning)
    assert serves(any_server)
    silent[0].settimeout(60)
    with contextlib.suppress(ConnectionError):
        while silent[0].recv(4096):
            pass
    assert serves(any_server)
    for sock in silent:
        sock.close()


def test_a_crowd_of_members_is_no_attack(server: Server) -> None:
    """They connect at once and are slow to speak: the lobby has room for a fleet."""

    async def crowd() -> list[int]:
        limits = httpx.Limits(max_connections=None)
        headers = auth.bearer_headers(server.token)
        async with httpx.AsyncClient(headers=headers, limits=limits, timeout=60) as client:
            calls = [client.get(server.url + server.call) for _ in range(160)]
            return [answer.status_code for answer in await asyncio.gather(*calls)]

    assert set(asyncio.run(crowd())) == {200}


def test_a_connection_that_has_proven_itself_stays(shared: Server) -> None:
    headers = auth.bearer_headers(shared.token)
    stays = httpx.Limits(keepalive_expiry=None)  # the client gives it up after no time of its own
    with httpx.Client(base_url=shared.url, headers=headers, timeout=60, limits=stays) as client:
        assert client.get(shared.call).status_code == 200
        (connection,) = client._transport._pool.connections  # type: ignore[attr-defined]
        silent = [dial(shared.url) for _ in range(FEW + 10)]
        assert client.get(shared.call).status_code == 200
        assert client._transport._pool.connections == [connection]  # type: ignore[attr-defined]
        for sock in silent:
            sock.close()


NOISE = [b"\x16\x03\x01\x02\x00" + b"\x00" * 600, b"\x00" * 4096, b"jxs1" + b"\xff" * 60 + b"\r\n\r\n"]


def test_nonsense_instead_of_http_is_closed(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    for noise in NOISE:
        with dial(server.url) as sock:
            sock.sendall(noise)
            sock.settimeout(60)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    assert serves(server)
    assert len(caplog.records) == len(refused_lines(caplog)) == 1
