"""The verbs transport over the fake: whole versions from publisher to subscriber, faults, refusals."""

from __future__ import annotations

import dataclasses
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sync.transfer import Subscriber, SubscriberConfig, Version, auth
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, PeerLost, TransferError
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.transports.parts import WHOLE, Flow
from jaxrl_sync.transfer.transports.verbs import VerbsReceiver, VerbsSender
from jaxrl_sync.transfer.verbs import rail
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection
from tests.transfer.models import ServerThread, convert, engine_target, same_bits, trainer_params, until
from tests.verbs.fakelib import Fake, made_up_port
from tests.verbs.rigs import PLACEMENTS, Rig, settings
from tests.verbs.zygote import Order, data, edge_and_slot, moved, slot_of


@pytest.fixture(params=PLACEMENTS)
def rig(token_file: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    made = Rig(token_file, theirs=settings("fake1", placement=request.param))
    yield made
    made.close()


def test_versions_arrive_bit_for_bit_in_any_order_of_completions(rig: Rig, fake: Fake) -> None:
    fake.set(seed=4, chance_delay=20000, short_poll=2)
    for number in range(4):
        report = rig.take(number, seed=number)
        assert report.transport == "verbs" and report.nbytes > 10 * 4096


def test_registration_happens_once(rig: Rig, fake: Fake) -> None:
    rig.take(0, 0)
    regions = fake.counts.mrs
    fake.knobs.register_limit = 1  # any further registration fails
    for number in range(1, 5):
        rig.take(number, number)
    assert fake.counts.mrs == regions


@pytest.mark.parametrize("fail_at", [1, 2, 7, 12, 17])
def test_failure_at_any_point_leaks_nothing_and_the_next_version_arrives(
    rig: Rig, fake: Fake, fail_at: int
) -> None:
    """Of data, immediates and answers alike: an error by name, the failed link's objects gone, a new link."""
    rig.take(0, 0)
    before = fake.alive()
    fake.set(fail_at=fail_at, fail_status=12)
    rig.fail(1)
    fake.set()
    rig.take_again(2)
    until(lambda: fake.alive() == before)  # the other side gives its end up in a thread of its own


def in_mid_transfer(fake: Fake, call: Callable[[], None]) -> threading.Thread:
    """A started thread that calls as soon as something more is posted."""
    posted = fake.counts.posts

    def wait() -> None:
        until(lambda: fake.counts.posts > posted, 60)
        call()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_closing_in_mid_transfer_ends_both_sides(token_file: Path, fake: Fake, placement: Any) -> None:
    rig = Rig(token_file, theirs=settings("fake1", placement=placement), timeout_s=200)
    rig.take(0, 0)
    fake.set(hold=1)
    closer = in_mid_transfer(fake, rig.publisher.close)
    started = time.monotonic()
    rig.fail(1)
    assert time.monotonic() - started < 60  # not the 200 s of the round's deadline
    closer.join()
    rig.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("part", [4096, 12288])
def test_two_rails_and_regions_in_parts(token_file: Path, fake: Fake, placement: Any, part: int) -> None:
    """Bytes go over both ports, memory is registered in parts on each, order is by chance."""
    both = {"placement": placement, "max_region_bytes": part, "queue_pairs": 2}
    made = Rig(token_file, ours=settings("fake0", "fake1", **both), theirs=settings("fake1", "fake0", **both))
    try:
        fake.set(seed=9, chance_delay=20000)
        for number in range(3):
            made.take(number, number)
        (link,) = made.publisher._listening._links.values()
        lanes = link._sender.endpoint.lanes  # type: ignore[union-attr]
        assert len(lanes) == 4 and all(lane.pair.posted > 3 for lane in lanes)
        assert fake.counts.mrs >= 12
    finally:
        made.close()


@pytest.mark.parametrize(
    ("ours", "words"),
    [
        (
            settings("fake0", "fake1"),
            "has 1 rails .fake1:1., this side 2 .fake0:1.fake1:1.: sync.verbs.rails",
        ),
        (
            settings("fake0", placement="placed"),
            "asks for a staged edge .*, but sync.verbs.placement is 'placed'",
        ),
        (settings("fake0", mtu=4096), "mtu is 4096, but fake0:1 has 1024 and fake1:1 of engine-0.0 .* 1024"),
    ],
)
def test_sides_that_do_not_fit_are_refused_in_words(
    token_file: Path, ours: VerbsSettings, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    made = Rig(token_file, ours=ours, timeout_s=3)
    try:
        made.publisher.publish(trainer_params(1), Version("a", 1))
        until(lambda: re.search(words, caplog.text) is not None)
    finally:
        made.close()


def test_a_slot_that_is_too_small_is_refused(
    token_file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = VerbsReceiver.describe

    def smaller(self: VerbsReceiver) -> dict[str, Any]:
        found = real(self)
        found["slots"] = [{**s, "nbytes": s["nbytes"] - 4096} for s in found["slots"]]
        for slot in found["slots"]:
            slot["rails"] = [{**r, "part_bytes": slot["nbytes"]} for r in slot["rails"]]
        return found

    monkeypatch.setattr(VerbsReceiver, "describe", smaller)
    made = Rig(token_file, theirs=settings("fake1", placement="placed"))
    try:
        made.publisher.publish(trainer_params(1), Version("a", 1))
        until(lambda: "bytes, the plan writes" in caplog.text)
    finally:
        made.close()


def test_a_wrong_token_is_refused_before_any_device_is_touched(token_file: Path, tmp_path: Path) -> None:
    hub = ServerThread(token_file)
    try:
        auth.create_token(tmp_path / "other")
        with pytest.raises(AuthError):
            Subscriber(
                hub.url,
                engine_target(),
                convert,
                token_file=tmp_path / "other",
                config=SubscriberConfig(transport="verbs", verbs=settings("fake1")),
            )
    finally:
        hub.close()


def test_a_slot_that_was_cut_off_gets_new_memory_and_keys(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender hangs in mid-round: its queue pairs are destroyed, what it posts later changes nothing."""
    real = VerbsReceiver.receive

    def briefly(self: VerbsReceiver, views: Shards, _: float, flow: Flow = WHOLE) -> None:
        real(self, views, time.monotonic() + 2.0, flow)  # from when the round has begun, however slow that is

    made = Rig(token_file, theirs=settings("fake1", placement="placed"))
    try:
        made.take(0, 0)
        before = fake.alive()
        fake.set(hold=1)
        slots = list(made.subscriber._slots)
        with monkeypatch.context() as patched:
            patched.setattr(VerbsReceiver, "receive", briefly)
            assert isinstance(made.fail(1), (DeadlineError, PeerLost))  # whichever side gives up first
        fake.set()
        replaced = [a is not b for a, b in zip(slots, made.subscriber._slots, strict=True)]
        assert sorted(replaced) == [False, True] and made.subscriber.stats()["quarantined"] == 1
        made.take_again(2)
        made.take(3, 3)
        until(lambda: fake.alive() == before)
    finally:
        made.close()


def test_auto_takes_verbs_where_memory_is_not_shared(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender

    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "shm"
        assert fake.counts.mrs == 0, "nothing is registered where shm serves"
    finally:
        made.close()

    def other_host(self: ShmSender, segment: dict[str, Any]) -> Any:
        raise TransferError("shared memory isn't visible here")

    monkeypatch.setattr(ShmSender, "map", other_host)
    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "verbs"
    finally:
        made.close()
    fake.set(create_errno=12)  # ports are there, but no queue can be made
    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "tcp"
    finally:
        made.close()
    fake.set()
    monkeypatch.setattr(rail, "scan", lambda: [])
    made = Rig(token_file, "auto")
    try:
        assert made.take(0, 0).transport == "tcp"
    finally:
        made.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_frames_take_the_ring_beside_full_versions(token_file: Path, fake: Fake, placement: Any) -> None:
    """Frames of any size between full versions of one edge, completions late and in any order."""
    options = {"placement": placement, "chunk_bytes": 4096, "ring": 3}
    order = Order("send", 0, "fake0", piece=10_001, runs=3, seed=5)
    (edge, layout), slot = edge_and_slot(order), slot_of(order)
    ours, theirs = socket.socketpair()
    near, far = Connection(ours, "engine-0.0"), Connection(theirs, "trainer.0")
    receiver = VerbsReceiver(edge, settings("fake1", **options), far, [slot])
    sender = VerbsSender(edge, settings("fake0"), receiver.describe(), near, layout)
    receiver.connect(sender.describe())
    rng = np.random.default_rng(0)
    try:
        fake.set(seed=3, chance_delay=20000)
        for nbytes in (1, 4096, 4097, 100_000, 3 * 4096):
            deadline = time.monotonic() + 60
            for act in ("frame", "full"):
                ready = receiver.ready(slot)
                frame, got = bytearray(rng.bytes(nbytes)), bytearray(nbytes)
                sources = {(0, "w"): data(order)}
                call = (sender.send_frame, frame) if act == "frame" else (sender.send, sources)
                thread = threading.Thread(target=call[0], args=(ready, call[1], deadline))
                thread.start()
                if act == "frame":
                    receiver.receive_frame(got, deadline)
                else:
                    receiver.receive(layout.views(slot.memory.data), deadline)
                    got[:] = frame
                thread.join()
                assert got == frame
        np.testing.assert_array_equal(np.frombuffer(slot.memory.data, np.uint8)[: order.size], moved(order))
    finally:
        sender.close()
        receiver.close()
        near.close()
        far.close()
        slot.memory.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_sparse_versions_go_over_the_ring(token_file: Path, fake: Fake, placement: Any) -> None:
    """A full version, then only what changed; the link's own connection carries no weights."""
    theirs = settings("fake1", placement=placement)
    made = Rig(token_file, theirs=theirs, payload=PayloadSettings(kind="sparse"))
    try:
        assert made.take(0, 0).payload == "full"
        params = trainer_params(0)
        norm = params["final_norm"]["scale"]
        for number in range(1, 4):
            change = jax.jit(lambda x, at=number: x.at[at].multiply(1.5), out_shardings=norm.sharding)
            params["final_norm"]["scale"] = norm = change(norm)
            made.publisher.publish(params, Version("a", number))
            update = made.subscriber.poll(timeout_s=60)
            assert update is not None
            posted = fake.counts.posts
            report = update.prepare()
            assert report.payload == "frame" and fake.counts.posts > posted, report
            assert same_bits(update.swap(), convert(params))
    finally:
        made.close()


def test_a_port_that_is_down_for_a_while_is_tried_again(
    token_file: Path, fake: Fake, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a link that has been; at the start a port that is down is an error at once."""
    ports = [made_up_port("fake0", 1), made_up_port("fake1", 2)]
    down = [dataclasses.replace(port, state="DOWN") for port in ports]
    made = Rig(token_file)
    try:
        made.take(0, 0)
        monkeypatch.setattr(rail, "scan", lambda: down)
        fake.set(fail_at=2, fail_status=12)
        made.fail(1)
        fake.set()
        made.publisher.publish(trainer_params(2), Version("a", 2))
        assert made.subscriber.poll(timeout_s=1.5) is None
        monkeypatch.setattr(rail, "scan", lambda: ports)
        made.take_again(3)
    finally:
        made.close()
    monkeypatch.setattr(rail, "scan", lambda: down)
    made = Rig(token_file)
    try:
        with pytest.raises(VerbsError, match="fake1:1: DOWN, expected ACTIVE"):
            made.subscriber.poll(timeout_s=60)
    finally:
        made.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_engine_that_closes_in_mid_transfer_gets_a_named_error(
    token_file: Path, fake: Fake, placement: Any
) -> None:
    """Another thread closes the subscriber under a prepare: a TransferError there, nothing left open."""
    made = Rig(token_file, theirs=settings("fake1", placement=placement))
    made.take(0, 0)
    fake.set(hold=1)
    closer = in_mid_transfer(fake, made.subscriber.close)
    made.fail(1)
    closer.join()
    fake.set()
    made.close()
