"""The token file, the mutual handshake and its refusals, message framing with deadlines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import auth, wire
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, ProtocolError

TOKEN = "ab" * 32
LIMIT_S = 60.0
"""What must succeed may take so long."""


def both(server: Callable[[socket.socket], Any], client: Callable[[socket.socket], Any]) -> tuple[Any, Any]:
    """Run both ends over a socket pair; an exception is returned in place of the result."""
    left, right = socket.socketpair()
    results: dict[str, Any] = {}

    def run(name: str, call: Callable[[socket.socket], Any], sock: socket.socket) -> None:
        try:
            results[name] = call(sock)
        except Exception as error:
            results[name] = error
            sock.close()

    thread = threading.Thread(target=run, args=("server", server, left))
    thread.start()
    run("client", client, right)
    thread.join(2 * LIMIT_S)
    left.close()
    right.close()
    return results["server"], results["client"]


def test_token_file_is_private_and_exclusive(tmp_path: Path) -> None:
    path = tmp_path / "token"
    token = auth.create_token(path)
    assert os.stat(path).st_mode & 0o777 == 0o600
    assert auth.load_token(path) == token and len(token) == 64
    with pytest.raises(AuthError, match="exists"):
        auth.create_token(path)
    os.chmod(path, 0o640)
    with pytest.raises(AuthError, match="mode"):
        auth.load_token(path)


def test_token_file_must_be_regular_and_whole(tmp_path: Path) -> None:
    path = tmp_path / "token"
    auth.create_token(path)
    link = tmp_path / "link"
    link.symlink_to(path)
    with pytest.raises(AuthError, match="token file"):
        auth.load_token(link)
    path.write_text("abc")
    with pytest.raises(AuthError, match="3 characters"):
        auth.load_token(path)
    with pytest.raises(AuthError, match="No such file"):
        auth.load_token(tmp_path / "none")


def test_handshake_is_mutual_and_carries_hello_and_reply() -> None:
    server, client = both(
        lambda s: auth.accept(s, TOKEN, "r1", LIMIT_S, reply=lambda hello: {"seen": hello["purpose"]}),
        lambda s: auth.connect(s, TOKEN, "r1", {"purpose": "weights"}, LIMIT_S),
    )
    assert server == {"purpose": "weights"}
    assert client == {"seen": "weights"}


@pytest.mark.parametrize(("token", "run_id"), [("cd" * 32, "r1"), (TOKEN, "r2")])
def test_handshake_refuses_wrong_token_and_foreign_run(token: str, run_id: str) -> None:
    server, client = both(
        lambda s: auth.accept(s, TOKEN, "r1", LIMIT_S), lambda s: auth.connect(s, token, run_id, {}, LIMIT_S)
    )
    assert isinstance(server, (AuthError, PeerLost))
    assert isinstance(client, AuthError)
    assert TOKEN not in str(server) + str(client)


def test_replayed_client_messages_are_refused() -> None:
    recorded: list[bytes] = []

    class Tap:
        """A socket that records what is sent."""

        def __init__(self, sock: socket.socket) -> None:
            self.sock = sock

        def sendmsg(self, views: list[memoryview]) -> int:
            recorded.append(b"".join(bytes(v) for v in views))
            return self.sock.sendmsg(views)

        def __getattr__(self, name: str) -> Any:
            return getattr(self.sock, name)

    both(
        lambda s: auth.accept(s, TOKEN, "r1", LIMIT_S),
        lambda s: auth.connect(Tap(s), TOKEN, "r1", {"x": 1}, LIMIT_S),  # type: ignore[arg-type]
    )

    def replay(sock: socket.socket) -> None:
        for part in recorded:
            sock.sendall(part)
        sock.settimeout(LIMIT_S)
        while sock.recv(4096):
            pass

    server, _ = both(lambda s: auth.accept(s, TOKEN, "r1", LIMIT_S), replay)
    assert isinstance(server, AuthError) and "wrong run token" in str(server)


@pytest.mark.invariant(18)
def test_silent_peer_ends_at_the_deadline() -> None:
    left, right = socket.socketpair()
    start = time.monotonic()
    with pytest.raises(DeadlineError):
        auth.accept(left, TOKEN, "r1", 0.2)
    assert time.monotonic() - start < 30  # it ended by itself
    left.close()
    right.close()


def test_oversized_handshake_is_refused_before_it_is_read() -> None:
    left, right = socket.socketpair()
    right.sendall((1 << 31).to_bytes(4, "little"))
    with pytest.raises(ProtocolError, match="limit"):
        auth.accept(left, TOKEN, "r1", LIMIT_S)
    left.close()
    right.close()


def test_refusal_reaches_the_client_in_words() -> None:
    def refuse(_: dict[str, Any]) -> dict[str, Any]:
        raise ProtocolError("layout differs in 'embed'")

    server, client = both(
        lambda s: auth.accept(s, TOKEN, "r1", LIMIT_S, reply=refuse),
        lambda s: auth.connect(s, TOKEN, "r1", {}, LIMIT_S),
    )
    assert isinstance(server, ProtocolError)
    assert isinstance(client, AuthError) and "layout differs in 'embed'" in str(client)


def test_bearer() -> None:
    assert auth.check_bearer(auth.bearer_headers(TOKEN)["Authorization"], TOKEN)
    assert not auth.check_bearer(None, TOKEN)
    assert not auth.check_bearer("Bearer x", TOKEN)
    assert not auth.check_bearer("Bearer ÿ", TOKEN)


def test_messages_round_trip_with_payload() -> None:
    left, right = socket.socketpair()
    big = bytes(range(256)) * 8192
    with wire.Connection(left, "left") as a, wire.Connection(right, "right") as b:
        thread = threading.Thread(
            target=a.send, args=({"kind": "x"}, big, b"tail"), kwargs={"timeout_s": LIMIT_S}
        )
        thread.start()
        header, payload = b.recv(LIMIT_S, max_payload_bytes=1 << 22)
        thread.join()
        assert header == {"kind": "x"} and payload == big + b"tail"
        target = bytearray(6)
        a.send({"kind": "y"}, b"abcdef", timeout_s=LIMIT_S)
        assert b.recv_into([memoryview(target)[:2], memoryview(target)[2:]], LIMIT_S) == {"kind": "y"}
        assert target == b"abcdef"
        a.send({}, b"xy", timeout_s=LIMIT_S)
        with pytest.raises(ProtocolError, match="payload of 2 bytes"):
            b.recv(LIMIT_S)


def test_connection_errors_are_named() -> None:
    left, right = socket.socketpair()
    a, b = wire.Connection(left, "engine-0"), wire.Connection(right, "trainer-0")
    with pytest.raises(DeadlineError, match="engine-0"):
        a.recv(0.05)
    b.close()
    with pytest.raises(PeerLost, match="engine-0 closed"):
        a.recv(LIMIT_S)
    with pytest.raises(PeerLost, match="trainer-0"):
        b.recv(LIMIT_S)
    a.close()


def test_a_listener_is_named_by_how_others_reach_it() -> None:
    with wire.listen("127.0.0.1") as loop, wire.listen("0.0.0.0") as everywhere:
        port = loop.getsockname()[1]
        assert wire.address_of(loop, "http://10.0.0.1:80") == f"127.0.0.1:{port}"
        named = wire.address_of(everywhere, f"http://127.0.0.1:{port}")
        assert named == f"127.0.0.1:{everywhere.getsockname()[1]}"
        wire.dial(named, LIMIT_S).close()
    assert (
        wire.is_loopback("::1") and not wire.is_loopback("0.0.0.0") and not wire.is_loopback("host.example")
    )


def test_close_wakes_a_waiting_receiver() -> None:
    left, right = socket.socketpair()
    conn = wire.Connection(left, "p")
    failed: list[Exception] = []

    def wait() -> None:
        try:
            conn.recv(2 * LIMIT_S)
        except Exception as error:
            failed.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    conn.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive() and isinstance(failed[0], PeerLost)
    right.close()


def test_light_modules_never_import_jax() -> None:
    code = (
        "import sys, jaxrl_sync.transfer.auth, jaxrl_sync.transfer.wire, jaxrl_sync.transfer.version;"
        "print([m for m in ('jax', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert out.stdout.strip() == "[]"
