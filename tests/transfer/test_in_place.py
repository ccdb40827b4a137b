"""One slot: a version lands in the memory that serves, under a poison mark until it is whole and verified."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.transports.shm import ShmSender
from tests.transfer.models import Rig, convert, memory_of, same_bits, take, trainer_params, until


def changed(params: Any) -> Any:
    """The same parameters but for one tensor."""
    return {**params, "final_norm": jax.tree.map(lambda x: x * 1.5, params["final_norm"])}


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("kind", ["full", "sparse"])
def test_versions_follow_one_another_in_the_same_memory(rig: Rig, transport: str, kind: Any) -> None:
    publisher = rig.publisher(trainer_params(), transport, payload=PayloadSettings(kind))
    subscriber = rig.subscriber(transport=transport, slots=1)
    trees = []
    for number in range(3):
        params = trainer_params(seed=number // 2)  # the last one changes nothing but one tensor
        if number == 2:
            params = changed(params)
        publisher.publish(params, Version("a", number))
        update = subscriber.poll(60)
        assert update is not None and update.in_place == (number > 0)
        report = update.prepare()
        assert subscriber.poisoned == (number > 0)  # until the swap nothing may serve
        trees.append(update.swap())
        assert not subscriber.poisoned
        assert report.payload == ("frame" if kind == "sparse" and number else "full")
        assert same_bits(trees[-1], convert(params))
    assert memory_of(trees[0]) == memory_of(trees[1]) == memory_of(trees[2])
    assert len(subscriber._slots) == 1


@pytest.mark.invariant(32)
def test_a_round_that_breaks_poisons_and_the_next_overwrites(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params, "shm"), rig.subscriber(transport="shm", slots=1)
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    real, pieces = ShmSender._copy, []

    def breaks(sender: Any, *args: Any) -> None:
        pieces.append(1)
        if len(pieces) == 3:
            raise TransferError("half of it is written")
        real(sender, *args)

    monkeypatch.setattr(ShmSender, "_copy", breaks)
    other = trainer_params(seed=1)
    publisher.publish(other, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(TransferError):
        update.prepare()
    assert subscriber.poisoned and subscriber.installed == Version("a", 0)  # the label never advances
    client = rig.hub_client()
    until(lambda: client.status()["engines"]["engine-0"]["ranks"]["0"] is None)
    version, tree = take(subscriber)
    assert version == Version("a", 1) and not subscriber.poisoned
    assert same_bits(tree, convert(other))
    assert subscriber.stats()["resumed_bytes"] > 0


def test_a_refused_round_leaves_what_serves(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber(slots=1)
    publisher.publish(params, Version("a", 0))
    _, tree = take(subscriber)
    publisher.read = lambda *_: "it was withdrawn"  # type: ignore[method-assign]
    publisher.publish(trainer_params(seed=1), Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    monkeypatch.setattr(subscriber, "_other", lambda *_: None)  # as after a wait for another version
    with pytest.raises(TransferError, match="it was withdrawn"):
        update.prepare()
    assert not subscriber.poisoned and subscriber.installed == Version("a", 0)
    assert same_bits(tree, convert(params))


def test_wrong_bits_in_place_are_found_and_overwritten_in_full(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params, "shm"), rig.subscriber(transport="shm", slots=1)
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    real, flips = ShmSender.send, [1]

    def send(sender: Any, ready: Any, *args: Any) -> None:
        real(sender, ready, *args)
        if flips:
            flips.pop()
            views = sender._open[ready["segment"]["name"]][1]
            next(iter(views.values())).reshape(-1).view("uint8")[3] ^= 1

    monkeypatch.setattr(ShmSender, "send", send)
    other = trainer_params(seed=1)
    publisher.publish(other, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(MismatchError):
        update.prepare()
    assert subscriber.poisoned
    _, tree = take(subscriber)
    assert same_bits(tree, convert(other)) and not subscriber.poisoned
    assert subscriber.stats()["resumed_bytes"] == 0  # what was wrong is nowhere taken for a prefix
