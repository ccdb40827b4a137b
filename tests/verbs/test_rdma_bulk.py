"""Many transfers of all sizes over real verbs, byte for byte, and many connections (see test_rdma.py)."""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Iterator

import numpy as np
import pytest

from jaxrl_sync.transfer.verbs import rail
from jaxrl_sync.transfer.verbs.devices import scan
from jaxrl_sync.transfer.verbs.endpoint import touched
from jaxrl_sync.transfer.verbs.handshake import remote_of
from tests.transfer.models import open_fds, until
from tests.verbs.soft import DEVICES, LONG_S, end_on, rows, soft_devices

pytestmark = [pytest.mark.rdma]
MIB = 1 << 20
LARGEST = 256 * MIB
SPACE = LARGEST + 16 * MIB
SEED = os.environ.get("JAXRL_SYNC_TEST_SEED", "0")


def sizes(small: int, around: int, large: int) -> Iterator[tuple[int, int]]:
    """(bytes, queue pairs) of every transfer: log-uniform to 1 MiB, around a message's 8 MiB, 256 MiB."""
    rng = np.random.default_rng([small, *SEED.encode()[:8]])
    kinds = rng.permutation([0] * small + [1] * around + [2] * large)
    for kind in kinds.tolist():
        if kind == 0:
            nbytes = int(2 ** rng.uniform(0, 20))
        elif kind == 1:
            nbytes = 8 * MIB + int(rng.integers(-5, 6)) * int(rng.choice([1, 64, 4096, 65536]))
        else:
            nbytes = LARGEST
        yield nbytes, int(rng.integers(1, 9))


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(
    ("small", "around", "large"), [(400, 6, 1), pytest.param(10000, 300, 4, marks=pytest.mark.full)]
)
def test_all_sizes_at_random_offsets(small: int, around: int, large: int) -> None:
    """Both directions, 1 to 8 queue pairs; nothing around a transfer changes. The full size moves 4 GB."""
    soft_devices()
    rng = np.random.default_rng([1, *SEED.encode()[:8]])
    source, target = touched(SPACE), touched(SPACE)
    sent, got = np.frombuffer(source, np.uint8), np.frombuffer(target, np.uint8)
    sent[:] = np.resize(rng.integers(0, 256, 17 * MIB + 7, dtype=np.uint8), SPACE)
    moved, started = 0, time.monotonic()
    ends = [end_on(d, pairs=8, sends=64, receives=4) for d in DEVICES]
    try:
        ends[0].connect(ends[1].describe())
        ends[1].connect(ends[0].describe())
        sources = [end.register(source, remote_write=False) for end in ends]
        remotes = [remote_of(end.register(target, remote_write=True).describe(), 1, "target") for end in ends]
        for number, (nbytes, pairs) in enumerate(sizes(small, around, large)):
            side = number % 2
            end, remote = ends[side], remotes[1 - side]
            at, to = (int(v) for v in rng.integers(0, SPACE - nbytes - 64, 2))
            got[max(0, to - 64) : to + nbytes + 64] = 0
            deadline = time.monotonic() + LONG_S + nbytes / MIB
            cuts = np.unique(np.linspace(0, nbytes, pairs + 1).astype(int)).tolist()
            waiting = set()
            for lane, (low, high) in enumerate(zip(cuts[:-1], cuts[1:], strict=True)):
                entry = rows((at + low, to + low, high - low))
                waiting.add(end.write(end.lanes[lane], sources[side], entry, remote, deadline))
            while waiting:
                for record in end.events(deadline, "writing"):
                    waiting.discard((int(record["token"]), int(record["seq"])))
            assert np.array_equal(got[to : to + nbytes], sent[at : at + nbytes]), (number, nbytes, at, to)
            assert not got[max(0, to - 64) : to].any() and not got[to + nbytes : to + nbytes + 64].any()
            moved += nbytes
    finally:
        for end in ends:
            end.close()
    took = time.monotonic() - started
    print(f"\n{small + around + large} transfers, {moved / 1e9:.2f} GB in {took:.0f} s")
    if small >= 10000:
        assert moved >= 4e9


@pytest.mark.timeout(7200)
@pytest.mark.parametrize("cycles", [40, pytest.param(1000, marks=pytest.mark.full)])
def test_connect_transfer_close_keeps_memory_flat(cycles: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Descriptors and the kernel's objects as before, resident memory within 4 MiB."""
    soft_devices()
    ports = scan()
    monkeypatch.setattr(
        rail, "scan", lambda: ports
    )  # thousands of files in sysfs: slow where they are emulated

    def cycle() -> None:
        a, b = end_on(DEVICES[0]), end_on(DEVICES[1])
        try:
            a.connect(b.describe())
            b.connect(a.describe())
            source, target = (
                a.register(touched(65536), remote_write=False),
                b.register(touched(65536), remote_write=True),
            )
            source.buffer[:] = os.urandom(65536)
            a.write(
                a.lanes[0],
                source,
                rows((0, 0, 65536)),
                remote_of(target.describe(), 1, "t"),
                time.monotonic() + LONG_S,
                7,
            )
            while not len(b.events(time.monotonic() + LONG_S, "waiting")):
                pass
            assert target.buffer == source.buffer
        finally:
            a.close()
            b.close()

    def state() -> tuple[str, int]:
        shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True)
        return shown.stdout, open_fds()

    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    for _ in range(10):
        cycle()
    gc.collect()  # what earlier tests left to the collector is none of ours
    before, bytes_before = state(), resident()
    for _ in range(cycles):
        cycle()
    until(lambda: state() == before, LONG_S)
    assert resident() - bytes_before < 4 * MIB
