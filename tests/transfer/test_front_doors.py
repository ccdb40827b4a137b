"""Attacks on the HTTP servers of a run: refused, logged once, service unharmed. And their TLS."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import ipaddress
import json
import logging
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import pytest
from starlette.responses import Response

from jaxrl_sync.inference.server import EngineServer, ServerConfig
from jaxrl_sync.orchestrator.engines import Engine, EngineClient, EngineGoneError
from jaxrl_sync.transfer import HubClient, Version, auth, impatient, tls
from jaxrl_sync.transfer.errors import AuthError, ResourceError
from jaxrl_sync.transfer.guard import Guard
from jaxrl_sync.transfer.hub import room
from jaxrl_sync.transfer.hub import server as hub_server
from jaxrl_sync.transfer.hub.server import run_hub
from jaxrl_sync.transfer.rates import DEFAULT_LIMITS, Buckets, Rate, RateLimits
from jaxrl_sync.transfer.refusals import Refusals
from tests.transfer.models import Rig, ServerThread, take, trainer_params

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
        assert ready.wait(10)
        yield urls[0]
    finally:
        stop.set()
        thread.join(10)


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
    return httpx.get(base + server.call, headers=headers, timeout=20, verify=verify).status_code == 200


def dial(url: str) -> socket.socket:
    parts = urlsplit(url)
    return socket.create_connection((parts.hostname or "", parts.port or 0), 10)


def refused_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if " refused 127.0.0.1: " in r.getMessage()]


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
        answer = httpx.get(server.url + path, headers=headers)
        assert answer.status_code == 401 and answer.headers["connection"] == "close"
    assert len(refused_lines(caplog)) == 1
    assert serves(server)
    assert server.token not in caplog.text and OTHER_TOKEN not in caplog.text


def test_two_tokens_in_one_request_prove_nothing(shared: Server) -> None:
    right = f"Bearer {shared.token}".encode()
    given = [(b"Authorization", f"Bearer {OTHER_TOKEN}".encode()), (b"Authorization", right)]
    assert httpx.get(shared.url + shared.call, headers=given).status_code == 401
    assert serves(shared)


def test_the_body_of_a_stranger_is_not_read(shared: Server) -> None:
    """A request that announces a gigabyte is answered at once, and its connection is closed."""
    with dial(shared.url) as sock:
        head = f"POST {shared.post} HTTP/1.1\r\nHost: x\r\nContent-Length: {1 << 30}\r\n\r\n"
        sock.sendall(head.encode() + b"x" * 1000)
        sock.settimeout(10)
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
        answer = httpx.post(shared.url + shared.post, content=body, headers=headers)
        assert answer.status_code in (400, 413)
    with dial(shared.url) as sock:
        with contextlib.suppress(ConnectionError):
            sock.sendall(b"GET /health HTTP/1.1\r\nX: " + b"a" * (1 << 18))
        sock.settimeout(10)
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
        sock.settimeout(10)
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
    silent[0].settimeout(20)
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


@pytest.mark.parametrize("descriptors", [256, 1024, 4096, 65536, 1 << 20])
def test_a_hub_takes_as_many_members_as_it_has_connections_for(descriptors: int) -> None:
    """It took 16384 members, and answered 503 from 2048 connections on."""
    found = room.Room.of(descriptors)
    strangers = min(impatient.MAX_UNPROVEN, descriptors // 2)
    assert found.members * room.CONNECTIONS_PER_MEMBER + strangers <= found.connections < descriptors
    assert found.members <= room.MAX_MEMBERS and found.refusal(found.members - 1) is None
    assert (found.members == room.MAX_MEMBERS) == (descriptors >= 65536)
    refusal = found.refusal(found.members)
    assert refusal is not None and f"{found.members} members are registered" in refusal


def test_a_member_too_many_is_refused_by_name_and_those_that_were_taken_are_all_served(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = room.Room.of(256)
    monkeypatch.setattr(room.Room, "here", lambda: small)
    token = auth.load_token(token_file)

    async def fleet(url: str) -> tuple[list[int], httpx.Response, httpx.Response]:
        limits = httpx.Limits(max_connections=None)
        headers = auth.bearer_headers(token)
        async with httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=60) as client:

            async def register(rank: int) -> httpx.Response:
                body = {"role": "subscriber", "name": "e", "rank": rank, "size": 4096, "incarnation": "i"}
                return await client.post("/v1/event/register", json={**body, "info": {}, "ttl_s": 60})

            assert {(await register(n)).status_code for n in range(small.members)} == {200}
            polls = room.CONNECTIONS_PER_MEMBER * small.members - 1  # one is left for what comes now
            waits = [client.post("/v1/newest", json={"model": "m", "timeout_s": 2.0}) for _ in range(polls)]
            waiting = asyncio.gather(*waits)
            refused, again = await register(small.members), await register(0)
            return [answer.status_code for answer in await waiting], refused, again

    with running_hub(token_file) as url:
        answers, refused, again = asyncio.run(fleet(url))
    assert set(answers) == {200} and again.status_code == 200
    assert refused.status_code == 400
    assert f"{small.members} members are registered" in refused.json()["message"]
    assert "limit of 256 open files (ulimit -n)" in refused.json()["message"]


def test_a_connection_that_has_proven_itself_stays(shared: Server) -> None:
    headers = auth.bearer_headers(shared.token)
    with httpx.Client(base_url=shared.url, headers=headers, timeout=20) as client:
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
            sock.settimeout(10)
            with contextlib.suppress(ConnectionError):
                while sock.recv(4096):
                    pass
    assert serves(server)
    assert len(caplog.records) == len(refused_lines(caplog)) == 1


# Rates and names, at the hub.


def test_a_client_that_calls_too_often_is_told_to_wait_and_others_are_served(
    token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    limits = RateLimits(client=Rate(5.0, 10.0))
    headers = auth.bearer_headers(auth.load_token(token_file))
    with running_hub(token_file, limits=limits) as url, httpx.Client(base_url=url, headers=headers) as client:
        answers = [client.get("/v1/status") for _ in range(30)]
        busy = [a for a in answers if a.status_code == 429]
        assert answers[0].status_code == 200 and busy and int(busy[0].headers["retry-after"]) >= 1
        assert len([line for line in refused_lines(caplog) if "too many" in line]) == 1
        with HubClient(url, token_file) as patient:  # rides it out
            assert patient.members() == []


def test_strangers_of_many_addresses_take_no_calls_from_members(token_file: Path) -> None:
    token, passed = auth.load_token(token_file), list[str]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        passed.append(scope["client"][0])

    def deny(scope: Any, status: int, message: str) -> Response:
        return Response(status_code=status)

    async def ignore(message: Any) -> None:
        pass

    refusals = Refusals(logging.getLogger("jaxrl_sync.hub"), "hub")
    guard = Guard(app, token=token, deny=deny, refusals=refusals, clock=lambda: 0.0)
    proof = [(b"authorization", f"Bearer {token}".encode())]

    async def call(address: str, headers: list[tuple[bytes, bytes]]) -> None:
        scope = {"type": "http", "path": "/health", "headers": headers, "client": (address, 1)}
        await guard(scope, ignore, ignore)  # type: ignore[arg-type]

    async def storm() -> None:
        for n in range(20_000):
            await call(f"2001:db8::{n % 5000:x}", [])
        strangers = len(passed)
        assert strangers == DEFAULT_LIMITS.strangers.burst
        for n in range(int(DEFAULT_LIMITS.all.burst)):
            await call(f"10.0.0.{n % 8}", proof)
        assert len(passed) - strangers == DEFAULT_LIMITS.all.burst, "every member's call"

    asyncio.run(storm())


def test_buckets_forget_and_fill() -> None:
    buckets = Buckets(Rate(2.0, 3.0), most=2)
    assert [buckets.take("a", 0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert buckets.take("a", 0.5) == 0.0 and buckets.take("a", 0.5) == 0.5
    assert buckets.take("b", 0.5) == 0.0 and buckets.take("c", 0.5) == 0.0
    assert buckets.take("a", 0.5) == 0.0, "of many clients the one that called longest ago is forgotten"


@pytest.mark.parametrize("name", ["a\nhub refused", "\x1b[31m", "", "x" * 257, "\u2028"])
def test_names_that_would_forge_logs_are_refused(hub: ServerThread, token_file: Path, name: str) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    member = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "info": {}}
    with httpx.Client(base_url=hub.url, headers=headers) as client:
        assert client.post("/v1/event/register", json={**member, "name": name}).status_code == 400
        assert client.post("/v1/event/register", json=member).status_code == 200
        version = {"lineage": "a", "number": 0}
        body = {**member, "model": name, "version": version, "bytes": 1}
        assert client.post("/v1/event/announce", json=body).status_code == 400
        assert client.get("/v1/status").json()["newest"] == {}


@pytest.mark.parametrize("value", ['"\\ud800"', "NaN", "1e999", "1" + "0" * 400, '["x\\ny"]'])
def test_nonsense_in_any_field_is_refused_and_spoils_no_answer_to_others(
    hub: ServerThread, token_file: Path, value: str
) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    version = {"lineage": "a", "number": 1}
    body = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "model": "m"}
    body |= {"info": {"model": "m"}, "version": version, "held": [version], "round": "r", "reason": "x"}
    with httpx.Client(base_url=hub.url, headers=headers) as client:
        for kind in ("register", "announce", "hold", "advance", "fail", "pin"):
            for field in (*body, "to", "by", "parts", "fanout", "sequence", "bytes", "installed"):
                text = json.dumps({k: v for k, v in body.items() if k != field})[:-1]
                answer = client.post(f"/v1/event/{kind}", content=f'{text}, "{field}": {value}}}')
                assert answer.status_code < 500, (kind, field, answer.text)
        for path in ("/v1/status", "/metrics"):
            assert client.get(path).status_code == 200
        for path in ("/v1/members", "/v1/newest", "/v1/preflight", "/v1/trace"):
            assert client.post(path, json={"model": "m"}).status_code == 200, path


def test_a_member_can_not_have_versions_and_models_remembered_without_end(
    hub: ServerThread, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_server, "MAX_HOLDINGS", 20)
    monkeypatch.setattr(hub_server, "MAX_MODELS", 5)
    headers = auth.bearer_headers(auth.load_token(token_file))
    me = {"role": "publisher", "name": "p", "rank": 0, "size": 1, "incarnation": "i"}
    with httpx.Client(base_url=hub.url, headers=headers) as client:

        def say(kind: str, **about: Any) -> int:
            return client.post(f"/v1/event/{kind}", json={**me, **about}).status_code

        assert say("register", info={"model": "m"}) == 200
        versions = [{"lineage": "a", "number": n} for n in range(40)]
        answers = [say("unpublish", model="m", version=v) for v in versions]
        assert answers == [200] * 20 + [400] * 20
        assert say("leave") == say("register", info={"model": "m"}) == 200  # a new life, a new account
        tree = {"kind": "tree", "degree": 2}
        answers = [say("announce", model=f"m{n}", version=versions[0], fanout=tree) for n in range(8)]
        assert answers == [200] * 5 + [400] * 3
        assert say("announce", model="m0", version=versions[1], fanout=tree) == 200


def test_a_member_can_not_store_a_file_in_the_directory(hub: ServerThread, token_file: Path) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    member = {"role": "x", "name": "p", "rank": 0, "size": 1, "incarnation": "i", "info": {"a": "x" * 70_000}}
    answer = httpx.post(hub.url + "/v1/event/register", json=member, headers=headers)
    assert answer.status_code == 400 and "info" in answer.json()["message"]


@pytest.mark.parametrize("secure", [False, True])
def test_listeners_for_everyone_are_loud_unless_they_speak_tls(
    token_file: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, secure: bool
) -> None:
    own = tls.of_run(tmp_path) if secure else None
    stop = threading.Event()
    run_hub("0.0.0.0", 0, token_file, stop=stop, announce=lambda url: stop.set(), tls=own)
    token = auth.load_token(token_file)
    with running_engine(token, ServerConfig(host="0.0.0.0", tls=own, name="e7")):
        pass
    loud = [r.getMessage() for r in caplog.records if "WITHOUT TLS" in r.getMessage()]
    assert [line.split(" LISTENS")[0] for line in loud] == ([] if secure else ["THE HUB", "e7"])


# TLS.


@pytest.fixture
def own(tmp_path: Path) -> tls.ServerTls:
    return tls.of_run(tmp_path)


def test_the_run_s_certificate_is_private_kept_and_no_authority(tmp_path: Path, own: tls.ServerTls) -> None:
    assert tls.of_run(tmp_path) == own
    assert own.key.stat().st_mode & 0o777 == 0o600 and own.key.parent.stat().st_mode & 0o777 == 0o700
    from cryptography import x509

    found = x509.load_pem_x509_certificate(own.cert.read_bytes())
    assert not found.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    with pytest.raises(ResourceError, match="can't keep a certificate"):
        tls.create_self_signed(own.cert.parent)
    own.key.chmod(0o640)
    with pytest.raises(ResourceError, match="expected -rw-------"):
        own.context()


@pytest.mark.parametrize("left", [["key.pem"], ["key.new"], ["key.pem", "cert.new"]])
def test_who_was_killed_while_it_made_a_certificate_blocks_nobody(tmp_path: Path, left: list[str]) -> None:
    (tmp_path / "tls").mkdir(mode=0o700)
    for name in left:
        (tmp_path / "tls" / name).touch(0o600)
    tls.of_run(tmp_path).context()  # a certificate and the key that it belongs to
    assert sorted(p.name for p in (tmp_path / "tls").iterdir()) == ["cert.pem", "key.pem"]


def test_weights_are_published_through_a_hub_with_tls(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        assert url.startswith("https://") and url.endswith(f"#sha256={own.fingerprint}")
        hub: Any = SimpleNamespace(url=url)
        with Rig(hub, token_file) as rig:
            params = trainer_params()
            rig.publisher(params).publish(params, Version("a", 0))
            assert take(rig.subscriber())[0] == Version("a", 0)


def test_a_hub_with_another_certificate_is_refused_before_the_token_is_sent(
    token_file: Path, own: tls.ServerTls, tmp_path: Path
) -> None:
    other = tls.create_self_signed(tmp_path / "other")
    with running_hub(token_file, tls=other) as url:
        place = url.partition("#")[0]
        for wrong in (own.vouched(place), place):
            begun = time.monotonic()
            with HubClient(wrong, token_file) as client, pytest.raises(AuthError, match="isn't trusted"):
                client.status()
            assert time.monotonic() - begun < 20, "not retried"
        with HubClient(url, token_file) as client:
            assert client.status()["epoch"]


@pytest.mark.parametrize(
    "url", ["http://h:1#sha256=" + "a" * 64, "https://h:1#sha256=abc", "https://h:1#x=y"]
)
def test_urls_that_ask_for_what_is_no_trust_are_refused(token_file: Path, url: str) -> None:
    with pytest.raises(AuthError, match="fragment|not https"):
        HubClient(url, token_file)


def test_plain_http_to_a_tls_port_harms_nobody(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        for _ in range(3):
            with dial(url) as sock:
                sock.sendall(b"GET /v1/status HTTP/1.1\r\nHost: x\r\n\r\n")
                sock.settimeout(10)
                with contextlib.suppress(ConnectionError):
                    assert not sock.recv(4096).startswith(b"HTTP/1.1 200")
        with HubClient(url, token_file) as client:
            assert client.members() == []


def test_old_protocols_are_not_spoken(token_file: Path, own: tls.ServerTls) -> None:
    with running_hub(token_file, tls=own) as url:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
        with pytest.warns(DeprecationWarning):
            context.maximum_version = ssl.TLSVersion.TLSv1_1
        with pytest.raises((ssl.SSLError, ConnectionError)), dial(url) as sock:
            context.wrap_socket(sock)


def test_an_engine_speaks_tls_to_the_loop(token_file: Path, own: tls.ServerTls, tmp_path: Path) -> None:
    token = auth.load_token(token_file)

    async def health(server: EngineServer, trusted: tls.ServerTls) -> dict[str, Any]:
        verify = tls.verify_of(trusted.vouched(server.url))
        client = EngineClient(token, connections=2, verify=verify)
        try:
            return await client.health(Engine("e", server.url, 1, 8), 10.0)
        finally:
            await client.close()

    with running_engine(token, ServerConfig(tls=own)) as server:
        assert server.url.startswith("https://")
        assert asyncio.run(health(server, own))["state"] == "ready"
        other = tls.create_self_signed(tmp_path / "other")
        with pytest.raises(EngineGoneError, match="certificate"):
            asyncio.run(health(server, other))


def test_certificates_of_an_authority_are_trusted_by_host_name(token_file: Path, tmp_path: Path) -> None:
    for hosts, trusted in ((["127.0.0.1"], True), (["10.9.9.9"], False)):
        signed = signed_by_authority(tmp_path / hosts[0], hosts)
        with running_hub(token_file, tls=signed) as url:
            assert url.endswith(f"#ca={signed.ca}")
            with HubClient(url, token_file) as client:
                if trusted:
                    assert client.status()["epoch"]
                else:
                    with pytest.raises(AuthError, match="isn't trusted"):
                        client.status()


def signed_by_authority(folder: Path, hosts: list[str]) -> tls.ServerTls:
    """A server certificate for some addresses, signed by an authority of its own."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.x509.oid import NameOID

    folder.mkdir()
    now = datetime.datetime.now(datetime.UTC)
    authority, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())

    def name(text: str) -> x509.Name:
        return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])

    def build(subject: str, public: Any, ca: bool) -> x509.CertificateBuilder:
        usage = dict.fromkeys(
            ["content_commitment", "key_encipherment", "data_encipherment", "key_agreement"], False
        )
        more: dict[str, bool] = dict.fromkeys(["encipher_only", "decipher_only"], False)
        usage |= more | {"digital_signature": not ca, "key_cert_sign": ca, "crl_sign": ca}
        builder = x509.CertificateBuilder().subject_name(name(subject)).issuer_name(name("authority"))
        builder = builder.public_key(public).serial_number(x509.random_serial_number())
        builder = builder.not_valid_before(now).not_valid_after(now + datetime.timedelta(days=1))
        builder = builder.add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        builder = builder.add_extension(x509.KeyUsage(**usage), critical=True)
        mine = x509.SubjectKeyIdentifier.from_public_key(public)
        theirs = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority.public_key())
        return builder.add_extension(mine, critical=False).add_extension(theirs, critical=False)

    addresses = [x509.IPAddress(ipaddress.ip_address(host)) for host in hosts]
    leaf = build("server", key.public_key(), ca=False)
    leaf = leaf.add_extension(x509.SubjectAlternativeName(addresses), critical=False)
    paths = tls.ServerTls(folder / "cert.pem", folder / "key.pem", folder / "ca.pem")
    root = build("authority", authority.public_key(), ca=True).sign(authority, hashes.SHA256())
    assert paths.ca is not None
    paths.ca.write_bytes(root.public_bytes(serialization.Encoding.PEM))
    paths.cert.write_bytes(leaf.sign(authority, hashes.SHA256()).public_bytes(serialization.Encoding.PEM))
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    paths.key.write_bytes(key.private_bytes(encoding, form, serialization.NoEncryption()))
    paths.key.chmod(0o600)
    return paths
