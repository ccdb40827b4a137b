"""Hostile bytes and wrong answers: each ends with a named error, and what lives goes on."""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxrl_sync.transfer import HubClient, Subscriber, SubscriberConfig, Version, auth, wire
from jaxrl_sync.transfer.errors import (
    AuthError,
    DeadlineError,
    PeerLost,
    ProtocolError,
    ResourceError,
)
from jaxrl_sync.transfer.hub.client import HubRefused
from jaxrl_sync.transfer.hub.local import LocalHub, find_hub
from jaxrl_sync.transfer.memory import SharedMemory
from jaxrl_sync.transfer.publisher import Publisher
from tests.ports import free_port
from tests.transfer.models import (
    Rig,
    ServerThread,
    convert,
    engine_target,
    open_fds,
    segments,
    take,
    trainer_params,
    until,
)

TOKEN = "ab" * 32
DEEP = b"[" * 60_000


# Bytes.


@pytest.mark.parametrize(
    "frame",
    [
        struct.pack("<4sIQ", b"jxs1", len(DEEP), 0) + DEEP,
        struct.pack("<4sIQ", b"jxs1", 2, 1 << 63) + b"{}",
        struct.pack("<4sIQ", b"jxs1", (1 << 32) - 1, 0),
        struct.pack("<4sIQ", b"jxs1", 2, 0) + b"\xff\xfe",
        struct.pack("<4sIQ", b"jxs1", 2, 0) + b"[]",
        b"GET / HTTP/1.1\r\n\r\n",
    ],
    ids=["deep", "payload-2**63", "header-2**32", "not-utf8", "no-object", "http"],
)
def test_frames_that_lie_are_refused(pair: tuple[socket.socket, socket.socket], frame: bytes) -> None:
    sender = threading.Thread(target=lambda: pair[1].sendall(frame), daemon=True)
    sender.start()
    with pytest.raises(ProtocolError):
        wire.Connection(pair[0], "stranger").recv(60, max_payload_bytes=1 << 20)
    sender.join(90)


def test_a_handshake_nested_too_deeply_is_refused(pair: tuple[socket.socket, socket.socket]) -> None:
    sender = threading.Thread(target=pair[1].sendall, args=(len(DEEP).to_bytes(4, "little") + DEEP,))
    sender.start()
    with pytest.raises(ProtocolError, match="isn't JSON"):
        auth.accept(pair[0], TOKEN, "r1", 60)
    sender.join(90)


def test_what_a_stranger_says_does_not_fill_the_log(pair: tuple[socket.socket, socket.socket]) -> None:
    text = json.dumps({"protocol": auth.PROTOCOL, "run_id": "x" * 50_000, "nonce": "n"}).encode()
    pair[1].sendall(len(text).to_bytes(4, "little") + text)
    with pytest.raises(AuthError, match="foreign") as caught:
        auth.accept(pair[0], TOKEN, "r1", 60)
    assert len(str(caught.value)) < 1000


def test_a_look_for_readable_bytes_sees_the_end_of_the_stream(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    connection = wire.Connection(pair[0], "p")
    assert not connection.wait_readable(0.0)
    pair[1].close()
    assert connection.wait_readable(0.0)


def test_a_socket_that_another_thread_closed_is_a_lost_peer(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    pair[0].close()
    with pytest.raises(PeerLost, match="closed on this side"):
        wire._wait(pair[0], select.POLLIN, time.monotonic() + 5, "p")


@pytest.mark.parametrize("address", ["", "None", "host:", "host:port", "host:99999", ":80"])
def test_an_address_that_is_none_is_a_lost_peer(address: str) -> None:
    with pytest.raises(PeerLost, match="expected host:port"):
        wire.dial(address, 1)


@pytest.mark.parametrize(
    "content",
    [b"\xff" * 64, b"a" * 32 + b"\n" + b"b" * 32, "ä".encode() * 32, b"A" * 64, b""],
    ids=["not-ascii", "newline", "umlauts", "capitals", "empty"],
)
def test_tokens_with_other_characters_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "token"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(AuthError, match="64 hexadecimal"):
        auth.load_token(path)


def test_a_folder_or_a_pipe_is_no_token_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "folder").mkdir(0o700)
    for name in ("pipe", "folder"):
        with pytest.raises(AuthError, match="mode"):
            auth.load_token(tmp_path / name)


def test_a_link_planted_at_the_name_of_a_segment_is_not_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    monkeypatch.setattr("jaxrl_sync.transfer.memory.SHM_DIR", tmp_path)
    monkeypatch.setattr("jaxrl_sync.transfer.memory.secrets.token_hex", lambda n: "0" * 16)
    probe = SharedMemory("r1", 4096)
    probe.close()
    (tmp_path / probe.name).symlink_to(victim)
    with pytest.raises(ResourceError, match="can't create"):
        SharedMemory("r1", 4096)
    assert victim.read_text() == "precious"


# The hub.


@pytest.mark.parametrize(
    "change",
    [
        {"ttl_s": float("nan")},
        {"ttl_s": float("inf")},
        {"size": 10**12},
        {"size": 10**40},
        {"rank": 5},
        {"rank": -1},
        {"rank": True},
    ],
    ids=str,
)
def test_numbers_that_would_hurt_the_hub_are_refused(
    hub: ServerThread, token_file: Path, change: dict[str, Any]
) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    member = {"role": "subscriber", "name": "e", "rank": 0, "size": 1, "incarnation": "i", "info": {}}
    body = json.dumps({**member, **change})
    answer = httpx.post(f"{hub.url}/v1/event/register", content=body, headers=headers, timeout=60)
    assert answer.status_code == 400 and answer.json()["error"] == "bad_request"
    assert httpx.get(f"{hub.url}/v1/status", headers=headers, timeout=60).json()["members"] == []


def test_a_body_nested_too_deeply_is_refused(hub: ServerThread, token_file: Path) -> None:
    headers = auth.bearer_headers(auth.load_token(token_file))
    answer = httpx.post(f"{hub.url}/v1/members", content=DEEP, headers=headers, timeout=60)
    assert answer.status_code == 400 and "nested" in answer.json()["message"]


@contextlib.contextmanager
def fake_hub(answers: list[tuple[int, bytes]]) -> Iterator[str]:
    """Gives each call the next of ``answers``, and the last one for ever."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("content-length", 0)))
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST  # noqa: N815

        def log_message(self, format: str, *args: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join(90)
        server.server_close()


GOOD = (200, b'{"epoch": "e", "run_id": "r", "members": []}')


def test_a_client_that_leaves_in_the_middle_of_a_request_is_one_line(
    hub: ServerThread, token_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    address = httpx.URL(hub.url)
    token = token_file.read_text().strip()
    head = (
        f"POST /v1/watch HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {token}\r\nContent-Length: 100\r\n\r\n"
    )
    with caplog.at_level("INFO"):
        with socket.create_connection((address.host, address.port or 80), 10) as sock:
            sock.sendall(head.encode() + b"{")
            time.sleep(0.2)
        until(lambda: any("went away" in r.getMessage() for r in caplog.records))
    assert not any(r.exc_info for r in caplog.records)
    with HubClient(hub.url, token_file) as client:
        assert client.status()["epoch"]


def test_server_errors_are_ridden_out_like_an_absent_hub(token_file: Path) -> None:
    page = b"<html>bad gateway</html>"
    with (
        fake_hub([(502, page), (503, b"Service Unavailable"), GOOD]) as url,
        HubClient(url, token_file) as client,
    ):
        assert client.members() == []
    with fake_hub([(500, page)]) as url, HubClient(url, token_file, timeout_s=0.3) as client:
        with pytest.raises(PeerLost, match=r"0\.3 s: HTTP 500: '<html>bad gateway"):
            client.members()


@pytest.mark.parametrize(
    "body",
    [b"<html>hello</html>", b"[]", b"3", b"{}", b"", DEEP],
    ids=["page", "list", "number", "object", "nothing", "deep"],
)
def test_answers_that_no_hub_gives_are_named(token_file: Path, body: bytes) -> None:
    with fake_hub([(200, body)]) as url, HubClient(url, token_file, timeout_s=1) as client:
        with pytest.raises(ProtocolError, match=f"{url} answered"):
            client.status()


@pytest.mark.parametrize("wish", [10**400, float("nan"), "soon", True], ids=["huge", "nan", "text", "bool"])
def test_a_receiver_that_wants_a_version_in_no_time_that_there_is_gets_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wish: Any
) -> None:
    """A number that no float holds ended the link with an OverflowError."""
    params, real, told = trainer_params(), wire.Connection.send, list[str]()

    def send(self: wire.Connection, header: dict[str, Any], *payload: Any, timeout_s: float) -> None:
        if header.get("kind") == "ready":
            told.append(header["kind"])
            header = {**header, "timeout_s": wish}
        real(self, header, *payload, timeout_s=timeout_s)

    monkeypatch.setattr(wire.Connection, "send", send)
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    assert take(rig.subscriber())[0] == Version("a", 0) and told == ["ready"]


@pytest.mark.parametrize("address", ["..:80", "a" * 300 + ":80", "host:" + "9" * 5000, "host:70000", ":1"])
def test_an_address_that_can_not_be_is_a_peer_that_is_lost(address: str) -> None:
    """Members tell their addresses; these ended in errors of Python's own."""
    with pytest.raises(PeerLost, match="can't connect to") as caught:
        wire.dial(address, 1.0)
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(("host", "port"), [("127.0.0.1", 65536), ("127.0.0.1", -1), ("..", 0)])
def test_a_place_where_nobody_can_listen_is_an_error_of_the_system(host: str, port: int) -> None:
    with pytest.raises(OSError, match=r"expected 0 to 65535|is no name of a host"):
        wire.listen(host, port)


def test_a_wait_may_be_longer_than_poll_can_count(pair: tuple[socket.socket, socket.socket]) -> None:
    """25 days in milliseconds are more than 31 bits."""
    receiver, sender = wire.Connection(pair[0], "a"), wire.Connection(pair[1], "b")
    late = threading.Timer(0.2, sender.send, ({"kind": "late"},), {"timeout_s": 1e9})
    late.start()
    assert receiver.recv(1e9) == ({"kind": "late"}, bytearray())
    assert not receiver.sock.getblocking()


def test_a_watch_that_makes_no_sense_is_asked_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrl_sync.transfer.hub.client import Lease

    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    real = Lease.call
    lies: list[dict[str, Any]] = [{}, {"publishers": [{"role": 1}], "offer": None}, {"publishers": 3}]

    def call(self: Lease, path: str, body: dict[str, Any], *limits: Any, **more: Any) -> dict[str, Any]:
        return lies.pop() if path == "/v1/watch" and lies else real(self, path, body, *limits, **more)

    monkeypatch.setattr(Lease, "call", call)
    version, _ = take(rig.subscriber())
    assert version == Version("a", 0) and not lies


def test_a_refused_registration_is_told_as_it_is_and_leaves_nothing(
    hub: ServerThread, token_file: Path
) -> None:
    with pytest.raises(HubRefused, match="not empty"):
        Subscriber(
            hub.url,
            engine_target(),
            convert,
            token_file=token_file,
            config=SubscriberConfig(engine=""),
        )
    assert segments(token_file) == []
    before = open_fds()
    with pytest.raises(HubRefused, match="not empty"):
        Publisher(hub.url, trainer_params(), token_file=token_file, name="")
    until(lambda: open_fds() <= before)  # the hub's end of a connection closes a moment after ours


def test_versions_that_a_restarted_hub_learns_out_of_order_cost_no_lease(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0)).wait(60)
    stale = list(publisher._retained._held)
    publisher.publish(params, Version("a", 1)).wait(60)
    publisher._retained._held = stale  # as the thread saw them that registers again
    publisher._rejoin()
    newest = rig.hub_client().newest()
    assert newest is not None and newest.version == Version("a", 1)


def test_publishes_while_the_hub_is_away_end_as_announced_or_superseded(
    hub: ServerThread, rig: Rig, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever finds the hub again tells it the newest version; here the older one's turn comes after that."""
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0)).wait(60)
    real, newest = publisher._hub._http.request, threading.Event()

    def request(method: str, path: str, **about: Any) -> httpx.Response:
        announced = about["json"]["version"]["number"] if path == "/v1/event/announce" else None
        if announced == 1 and not newest.is_set():
            raise httpx.ConnectError("still away")
        answer = real(method, path, **about)
        if announced == 2 and answer.status_code == 200:
            newest.set()
        return answer

    monkeypatch.setattr(publisher._hub._http, "request", request)
    port = int(hub.url.rsplit(":", 1)[1])
    hub.close()
    first, last = (publisher.publish(params, Version("a", n)) for n in (1, 2))
    with pytest.raises(DeadlineError, match=r"a:2 is still open after 0\.1 s at the hub"):
        last.wait(0.1)
    again = ServerThread(token_file, port)
    try:
        assert last.wait(60).state == "committed"
        assert first.wait(60).state == "superseded"
    finally:
        rig.close()
        again.close()


@pytest.mark.parametrize("place", ["file", "file/x"])
def test_a_folder_that_can_not_be_made_is_named(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ResourceError, match="can't write the folder"):
        LocalHub(tmp_path / place)


def test_an_address_that_somebody_else_could_have_written_is_not_followed(tmp_path: Path) -> None:
    """Who follows it sends the run token there."""
    with LocalHub(tmp_path / "run") as hub:
        assert find_hub(tmp_path / "run", 5).url == hub.url
        file = tmp_path / "run" / "hub.json"
        text = file.read_text()
        (tmp_path / "elsewhere").write_text(text)
        file.chmod(0o666)
        with pytest.raises(ResourceError, match="expected a file that only uid"):
            find_hub(tmp_path / "run", 5)
        file.unlink()
        file.symlink_to(tmp_path / "elsewhere")
        with pytest.raises(ResourceError, match="can't read"):
            find_hub(tmp_path / "run", 5)
        file.unlink()
        os.mkfifo(file, 0o600)
        with pytest.raises(ResourceError, match="expected a file that only uid"):
            find_hub(tmp_path / "run", 5)


def test_a_hub_that_can_not_say_where_it_is_leaves_no_thread_and_no_port(tmp_path: Path) -> None:
    """Its thread served on, and its port was taken until the process ended."""
    port = free_port()
    (tmp_path / "run" / "hub.new").mkdir(parents=True)
    before = {thread.ident for thread in threading.enumerate()}
    with pytest.raises(ResourceError, match=r"can't write .*hub\.json: "):
        LocalHub(tmp_path / "run", port=port)
    left = [t.name for t in threading.enumerate() if t.ident not in before and t.name == "local-hub"]
    assert left == []
    (tmp_path / "run" / "hub.new").rmdir()
    with LocalHub(tmp_path / "run", port=port) as hub:
        assert find_hub(tmp_path / "run", 5).url == hub.url == f"http://127.0.0.1:{port}"
