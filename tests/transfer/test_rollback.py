"""Rollback to the version before, versions that an engine comes back with, and engines that leave."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import Version, receiving
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.receiving import Offer, ReceiverState
from jaxrl_sync.transfer.transports.shm import ShmSender
from tests.transfer.models import Rig, convert, host, same_bits, take, trainer_params, until
from tests.transfer.test_in_place import changed


def installed_at_hub(rig: Rig, engine: str = "engine-0") -> Any:
    return rig.hub_client().status()["engines"][engine]["ranks"]["0"]


@pytest.mark.invariant(32)
def test_rollback_restores_the_exact_bits_and_tells_the_hub(rig: Rig) -> None:
    publisher, subscriber = rig.publisher(trainer_params()), rig.subscriber()
    bits = []
    for number in range(2):
        publisher.publish(trainer_params(seed=number), Version("a", number))
        _, tree = take(subscriber)
        bits.append({p: b.copy() for p, b in host(tree).items()})
    back = host(subscriber.rollback())
    assert subscriber.installed == Version("a", 0)
    assert all((back[p] == bits[0][p]).all() for p in bits[0])
    until(lambda: installed_at_hub(rig) == {"lineage": "a", "number": 0})
    assert subscriber.poll(0.5) is None  # the version that was left isn't taken again
    publisher.publish(trainer_params(seed=2), Version("a", 2))
    version, tree = take(subscriber)
    assert version == Version("a", 2) and same_bits(tree, convert(trainer_params(seed=2)))
    assert subscriber.stats()["rollbacks"] == 1


def test_frames_start_from_the_version_that_was_rolled_back_to(rig: Rig) -> None:
    publisher = rig.publisher(trainer_params(), payload=PayloadSettings("sparse"))
    subscriber, behind = rig.subscriber(), rig.subscriber("behind")
    until(lambda: publisher.stats()["links"] == 2)
    params = trainer_params()
    for number in range(3):
        params = changed(params)
        ticket = publisher.publish(params, Version("a", number))
        take(subscriber)
        if not number:
            take(behind)  # for its sake the publisher keeps all changes since then
            assert ticket.wait(60).state == "committed"  # once it has heard of that
    subscriber.rollback()
    params = changed(params)
    publisher.publish(params, Version("a", 3))
    update = subscriber.poll(60)
    assert update is not None
    report = update.prepare()
    assert report.payload == "frame"
    assert same_bits(update.swap(), convert(params))


def test_a_slot_that_was_reused_cannot_be_rolled_back_to(rig: Rig) -> None:
    publisher, subscriber = rig.publisher(trainer_params()), rig.subscriber()
    with pytest.raises(TransferError, match="no version before None"):
        subscriber.rollback()
    for number in range(2):
        publisher.publish(trainer_params(seed=number), Version("a", number))
        take(subscriber)
    publisher.publish(trainer_params(seed=2), Version("a", 2))
    update = subscriber.poll(60)
    assert update is not None
    update.prepare()
    with pytest.raises(TransferError, match="can't roll back to version a:0: its slot was reused"):
        subscriber.rollback()
    update.swap()
    assert subscriber.installed == Version("a", 2)


def test_a_third_slot_keeps_the_previous_version_while_another_is_filled() -> None:
    offers = [Offer(f"r-{n}", Version("a", n), "t") for n in range(4)]
    state = ReceiverState(3)
    for offer in offers[:3]:
        state = receiving.swap(receiving.prepared(receiving.begin(state, offer)), offer)
    state = receiving.begin(state, offers[3])
    assert state.filling is not None and state.filling.slot == 0
    back = receiving.rollback(state)
    assert (back.installed, back.serving, back.rejected) == (Version("a", 1), 1, (Version("a", 2),))
    assert receiving.wanted(receiving.see(back, offers[2])) is None
    again = receiving.swap(receiving.prepared(back), offers[3])
    assert again.rejected == ()


def test_a_round_that_brings_what_was_rolled_back_is_over() -> None:
    """It was swapped in afterwards: the version before served under the label of the one that was left."""
    offers = [Offer(f"r-{n}", Version("a", n), "t") for n in range(2)]
    state = ReceiverState(2)
    for offer in offers:
        state = receiving.swap(receiving.prepared(receiving.begin(state, offer)), offer)
    again = Offer("r-2", Version("a", 1), "t")  # for another rank's sake
    state = receiving.rollback(receiving.prepared(receiving.begin(state, again)))
    assert state.installed == Version("a", 0) and state.filling is None
    with pytest.raises(TransferError, match="isn't prepared"):
        receiving.swap(state, again)
    assert receiving.wanted(receiving.see(state, again)) is None


def test_a_prepare_whose_round_a_rollback_ended_says_so() -> None:
    """While it waited for the other ranks, the rollback ended the round that brought nothing."""
    offers = [Offer(f"r-{n}", Version("a", n), "t") for n in range(2)]
    state = ReceiverState(2)
    for offer in offers:
        state = receiving.swap(receiving.prepared(receiving.begin(state, offer)), offer)
    state = receiving.rollback(receiving.begin(state, Offer("r-2", Version("a", 1), "t")))
    with pytest.raises(TransferError, match="given up"):
        receiving.prepared(state)


@pytest.mark.invariant(29)
def test_an_engine_comes_back_with_old_weights_and_gets_what_changed(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=PayloadSettings("sparse"))
    first = rig.subscriber("x", "tcp")
    publisher.publish(params, Version("a", 0))
    _, tree = take(first)
    other = rig.subscriber("y", "tcp")  # stays at that version, so that what changes since then is kept
    take(other)
    saved = jax.tree.map(lambda x: jax.device_put(jax.device_get(x), x.sharding), tree)
    first.close()
    params = changed(params)
    publisher.publish(params, Version("a", 1))
    second = rig.subscriber("x", "tcp")
    assert same_bits(second.adopt(saved, Version("a", 0)), saved)
    assert second.installed == Version("a", 0)
    update = second.poll(60)
    assert update is not None and update.version == Version("a", 1)
    report = update.prepare()
    assert report.payload == "frame" and report.nbytes < 4096
    assert same_bits(update.swap(), convert(params))
    with pytest.raises(TransferError, match="a:1 is installed"):
        second.adopt(saved, Version("a", 0))
    third = rig.subscriber("z", "tcp")
    with pytest.raises(MismatchError, match="adopted 'embed': nothing, expected bfloat16"):
        third.adopt({}, Version("a", 0))


def test_an_engine_whose_lease_ran_out_comes_back_with_what_it_has(rig: Rig) -> None:
    publisher, subscriber = rig.publisher(trainer_params()), rig.subscriber(ttl_s=0.6)
    publisher.publish(trainer_params(), Version("a", 0))
    take(subscriber)
    lease = subscriber._lease
    real, rejoin, away = lease._beat, lease._rejoin, threading.Event()

    def later() -> None:
        assert away.wait(120)
        rejoin()

    lease._beat = lambda: None if not away.is_set() else real()  # type: ignore[method-assign]
    lease._rejoin = later  # type: ignore[method-assign]  # every call of it comes back as soon as it is gone
    client = rig.hub_client()
    until(lambda: "engine-0" not in client.status()["engines"])
    publisher.publish(trainer_params(seed=1), Version("a", 1))
    away.set()
    version, tree = take(subscriber)
    assert version == Version("a", 1) and same_bits(tree, convert(trainer_params(seed=1)))


@pytest.mark.invariant(34)
def test_a_relay_that_leaves_waits_for_its_readers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "shm", fanout="chain")
    relay, reader = rig.subscriber("a", "shm", relay=True), rig.subscriber("b", "shm")
    publisher.publish(params, Version("a", 0))
    take(relay)
    sending, go_on, real = threading.Event(), threading.Event(), ShmSender.send

    def send(*args: Any) -> None:
        sending.set()
        assert go_on.wait(120)
        real(*args)

    monkeypatch.setattr(ShmSender, "send", send)
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(take(reader)))
    thread.start()
    assert sending.wait(60)
    leaving = threading.Thread(target=relay.close, args=(60,))
    leaving.start()
    time.sleep(0.3)
    assert leaving.is_alive()
    go_on.set()
    thread.join(90)
    leaving.join(90)
    assert same_bits(found[0][1], convert(params))
    assert reader.stats()["failed"] == 0
    until(lambda: publisher.stats()["sends"] == 1)


@pytest.mark.invariant(34)
def test_a_slot_that_is_read_is_not_filled(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    publisher = rig.publisher(trainer_params(), "shm", fanout="chain", keep_versions=3)
    relay = rig.subscriber("a", "shm", relay=True, drain_s=0.3)
    publisher.publish(trainer_params(), Version("a", 0))
    _, tree = take(relay)
    reading = relay._holding.read(Version("a", 0), time.monotonic() + 60)
    assert not isinstance(reading, str)
    shards = {k: v.copy() for k, v in reading.shards.items()}
    for number in (1, 2, 3):  # the slot that is read comes up at 2: it gets new memory
        publisher.publish(trainer_params(seed=number), Version("a", number))
        _, tree = take(relay)
        assert same_bits(tree, convert(trainer_params(seed=number)))
    assert all((reading.shards[k].view("uint8") == v.view("uint8")).all() for k, v in shards.items())
    reading.close()
    refused = relay._holding.read(Version("a", 0), time.monotonic() + 0.1)
    assert (
        refused == "version a:0 isn't here, but a:2, a:3" or refused == "version a:0 isn't here, but a:3, a:2"
    )


def test_there_is_no_way_back_to_a_slot_that_got_new_memory(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp")
    subscriber = rig.subscriber(transport="tcp", relay=True, drain_s=0.05)
    for number in range(2):
        publisher.publish(params, Version("a", number))
        take(subscriber)
    reading = subscriber._holding.read(Version("a", 0), time.monotonic() + 60)
    assert not isinstance(reading, str)
    monkeypatch.setattr(publisher, "read", lambda *_: "not now")
    monkeypatch.setattr(subscriber, "_other", lambda *_: None)  # as after a wait for another version
    publisher.publish(params, Version("a", 2))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(TransferError, match="not now"):
        update.prepare()  # nothing was written, but the reader kept the memory of a:0
    with pytest.raises(TransferError, match="its slot was reused"):
        subscriber.rollback()
    reading.close()
    assert subscriber.installed == Version("a", 1)


def test_an_offer_that_comes_while_weights_are_adopted_is_taken(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 9))
    update = subscriber.poll(60)
    assert update is not None
    subscriber._see(None)  # as if the watching thread heard of it only later
    monkeypatch.setattr(subscriber._slots[0], "copy_in", lambda tree: subscriber._see(update._offer))
    subscriber.adopt({}, Version("a", 3))
    assert subscriber.installed == Version("a", 3)
    version, tree = take(subscriber)
    assert version == Version("a", 9) and same_bits(tree, convert(params))
