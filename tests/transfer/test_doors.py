"""Attacks on every listener of the data side: refused, logged once, and the listener goes on to serve."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from jaxrl_sync.batch.connection import BatchReceiver, BatchSender, ConnectionConfig, TrainerState
from jaxrl_sync.inference import group
from jaxrl_sync.inference.group import Leader
from jaxrl_sync.transfer import Subscriber, SubscriberConfig, Version, auth, wire
from jaxrl_sync.transfer.errors import AuthError, PeerLost, TransferError
from jaxrl_sync.transfer.lobby import Lobby
from jaxrl_sync.transfer.refusals import AGAIN_S, MAX_LINES, Refusals
from tests.transfer.models import (
    LEASE_S,
    Rig,
    ServerThread,
    convert,
    engine_target,
    take,
    trainer_params,
    until,
)

OTHER_TOKEN = "cd" * 32
PATIENT_S = 60.0
"""For a handshake: no attack of these may take so long that it is refused as slow."""
_LENGTH = struct.Struct("<I")


class Door(NamedTuple):
    """A listener: where it is, what a good peer says, and a check that it serves one."""

    address: str
    token: str
    run_id: str
    hello: dict[str, Any]
    serves: Callable[[], None]


@contextlib.contextmanager
def publisher_door(hub: ServerThread, token_file: Path) -> Iterator[Door]:
    with Rig(hub, token_file) as rig:
        params = trainer_params()
        publisher = rig.publisher(params, handshake_timeout_s=PATIENT_S)
        publisher.publish(params, Version("a", 0)).wait(60)
        client = rig.hub_client()
        (member,) = client.members("publisher")
        hello = {"purpose": "weights", "engine": "e", "rank": 0}

        def serves() -> None:
            assert take(rig.subscriber())[0] == Version("a", 0)

        yield Door(member.info["address"], client.token, client.run_id, hello, serves)


@contextlib.contextmanager
def relay_door(hub: ServerThread, token_file: Path) -> Iterator[Door]:
    """An engine that serves to others, after the publisher is gone."""
    with Rig(hub, token_file) as rig:
        params = trainer_params()
        publisher = rig.publisher(params)
        publisher.publish(params, Version("a", 0)).wait(60)
        config = SubscriberConfig(engine="r", relay=True, ttl_s=LEASE_S, handshake_timeout_s=PATIENT_S)
        with Subscriber(hub.url, engine_target(), convert, token_file=token_file, config=config) as relay:
            take(relay)
            client = rig.hub_client()
            until(lambda: client.status()["engines"]["r"]["ranks"]["0"] is not None)
            publisher.close()
            (member,) = client.members("relay")
            hello = {"purpose": "weights", "engine": "e", "rank": 0}

            def serves() -> None:
                assert take(rig.subscriber())[0] == Version("a", 0)

            yield Door(member.info["address"], client.token, client.run_id, hello, serves)


@contextlib.contextmanager
def batch_door(hub: ServerThread, token_file: Path) -> Iterator[Door]:
    token = auth.load_token(token_file)
    run_id = auth.run_id_of(token)
    state = TrainerState("a", 7, {})
    config = ConnectionConfig(handshake_s=PATIENT_S)
    with BatchReceiver(state, token=token, run_id=run_id, data_rank=0, config=config) as receiver:

        def serves() -> None:
            with BatchSender(receiver.address, token=token, run_id=run_id, data_rank=0) as sender:
                assert sender.connect().number == 7

        hello = {"purpose": "batch", "data_rank": 0}
        yield Door(receiver.address, token, run_id, hello, serves)


@contextlib.contextmanager
def group_door(hub: ServerThread, token_file: Path) -> Iterator[Door]:
    token = auth.load_token(token_file)
    run_id = auth.run_id_of(token)
    leader = Leader("engine-7", token, "127.0.0.1", 2, lambda cause, code: None)
    waiting = threading.Thread(target=leader.wait, args=(240.0,))
    address = "{}:{}".format(*leader.address)

    def serves() -> None:
        with wire.dial(address, 60) as sock:
            auth.connect(sock, token, run_id, {"rank": 1}, 60)
            waiting.join(90)
            assert not waiting.is_alive()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "_HANDSHAKE_S", PATIENT_S)
        waiting.start()
        yield Door(address, token, run_id, {"rank": 1}, serves)
    leader.close()


DOORS = {"publisher": publisher_door, "relay": relay_door, "batch": batch_door, "group": group_door}


@pytest.fixture(params=list(DOORS.values()), ids=list(DOORS))
def door(request: pytest.FixtureRequest, hub: ServerThread, token_file: Path) -> Iterator[Door]:
    with request.param(hub, token_file) as opened:
        yield opened


def message(body: dict[str, Any]) -> bytes:
    text = json.dumps(body).encode()
    return _LENGTH.pack(len(text)) + text


def answer(sock: socket.socket) -> dict[str, Any]:
    view = bytearray(_LENGTH.size)
    wire.recv_exact_into(sock, memoryview(view), time.monotonic() + 60)
    text = bytearray(_LENGTH.unpack(view)[0])
    wire.recv_exact_into(sock, memoryview(text), time.monotonic() + 60)
    return dict(json.loads(bytes(text)))


def ended(sock: socket.socket) -> bool:
    """Whether the other side ends the connection; what it says before is skipped."""
    sock.settimeout(60)
    try:
        while sock.recv(4096):
            pass
    except ConnectionError:
        pass
    return True


def wrong_token(door: Door, sock: socket.socket) -> None:
    with pytest.raises(AuthError, match="can't prove"):
        auth.connect(sock, OTHER_TOKEN, door.run_id, door.hello, 60)


def wrong_token_that_trusts_anyone(door: Door, sock: socket.socket) -> None:
    sock.sendall(message({"protocol": auth.PROTOCOL, "run_id": door.run_id, "nonce": "n"}))
    answer(sock)
    sock.sendall(message({"hello": json.dumps(door.hello), "proof": "00" * 32}))
    assert "wrong run token" in answer(sock)["error"]


def no_token(door: Door, sock: socket.socket) -> None:
    sock.sendall(message({"protocol": auth.PROTOCOL, "run_id": door.run_id, "nonce": "n"}))
    answer(sock)
    sock.sendall(message({"hello": json.dumps(door.hello)}))
    assert ended(sock)


def foreign_run(door: Door, sock: socket.socket) -> None:
    with pytest.raises(AuthError, match="foreign"):
        auth.connect(sock, door.token, "0123456789abcdef", door.hello, 60)


def oversized(door: Door, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(_LENGTH.pack(1 << 30) + b"{" * 100_000)
    assert ended(sock)


def oversized_hello(door: Door, sock: socket.socket) -> None:
    sock.sendall(message({"protocol": auth.PROTOCOL, "run_id": door.run_id, "nonce": "n"}))
    answer(sock)
    with contextlib.suppress(ConnectionError):
        sock.sendall(_LENGTH.pack(auth.MAX_UNPROVEN_BYTES + 1))
    assert ended(sock)


def other_protocol(door: Door, sock: socket.socket) -> None:
    with contextlib.suppress(ConnectionError):
        sock.sendall(b"GET / HTTP/1.1\r\n\r\n")
    assert ended(sock)


ATTACKS: list[tuple[str, Callable[[Door, socket.socket], None]]] = [
    ("token", wrong_token_that_trusts_anyone),
    ("token", foreign_run),
    ("protocol", no_token),
    ("protocol", oversized),
    ("protocol", oversized_hello),
    ("protocol", other_protocol),
    ("gone", wrong_token),
]
"""The kind of each refusal, and an attack."""


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if " refused 127.0.0.1: " in r.getMessage()]


def test_strangers_are_refused_and_logged_once(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """Every attack three times; of each reason one line."""
    for _, attack in ATTACKS:
        for _ in range(3):
            with wire.dial(door.address, 60) as sock:
                attack(door, sock)
    kinds = {kind for kind, _ in ATTACKS}
    until(lambda: len(lines(caplog)) >= len(kinds))
    door.serves()
    assert len(lines(caplog)) == len(kinds), lines(caplog)
    for word in ("wrong run token", "the limit is", "closed the connection"):
        assert sum(word in line for line in lines(caplog)) <= 1, word
    assert door.token not in caplog.text


def test_a_replayed_handshake_is_refused(door: Door, caplog: pytest.LogCaptureFixture) -> None:
    """Every byte that a good client sent, sent again by somebody who read them."""
    first = message({"protocol": auth.PROTOCOL, "run_id": door.run_id, "nonce": "ab" * 32})
    with wire.dial(door.address, 60) as good:
        good.sendall(first)
        nonce = answer(good)["nonce"]
        text = json.dumps({**door.hello, "purpose": "none", "rank": 99})  # proven, and then of no use
        bind = (door.run_id, "ab" * 32, nonce)
        second = message({"hello": text, "proof": auth._proof(door.token, "client", bind, text)})
        good.sendall(second)
        assert "wrong run token" not in str(answer(good))
    with wire.dial(door.address, 60) as thief:
        thief.sendall(first)
        assert answer(thief)["nonce"] != nonce
        thief.sendall(second)
        assert "wrong run token" in answer(thief)["error"]
    until(lambda: any("wrong run token" in line for line in lines(caplog)))
    door.serves()


def test_silent_connections_keep_nobody_out(door: Door) -> None:
    """More than fit into the lobby: the oldest are ended at once, a good peer gets in."""
    silent = [wire.dial(door.address, 60) for _ in range(300)]
    begun = time.monotonic()
    door.serves()
    assert ended(silent[0])
    assert time.monotonic() - begun < 60
    for sock in silent:
        sock.close()


def test_a_listener_can_not_be_played_by_somebody_without_the_token() -> None:
    """Whoever takes over a port of ours learns nothing from those who come to it."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        seen: list[bytes] = []

        def play() -> None:
            sock, _ = impostor.accept()
            with sock:
                seen.append(sock.recv(4096))
                sock.sendall(message({"nonce": "n", "proof": "00" * 32}))
                sock.settimeout(5)
                with contextlib.suppress(OSError):
                    seen.append(sock.recv(4096))

        thread = threading.Thread(target=play)
        thread.start()
        with wire.dial("{}:{}".format(*impostor.getsockname()), 60) as sock:
            with pytest.raises(AuthError, match="can't prove the run token"):
                auth.connect(sock, OTHER_TOKEN, "r1", {"secret": 1}, 60)
        thread.join(90)
    assert seen[1:] in ([], [b""])
    assert OTHER_TOKEN.encode() not in b"".join(seen) and b"secret" not in b"".join(seen)


def test_a_proof_of_a_listener_is_none_of_a_client(pair: tuple[socket.socket, socket.socket]) -> None:
    """Reflection: what one listener proves can't be handed to another as a client's proof."""
    results: list[BaseException] = []

    def listen() -> None:
        try:
            auth.accept(pair[0], OTHER_TOKEN, "r1", 60)
        except TransferError as error:
            results.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    pair[1].sendall(message({"protocol": auth.PROTOCOL, "run_id": "r1", "nonce": "n"}))
    proof = answer(pair[1])["proof"]
    pair[1].sendall(message({"hello": "", "proof": proof}))
    thread.join(90)
    assert isinstance(results[0], AuthError)


def test_the_lobby_ends_who_has_most_and_came_first() -> None:
    lobby, gone = Lobby(3), []
    for number in range(3):
        lobby.enter("greedy", lambda n=number: gone.append(n))  # type: ignore[misc]
    mine = lobby.enter("modest", lambda: gone.append(99))
    assert gone == [0] and len(lobby) == 3
    lobby.enter("greedy", lambda: gone.append(3))
    assert gone == [0, 1] and lobby.evicted == 2
    lobby.leave("modest", mine)
    lobby.leave("modest", mine)
    assert len(lobby) == 2


def test_refusals_fill_no_log(caplog: pytest.LogCaptureFixture) -> None:
    import logging

    now = [0.0]
    refusals = Refusals(logging.getLogger("door"), "door", lambda: now[0])
    for number in range(3 * MAX_LINES):
        refusals.note(f"10.0.{number // 256}.{number % 256}", "token", "x\n" * 5000)
    assert len(caplog.records) == MAX_LINES
    assert all("\n" not in r.getMessage() and len(r.getMessage()) < 700 for r in caplog.records)
    assert refusals.counts() == {"token": 3 * MAX_LINES}
    now[0] = AGAIN_S
    refusals.note_error("10.0.0.0", PeerLost("left"))
    refusals.note("10.0.0.0", "token", "again")
    assert caplog.records[-1].getMessage() == "door refused 10.0.0.0: again (logged once in 600 s)"
