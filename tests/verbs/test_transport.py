"""The verbs transport over the fake: whole versions from publisher to subscriber, faults, refusals."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version, auth
from jaxrl_sync.transfer.errors import ProtocolError, TransferError
from jaxrl_sync.transfer.verbs import endpoint
from jaxrl_sync.transfer.verbs.devices import Choice, Gid, Port
from jaxrl_sync.transfer.verbs.endpoint import Endpoint, check_description
from jaxrl_sync.transfer.verbs.errors import CompletionError, VerbsError
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from tests.transfer.models import ServerThread, convert, engine_target, open_fds, same_bits, trainer_params
from tests.verbs.fakelib import Fake


def made_up_port(device: str, last: int, layer: str = "Ethernet") -> Port:
    gid = Gid(1, bytes(10) + b"\xff\xff" + bytes([10, 77, 0, last]), "RoCE v2", "eth0")
    return Port(device, 1, "ACTIVE", layer, 100.0, 0, -1, (gid,))


def settings(device: str, **options: Any) -> VerbsSettings:
    values = {"chunk_bytes": 4096, "ring": 4, "queue_pairs": 3, **options}
    return VerbsSettings(choice=Choice(include=(device,)), **values)


class Rig:
    """A hub, one publisher on fake0, one subscriber on fake1."""

    def __init__(self, token_file: Path, transport: Any = "verbs", **options: Any) -> None:
        self.hub = ServerThread(token_file)
        self.params = trainer_params()
        ours = PublisherConfig(transport=transport, verbs=settings("fake0"), ttl_s=2.0)
        theirs = SubscriberConfig(
            transport=transport, verbs=settings("fake1", **options), ttl_s=2.0, timeout_s=8
        )
        self.publisher = Publisher(self.hub.url, self.params, token_file=token_file, config=ours)
        self.subscriber = Subscriber(
            self.hub.url, engine_target(), convert, token_file=token_file, config=theirs
        )

    def take(self, number: int, seed: int) -> Any:
        """Publish parameters and take them in; the report. Compares bits."""
        params = trainer_params(seed)
        self.publisher.publish(params, Version("a", number))
        update = self.subscriber.poll(timeout_s=15)
        assert update is not None
        report = update.prepare()
        assert same_bits(update.swap(), convert(params))
        return report

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()
        self.hub.close()


@pytest.fixture
def token_file(tmp_path: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run token; and the fake's devices in place of the kernel's."""
    ports = [made_up_port("fake0", 1), made_up_port("fake1", 2)]
    monkeypatch.setattr(endpoint, "scan", lambda: ports)
    auth.create_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def rig(token_file: Path) -> Iterator[Rig]:
    made = Rig(token_file)
    yield made
    made.close()


def test_versions_arrive_bit_for_bit_in_any_order_of_completions(rig: Rig, fake: Fake) -> None:
    fake.set(seed=4, chance_delay=20000, short_poll=2)
    for number in range(4):
        report = rig.take(number, seed=number)
        assert report.transport == "verbs" and report.nbytes > 10 * 4096
    assert fake.counts.mrs == 2 and fake.counts.registered_bytes == 2 * 4 * 4096


def test_registration_happens_once(rig: Rig, fake: Fake) -> None:
    rig.take(0, 0)
    fake.knobs.register_limit = 1  # any further registration fails
    descriptors = open_fds()
    for number in range(1, 4):
        rig.take(number, number)
    assert open_fds() <= descriptors  # connections to the hub come and go


@pytest.mark.parametrize("fail_at", [1, 2, 7, 12, 23])
def test_failure_at_any_point_leaks_nothing_and_the_next_version_arrives(
    rig: Rig, fake: Fake, fail_at: int
) -> None:
    """Of data, immediates and answers alike: an error by name, the failed link's objects gone, a new link."""
    rig.take(0, 0)
    before = fake.alive()
    fake.set(fail_at=fail_at, fail_status=12)
    rig.publisher.publish(trainer_params(1), Version("a", 1))
    update = rig.subscriber.poll(timeout_s=15)
    assert update is not None
    with pytest.raises(TransferError):
        update.prepare()
    fake.set()
    end = time.monotonic() + 30
    while True:
        try:
            rig.take(2, 2)
            break
        except TransferError:  # the link is being made again
            assert time.monotonic() < end
    assert fake.alive() == before


def test_closing_in_mid_transfer_ends_both_sides(rig: Rig, fake: Fake) -> None:
    rig.take(0, 0)
    fake.set(hold=1)
    rig.publisher.publish(trainer_params(1), Version("a", 1))
    update = rig.subscriber.poll(timeout_s=15)
    assert update is not None
    timer = threading.Timer(0.3, rig.publisher.close)
    timer.start()
    started = time.monotonic()
    with pytest.raises(TransferError):
        update.prepare()
    assert time.monotonic() - started < 6
    timer.join()


def test_auto_takes_verbs_where_memory_is_not_shared(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender

    def other_host(self: ShmSender, segment: dict[str, Any]) -> Any:
        raise TransferError("shared memory isn't visible here")

    monkeypatch.setattr(ShmSender, "map", other_host)
    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "verbs"
    finally:
        made.close()
    monkeypatch.setattr(endpoint, "scan", lambda: [])
    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "tcp"
    finally:
        made.close()


def test_no_device_is_a_clear_refusal(token_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "scan", lambda: [])
    with pytest.raises(VerbsError, match="no usable RDMA port .the kernel lists no RDMA device"):
        endpoint.pick(VerbsSettings())


def describe() -> dict[str, Any]:
    return {
        "protocol": 1,
        "device": "x",
        "gid": "00" * 16,
        "lid": 0,
        "link_layer": "Ethernet",
        "mtu": 3,
        "pairs": [[1, 2]],
        "address": 4096,
        "nbytes": 8192,
        "rkey": 1,
        "chunk_bytes": 4096,
        "ring": 2,
    }


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("protocol", 2, "protocol is 2, expected 1 to 1"),
        ("mtu", 6, "mtu is 6, expected 1 to 5"),
        ("mtu", True, "mtu is True"),
        ("address", -1, "address is -1"),
        ("rkey", 1 << 32, "rkey is 4294967296"),
        ("nbytes", 8191, "ring has 8191 bytes"),
        ("gid", "zz", "gid is 'zz', expected 32 hexadecimal"),
        ("link_layer", "InfiniBand", "link layer is 'InfiniBand', expected 'Ethernet'"),
        ("pairs", [[1, 2], [3, 4]], "expected 1 of"),
        ("pairs", [[1 << 24, 2]], "expected 1 of"),
        ("ring", None, "ring is None"),
    ],
)
def test_descriptions_that_can_not_be_are_refused_by_name(field: str, value: object, words: str) -> None:
    check_description(describe(), "Ethernet", 1)
    with pytest.raises(ProtocolError, match=words):
        check_description({**describe(), field: value}, "Ethernet", 1)
    with pytest.raises(ProtocolError, match="expected an object"):
        check_description([field], "Ethernet", 1)


def test_error_names_peer_device_queue_pair_and_cause(token_file: Path, fake: Fake) -> None:
    a = Endpoint(settings("fake0"), "engine-0.0", 4096, 4, 1)
    b = Endpoint(settings("fake1"), "trainer.0", 4096, 4, 1)
    try:
        a.connect(b.describe())
        b.connect(a.describe())
        fake.kill(b.pairs[0].qp_num)
        a.write_chunk(0, 100, 5, time.monotonic() + 5)
        with pytest.raises(CompletionError) as caught:
            a.events(time.monotonic() + 5, lambda: None, "sending")
        number = f"0x{a.pairs[0].qp_num:06x}"
        assert str(caught.value) == (
            f"RDMA WRITE 1 on queue pair {number} of fake0:1 to engine-0.0 failed: "
            "transport retry counter exceeded (status 12, vendor error 0xfa)"
        )
    finally:
        a.close()
        b.close()
