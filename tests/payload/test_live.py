"""Frames between a live publisher and live subscribers bring, bit for bit, what a full sync brings."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.errors import CorruptFrame, WrongBase
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.outcome import Ticket
from jaxrl_sync.transfer.payload.chain import Chain
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.transfer.models import Rig, convert, host, same_bits, take, trainer_params, until

SPARSE = PayloadSettings("sparse", CodingRules(whole=False))


@jax.jit
def _step(params: Any, seed: Any) -> Any:
    """A small step of every 20th weight."""

    def moved(x: jax.Array) -> jax.Array:
        chosen = (jnp.arange(x.size) * 7 + seed * 3) % 20 == 0
        return jnp.multiply(x, 1 + 0.01 * chosen.reshape(x.shape))

    return jax.tree.map(moved, params)


def _prepare(subscriber: Any) -> Any:
    update = subscriber.poll(60)
    assert update is not None
    return update, update.prepare()


def _installed(ticket: Ticket, *engines: str) -> None:
    """Wait until the publisher has heard of these, too: its links hear an engine after that has swapped."""
    until(lambda: set(engines) <= ticket.wait(60).engines.keys())
    assert all(ticket.wait(60).engines[name][0].state == "installed" for name in engines)


@pytest.mark.invariant(39)
@pytest.mark.parametrize(
    ("transport", "values", "compare"),
    [
        ("shm", "overwrite", "host"),
        ("shm", "auto", "host"),
        ("tcp", "overwrite", "host"),
        ("tcp", "auto", "host"),
        ("tcp", "auto", "device"),
    ],
)
def test_frames_bring_every_version_bit_for_bit(rig: Rig, transport: str, values: Any, compare: Any) -> None:
    params = trainer_params()
    settings = PayloadSettings("sparse", CodingRules(values=values, whole=False), compare=compare)
    publisher = rig.publisher(params, transport, payload=settings)
    subscriber = rig.subscriber(transport=transport)
    full_bytes, read = 0, 0.0
    for number in range(8):
        ticket = publisher.publish(params, Version("a", number))
        update, report = _prepare(subscriber)
        assert same_bits(update.swap(), convert(params)), number
        if number == 0:
            full_bytes = report.nbytes
            assert report.payload == "full" and report.density == 1.0
        else:
            assert report.payload == "frame" and report.transport == transport
            assert report.nbytes < full_bytes / 4 and 0 < report.density < 0.1 and report.coding
            rank = ticket.wait(60).engines["engine-0"][0]
            assert (rank.payload, rank.nbytes) == ("frame", report.nbytes)
            assert rank.density == pytest.approx(report.density) and rank.coding == report.coding
            assert rank.compared == compare and 0 < rank.seconds["compare"] <= rank.seconds["encode"]
            assert publisher.stats()["shards_read"] == read  # none since the anchor
        read = publisher.stats()["shards_read"]
        params = _step(params, number)
    stats = publisher.stats()
    assert subscriber.stats()["frames"] == 7 == stats["frames"]
    assert stats["compare_on_device"] == (compare == "device") and stats["device_compares"] in (0, 7)
    assert (stats["baseline_bytes"] == 0) == (read > 0) == (compare == "device")


@pytest.mark.parametrize("count", [1, 4, 16])
def test_equal_replicas_share_what_the_devices_find(rig: Rig, count: int) -> None:
    params = trainer_params()
    settings = PayloadSettings("sparse", CodingRules(whole=False), compare="device")
    publisher = rig.publisher(params, "tcp", payload=settings)
    engines = [rig.subscriber(f"engine-{i}", transport="tcp") for i in range(count)]
    for number in range(3):
        ticket = publisher.publish(params, Version("a", number))
        for engine in engines:
            assert same_bits(take(engine)[1], convert(params))
        _installed(ticket, *(f"engine-{i}" for i in range(count)))  # else frames are made of older bases, too
        params = _step(params, number)
    stats = publisher.stats()
    assert (stats["device_compares"], stats["frames_encoded"], stats["frames"]) == (2, 2, 2 * count)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_shards_that_stay_on_their_devices_are_read_once_and_only_where_an_edge_needs_them(
    rig: Rig, transport: str
) -> None:
    """As on an accelerator: nothing is compared, everything is read, while the trainer donates its tree."""
    params = trainer_params()
    publisher = rig.publisher(params, transport)
    publisher._comparing.lazy = True
    subscribers = [rig.subscriber(f"engine-{i}", transport=transport) for i in range(2)]
    step, read = jax.jit(_step, donate_argnums=0), list[float]()
    for number in range(3):
        expected = host(jax.jit(convert)(params))
        ticket = publisher.publish(params, Version("a", number))
        params = step(params, number)
        for subscriber in subscribers:
            found = host(take(subscriber)[1])
            assert all(np.array_equal(found[p], expected[p]) for p in expected)
        _installed(ticket, "engine-0", "engine-1")
        read.append(publisher.stats()["shards_read"])
    (held,) = publisher._retained._held
    shards = sum(len(x.addressable_shards) for kind in held.exports.values() for x in kind.values())
    assert read == [read[0], 2 * read[0], 3 * read[0]] and 0 < read[0] < shards


@pytest.mark.parametrize(
    ("kind", "compare", "platforms", "form"),
    [
        ("auto", "auto", {"cpu"}, "host"),
        ("auto", "auto", {"gpu"}, "device"),
        ("sparse", "auto", {"tpu"}, "device"),
        ("sparse", "host", {"gpu"}, "host"),
        ("bitmap", "device", {"cpu"}, "device"),
        ("auto", "auto", set(), "host"),
        ("full", "device", {"gpu"}, "host"),
    ],
)
def test_where_versions_are_compared(kind: Any, compare: Any, platforms: set[str], form: str) -> None:
    chosen, reason = PayloadSettings(kind, compare=compare).compare_on(platforms)
    assert chosen == form and reason
    with pytest.raises(ValueError, match="compare='both', expected one of auto, host, device"):
        PayloadSettings(kind, compare="both")  # type: ignore[arg-type]


def test_full_stays_full_and_auto_is_full_over_shared_memory(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "shm", payload=PayloadSettings("auto"))
    subscriber = rig.subscriber(transport="shm")
    for number in range(3):
        publisher.publish(params, Version("a", number))
        update, report = _prepare(subscriber)
        assert report.payload == "full" and same_bits(update.swap(), convert(params))
        params = _step(params, number)
    stats = publisher.stats()
    assert stats["baseline_bytes"] == stats["frames_encoded"] == 0  # nothing was compared, nothing kept


@pytest.mark.invariant(39)
def test_a_slow_engine_gets_the_union_and_a_late_one_an_anchor(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    fast, slow = rig.subscriber("fast", transport="tcp"), rig.subscriber("slow", transport="tcp")
    ticket = publisher.publish(params, Version("a", 0))
    take(fast)
    take(slow)
    _installed(ticket, "fast", "slow")  # else nothing is kept for the slow one
    for number in range(1, 5):
        params = _step(params, number)
        publisher.publish(params, Version("a", number))
        update, report = _prepare(fast)
        assert report.payload == "frame" and same_bits(update.swap(), convert(params))
    update, report = _prepare(slow)
    while update.version.number < 4:  # an offer that was open when the fast one went on
        update.swap()
        update, report = _prepare(slow)
    assert report.payload == "frame" and same_bits(update.swap(), convert(params))
    late = rig.subscriber("late", transport="tcp")
    update, report = _prepare(late)
    edge_bytes = report.nbytes
    assert report.payload == "full" and same_bits(update.swap(), convert(params))
    params = _step(params, 9)
    publisher.publish(params, Version("a", 5))
    for subscriber in (fast, slow, late):
        update, report = _prepare(subscriber)
        assert report.payload == "frame" and same_bits(update.swap(), convert(params))
    assert publisher.stats()["baseline_bytes"] == edge_bytes  # three engines, one baseline


@pytest.mark.invariant(39)
def test_a_new_lineage_and_a_restarted_trainer_bring_an_anchor(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    subscriber = rig.subscriber(transport="tcp")
    for number, lineage in ((0, "a"), (1, "a"), (1, "b"), (2, "b")):
        params = _step(params, number)
        publisher.publish(params, Version(lineage, number))
        update, report = _prepare(subscriber)
        assert report.payload == ("full" if (lineage, number) in (("a", 0), ("b", 1)) else "frame")
        assert same_bits(update.swap(), convert(params))
    publisher.close()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    for number in (3, 4):
        params = _step(params, number)
        publisher.publish(params, Version("b", number))
        update, report = _prepare(subscriber)
        assert report.payload == ("full" if number == 3 else "frame")
        assert same_bits(update.swap(), convert(params))


def test_anchors_come_on_request_and_on_interval(rig: Rig) -> None:
    params = trainer_params()
    settings = PayloadSettings("sparse", CodingRules(whole=False), anchor_every=3)
    publisher = rig.publisher(params, "tcp", payload=settings)
    subscriber = rig.subscriber(transport="tcp")
    kinds = []
    for number in range(9):
        params = _step(params, number)
        publisher.publish(params, Version("a", number))
        if number == 6:
            subscriber.request_anchor()
        update, report = _prepare(subscriber)
        kinds.append(report.payload)
        assert same_bits(update.swap(), convert(params))
    assert kinds == ["full", "frame", "frame", "frame", "full", "frame", "full", "frame", "frame"]


@pytest.mark.invariant(32)
@pytest.mark.invariant(39)
@pytest.mark.parametrize("damage", ["flip", "replay", "sums"])
def test_a_bad_frame_is_refused_by_name_and_repaired_by_an_anchor(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, damage: str
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    subscriber = rig.subscriber(transport="tcp")
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    sent: list[Any] = []
    true_frame = Chain.frame

    def bad_frame(self: Chain, *args: Any) -> Any:
        import dataclasses

        encoded = true_frame(self, *args)
        if encoded is None:
            return None
        sent.append(encoded)
        if len(sent) == 1:
            return encoded
        if damage == "flip":
            data = bytearray(encoded.data)
            data[len(data) // 2] ^= 1
            return dataclasses.replace(encoded, data=data)
        if damage == "replay":
            return sent[0]
        return dataclasses.replace(encoded, digests={p: (a ^ 1, b) for p, (a, b) in encoded.digests.items()})

    monkeypatch.setattr(Chain, "frame", bad_frame)
    params = _step(params, 1)
    publisher.publish(params, Version("a", 1))
    _, tree = take(subscriber)
    before, links = host(tree), list(subscriber._links._links.values())
    params = _step(params, 2)
    publisher.publish(params, Version("a", 2))
    update = subscriber.poll(60)
    assert update is not None
    error = {"flip": CorruptFrame, "replay": WrongBase, "sums": MismatchError}[damage]
    with pytest.raises(error):
        update.prepare()
    assert subscriber.installed == Version("a", 1)
    after = host(tree)  # what serves is untouched
    assert all(np.array_equal(before[p], after[p]) for p in before)
    if damage != "replay":  # a lane may be out of step; a sound frame of another base leaves that open
        assert links
        until(lambda: all(link.closed for link in links))
    monkeypatch.setattr(Chain, "frame", true_frame)
    update, report = _prepare(subscriber)
    assert report.payload == "full" and same_bits(update.swap(), convert(params))
