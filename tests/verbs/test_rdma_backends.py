"""The C extension against pyverbs, an independent implementation, in all four pairings (see test_rdma.py)."""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.transfer.memory import PrivateMemory
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, Memory, touched
from jaxrl_sync.transfer.verbs.errors import CompletionError, PeerUnreachable, VerbsError
from jaxrl_sync.transfer.verbs.handshake import Remote, remote_of
from jaxrl_sync.transfer.verbs.native import backend
from tests.verbs.soft import DEVICES, LONG_S, end_on, pyverbs_here, rows, soft_devices

PAIRINGS = list(itertools.product(["native", "pyverbs"], repeat=2))
NBYTES = 1 << 20


@pytest.fixture
def devices() -> None:
    """Skip without devices or pyverbs."""
    soft_devices()
    pyverbs_here()


def connected(left: str, right: str, **options: Any) -> tuple[Endpoint, Endpoint]:
    a, b = end_on(DEVICES[0], backend=left, **options), end_on(DEVICES[1], backend=right, **options)
    a.connect(b.describe())
    b.connect(a.describe())
    return a, b


def target(end: Endpoint, nbytes: int = NBYTES) -> tuple[Memory, Remote]:
    """Memory that a peer may write, and its description as the peer reads it."""
    memory = end.register(touched(nbytes), remote_write=True)
    return memory, remote_of(memory.describe(), len(end.rails), "target")


def immediates(end: Endpoint, count: int, deadline: float) -> list[int]:
    """The next immediates that arrive; our own completions pass by."""
    found: list[int] = []
    while len(found) < count:
        records = end.events(deadline, "waiting for an immediate")
        found += records["imm"][records["receive"] == 1].tolist()
    return found


@pytest.mark.rdma
@pytest.mark.parametrize(("left", "right"), PAIRINGS)
def test_every_pairing_moves_bytes_both_ways(devices: None, left: str, right: str) -> None:
    """Writes in parts of regions over two queue pairs, an immediate behind each."""
    a, b = connected(left, right, max_region_bytes=65536)
    try:
        rng = np.random.default_rng(1)
        deadline = time.monotonic() + LONG_S
        for sender, receiver in ((a, b), (b, a)):
            into, remote = target(receiver)
            source = sender.register(touched(NBYTES), remote_write=False)
            source.buffer[:] = rng.integers(0, 256, NBYTES, dtype=np.uint8).tobytes()
            for number in range(6):
                at, to, n = (int(v) for v in rng.integers(1, NBYTES // 2, 3))
                lane = sender.lanes[number % 2]
                sender.write(lane, source, rows((at, to, n)), remote, deadline, imm=0x5A000000 | number)
                assert immediates(receiver, 1, deadline) == [0x5A000000 | number]
                assert into.buffer[to : to + n] == source.buffer[at : at + n]
    finally:
        a.close()
        b.close()


@pytest.mark.rdma
def test_pyverbs_names_a_failure_too(devices: None) -> None:
    a, b = connected("pyverbs", "native")
    try:
        _, remote = target(b)
        source = a.register(touched(4096), remote_write=False)
        wrong = Remote(remote.address, remote.nbytes, remote.part_bytes, ((remote.rkeys[0][0] ^ 0x55,),))
        a.write(a.lanes[0], source, rows((0, 0, 100)), wrong, time.monotonic() + LONG_S)
        with pytest.raises(CompletionError, match="RDMA WRITE 1 on queue pair .* to the peer of rxe0 failed"):
            a.events(time.monotonic() + LONG_S, "waiting")
    finally:
        a.close()
        b.close()


@pytest.fixture
def native_pair() -> Iterator[tuple[Endpoint, Endpoint]]:
    soft_devices()
    a, b = connected("native", "native")
    yield a, b
    a.close()
    b.close()


@pytest.mark.rdma
def test_memory_that_was_closed_is_refused_by_the_device(native_pair: tuple[Endpoint, Endpoint]) -> None:
    """The key of a slot whose memory was closed: one clear error, not a byte written."""
    a, b = native_pair
    memory = PrivateMemory(8192)
    device = b.rails[0].device
    assert device is not None
    registered = device.register_slot(memory, 1 << 40)
    described = {"address": registered.address, "nbytes": 8192, "rails": [registered.describe()]}
    remote = remote_of(described, 1, "slot")
    source = a.register(touched(4096), remote_write=False)
    a.write(a.lanes[0], source, rows((0, 5, 100)), remote, time.monotonic() + LONG_S)
    a.events(time.monotonic() + LONG_S, "writing")
    memory.close()
    a.write(a.lanes[0], source, rows((0, 5, 100)), remote, time.monotonic() + LONG_S)
    with pytest.raises(CompletionError, match="the peer closed or replaced that memory"):
        a.events(time.monotonic() + LONG_S, "writing")


@pytest.mark.rdma
def test_a_peer_that_closed_is_unreachable_within_the_bound(native_pair: tuple[Endpoint, Endpoint]) -> None:
    """Nothing is on its way when the peer's queue pairs go: the probe finds out; with writes, they do."""
    a, b = native_pair
    _, remote = target(b)
    source = a.register(touched(4096), remote_write=False)
    b.close()
    started = time.monotonic()
    with pytest.raises(PeerUnreachable, match="to the peer of rxe0 failed: .*retry"):
        while True:
            a.events(started + LONG_S, "waiting")
    assert time.monotonic() - started < LONG_S / 4
    with pytest.raises((CompletionError, VerbsError)):
        a.write(a.lanes[0], source, rows((0, 0, 100)), remote, time.monotonic() + LONG_S)
        a.events(time.monotonic() + LONG_S, "writing")


def test_missing_pyverbs_says_what_to_do() -> None:
    if importlib.util.find_spec("pyverbs") is not None:
        pytest.skip("pyverbs is here")
    with pytest.raises(VerbsError, match="python3-pyverbs serves the system's Python.*sync.verbs.backend"):
        backend("pyverbs")
    with pytest.raises(VerbsError, match="backend 'other', expected native or pyverbs"):
        backend("other")
