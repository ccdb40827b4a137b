"""``jaxrl-sync verbs bench``: what it measures arrives as sent, and a difference is found."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.transfer.bench import queue_pairs
from jaxrl_sync.transfer.bench.shape import BenchError, Result, Shape, parse_bytes, percentiles
from jaxrl_sync.transfer.errors import PeerLost
from jaxrl_sync.transfer.verbs.devices import Choice, Gid, Port
from jaxrl_sync.transfer.verbs.records import new_records
from jaxrl_sync.transfer.wire import Connection
from tests.verbs.fakelib import Fake


@pytest.fixture
def ports(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Fake:
    """The two devices of the fake as the kernel would list them."""
    gids = [Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, n]), "RoCE v2", "eth0") for n in (1, 2)]
    found = [Port(f"fake{i}", 1, "ACTIVE", "Ethernet", 100.0, 0, -1, (gid,)) for i, gid in enumerate(gids)]
    monkeypatch.setattr(queue_pairs, "scan", lambda: found)
    return fake


def both(shape: Shape, server: Callable[..., None] = queue_pairs.serve) -> Result:
    """Client and server in two threads. The client's error is raised, the server's fails the test."""
    ends = [
        Connection(sock, name) for sock, name in zip(socket.socketpair(), ("server", "client"), strict=True)
    ]
    problems: list[BaseException] = []

    def serve() -> None:
        try:
            opening = queue_pairs.expect(ends[1], "open", 20.0)
            server(ends[1], Shape.from_json(opening["shape"]), opening["side"], Choice(("fake1",)))
        except BenchError as error:
            ends[1].send({"kind": "failed", "reason": str(error)}, timeout_s=20.0)
        except PeerLost:  # the client gave up, and says why
            pass
        except BaseException as error:
            problems.append(error)
            ends[1].close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        return queue_pairs.measure(ends[0], shape, Choice(("fake0",)))
    finally:
        ends[0].close()
        thread.join(60)
        ends[1].close()
        assert not problems, problems


@pytest.mark.parametrize(
    "shape",
    [
        Shape(size_bytes=4096, iters=500, qps=3, depth=16, scattered=True, pings=5, timeout_s=60.0),
        Shape(size_bytes=65536, iters=60, depth=4, pings=3, checked=8, timeout_s=60.0),
        Shape(size_bytes=1, iters=10, depth=1, pings=2, checked=4, timeout_s=60.0),
    ],
)
def test_measures_and_compares(ports: Fake, shape: Shape) -> None:
    result = both(shape)
    assert result.messages == shape.iters and result.bytes_per_s > 0
    assert result.compared["messages"] == 2 * min(shape.checked, shape.memory_bytes // shape.size_bytes)
    assert set(result.latency_us) == {"min", "median", "p99"}
    told = json.loads(json.dumps(result.to_json()))
    assert told["registrations"] == 1 and told["transport"] == "verbs" and told["qps"] == shape.qps
    assert any(line.startswith("bandwidth") for line in result.lines())


def test_a_byte_that_differs_is_named(ports: Fake) -> None:
    def corrupting(connection: Connection, shape: Shape, described: object, choice: Choice) -> None:
        real = queue_pairs._compare

        def compare(side: queue_pairs.Side, seed: int) -> dict[str, int]:
            side.memory[77] ^= 1
            return real(side, seed)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(queue_pairs, "_compare", compare)
            queue_pairs.serve(connection, shape, described, choice)

    with pytest.raises(BenchError, match="server: 1 bytes differ, the first at 77"):
        both(Shape(size_bytes=64, iters=4, pings=0, timeout_s=30.0), corrupting)


def test_a_failed_write_ends_the_measurement(ports: Fake) -> None:
    ports.set(fail_at=40, fail_status=10)
    with pytest.raises(BenchError, match=r"RDMA WRITE 40 on fake0:1 failed: remote access error \(10\)"):
        both(Shape(size_bytes=64, iters=100, checked=8, pings=0, timeout_s=30.0))


def test_an_error_behind_more_completions_than_are_taken_at_once_is_named(ports: Fake) -> None:
    shape = Shape(size_bytes=64, depth=8)
    with queue_pairs.Side(shape, Choice(), "b") as a, queue_pairs.Side(shape, Choice(), "a") as b:
        a.connect(b.describe())
        b.connect(a.describe())
        a._records = new_records(1)
        ports.set(fail_at=8, fail_status=10)  # write 4 says that it is done before
        with pytest.raises(BenchError, match="RDMA WRITE 8 on fake"):
            a.write_all(a.table(8, 0, apart=False), time.monotonic() + 20)


def test_what_can_not_be_measured_is_said() -> None:
    assert [parse_bytes(text) for text in ("4096", "64k", "1MiB", "2 GB")] == [4096, 65536, 1 << 20, 2 << 30]
    with pytest.raises(ValueError, match="size '1T', expected a number"):
        parse_bytes("1T")
    with pytest.raises(BenchError, match="tcp has no queue pairs"):
        Shape(transport="tcp")
    with pytest.raises(BenchError, match="depth is 0, expected 1 to"):
        Shape.from_json({"depth": 0})
    assert percentiles([3.0, 1.0, 2.0]) == {"min": 1.0, "median": 2.0, "p99": 3.0}


def test_table_of_writes_stays_inside_and_apart(ports: Fake) -> None:
    with queue_pairs.Side(Shape(size_bytes=100, region_bytes=1050, scattered=True), Choice(), "x") as side:
        rows = side.table(64, 3, apart=True)
        starts = np.sort(rows[:, 0].astype(np.int64))
        assert len(rows) == 10 and (np.diff(starts) >= 100).all() and starts[-1] + 100 <= 1050
        rows = side.table(500, 3, apart=False)
        assert len(rows) == 500 and int(rows[:, 0].max()) + 100 <= 1050 and len(set(rows[:, 0].tolist())) > 50


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "one of the arguments --loopback --listen --connect is required"),
        (["--loopback", "--size", "huge"], "size 'huge', expected"),
        (["--loopback", "--transport", "shm", "--through", "queue-pairs"], "shm has no queue pairs"),
        (["--connect", "127.0.0.1:1"], "--connect needs --token-file"),
        (["--listen", "127.0.0.1:0"], "--listen needs --token-file"),
    ],
)
def test_command_line_refuses_in_one_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verbs", "bench", *words]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_weights_between_two_processes(transport: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--loopback", "--transport", transport, "--size", "3MiB", "--iters", "4", "--json"]
    assert main(["verbs", "bench", *words]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert (found["transport"], found["compared"]["versions"]) == (transport, 4)
    assert found["bytes_per_s"] > 0 and found["wire_s"] > 0
