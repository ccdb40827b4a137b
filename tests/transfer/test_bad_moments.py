"""Rounds at bad moments: closed links, slots without room, closes in mid-prepare, joins beside deaths."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import socket
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import pytest

from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import Subscriber, SubscriberConfig, Version, holding, wire
from jaxrl_sync.transfer import subscriber as subscriber_module
from jaxrl_sync.transfer.errors import (
    DeadlineError,
    MismatchError,
    PeerLost,
    ProtocolError,
    ResourceError,
    TransferError,
)
from jaxrl_sync.transfer.hub import client
from jaxrl_sync.transfer.inbound import Inbound
from jaxrl_sync.transfer.memory import SharedMemory
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.verbs.errors import VerbsError
from tests.transfer.models import (
    CONFIG,
    Rig,
    convert,
    engine_target,
    mesh,
    same_bits,
    segments,
    take,
    trainer_params,
    until,
)


def test_lanes_may_arrive_in_any_order(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    from jaxrl_sync.transfer.outbound import Outbound

    real = Outbound.add_lane

    def add_lane(self: Outbound, connection: wire.Connection, index: object) -> None:
        time.sleep({1: 0.6, 2: 0.3}.get(index, 0.0))  # type: ignore[call-overload]
        real(self, connection, index)

    monkeypatch.setattr(Outbound, "add_lane", add_lane)
    params = trainer_params()
    rig.publisher(params, "tcp").publish(params, Version("a", 0))
    config = SubscriberConfig(transport="tcp", connections=4)
    client = rig.hub_client()
    target = engine_target()
    with Subscriber(client.url, target, convert, token_file=rig._token_file, config=config) as subscriber:
        assert subscriber._links is not None
        _, tree = take(subscriber)
        assert len(subscriber._links.all[0]._lanes) == 4
    assert same_bits(tree, convert(params))


@pytest.mark.parametrize("index", [None, 64, -1, 1000, "1"])
def test_lanes_with_absurd_numbers_are_refused(
    rig: Rig, pair: tuple[socket.socket, socket.socket], index: object
) -> None:
    from jaxrl_sync.transfer.outbound import Outbound

    publisher = rig.publisher(trainer_params())
    link = Outbound(publisher, wire.Connection(pair[0], "p"), {"engine": "e", "rank": 0}, "l")
    with pytest.raises(ProtocolError, match="expected another one from 0"):
        link.add_lane(wire.Connection(pair[1], "p"), index)


def test_a_publisher_out_of_descriptors_takes_links_again_later(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    real, refused = publisher._listening._reception._listener, threading.Event()

    class Full:
        """A listener that can't accept once; the accepting thread may only now be about to use it."""

        def settimeout(self, limit_s: float) -> None:
            real.settimeout(limit_s)

        def accept(self) -> Any:
            publisher._listening._reception._listener = real
            refused.set()
            raise OSError(errno.EMFILE, "Too many open files")

    publisher._listening._reception._listener = Full()  # type: ignore[assignment]
    assert refused.wait(60)
    publisher.publish(params, Version("a", 0))
    assert take(rig.subscriber())[0] == Version("a", 0)


def test_a_link_that_the_publisher_closed_is_opened_again_before_it_is_needed(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    (old,), (link,) = publisher._listening._links.values(), subscriber._links.all
    old._connection.close()
    until(lambda: not link.alive)  # for good, even where another one has taken its place already
    publisher.publish(params, Version("a", 1))
    assert take(subscriber)[0] == Version("a", 1)
    assert subscriber.stats()["failed"] == 0


def test_a_report_to_a_stuck_publisher_ends_the_link_and_not_the_engine(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None
    update.prepare()
    (link,) = subscriber._links.all
    connection = link._connection
    real = connection.send

    def send(*args: Any, timeout_s: float) -> None:
        real({"kind": "installed", "version": "half"}, timeout_s=timeout_s)
        raise DeadlineError("the socket took half of it")

    monkeypatch.setattr(connection, "send", send)
    update.swap()
    assert connection.closed
    publisher.publish(params, Version("a", 1))
    assert take(subscriber)[0] == Version("a", 1)


def test_a_sender_that_gives_up_before_it_begins_is_heard_out(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    link, there = object.__new__(Inbound), wire.Connection(pair[1], "reader")
    link.peer, link._connection = "relay-0.0", wire.Connection(pair[0], "relay")
    there.send({"kind": "failed", "round": "r", "reason": "its own round ended"}, timeout_s=5)
    with pytest.raises(PeerLost, match=r"relay-0\.0 gave up: its own round ended"):
        link._next(Offer("r", Version("a", 1), "relay-0", "relay"), time.monotonic() + 5)


def test_a_conversion_that_raises_is_told_by_poll(rig: Rig) -> None:
    rig.publisher(trainer_params())
    subscriber = rig.subscriber(convert=lambda p: p["no such branch"])
    with pytest.raises(TransferError, match="no such branch"):
        subscriber.poll(60)


# Bad moments.


def test_after_close_nothing_is_prepared_or_swapped_in(rig: Rig, token_file: Path) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    first, second = rig.subscriber("x"), rig.subscriber("y")
    prepared, offered = first.poll(60), second.poll(60)
    assert prepared is not None and offered is not None
    prepared.prepare()
    for subscriber in (first, second):
        subscriber.close()
        subscriber.close()
    with pytest.raises(TransferError, match="closed"):
        prepared.swap()
    with pytest.raises(TransferError, match="closed"):
        offered.prepare()
    assert first.installed is None and segments(token_file) == []


def test_a_prepared_update_that_is_dropped_does_not_keep_its_engine_from_later_versions(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None
    update.prepare()
    publisher.publish(params, Version("a", 1))
    assert subscriber.poll(0.3) is None  # its round waits for the swap
    del update
    version, tree = take(subscriber)
    assert version == Version("a", 1) and same_bits(tree, convert(params))
    assert subscriber.poll(0.3) is None and subscriber.installed == version  # to drop what serves is nothing


def test_a_link_that_closes_while_its_offer_waits_is_opened_again_before_the_hub_says_more(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, seen, over = client.Lease.call, threading.Event(), threading.Event()

    def call(self: client.Lease, path: str, body: dict[str, Any], *limits: Any, **more: Any) -> Any:
        if path == "/v1/watch" and seen.is_set():
            over.wait(120)  # the hub says nothing more
        answer = real(self, path, body, *limits, **more)
        if path == "/v1/watch" and (answer.get("offer") or {}).get("version", {}).get("number") == 1:
            seen.set()
        return answer

    monkeypatch.setattr(client.Lease, "call", call)
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    publisher.publish(params, Version("a", 1))
    assert subscriber.poll(60) is not None
    (link,) = subscriber._links.all
    link.close()  # as a round does that ends here after the hub has offered the next one
    update = subscriber.poll(60)
    assert update is not None and seen.is_set()
    update.prepare()
    assert same_bits(update.swap(), convert(params))
    over.set()


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_close_during_prepare_ends_it_and_leaves_no_segment(
    rig: Rig, token_file: Path, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender
    from jaxrl_sync.transfer.transports.tcp import TcpSender

    params = trainer_params()
    publisher, subscriber = rig.publisher(params, transport), rig.subscriber(transport=transport)
    sending, go_on = threading.Event(), threading.Event()

    def send(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        sending.set()
        go_on.wait(120)
        raise PeerLost("woken up too late")

    monkeypatch.setattr(ShmSender if transport == "shm" else TcpSender, "send", send)
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None
    failed: list[BaseException] = []

    def prepare() -> None:
        try:
            update.prepare()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    assert sending.wait(60)
    subscriber.close()
    thread.join(90)
    go_on.set()
    assert not thread.is_alive() and isinstance(failed[0], TransferError)
    assert segments(token_file) == []


def test_prepare_without_a_hub_ends_soon_after_its_own_deadline(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None

    def away(*args: Any, **options: Any) -> Any:
        raise httpx.ConnectError("connection refused")

    with monkeypatch.context() as patched:
        patched.setattr(subscriber_module, "HUB_GRACE_S", 0.2)
        patched.setattr(subscriber._hub._http, "request", away)
        with pytest.raises(PeerLost, match=r"didn't answer for 0\.\d"):  # and not for the config's 60 s
            update.prepare(timeout_s=0.5)
    assert take(subscriber)[0] == Version("a", 0)


def narrow_target() -> Any:
    return qwen3.engine_abstract(CONFIG, mesh((2,), ("tp",), 6), jnp.float32)


def narrow(params: Any) -> Any:
    return qwen3.convert(params, CONFIG, 2, jnp.float32)


@pytest.mark.invariant(29)
def test_after_the_last_publish_a_restart_is_served_and_a_new_kind_waits_in_peace(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    with rig.open_subscriber("e") as first:
        publisher.publish(params, Version("a", 0))
        take(first)
        publisher.publish(params, Version("a", 1))
        take(first)
    expected = convert(params)
    version, tree = take(rig.subscriber("e"))
    assert version == Version("a", 1) and same_bits(tree, expected)

    other = rig.subscriber("other", target=narrow_target(), convert=narrow)
    update = other.poll(60)
    assert update is not None
    start = time.monotonic()
    with pytest.raises(TransferError, match="exported before this layout was known"):
        update.prepare(timeout_s=1.0)
    assert 0.5 < time.monotonic() - start < 30  # until its own deadline, not the config's
    assert "exported before this layout was known" in caplog.text
    closed = [r for r in rig.hub_client().status()["closed"] if r["engine"] == "other"]
    assert len(closed) <= 3, closed  # asked once, not in a loop
    publisher.publish(params, Version("a", 2))
    end = time.monotonic() + 60
    while other.installed is None and time.monotonic() < end:
        with contextlib.suppress(TransferError):
            take(other)
    assert other.installed == Version("a", 2)


def test_a_slot_that_finds_no_room_again_is_named_and_comes_back(
    rig: Rig, token_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender

    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    _, serving = take(subscriber)
    real_send, real_memory = ShmSender.send, SharedMemory
    go_on = threading.Event()

    def silent(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        go_on.wait(30)

    def full(run_id: str, nbytes: int) -> SharedMemory:
        raise ResourceError("/dev/shm is too small")

    monkeypatch.setattr(ShmSender, "send", silent)
    monkeypatch.setattr(holding, "SharedMemory", full)
    publisher.publish(params, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(DeadlineError):
        update.prepare(timeout_s=0.3)
    go_on.set()
    monkeypatch.setattr(ShmSender, "send", real_send)
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(TransferError, match="no slot to prepare in: /dev/shm is too small"):
        update.prepare()
    assert subscriber.installed == Version("a", 0) and same_bits(serving, convert(params))
    monkeypatch.setattr(holding, "SharedMemory", real_memory)
    assert take(subscriber)[0] == Version("a", 1)
    assert len(segments(token_file)) == 2


@pytest.mark.parametrize("came_back", [False, True])
def test_a_link_that_is_replaced_before_it_is_cut_still_costs_the_slot_its_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, came_back: bool
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender

    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    go_on, real_send = threading.Event(), ShmSender.send

    def stuck(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        go_on.wait(120)
        real_send(self, ready, sources, deadline + 60, *flow)  # as if stopped after its last look

    links = subscriber._links
    real_cut = links.cut_unconfirmed
    (link,) = links.all

    def cut(reading: Any) -> bool:
        """The watching thread's turn comes just before: a word of the late sender lies in the socket, or
        the hub lists the publisher's next process while the old one still writes."""
        monkeypatch.setattr(link._connection, "wait_readable", lambda timeout_s: True)
        again = "another" if came_back else links.publishers[0].incarnation
        links.update([dataclasses.replace(p, incarnation=again) for p in links.publishers])
        assert came_back == (link not in links._links.values())
        return real_cut(reading)

    monkeypatch.setattr(links, "cut_unconfirmed", cut)
    monkeypatch.setattr(ShmSender, "send", stuck)
    publisher.publish(params, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    before = {slot.generation for slot in subscriber._slots}
    with pytest.raises(DeadlineError):
        update.prepare(timeout_s=0.3)
    go_on.set()
    assert link.closed and subscriber.stats()["quarantined"] == 1
    assert len(before - {slot.generation for slot in subscriber._slots}) == 1
    monkeypatch.setattr(ShmSender, "send", real_send)
    assert take(subscriber)[0] == Version("a", 1)


@pytest.mark.parametrize("side", ["publisher", "subscriber"])
def test_an_edge_that_a_device_does_not_give_up_is_ended_all_the_same(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, side: str
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmReceiver, ShmSender

    go_on = threading.Event()

    def refuse(self: Any) -> None:
        raise VerbsError(16, "ibv_destroy_qp: Device or resource busy")

    def silent(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        go_on.wait(30)

    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    monkeypatch.setattr(ShmSender if side == "publisher" else ShmReceiver, "close", refuse)
    monkeypatch.setattr(ShmSender, "send", silent)
    (old,) = publisher._listening._links
    publisher.publish(params, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(DeadlineError):
        update.prepare(timeout_s=0.3)
    go_on.set()
    until(lambda: old not in publisher._listening._links)
    monkeypatch.undo()
    assert "isn't wholly closed" in caplog.text
    assert take(subscriber)[0] == Version("a", 1) and subscriber.stats()["quarantined"] == 1


def test_publish_after_a_failed_one_and_after_a_regress_goes_on(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    gone = jax.tree.map(jnp.copy, params)
    jax.tree.map(lambda x: x.delete(), gone)
    with pytest.raises(RuntimeError, match="deleted"):
        publisher.publish(gone, Version("a", 1))
    with pytest.raises(TransferError, match="doesn't come after"):
        publisher.publish(params, Version("a", 0))
    publisher.publish(params, Version("a", 1))
    version, tree = take(subscriber)
    assert version == Version("a", 1) and same_bits(tree, convert(params))


def test_an_export_that_fails_after_the_announcement_stops_no_later_version(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)

    def fail(version: Version) -> None:
        monkeypatch.undo()
        raise RuntimeError("out of memory")

    monkeypatch.setattr(publisher, "_look_up", fail)
    publisher.publish(params, Version("a", 0))
    until(lambda: "version a:0 is announced, its shards can't be found" in caplog.text)
    assert publisher.publish(params, Version("a", 1)).wait(60).state == "committed"


def test_a_joiner_is_served_while_another_dies(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    for round_number in range(3):
        dying = rig.open_subscriber("dying")
        update = dying.poll(60)
        assert update is not None
        joined: list[Version] = []
        joiner = rig.subscriber(f"joiner-{round_number}", first=6)
        thread = threading.Thread(target=lambda j=joiner, v=joined: v.append(take(j)[0]))
        thread.start()
        dying.close()
        thread.join(90)
        assert joined == [Version("a", 0)]


def test_a_jump_of_the_wall_clock_ends_no_lease(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 86_400)
    time.sleep(1.0)
    monkeypatch.setattr(time, "time", lambda: real() - 86_400)
    publisher.publish(params, Version("a", 1))
    assert take(subscriber)[0] == Version("a", 1)
    assert len(rig.hub_client().members("subscriber")) == 1


def test_the_whole_tree_is_compared_before_the_first_publish(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    with pytest.raises(MismatchError, match="is missing"):
        publisher.publish({}, Version("a", 0))
    assert publisher.publish(params, Version("a", 0)).wait(60).state == "committed"


@pytest.mark.parametrize("given", [("a", 0), "a:0", 0, None])
def test_what_is_no_version_is_refused_before_it_gets_anywhere(rig: Rig, given: Any) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    with pytest.raises(TransferError, match=r"expected Version\(lineage, number\)"):
        publisher.publish(params, given)
    assert publisher.publish(params, Version("a", 0)).wait(60).state == "committed"
