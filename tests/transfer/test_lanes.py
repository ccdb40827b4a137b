"""Lanes of a tcp edge that end: what has arrived on the others isn't lost."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import stat
import threading
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.errors import PeerLost, TransferError
from jaxrl_sync.transfer.outbound import Outbound
from jaxrl_sync.transfer.placement import Terms
from jaxrl_sync.transfer.transports.pinned import Pinned
from jaxrl_sync.transfer.transports.tcp import LINGER_S, _Lanes
from jaxrl_sync.transfer.transports.windows import Direct
from jaxrl_sync.transfer.wire import Connection
from tests.transfer.models import Rig, take, trainer_params

TERMS = Terms("tcp", "", 256, 4096, ("full",))
BYTES = Direct((), np.zeros((0, 0), np.int64), 1)


def test_a_lane_that_ends_lets_the_others_take_what_is_there() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    lanes = _Lanes([Connection(a, "sender") for a, _ in pairs], Edge(0, 0, ()), TERMS, "target")
    ended, taken = threading.Event(), []

    def work(lane: int) -> None:
        if lane == 0:
            ended.set()
            raise PeerLost("the stream ended")
        assert ended.wait(60)
        taken.append(lanes.connections[1].sock.recv(4))

    pairs[1][1].sendall(b"last")
    with pytest.raises(PeerLost, match="the stream ended"):
        lanes.run(work, LINGER_S * 20)
    assert taken == [b"last"] and all(c.closed for c in lanes.connections)
    lanes.close()
    for _, there in pairs:
        there.close()


def test_a_lane_without_a_thread_is_named_and_those_that_had_one_are_over() -> None:
    """It was told that the connection had been closed, and other lanes went on meanwhile."""
    pairs = [socket.socketpair() for _ in range(3)]
    lanes = _Lanes([Connection(a, "sender") for a, _ in pairs], Edge(0, 0, ()), TERMS, "target")
    assert lanes._pool is not None
    over, real = list[int](), lanes._pool.submit

    def submit(*args: Any) -> Any:
        if args[1] == 2:
            raise RuntimeError("can't start new thread")
        return real(*args)

    def work(lane: int) -> None:
        with contextlib.suppress(OSError):
            lanes.connections[lane].sock.recv(4)  # until it is closed
        over.append(lane)

    lanes._pool.submit = submit  # type: ignore[assignment]
    with pytest.raises(TransferError, match="no thread for a connection of the edge to sender: can't start"):
        lanes.run(work)
    assert over == [1] and all(c.closed for c in lanes.connections)
    lanes.close()
    for _, there in pairs:
        there.close()


def test_a_link_without_a_thread_is_refused_and_the_next_one_served(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It stayed among the links for good, and its peer waited for an answer."""
    real, refused = Outbound.start, list[str]()

    def start(link: Outbound) -> None:
        if not refused:
            refused.append(link.link)
            raise RuntimeError("can't start new thread")
        real(link)

    monkeypatch.setattr(Outbound, "start", start)
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    assert take(rig.subscriber())[0] == Version("a", 0)
    assert refused and [link.link for link in publisher._listening.links] != refused
    assert "no thread for the link of engine-0.0 at " in caplog.text


def test_a_lane_that_is_closed_just_then_is_never_another_file(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at its number and its copy the number was given away: that file got the weights."""
    connection = Connection(pair[0], "sender")
    lanes = _Lanes([connection], Edge(0, 0, ()), TERMS, "target")
    closer, copy = threading.Thread(target=connection.close), os.dup

    def dup(number: int) -> int:
        closer.start()
        closer.join(0.3)
        other = os.open(os.devnull, os.O_WRONLY)  # takes the number if it is free
        try:
            return copy(number)
        finally:
            os.close(other)

    seen: list[int] = []

    def piece(number: int, *where: Any) -> int:
        seen.append(os.fstat(number).st_mode)
        return 1

    monkeypatch.setattr(os, "dup", dup)
    lanes.move(0, BYTES, Pinned({}), piece)
    closer.join(90)
    assert [stat.S_ISSOCK(mode) for mode in seen] == [True] and connection.closed
    with pytest.raises(PeerLost, match="was closed on this side"):
        lanes.move(0, BYTES, Pinned({}), piece)


def test_a_lane_without_a_descriptor_says_so(
    pair: tuple[socket.socket, socket.socket], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was told that the connection was closed."""

    def full(number: int) -> int:
        raise OSError(errno.EMFILE, "Too many open files")

    connection = Connection(pair[0], "sender")
    monkeypatch.setattr(os, "dup", full)
    with pytest.raises(TransferError, match="no descriptor for the connection to sender: .*Too many open"):
        connection.duplicate()
