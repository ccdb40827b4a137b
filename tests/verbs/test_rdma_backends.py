"""The C extension against pyverbs, an independent implementation, in all four pairings (see test_rdma.py)."""

from __future__ import annotations

import importlib.util
import itertools
import sys
import time
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.transfer.verbs.devices import Choice, scan
from jaxrl_sync.transfer.verbs.endpoint import Endpoint
from jaxrl_sync.transfer.verbs.errors import CompletionError, VerbsError
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

DEBIAN = "/usr/lib/python3/dist-packages"
CHUNK, RING = 65536, 4
PAIRINGS = list(itertools.product(["native", "pyverbs"], repeat=2))


@pytest.fixture
def devices() -> None:
    """Skip without devices or pyverbs; Debian's bindings serve virtual environments of the same Python."""
    if not {"rxe0", "rxe1"} <= {port.device for port in scan()}:
        pytest.skip("needs the RDMA devices rxe0 and rxe1 of tests/vm/run")
    if importlib.util.find_spec("pyverbs") is None:
        sys.path.append(DEBIAN)
    if sys.version_info[:2] != (3, 11) or importlib.util.find_spec("pyverbs") is None:
        pytest.skip("needs python3-pyverbs for this Python")


def end(device: str, kind: Any) -> Endpoint:
    settings = VerbsSettings(choice=Choice(include=(device,)), backend=kind)
    return Endpoint(settings, f"the peer of {device}", CHUNK, RING, 2)


def nothing() -> None:
    """No link to watch."""


@pytest.mark.rdma
@pytest.mark.parametrize(("left", "right"), PAIRINGS)
def test_every_pairing_moves_bytes_both_ways(devices: None, left: str, right: str) -> None:
    a, b = end("rxe0", left), end("rxe1", right)
    try:
        a.connect(b.describe())
        b.connect(a.describe())
        rng = np.random.default_rng(1)
        deadline = time.monotonic() + 120
        for sender, receiver in ((a, b), (b, a)):
            for index in range(2 * RING):
                data = rng.integers(0, 256, int(rng.integers(1, CHUNK)), dtype=np.uint8).tobytes()
                sender.chunk(index, len(data))[:] = data
                sender.write_chunk(index, len(data), 0x5A000000 | index, deadline)
                records = await_receive(receiver, deadline)
                assert [int(i) for i in records["imm"]] == [0x5A000000 | index]
                assert bytes(receiver.chunk(index, len(data))) == data
                receiver.say(index, index, deadline)
                assert [int(i) for i in await_receive(sender, deadline)["imm"]] == [index]
    finally:
        a.close()
        b.close()


def await_receive(endpoint: Endpoint, deadline: float) -> Any:
    """The next records of receives; our own completions pass by."""
    while True:
        found = endpoint.events(deadline, nothing, "waiting")
        found = found[found["receive"] == 1].copy()
        if len(found):
            return found


@pytest.mark.rdma
def test_pyverbs_names_a_failure_too(devices: None) -> None:
    a, b = end("rxe0", "pyverbs"), end("rxe1", "native")
    try:
        described = b.describe()
        a.connect({**described, "rkey": described["rkey"] ^ 0x55})
        b.connect(a.describe())
        a.write_chunk(0, 100, 1, time.monotonic() + 60)
        with pytest.raises(CompletionError, match="RDMA WRITE 1 on queue pair .* to the peer of rxe0 failed"):
            a.events(time.monotonic() + 60, nothing, "waiting")
    finally:
        a.close()
        b.close()


def test_missing_pyverbs_says_what_to_do() -> None:
    if importlib.util.find_spec("pyverbs") is not None:
        pytest.skip("pyverbs is here")
    with pytest.raises(VerbsError, match="python3-pyverbs for the system's Python, or sync.verbs.backend"):
        backend("pyverbs")
    with pytest.raises(VerbsError, match="backend 'other', expected native or pyverbs"):
        backend("other")
