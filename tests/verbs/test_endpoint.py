"""Two connected endpoints over the fake: what fails is named with peer, device and cause."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.memory import PrivateMemory
from jaxrl_sync.transfer.verbs import rail
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, touched
from jaxrl_sync.transfer.verbs.errors import CompletionError, PeerUnreachable, VerbsError
from jaxrl_sync.transfer.verbs.handshake import remote_of
from jaxrl_sync.transfer.verbs.opened import Registered, open_device
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from tests.transfer.models import until
from tests.verbs.fakelib import Fake
from tests.verbs.rigs import settings


def test_no_device_is_a_clear_refusal(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rail, "scan", lambda: [])
    with pytest.raises(VerbsError, match="no usable RDMA port .the kernel lists no RDMA device"):
        rail.pick(VerbsSettings())


def pair(left: VerbsSettings, right: VerbsSettings) -> tuple[Endpoint, Endpoint]:
    """Two connected endpoints."""
    a = Endpoint(left, "engine-0.0", pairs=1, sends=64, receives=4)
    b = Endpoint(right, "trainer.0", pairs=1, sends=64, receives=4)
    a.connect(b.describe())
    b.connect(a.describe())
    return a, b


def rows(*entries: tuple[int, int, int]) -> Any:
    return np.array(entries, np.uint64)


def test_error_names_peer_device_queue_pair_and_cause(token_file: Path, fake: Fake) -> None:
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        source, target = (
            a.register(touched(4096), remote_write=False),
            b.register(touched(4096), remote_write=True),
        )
        remote = remote_of(target.describe(), 1, "target")
        fake.kill(b.lanes[0].pair.qp_num)
        a.write(a.lanes[0], source, rows((0, 0, 100)), remote, time.monotonic() + 60, imm=5)
        with pytest.raises(PeerUnreachable) as caught:
            a.events(time.monotonic() + 60, "sending")
        number = f"0x{a.lanes[0].pair.qp_num:06x}"
        assert isinstance(caught.value, PeerLost)
        assert str(caught.value) == (
            f"RDMA WRITE 1 on queue pair {number} of fake0:1 to engine-0.0 failed: "
            "transport retry counter exceeded (status 12, vendor error 0xfa)"
        )
    finally:
        a.close()
        b.close()


def test_a_waiting_side_asks_whether_the_peer_is_alive(token_file: Path, fake: Fake) -> None:
    """Nothing is on its way: the probe of the doorbell page finds out that the peer is gone."""
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        with pytest.raises(DeadlineError, match="waiting with trainer.0 over fake1:1: deadline passed"):
            end = time.monotonic() + 0.7
            while True:
                b.events(end, "waiting")  # returns when a probe was answered
        fake.kill(a.lanes[0].pair.qp_num)
        started = time.monotonic()
        with pytest.raises(PeerUnreachable, match="to trainer.0 failed: transport retry counter"):
            while True:
                b.events(time.monotonic() + 60, "waiting")
        assert time.monotonic() - started < 30
    finally:
        a.close()
        b.close()


def test_memory_that_was_closed_is_a_remote_access_error(token_file: Path, fake: Fake) -> None:
    a, b = pair(settings("fake0"), settings("fake1"))
    memory = PrivateMemory(8192)
    try:
        device = b.rails[0].device
        assert device is not None
        registered = device.register_slot(memory, 1 << 40)
        assert device.register_slot(memory, 1 << 40) is registered
        described = {"address": registered.address, "nbytes": 8192, "rails": [registered.describe()]}
        source, remote = a.register(touched(4096), remote_write=False), remote_of(described, 1, "slot")
        a.write(a.lanes[0], source, rows((0, 5, 100)), remote, time.monotonic() + 60)
        a.events(time.monotonic() + 60, "sending")
        memory.close()
        a.write(a.lanes[0], source, rows((0, 5, 100)), remote, time.monotonic() + 60)
        with pytest.raises(
            CompletionError, match="remote access error .*the peer closed or replaced that memory"
        ):
            a.events(time.monotonic() + 60, "sending")
    finally:
        a.close()
        b.close()
        memory.close()


def test_what_a_status_hints_at_is_said_beside_what_the_port_counted(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single packet that was sent again took the place of the cause."""
    a, b = pair(settings("fake0"), settings("fake1"))
    monkeypatch.setattr(rail.Rail, "trouble", lambda self, lane: "counted: completer_retry_err 1")
    try:
        fake.set(fail_at=1, fail_status=10)
        a.say(a.lanes[0], 3, time.monotonic() + 60)
        words = "the peer closed or replaced that memory, .*; counted: completer_retry_err 1"
        with pytest.raises(CompletionError, match=words):
            a.events(time.monotonic() + 60, "sending")
    finally:
        a.close()
        b.close()


def test_a_peer_that_dies_slowly_is_looked_for_more_than_twice(
    token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who was stopped for a moment between two looks took a peer that was about to go for a living one."""
    a = Endpoint(settings("fake0"), "engine-0.0", pairs=1, sends=64, receives=4)
    now, looks = [0.0], list[int]()

    def look() -> None:
        looks.append(1)
        if len(looks) == 5:
            raise PeerLost("the connection was closed")

    def sleep(seconds: float) -> None:
        now[0] += 1.0

    stopping = types.SimpleNamespace(monotonic=lambda: now[0], sleep=sleep)
    try:
        a.watch = look
        with monkeypatch.context() as patched:
            patched.setattr("jaxrl_sync.transfer.verbs.endpoint.time", stopping)
            assert a._peer_gone() == "the connection was closed"
    finally:
        a.close()


def test_a_port_that_went_down_is_named(token_file: Path, fake: Fake) -> None:
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        fake.async_event(a.lanes[0].pair.qp_num, 10, 1)
        until(lambda: bool(a.rails[0].open_device().events(0.0)))  # it comes through a thread
        fake.kill(b.lanes[0].pair.qp_num)
        a.say(a.lanes[0], 3, time.monotonic() + 60)
        with pytest.raises(PeerUnreachable, match="PORT_ERR of port 1: port error"):
            a.events(time.monotonic() + 60, "sending")
    finally:
        a.close()
        b.close()


def test_a_device_that_fails_ends_the_wait(token_file: Path, fake: Fake) -> None:
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        fake.async_event(b.lanes[0].pair.qp_num, 8, 0)
        end = time.monotonic() + 60
        with pytest.raises(VerbsError, match="fake1:1: DEVICE_FATAL .*the edge is given up"):
            while True:
                b.events(end, "waiting")  # returns when a probe was answered
    finally:
        a.close()
        b.close()


def test_no_receive_in_time_is_an_error_with_a_hint(token_file: Path, fake: Fake) -> None:
    a, b = pair(settings("fake0", rnr_retries=1), settings("fake1"))
    try:
        for number in range(5):  # b has four receives and never looks
            a.say(a.lanes[0], number, time.monotonic() + 60)
        with pytest.raises(CompletionError, match="RNR .*the peer posts no receives"):
            while True:
                a.events(time.monotonic() + 60, "sending")
    finally:
        a.close()
        b.close()


def test_registration_that_fails_in_the_middle_is_rolled_back(token_file: Path, fake: Fake) -> None:
    device = open_device("native", "fake0")
    try:
        fake.knobs.register_limit = fake.counts.registered_bytes + 3 * 4096
        before = fake.counts.mrs
        with pytest.raises(VerbsError, match="registering 4096 bytes"):
            Registered(device.borrow(), memoryview(bytearray(5 * 4096)), 4096, remote_write=True)
        assert fake.counts.mrs == before
    finally:
        device.give_back()


def test_fewer_ports_than_rails_is_an_error(token_file: Path) -> None:
    with pytest.raises(VerbsError, match="fake7"):
        rail.pick(settings("fake0", "fake7"))
    with pytest.raises(VerbsError, match="3 rails are wanted, usable ports are fake0:1, fake1:1"):
        rail.pick(VerbsSettings(rails=3))


def test_a_description_of_another_link_layer_is_refused(token_file: Path) -> None:
    a = Endpoint(settings("fake0"), "engine-0.0", pairs=1, sends=64, receives=4)
    try:
        described = a.describe()
        described["rails"][0]["link_layer"] = "InfiniBand"
        with pytest.raises(ProtocolError, match="fake0:1 is InfiniBand, expected Ethernet as fake0:1 is"):
            a.connect(described)
    finally:
        a.close()


def test_a_full_queue_notices_that_the_peer_went(token_file: Path, fake: Fake) -> None:
    """Nothing completes and no retries end: only the watch can tell, long before the deadline."""
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        fake.set(hold=1)
        source, target = (
            a.register(touched(4096), remote_write=False),
            b.register(touched(4096), remote_write=True),
        )

        def look() -> None:
            raise PeerLost("the connection was closed")

        a.watch = look
        many = rows(*[(0, 0, 8)] * 100)  # the queue takes 64
        with pytest.raises(PeerLost, match="the connection was closed .queue pairs 0x"):
            a.write(
                a.lanes[0], source, many, remote_of(target.describe(), 1, "target"), time.monotonic() + 60
            )
    finally:
        fake.set()
        a.close()
        b.close()


def test_a_side_that_another_thread_closed_ends_as_peer_lost(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = pair(settings("fake0"), settings("fake1"))
    try:
        with monkeypatch.context() as patched:  # while it waits for what events say about a failure
            patched.setattr("jaxrl_sync.transfer.verbs.rail.time.sleep", lambda s: b.close())
            assert b.rails[0].trouble(b.lanes[0]) == ""
        with pytest.raises(PeerLost, match="to trainer.0 over fake1:1 was closed on this side"):
            b.say(b.lanes[0], 1, time.monotonic() + 60)
    finally:
        a.close()
        b.close()


def test_a_queue_pair_that_cannot_be_destroyed_keeps_no_other(token_file: Path, fake: Fake) -> None:
    """What a device refuses is said when all the rest has been closed."""
    a = Endpoint(settings("fake0"), "engine-0.0", pairs=2, sends=64, receives=4)
    real = a.rails[0].cq

    class Refusing:
        calls = 0

        def close(self) -> None:
            self.calls += 1
            if self.calls == 1:
                raise VerbsError(5, "destroying queue pair 0x000001")
            real.close()

    a.rails[0].cq = Refusing()
    with pytest.raises(VerbsError, match="destroying queue pair 0x000001"):
        a.close()
    assert real.closed and all(lane.pair.closed for lane in a.lanes)
    a.close()
    assert fake.counts.qps == fake.counts.mrs == fake.counts.contexts == 0
