"""Peers that are killed or stopped, ports that go down: real verbs between processes (see test_rdma.py)."""

from __future__ import annotations

import dataclasses
import gc
import os
import random
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost
from jaxrl_sync.transfer.verbs.errors import CompletionError
from tests.transfer.models import open_fds, until
from tests.verbs.soft import DEVICES, LONG_S, bring_up, end_on, soft_devices
from tests.verbs.zygote import Death, Order, Zygote, killed, moved, receive, send, slot_of, stopped

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]
BOUND_S = 20.0  # 3.8 s of retries and 0.25 s of looking, in an emulated guest on a busy machine
PIECE, RUNS = 200_000, 10
OPTIONS: dict[str, Any] = {"chunk_bytes": 65536, "ring": 4}
SEED = os.environ.get("JAXRL_SYNC_TEST_SEED", "0")


@pytest.fixture(scope="module")
def zygote() -> Iterator[Zygote]:
    soft_devices()
    made = Zygote()
    yield made
    made.close()


def resources() -> dict[str, str]:
    """What the kernel counts of each device: contexts, protection domains, queues, queue pairs, regions."""
    shown = subprocess.run(["rdma", "resource", "show"], capture_output=True, text=True, check=True).stdout
    return {line.split(": ")[1]: line.split(": ", 2)[2] for line in shown.splitlines()}


def quiet(zygote: Zygote) -> tuple[dict[str, str], int]:
    """Kernel's counts and our descriptors with no transfer under way."""
    gc.collect()  # what earlier tests left to the collector is none of ours
    return resources(), open_fds()


def take_in(zygote: Zygote, theirs: Order, seed: int) -> None:
    """A whole transfer from a new peer, compared byte for byte."""
    order = dataclasses.replace(theirs, role="send", port=zygote.port, device=DEVICES[0], seed=seed)
    slot = slot_of(order)
    _, connection = zygote.start(order)
    receive(theirs, connection, slot, LONG_S)
    assert zygote.expect("done")["outcome"] == "ok"
    connection.close()
    np.testing.assert_array_equal(np.frombuffer(slot.memory.data, np.uint8)[: order.size], moved(order))
    slot.memory.close()


@pytest.mark.parametrize("placement", ["placed", "staged"])
def test_a_sender_killed_at_any_point(zygote: Zygote, placement: str) -> None:
    """Ten points: the receiver's error comes within the bound, names the peer, and nothing is left open."""
    options = {**OPTIONS, "placement": placement}
    posts = -(-PIECE * RUNS // OPTIONS["chunk_bytes"])
    points = sorted(random.Random(SEED + placement).sample(range(1, posts + 1), 10))
    before = quiet(zygote)
    for at in points:
        order = Order(
            "send", zygote.port, DEVICES[0], PIECE, RUNS, seed=at, act="kill", at=at, options=options
        )
        theirs = Order("receive", 0, DEVICES[1], PIECE, RUNS, options=options)
        slot = slot_of(order)
        pid, connection = zygote.start(order)
        death = Death(pid)
        with pytest.raises(PeerLost, match=rf"child {pid}"):
            receive(theirs, connection, slot, LONG_S)
        told = time.monotonic()
        assert told - death.at() < BOUND_S
        connection.close()
        slot.memory.close()
        take_in(zygote, theirs, seed=at + 1)
    until(lambda: quiet(zygote) == before, LONG_S)


@pytest.mark.parametrize("placement", ["placed", "staged"])
def test_a_receiver_killed_at_any_point(zygote: Zygote, placement: str) -> None:
    """The sender's error: within the bound, naming the peer and its queue pairs; nothing is left open."""
    options = {**OPTIONS, "placement": placement}
    before = quiet(zygote)
    for at in sorted(random.Random(SEED + placement).sample(range(1, 31), 5)):
        order = Order("receive", zygote.port, DEVICES[1], PIECE, RUNS, seed=at, options=options)
        ours = Order("send", 0, DEVICES[0], PIECE, RUNS, seed=at, at=at, options=options)
        pid, connection = zygote.start(order)
        gone: list[float] = []

        def kill(pid: int = pid, gone: list[float] = gone) -> None:
            killed(pid)
            gone.append(time.monotonic())

        with pytest.raises(PeerLost, match=rf"child {pid}.*queue pair|queue pair.*child {pid}"):
            send(ours, connection, LONG_S, kill)
        assert time.monotonic() - gone[0] < BOUND_S
        connection.close()
    until(lambda: quiet(zygote) == before, LONG_S)


def test_a_sender_stopped_in_mid_write_can_never_change_the_slot_again(zygote: Zygote) -> None:
    """Its round expires, another sender fills the same memory under the same key, then it wakes up."""
    options = {**OPTIONS, "placement": "placed"}
    order = Order("send", zygote.port, DEVICES[0], PIECE, RUNS, seed=1, act="stop", at=7, options=options)
    theirs = Order("receive", 0, DEVICES[1], PIECE, RUNS, options=options)
    slot = slot_of(order)
    pid, connection = zygote.start(order)
    with pytest.raises(DeadlineError, match=f"waiting for .* queue pairs to end with child {pid}"):
        receive(theirs, connection, slot, 3.0, lambda: until(lambda: stopped(pid), LONG_S))
    next_one = Order("send", zygote.port, DEVICES[0], PIECE, RUNS, seed=2, options=options)
    _, other = zygote.start(next_one)
    receive(theirs, other, slot, LONG_S)
    assert zygote.expect("done")["outcome"] == "ok"
    other.close()
    installed = bytes(slot.memory.data)
    np.testing.assert_array_equal(np.frombuffer(installed, np.uint8)[: order.size], moved(next_one))
    os.kill(pid, signal.SIGCONT)
    told = zygote.expect("done")
    assert told["done"] == pid and told["outcome"].startswith(
        ("PeerUnreachable", "CompletionError", "PeerLost")
    )
    assert bytes(slot.memory.data) == installed
    connection.close()
    slot.memory.close()


def test_a_port_that_goes_down_in_mid_run_is_named() -> None:
    soft_devices()
    a, b = end_on(DEVICES[0]), end_on(DEVICES[1])
    try:
        a.connect(b.describe())
        b.connect(a.describe())
        subprocess.run(["ip", "link", "set", "veth1", "down"], check=True)
        errors: list[str] = []

        def wait(end: Any) -> None:
            deadline = time.monotonic() + LONG_S
            try:
                while True:
                    end.events(deadline, "waiting")
            except CompletionError as error:  # of the port itself another status than of its peer
                errors.append(str(error))

        threads = [threading.Thread(target=wait, args=(end,)) for end in (a, b)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(errors) == 2 and any("port rxe1:1 is DOWN, expected ACTIVE" in text for text in errors), (
            errors
        )
    finally:
        a.close()
        b.close()
        bring_up("veth1")
