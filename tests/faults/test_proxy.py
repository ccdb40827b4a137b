"""The fault proxy itself: each fault does what it says to bytes that we know, and every byte is counted."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from tests.faults.proxy_client import ProxyClient, ProxyError, dial
from tests.faults.rules import Bucket, Edge, Rule, Trigger
from tests.ports import free_port

DATA = bytes(hashlib.shake_128(b"bytes").digest(3 << 20))


class Server:
    """Takes connections one by one; sends ``reply`` on each that says so, keeps what it got."""

    def __init__(self) -> None:
        port = free_port()  # each test's own: the proxy counts by address as long as it lives
        self.listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"

    def accept(self) -> socket.socket:
        self.listener.settimeout(20)
        sock, _ = self.listener.accept()
        sock.settimeout(20)
        return sock


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProxyClient]:
    with ProxyClient(tmp_path_factory.mktemp("proxy")) as made:
        yield made


@pytest.fixture
def server(proxy: ProxyClient) -> Iterator[Server]:
    made = Server()
    yield made
    proxy.clear()
    made.listener.close()


@pytest.fixture
def pair(proxy: ProxyClient, server: Server) -> Iterator[tuple[socket.socket, socket.socket]]:
    """(client, server) of one proxied connection."""
    client = dial(proxy.listen(), Edge("e", server.address, "data"), 10)
    client.settimeout(20)
    other = server.accept()
    client.sendall(b"!")
    assert receive(other, 1) == b"!"  # the proxy knows the connection, too
    yield client, other
    client.close()
    other.close()


def receive(sock: socket.socket, nbytes: int) -> bytes:
    parts = b""
    while len(parts) < nbytes and (data := sock.recv(nbytes - len(parts))):
        parts += data
    return parts


def silent(sock: socket.socket, seconds: float = 0.2) -> bool:
    """Whether nothing comes, not even the end."""
    sock.settimeout(seconds)
    try:
        sock.recv(1, socket.MSG_PEEK)
    except TimeoutError:
        return True
    finally:
        sock.settimeout(20)
    return False


Pair = tuple[socket.socket, socket.socket]


def test_bytes_pass_both_ways_and_are_counted(proxy: ProxyClient, server: Server, pair: Pair) -> None:
    client, other = pair
    sender = threading.Thread(target=client.sendall, args=(DATA,))
    sender.start()
    assert receive(other, len(DATA)) == DATA
    sender.join()
    other.sendall(DATA[:1000])
    assert receive(client, 1000) == DATA[:1000]
    assert proxy.counts()[Edge("e", server.address, "data")] == (1 + len(DATA), 1000)
    client.shutdown(socket.SHUT_WR)
    assert other.recv(1) == b""
    other.sendall(b"after")
    assert receive(client, 5) == b"after"


def test_a_listener_of_one_edge_needs_no_preamble(proxy: ProxyClient, server: Server) -> None:
    edge = Edge("t", server.address, "control")
    host, _, port = proxy.listen(edge).rpartition(":")
    with socket.create_connection((host, int(port)), 10) as client:
        client.sendall(b"hello")
        with server.accept() as other:
            assert receive(other, 5) == b"hello"
            assert edge in proxy.connections()
    assert proxy.counts()[edge] == (5, 0)


def test_a_stall_after_so_many_bytes_holds_the_rest_and_loses_nothing(proxy: ProxyClient, pair: Pair) -> None:
    client, other = pair
    rule = proxy.enforce(Rule("stall", source="e", down=False, after_bytes=100_000))
    sender = threading.Thread(target=client.sendall, args=(DATA,))
    sender.start()
    assert receive(other, 100_000) == DATA[:100_000]
    event = proxy.fired(rule, 10)
    assert event is not None and event["source"] == "e" and event["direction"] == "up"
    assert silent(other)
    other.sendall(b"down")  # the other direction isn't concerned
    assert receive(client, 4) == b"down"
    proxy.clear(rule)
    assert receive(other, len(DATA) - 100_000) == DATA[100_000:]
    sender.join()


def test_a_pattern_is_found_across_pieces_and_nothing_of_it_passes(proxy: ProxyClient, pair: Pair) -> None:
    client, other = pair
    rule = proxy.enforce(Rule("stall", down=False, pattern="nee+dle"))
    client.sendall(b"hay nee")
    assert receive(other, 7) == b"hay nee"  # not known yet
    assert proxy.fired(rule, 0.3) is None
    client.sendall(b"eeedle hay")
    assert proxy.fired(rule, 10) is not None
    assert silent(other)
    proxy.clear(rule)
    assert receive(other, 10) == b"eeedle hay"


def test_reset_is_a_reset_for_both(proxy: ProxyClient, pair: Pair) -> None:
    client, other = pair
    proxy.enforce(Rule("reset", source="e"))
    for sock in (client, other):
        with pytest.raises(ConnectionResetError):
            sock.recv(1)


def test_half_open_tells_the_target_only_and_the_source_once_it_is_lifted(
    proxy: ProxyClient, pair: Pair
) -> None:
    client, other = pair
    rule = proxy.enforce(Rule("half_open", source="e"))
    with pytest.raises(ConnectionResetError):
        other.recv(1)
    client.sendall(b"is anybody there")
    assert silent(client)
    proxy.clear(rule)
    with pytest.raises(ConnectionResetError):
        client.recv(1)


def test_a_partition_holds_old_and_new_connections_and_heals(
    proxy: ProxyClient, server: Server, pair: Pair
) -> None:
    client, other = pair
    rule = proxy.enforce(Rule("partition", source="e"))
    client.sendall(b"old")
    other.sendall(b"old")
    fresh = dial(proxy.listen(), Edge("e", server.address, "data"), 10)
    fresh.sendall(b"new")
    unconcerned = dial(proxy.listen(), Edge("f", server.address, "data"), 10)
    unconcerned.sendall(b"f")
    with server.accept() as theirs:
        assert receive(theirs, 1) == b"f"
    assert silent(other) and silent(client)
    proxy.clear(rule)
    assert receive(other, 3) == receive(client, 3) == b"old"
    with server.accept() as theirs:
        assert receive(theirs, 3) == b"new"
    fresh.close()
    unconcerned.close()


def test_duplicate_truncate_and_flip_change_what_arrives(
    proxy: ProxyClient, server: Server, pair: Pair
) -> None:
    client, other = pair
    proxy.enforce(Rule("duplicate", value=4, pattern="cd"))
    client.sendall(b"abcdefgh")
    assert receive(other, 12) == b"abcdefcdefgh"
    proxy.clear()
    proxy.enforce(Rule("flip", after_bytes=2))
    client.sendall(b"abcd")
    assert receive(other, 4) == b"ab" + bytes([ord("c") ^ 1]) + b"d"
    proxy.clear()
    proxy.enforce(Rule("truncate", down=False, after_bytes=3))
    client.sendall(b"abcdef")
    assert receive(other, 3) == b"abc" and other.recv(1) == b""
    assert proxy.counts()[Edge("e", server.address, "data")] == (1 + 12 + 4 + 3, 0)


def test_a_delay_is_a_delay_and_a_rate_a_rate(proxy: ProxyClient, pair: Pair) -> None:
    client, other = pair
    with proxy.broken(Rule("delay", value=0.2)):
        start = time.monotonic()
        client.sendall(b"ping")
        receive(other, 4)
        other.sendall(b"pong")
        receive(client, 4)
        assert time.monotonic() - start >= 0.4
    with proxy.broken(Rule("rate", value=1e6)):
        start = time.monotonic()
        sender = threading.Thread(target=client.sendall, args=(DATA[:500_000],))
        sender.start()
        assert receive(other, 500_000) == DATA[:500_000]
        assert time.monotonic() - start >= 0.49
        sender.join()


def test_a_rule_with_a_mistake_is_refused_by_name(proxy: ProxyClient) -> None:
    with pytest.raises(ValueError, match="rate with value 0"):
        Rule("rate")
    with pytest.raises(ValueError, match="action 'explode'"):
        Rule("explode")  # type: ignore[arg-type]
    with pytest.raises(ProxyError, match="unknown command 'dance'"):
        proxy._ask("dance")


def test_a_peer_that_cannot_be_reached_is_a_reset(proxy: ProxyClient) -> None:
    address = f"127.0.0.1:{free_port()}"
    client = dial(proxy.listen(), Edge("e", address, "data"), 10)
    client.settimeout(20)
    with pytest.raises(ConnectionResetError):
        client.recv(1)
    client.close()


def test_triggers_count_all_connections_of_a_rule_together() -> None:
    trigger = Trigger(Rule("stall", after_bytes=10))
    assert trigger.find(1, "up", memoryview(b"123456")) is None
    assert trigger.find(2, "down", memoryview(b"1234")) is None
    assert trigger.find(1, "up", memoryview(b"12")) == 0
    one_way = Trigger(Rule("stall", up=False, after_bytes=0))
    assert one_way.find(1, "up", memoryview(b"x")) is None
    assert one_way.find(1, "down", memoryview(b"x")) == 0


def test_a_bucket_is_shared_in_order() -> None:
    bucket = Bucket(100.0)
    assert bucket.reserve(50, 10.0) == 10.5
    assert bucket.reserve(50, 10.1) == 11.0
    assert bucket.reserve(100, 20.0) == 21.0
