"""Clients of an engine server that are slow, silent, gone or lie: refused or cut off, others are served."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import threading
import time
from typing import Any

import httpx
import pytest
from starlette.responses import Response

from jaxrl_sync.inference import http_shell
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.request import TEMPERATURES
from jaxrl_sync.inference.server import EngineServer
from jaxrl_sync.transfer import impatient
from tests.inference.served import TOKEN, eventually, generate_body


def raw(server: EngineServer, data: bytes) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)), timeout=20)
    sock.sendall(data)
    return sock


def post(path: str, body: dict[str, Any]) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {**generate_body("gone"), "n": 2}),
        ("/v1/completions", {"model": "policy", "prompt": "1+", "n": 2}),
        ("/v1/completions", {"model": "policy", "prompt": "1+", "n": 2, "stream": True}),
        ("/v1/chat/completions", {"model": "policy", "messages": [{"role": "user", "content": "1"}], "n": 2}),
    ],
)
def test_a_client_that_goes_away_frees_the_engine(
    server: EngineServer, engine: Engine, frozen: None, path: str, body: dict[str, Any]
) -> None:
    sock = raw(server, post(path, body))
    eventually(lambda: engine.stats().waiting + engine.stats().running == 2)
    sock.close()
    eventually(lambda: engine.stats().waiting + engine.stats().running == 0)


@pytest.mark.parametrize(
    "beginning",
    [b"", b"POST /generate HTTP/1.1\r\nHost:", b"GET /health HTTP/1.1\r\nHost: x\r\n\r\nGET /hea"],
    ids=["silence", "half a header", "half a second request"],
)
def test_slow_headers_are_cut_off(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch, beginning: bytes
) -> None:
    monkeypatch.setattr(impatient, "HEADERS_DEADLINE_S", 0.2)
    monkeypatch.setattr(impatient, "KEEP_ALIVE_S", 0.2)
    begun = time.monotonic()
    with contextlib.suppress(ConnectionError), raw(server, beginning) as sock:  # cut off before it had sent
        while sock.recv(4096):
            pass
    assert time.monotonic() - begun < 10


def test_slow_body_is_408(server: EngineServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_shell, "BODY_DEADLINE_S", 0.2)
    whole = post("/generate", generate_body("slow"))
    with raw(server, whole[:-5]) as sock:
        answer = sock.recv(4096)
        while b"not complete after 0.2 s" not in answer:  # head and body may come one after the other
            part = sock.recv(4096)
            assert part, answer
            answer += part
    assert answer.startswith(b"HTTP/1.1 408")


def test_a_client_that_goes_away_in_its_body_is_no_error_of_the_server(
    server: EngineServer, caplog: pytest.LogCaptureFixture
) -> None:
    """The log had a traceback for each of them."""
    answers: list[int] = []
    ended = threading.Event()

    def seen(*args: Any, **more: Any) -> Any:
        answers.append(more.get("status_code", 200))
        ended.set()
        return Response(*args, **more)

    with pytest.MonkeyPatch.context() as patched, caplog.at_level(logging.INFO):
        patched.setattr(http_shell, "Response", seen)
        raw(server, post("/generate", generate_body("cut"))[:-5]).close()
        assert ended.wait(60)
    assert answers == [499] and not [r for r in caplog.records if r.levelno >= logging.ERROR]


def test_reader_that_lets_its_answers_stand_is_cut_off(
    server: EngineServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(impatient, "SEND_DEADLINE_S", 0.3)
    call = f"GET /stats HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n\r\n".encode()
    host, port = server.url.removeprefix("http://").split(":")
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect((host, int(port)))
        sock.settimeout(0.5)
        end = time.monotonic() + 240
        with pytest.raises(ConnectionError):
            while time.monotonic() < end:
                with contextlib.suppress(TimeoutError):
                    sock.sendall(call * 1000)


def test_header_of_many_bytes_is_refused(server: EngineServer) -> None:
    with raw(server, b"GET /health HTTP/1.1\r\nX: ") as sock:
        with contextlib.suppress(ConnectionError):  # the answer may be there, and the end, before all is sent
            sock.sendall(b"a" * (1 << 17))
        assert sock.recv(4096).startswith(b"HTTP/1.1 400")


@pytest.mark.parametrize(
    "head",
    [
        "Content-Length: 9223372036854775808",
        "Content-Length: -1",
        "Content-Length: 5\r\nContent-Length: 6",
        "Content-Length: 5\r\nTransfer-Encoding: chunked",
        "Authorization: Bearer x\r\nContent-Length: 0",
    ],
)
def test_heads_that_lie_are_refused_and_the_server_lives(
    server: EngineServer, http: httpx.Client, head: str
) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), 5) as sock:
        sock.settimeout(10)
        lines = f"POST /abort HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\n{head}\r\n\r\n"
        sock.sendall(lines.encode() + b"0\r\n\r\n")
        assert sock.recv(200).split(b" ")[1] in (b"400", b"401", b"413")
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize(
    ("path", "content"),
    [
        ("/generate", b'{"a":' * 5000),
        ("/generate", b'{"request_id": "\\ud800", "prompt": [1], "n": 1' + b"0" * 5000 + b"}"),
        ("/generate", b'{"request_id": "x", "prompt": [NaN]}'),
        ("/generate", b'{"request_id": "x", "prompt": [1], "version": {"lineage": {"a": 1}, "number": 1}}'),
        ("/swap", b'{"lineage": "a", "number": 1, "timeout_s": NaN}'),
        ("/v1/completions", b'{"model": "policy", "prompt": "\\ud800"}'),
        (
            "/v1/chat/completions",
            b'{"model": "policy", "messages": [{"role": "user", "content": "\\udfff"}]}',
        ),
        ("/v1/completions", b'{"model": "policy", "prompt": "1", "\\ud800": 3}'),
        ("/v1/completions", b'{"model": "policy", "prompt": "1", "temperature": Infinity}'),
        ("/abort", b"\xff\xfe"),
        ("/generate", b'{"request_id": "\\ud800", "prompt": [1]}'),
        ("/generate", b'{"request_id": "x", "prompt": [1], "n": 1000000000000}'),
        ("/generate", b'{"request_id": "x", "prompt": [1], "sampling": {"top_k": 1' + b"0" * 30 + b"}}"),
        (
            "/generate",
            b'{"request_id": "x", "prompt": [1], "sampling": {"temperature": 1' + b"0" * 400 + b"}}",
        ),
        ("/generate", b'{"request_id": "x", "prompt": [1], "sampling": {"temperature": 1e-40}}'),
        ("/generate", b'{"request_id": "x", "prompt": [1], "timeout_s": 1' + b"0" * 400 + b"}"),
        ("/v1/completions", b'{"model": "policy", "prompt": "1", "temperature": 1e-38}'),
        ("/v1/completions", b'{"model": "policy", "prompt": "1", "top_k": 2147483648}'),
    ],
)
def test_bodies_that_lie_are_400_and_the_engine_lives(
    http: httpx.Client, engine: Engine, path: str, content: bytes
) -> None:
    """Half a character as a request's id, or a number too large for the device, ended the engine's thread."""
    answer = http.post(path, content=content)
    assert answer.status_code == 400, answer.text
    assert 0 < len(answer.json()["error"]["message"]) < 1000 and engine.state == "ready"


@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_the_least_and_the_greatest_temperature_give_numbers(http: httpx.Client, temperature: float) -> None:
    answer = http.post("/generate", json=generate_body(f"t{temperature}", temperature=temperature))
    (sample,) = answer.json()["samples"]
    assert len(sample["logprobs"]) == 5 and all(-20 < x < 1e-6 for x in sample["logprobs"]), sample


def test_many_idle_connections_keep_nobody_waiting(server: EngineServer, http: httpx.Client) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    idle = [socket.create_connection((host, int(port)), 5) for _ in range(300)]
    try:
        assert http.post("/generate", json=generate_body("many")).status_code == 200
    finally:
        for sock in idle:
            sock.close()
