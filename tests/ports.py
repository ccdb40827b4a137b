"""Ports for processes that a test starts."""

from __future__ import annotations

import itertools
import os
import socket

_FIRST, _COUNT = 12_000, 20_000
"""Below what kernels choose from by themselves (from 32768 on): between the test's choice and its process's
``listen`` no other socket gets the port by chance."""

_turn = itertools.count(os.getpid() * 97)


def free_port() -> int:
    """A TCP port of loopback where nobody listens; another one each time, and in each test process."""
    for _ in range(_COUNT):
        port = _FIRST + next(_turn) % _COUNT
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError(f"no free port from {_FIRST} to {_FIRST + _COUNT}")
