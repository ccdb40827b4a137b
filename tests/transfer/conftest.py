"""A run token and a hub in a thread."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_sync.transfer import auth
from tests.transfer.models import Rig, ServerThread


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    auth.create_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def hub(token_file: Path) -> Iterator[ServerThread]:
    server = ServerThread(token_file)
    yield server
    server.close()


@pytest.fixture
def rig(hub: ServerThread, token_file: Path) -> Iterator[Rig]:
    with Rig(hub, token_file) as made:
        yield made


@pytest.fixture
def pair() -> Iterator[tuple[socket.socket, socket.socket]]:
    left, right = socket.socketpair()
    yield left, right
    left.close()
    right.close()
