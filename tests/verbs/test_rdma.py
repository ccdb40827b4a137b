"""Real verbs between two devices, byte for byte. ``tests/vm/run`` provides soft-RoCE devices for them."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.transfer import _verbs
from jaxrl_sync.transfer.verbs import counters
from jaxrl_sync.transfer.verbs.devices import Choice, choose, scan
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.events import EventWatcher
from tests.transfer.models import open_fds, until
from tests.verbs.pairs import connect, open_end, pair, rows, write
from tests.verbs.soft import DEVICES, LONG_S, PATIENT, bring_up, soft_devices

pytestmark = pytest.mark.rdma

MTU_4096 = 5
SOFT: dict[str, Any] = {"devices": DEVICES, "mtu": MTU_4096, "timeout": PATIENT}
MIB = 1 << 20


@pytest.fixture(autouse=True)
def devices() -> None:
    """Skip where the two devices aren't."""
    soft_devices()


def test_chooses_the_routable_address() -> None:
    assert _verbs.load_error() is None
    assert set(DEVICES) <= set(_verbs.device_names())
    chosen = choose(scan(), Choice(include=("rxe1",)))
    assert str(chosen.gid.address) == "10.77.0.2" and chosen.gid.kind == "RoCE v2", chosen.reason
    with _verbs.Context("rxe1") as context:
        assert context.query_gid(1, chosen.gid.index) == chosen.gid.raw
        port = context.query_port(1)
        assert (port["state"], port["active_mtu"], port["max_message_bytes"]) == (4, MTU_4096, 8 * MIB)


@pytest.mark.parametrize("qps", [1, 2, 4])
def test_sizes_and_offsets(qps: int) -> None:
    """1 B to 1 MiB, log-uniform, at disjoint random offsets, with one immediate per queue pair at the end."""
    rng = np.random.default_rng([qps, *os.environ.get("JAXRL_SYNC_TEST_SEED", "0").encode()[:8]])
    nbytes = 6 * MIB
    table, at = [], 0
    while True:
        length = int(2 ** rng.uniform(0, 20))
        gap = int(rng.integers(0, 4096))
        if at + gap + length > nbytes:
            break
        table.append((at + gap, at + gap, length))
        at += gap + length
    entries = rng.permutation(np.array(table, np.uint64))
    with pair(nbytes, qps=qps, depth=32, **SOFT) as (left, right):
        left.memory[:] = rng.integers(0, 256, nbytes, dtype=np.uint8)
        expected = np.zeros(nbytes, np.uint8)
        for start, _, length in table:
            expected[start : start + length] = left.memory[start : start + length]
        shares = [np.ascontiguousarray(entries[i::qps]) for i in range(qps)]
        done = [0] * qps
        end = time.monotonic() + 120
        for qp in right.qps:
            assert qp.receive(1) == 1
        while any(d <= len(s) for d, s in zip(done, shares, strict=True)):
            assert time.monotonic() < end
            for i, share in enumerate(shares):
                if done[i] <= len(share):
                    done[i] += write(left, right, share, i, start=done[i], signal_every=8, imm=i)
            left.cq.wait(0.01)
            assert (left.poll()["status"] == 0).all()
        arrived = right.collect(qps, 60.0)
        assert sorted(arrived["imm"].tolist()) == list(range(qps))
        np.testing.assert_array_equal(right.memory, expected)


def test_sizes_around_the_largest_message() -> None:
    with pair(9 * MIB, depth=8, **SOFT, max_message_bytes=8 * MIB) as (left, right):
        left.memory[:] = np.random.default_rng(3).integers(0, 256, 9 * MIB, dtype=np.uint8)
        for length in (8 * MIB - 1, 8 * MIB):
            right.memory[:] = 0
            assert write(left, right, rows((5, 9, length))) == 1
            assert left.collect(1, 120.0)["status"].tolist() == [0]
            np.testing.assert_array_equal(right.memory[9 : 9 + length], left.memory[5 : 5 + length])
        with pytest.raises(ValueError, match="a message at most 8388608"):
            write(left, right, rows((0, 0, 8 * MIB + 1)))


def test_wrong_key_is_one_error_and_the_pair_recovers() -> None:
    with pair(MIB, depth=8, **SOFT) as (left, right):
        target = right.region
        entries = rows(*[(0, 0, 1000)] * 3)
        left.qps[0].write(left.region, entries, target.address, target.nbytes, target.rkey ^ 0x55)
        seen = left.collect(3, 60.0)
        assert seen["status"].tolist() == [10, 5, 5]
        assert (left.qps[0].reset(), right.qps[0].reset()) == (0, 0)
        connect(left.qps[0], right.qps[0], left, right, timeout=PATIENT)
        connect(right.qps[0], left.qps[0], right, left, timeout=PATIENT)
        left.memory[:1000] = 7
        write(left, right, entries)
        assert set(left.collect(3, 60.0)["status"].tolist()) == {0}
        assert (right.memory[:1000] == 7).all()


def test_immediate_without_receive_is_an_rnr_error() -> None:
    with pair(4096, **SOFT, rnr_retries=2) as (left, right):
        write(left, right, rows(), imm=1)
        assert left.collect(1, 60.0)["status"].tolist() == [13]


PEER = """
import sys, time
from tests.verbs.pairs import open_end, connect
end = open_end("rxe1", 1 << 20, 1, 8)
gid = bytes.fromhex(sys.argv[2])
qp = end.qps[0]
qp.to_init(); qp.to_rtr(int(sys.argv[1]), 7, 5, gid=gid, gid_index=1); qp.to_rts(7)
print(qp.qp_num, end.region.address, end.region.rkey, flush=True)
time.sleep(100)
"""


def test_killed_peer_is_an_error_within_the_bound() -> None:
    left = open_end("rxe0", MIB, 1, 8)
    with left.context:
        qp = left.qps[0]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        command = [sys.executable, "-c", PEER, str(qp.qp_num), left.context.query_gid(1, 1).hex()]
        peer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        try:
            assert peer.stdout is not None
            number, address, rkey = (int(word) for word in peer.stdout.readline().split())
            with _verbs.Context("rxe1") as other:
                gid = other.query_gid(1, 1)
            qp.to_init()
            qp.to_rtr(number, 7, MTU_4096, gid=gid, gid_index=1)
            qp.to_rts(7, timeout=14, retries=6)
            qp.write(left.region, rows((0, 0, 1000)), address, MIB, rkey)
            assert left.collect(1, 60.0)["status"].tolist() == [0]
            peer.kill()
            peer.wait()
            started = time.monotonic()
            qp.write(left.region, rows((0, 0, 1000)), address, MIB, rkey)
            assert left.collect(1, 60.0)["status"].tolist() == [12]
            assert time.monotonic() - started < 10
        finally:
            peer.kill()
            peer.wait()


def test_connections_leave_nothing_open() -> None:
    gc.collect()  # what earlier tests left to the collector is none of ours
    before = open_fds()
    for number in range(20):
        with pair(4096, **SOFT) as (left, right):
            right.qps[0].receive(1)
            write(left, right, rows((0, 0, 100)), imm=number)
            assert right.collect(1, 60.0)["imm"].tolist() == [number]
    assert open_fds() == before


def test_mtu_that_the_port_has_not_is_refused() -> None:
    end = open_end("rxe0", 4096, 1, 8)
    with end.context, pytest.raises(VerbsError, match="to RTR .*MTU code 9"):
        end.qps[0].to_init()
        end.qps[0].to_rtr(5, 7, 9, gid=end.context.query_gid(1, 1), gid_index=1)


def test_what_the_device_says_of_itself() -> None:
    """Soft-RoCE knows no ECE and no dmabuf; a state can be asked for, and the port's counters move."""
    with pair(MIB, **SOFT) as (left, right):
        qp = left.qps[0]
        assert qp.query()["state"] == "RTS" and qp.query()["peer_qp_num"] == right.qps[0].qp_num
        assert qp.query_ece() is None and not qp.set_ece(0x15B3, 1, 0)
        assert not left.context.dmabuf_supported()
        relaxed = {"remote_write": True, "relaxed_ordering": True}
        assert _verbs.MemoryRegion(left.context, bytearray(4096), **relaxed).rkey
        before = counters.read("rxe0", 1)
        write(left, right, rows(*[(0, 0, 100_000)] * 4))
        left.collect(4, 60.0)
        # the kernel counts anew after some milliseconds only
        until(lambda: counters.moved(before, counters.read("rxe0", 1)).get("sent_pkts", 0) >= 4 * 25)
        assert sum(qp.latency()["done"]) == 1
        qp.to_error()
        assert qp.query()["state"] == "ERR"


def test_port_that_goes_down_is_told_by_name_and_comes_back() -> None:
    told: list[str] = []
    with pair(MIB, **SOFT) as (left, _):
        with EventWatcher(
            left.context, lambda event: told.append(f"{event.name} {event.kind} {event.number}")
        ):
            try:
                subprocess.run(["ip", "link", "set", "veth0", "down"], check=True)
                until(lambda: "PORT_ERR port 1" in told, LONG_S)
            finally:
                bring_up("veth0")
            until(lambda: "PORT_ACTIVE port 1" in told, LONG_S)


@pytest.mark.parametrize("scattered", [False, True])
def test_bench_between_two_processes(scattered: bool, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--loopback", "--device", "rxe0", "--peer-device", "rxe1", "--size", "64k", "--iters", "100"]
    words += ["--pings", "5", "--qps", "2", "--json", *(["--scattered"] if scattered else [])]
    assert main(["verbs", "bench", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["compared"] == {"messages": 32, "bytes": 2 * (1 << 20)}
    assert found["bytes_per_s"] > 0 and found["latency_us"]["median"] > 0
    assert "10.77.0.1" in found["reason"] and "10.77.0.2" in found["peer"]
    assert found["registrations"] == 1
