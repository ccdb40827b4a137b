"""The run token and the handshake that proves it on every data connection; bearer helpers for HTTP.

The token is 32 random bytes in hexadecimal in a file of mode 0600. It never travels on a data connection:
both sides prove it by HMAC-SHA256 over fresh nonces of both, the run id and what they say in the handshake,
with different labels per direction, so that no message can be replayed or reflected.

    client -> server   {protocol, run_id, nonce c}
    server -> client   {nonce s, proof = HMAC(token, "server" | run_id | c | s)}
    client -> server   {hello, proof = HMAC(token, "client" | run_id | c | s | hello)}
    server -> client   {reply, proof = HMAC(token, "reply" | run_id | c | s | reply)}  or  {error}
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import os
import secrets
import socket
import stat
import struct
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import wire
from jaxrl_sync.transfer.errors import AuthError, ProtocolError, TransferError

PROTOCOL = 2
"""Of links, whole: another number for every change of what travels. 2: woven rows on tcp's lanes."""

TOKEN_HEX = 64
MAX_HELLO_BYTES = 1 << 20
MAX_UNPROVEN_BYTES = 64 << 10  # of a message whose sender hasn't proven the token yet
_LENGTH = struct.Struct("<I")
_SHOWN = 300  # characters of what an unproven peer says that get into messages and logs

Hello = dict[str, Any]
Reply = Mapping[str, Any] | Callable[[Hello], Mapping[str, Any]]


def create_token(path: str | Path) -> str:
    """Create the token file exclusively with mode 0600 and return the token. AuthError if it exists."""
    token = secrets.token_hex(TOKEN_HEX // 2)
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise AuthError(f"token file {path} exists already") from error
    with os.fdopen(fd, "w") as file:
        os.fchmod(file.fileno(), 0o600)  # whatever the umask is
        file.write(token + "\n")
    return token


class TokenFileMissing(AuthError):
    """There is no token file at the path given."""

    exit_code = 3


def load_token(path: str | Path) -> str:
    """Read a token file that nobody but its owner can read. AuthError names what is wrong with it."""
    try:  # a pipe in its place must not block us
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError as error:
        raise TokenFileMissing(f"can't read token file {path}: {error.strerror}") from error
    except OSError as error:
        raise AuthError(f"can't read token file {path}: {error.strerror}") from error
    try:
        info = os.fstat(fd)
        if not stat.S_ISREG(info.st_mode) or stat.S_IMODE(info.st_mode) & 0o077:
            raise AuthError(f"token file {path} has mode {stat.filemode(info.st_mode)}, expected -rw-------")
        if info.st_uid not in (os.geteuid(), 0):
            raise AuthError(f"token file {path} belongs to uid {info.st_uid}, expected {os.geteuid()}")
        text = os.read(fd, TOKEN_HEX + 2).decode("ascii", "replace").strip()
    finally:
        os.close(fd)
    if len(text) != TOKEN_HEX or any(c not in "0123456789abcdef" for c in text):
        raise AuthError(
            f"token file {path} holds {len(text)} characters, expected {TOKEN_HEX} hexadecimal ones"
        )
    return text


def run_id_of(token: str) -> str:
    """The public name of the run that a token belongs to: 16 hex digits that don't reveal the token."""
    return hmac.new(bytes.fromhex(token), b"jaxrl_sync run id", hashlib.sha256).hexdigest()[:16]


def bearer_headers(token: str) -> dict[str, str]:
    """The HTTP header that carries the token."""
    return {"Authorization": f"Bearer {token}"}


def check_bearer(authorization: str | None, token: str) -> bool:
    """Whether an ``Authorization`` header value carries the token; compared in constant time."""
    scheme, _, given = (authorization or "").partition(" ")
    found = f"{scheme.lower()} {given.strip()}".encode("utf-8", "replace")
    return hmac.compare_digest(found, f"bearer {token}".encode())


def connect(sock: socket.socket, token: str, run_id: str, hello: Hello, deadline_s: float) -> Hello:
    """Prove the token to a listener, be proved to, say ``hello`` and return its reply.

    Blocks up to ``deadline_s`` seconds. AuthError when the other side lacks the token or refuses us,
    PeerLost, DeadlineError, ProtocolError. The socket stays the caller's, and becomes non-blocking.
    """
    deadline = time.monotonic() + deadline_s
    sock.setblocking(False)
    nonce = secrets.token_hex(32)
    _send(sock, {"protocol": PROTOCOL, "run_id": run_id, "nonce": nonce}, deadline)
    answer = _recv(sock, deadline)
    bind = (run_id, nonce, _text(answer, "nonce"))
    if not hmac.compare_digest(_text(answer, "proof"), _proof(token, "server", bind, "")):
        raise AuthError("the listener can't prove the run token")
    text = json.dumps(hello)
    _send(sock, {"hello": text, "proof": _proof(token, "client", bind, text)}, deadline)
    answer = _recv(sock, deadline)
    reply = _text(answer, "reply")
    if not hmac.compare_digest(_text(answer, "proof"), _proof(token, "reply", bind, reply)):
        raise AuthError("the listener's reply doesn't carry a valid proof")
    return _parse(reply)


def accept(
    sock: socket.socket, token: str, run_id: str, deadline_s: float, reply: Reply | None = None
) -> Hello:
    """The listener's half of ``connect``: returns the peer's hello once it has proved the token.

    ``reply`` is what the peer gets, or a function of its hello; if that raises a TransferError the peer is
    told the message and the error goes on. AuthError on a wrong token, run id or replay; PeerLost;
    DeadlineError.
    """
    deadline = time.monotonic() + deadline_s
    sock.setblocking(False)
    first = _recv(sock, deadline, MAX_UNPROVEN_BYTES)
    if first.get("protocol") != PROTOCOL:
        found = repr(first.get("protocol"))[:_SHOWN]
        _refuse(sock, f"protocol {found} isn't spoken here, expected {PROTOCOL}", deadline)
    if first.get("run_id") != run_id:
        found = repr(first.get("run_id"))[:_SHOWN]
        _refuse(sock, f"run id {found} is foreign here", deadline)
    nonce = secrets.token_hex(32)
    bind = (run_id, _text(first, "nonce"), nonce)
    _send(sock, {"nonce": nonce, "proof": _proof(token, "server", bind, "")}, deadline)
    second = _recv(sock, deadline, MAX_UNPROVEN_BYTES)
    text = _text(second, "hello")
    if not hmac.compare_digest(_text(second, "proof"), _proof(token, "client", bind, text)):
        _refuse(sock, "wrong run token", deadline)
    hello = _parse(text)
    try:
        answer = json.dumps(dict(reply(hello) if callable(reply) else reply or {}))
    except TransferError as error:
        with contextlib.suppress(TransferError):
            _send(sock, {"error": str(error)}, deadline)
        raise
    _send(sock, {"reply": answer, "proof": _proof(token, "reply", bind, answer)}, deadline)
    return hello


def _proof(token: str, label: str, bind: tuple[str, str, str], text: str) -> str:
    parts = (label, *bind, text)
    message = b"".join(_LENGTH.pack(len(p.encode())) + p.encode() for p in parts)
    return hmac.new(bytes.fromhex(token), message, hashlib.sha256).hexdigest()


def _send(sock: socket.socket, message: Hello, deadline: float) -> None:
    text = json.dumps(message).encode()
    if len(text) > MAX_HELLO_BYTES:
        raise ProtocolError(f"a handshake message of {len(text)} bytes, the limit is {MAX_HELLO_BYTES}")
    wire.send_all(sock, [_LENGTH.pack(len(text)) + text], deadline)


def _recv(sock: socket.socket, deadline: float, limit_bytes: int = MAX_HELLO_BYTES) -> Hello:
    prefix = bytearray(_LENGTH.size)
    wire.recv_exact_into(sock, memoryview(prefix), deadline)
    (length,) = _LENGTH.unpack(prefix)
    if length > limit_bytes:
        raise ProtocolError(f"a handshake message of {length} bytes, the limit is {limit_bytes}")
    text = bytearray(length)
    wire.recv_exact_into(sock, memoryview(text), deadline)
    message = _parse(bytes(text))
    if "error" in message:
        raise AuthError(f"the other side refused the connection: {str(message['error'])[:_SHOWN]}")
    return message


def _refuse(sock: socket.socket, reason: str, deadline: float) -> None:
    with contextlib.suppress(TransferError):
        _send(sock, {"error": reason}, deadline)
    raise AuthError(f"refused a connection: {reason}")


def _text(message: Hello, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str) or not value.isascii():
        raise ProtocolError(f"handshake field {key!r} is {type(value).__name__}, expected ASCII text")
    return value


def _parse(text: str | bytes) -> Hello:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a handshake message isn't JSON: {error}") from error
    if not isinstance(value, dict):
        raise ProtocolError(f"a handshake message is {type(value).__name__}, expected an object")
    return value
