"""Lanes of a tcp edge that end: what has arrived on the others isn't lost."""

from __future__ import annotations

import socket
import threading

import pytest

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer.errors import PeerLost
from jaxrl_sync.transfer.placement import Terms
from jaxrl_sync.transfer.transports.tcp import LINGER_S, _Lanes
from jaxrl_sync.transfer.wire import Connection


def test_a_lane_that_ends_lets_the_others_take_what_is_there() -> None:
    pairs = [socket.socketpair() for _ in range(2)]
    terms = Terms("tcp", "", 256, 4096, ("full",))
    lanes = _Lanes([Connection(a, "sender") for a, _ in pairs], Edge(0, 0, ()), terms, "target")
    ended, taken = threading.Event(), []

    def work(lane: int) -> None:
        if lane == 0:
            ended.set()
            raise PeerLost("the stream ended")
        assert ended.wait(10)
        taken.append(lanes.connections[1].sock.recv(4))

    pairs[1][1].sendall(b"last")
    with pytest.raises(PeerLost, match="the stream ended"):
        lanes.run(work, LINGER_S * 20)
    assert taken == [b"last"] and all(c.closed for c in lanes.connections)
    lanes.close()
    for _, there in pairs:
        there.close()
