"""Weights from a trainer mesh to engine meshes inside one process, over every transport."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.sharding import MappingError
from jaxrl_sync.transfer import Subscriber, Version
from jaxrl_sync.transfer import slots as slots_module
from jaxrl_sync.transfer.errors import AuthError, DeadlineError, MismatchError, ProtocolError, TransferError
from jaxrl_sync.transfer.inbound import Inbound
from jaxrl_sync.transfer.transports import tcp
from jaxrl_sync.transfer.transports.pinned import Pinned, Table
from tests.transfer.models import (
    Rig,
    ServerThread,
    convert,
    engine_target,
    memory_of,
    mesh,
    open_fds,
    same_bits,
    segments,
    take,
    trainer_params,
    until,
)


def same_values(a: Any, b: Any) -> bool:
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return all(x.tobytes() == y.tobytes() for x, y in pairs)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(7)
def test_every_version_arrives_bit_for_bit_while_training_donates(rig: Rig, transport: str) -> None:
    params = trainer_params()
    step = jax.jit(lambda p, k: jax.tree.map(lambda x: x * 1.01 + k, p), donate_argnums=0)
    publisher, subscriber = rig.publisher(params, transport), rig.subscriber(transport=transport)
    trees = []
    for number in range(6):
        expected = jax.jit(convert)(params)
        ticket = publisher.publish(params, Version("a", number))
        params = step(params, 0.001)  # donates what was published
        params = step(params, 0.001)
        update = subscriber.poll(timeout_s=60)
        assert update is not None and update.version == Version("a", number)
        report = update.prepare()
        assert report.transport == transport and report.nbytes > 0
        tree = update.swap()
        assert same_bits(tree, expected)
        found = jax.device_get(tree)  # jax keeps what it makes for it: not the bits of two versions before
        assert same_values(found, jax.device_get(expected))
        if number:
            outcome = ticket.wait(60)
            assert outcome.state == "committed", outcome
            assert outcome.nbytes == report.nbytes
            assert set(outcome.seconds) >= {"export", "queue", "wire", "swap", "commit"}
        trees.append(tree)
    memory = [memory_of(tree) for tree in trees]
    assert (
        memory[0] == memory[2] == memory[4] and memory[1] == memory[3] == memory[5]
    )  # two slots, built once
    assert not memory[0] & memory[1]
    assert subscriber.installed == Version("a", 5)
    assert publisher.stats()["published"] == 6 and subscriber.stats()["installed"] == 6


@pytest.mark.invariant(29)
def test_without_subscribers_a_publish_only_announces_and_a_joiner_gets_the_newest(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    assert publisher.publish(params, Version("a", 0)).wait(60).state == "committed"
    assert publisher.publish(params, Version("a", 1)).wait(60).engines == {}
    expected = jax.device_get(jax.jit(convert)(params))
    jax.tree.map(lambda x: x.delete(), params)  # the trainer donated it long ago
    version, tree = take(rig.subscriber("x"))
    assert version == Version("a", 1)
    assert same_bits(tree, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), tree, expected))
    version, _ = take(rig.subscriber("late", first=6))
    assert version == Version("a", 1)


def test_slow_engine_skips_superseded_versions(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    tickets = [publisher.publish(params, Version("a", n)) for n in (1, 2, 3)]
    newest = rig.hub_client().wait_version(Version("a", 2), 60)
    assert newest is not None and newest.version == Version("a", 3)
    stale = subscriber.poll(60)
    assert stale is not None
    stale.prepare()  # moves on to the newest if an older one was still on offer
    assert stale.version == Version("a", 3)
    stale.swap()
    assert tickets[2].wait(60).state == "committed"
    assert tickets[0].wait(60).state == tickets[1].wait(60).state == "superseded"
    assert subscriber.poll(0.2) is None


@pytest.mark.invariant(8)
def test_a_new_lineage_is_an_anchor_and_an_old_number_is_refused(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 7))
    take(subscriber)
    for number in (7, 6):
        with pytest.raises(TransferError, match="doesn't come after a:7"):
            publisher.publish(params, Version("a", number))
    other = trainer_params(seed=1)
    restarted = rig.publisher(other)  # takes the place of the first
    restarted.publish(other, Version("b", 2))
    version, tree = take(subscriber)
    assert version == Version("b", 2) and same_bits(tree, convert(other))


def test_trees_and_conversions_that_do_not_fit_are_named(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, convert=convert)
    wrong = {**params, "final_norm": {"scale": jnp.zeros((3,))}}
    with pytest.raises(MismatchError, match="final_norm/scale"):
        publisher.publish(wrong, Version("a", 0))

    def narrow(p: Any) -> Any:
        return {**convert(p), "final_norm": p["final_norm"]["scale"][:16].astype(jnp.bfloat16)}

    def swapped(p: Any) -> Any:
        tree = convert(p)
        return {**tree, "final_norm": tree["layers"]["0"]["input_norm"]}

    for name, bad, error in (("x", narrow, MappingError), ("y", swapped, MismatchError)):
        with pytest.raises(error, match="final_norm|layers/0/input_norm"):
            rig.subscriber(name, convert=bad).poll(60)


def test_a_conversion_that_computes_is_refused_where_nobody_can_evaluate_it(rig: Rig) -> None:
    """It was taken, and from then on every publish raised: an engine could end the training."""
    params = trainer_params()
    publisher = rig.publisher(params)

    def computes(p: Any) -> Any:
        tree = convert(p)
        return {**tree, "final_norm": tree["final_norm"] + 1}

    with pytest.raises(MismatchError, match=r"computes 'final_norm' \(add\), and the publisher was made"):
        rig.subscriber("x", convert=computes).poll(60)
    publisher.publish(params, Version("a", 0))
    assert same_bits(take(rig.subscriber("y", first=6))[1], convert(params))


def test_iterators_scalars_empty_tensors_constants_and_computed_leaves(rig: Rig) -> None:
    grid, one = mesh((2,), ("fsdp",)), mesh((2,), ("tp",), 4)
    put = lambda x, *spec: jax.device_put(x, NamedSharding(grid, PartitionSpec(*spec)))  # noqa: E731
    source = {
        "w": put(jnp.arange(12.0).reshape(4, 3), "fsdp"),
        "scale": put(jnp.float32(3.0)),
        "none": put(jnp.zeros((0, 5))),
        "i": put(jnp.arange(8, dtype=jnp.int8), "fsdp"),
    }

    def mix(p: Any) -> Any:
        return {
            "padded": jnp.pad(p["w"], ((0, 2), (0, 0))).astype(jnp.bfloat16),
            "scale": p["scale"],
            "none": p["none"],
            "i": p["i"],
            "computed": 1.0 + p["w"],
        }

    shapes = jax.eval_shape(mix, source)
    target = {
        k: jax.ShapeDtypeStruct(
            v.shape, v.dtype, sharding=NamedSharding(one, PartitionSpec(*(["tp"] if k == "padded" else [])))
        )
        for k, v in shapes.items()
    }
    publisher = rig.publisher(source, convert=mix)
    publisher.publish(iter(source.items()), Version("a", 0))
    subscriber = rig.subscriber(target=target, convert=mix)
    _, tree = take(subscriber)
    assert same_bits(tree, mix(source))
    again = {**source, "w": source["w"] * 2, "scale": put(jnp.float32(-0.0))}
    publisher.publish(again, Version("a", 1))
    _, tree = take(subscriber)
    assert same_bits(tree, mix(again))


def test_a_model_without_tensors_still_has_versions(rig: Rig) -> None:
    publisher, subscriber = rig.publisher({}), rig.subscriber(target={}, convert=lambda p: {})
    publisher.publish({}, Version("a", 0))
    version, tree = take(subscriber)
    assert version == Version("a", 0) and tree == {}


def test_where_arrays_do_not_alias_the_slot_each_version_is_put_on_the_devices(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slots_module, "_aliases", lambda arrays, views: False)
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    _, first = take(subscriber)
    expected = convert(params)
    other = trainer_params(seed=5)
    publisher.publish(other, Version("a", 1))
    _, second = take(subscriber)
    assert same_bits(first, expected) and same_bits(second, convert(other))


def flip_in_shm(monkeypatch: pytest.MonkeyPatch, corrupt: threading.Event) -> None:
    """The sender's copies leave one wrong pattern in the slot."""
    real = Table.run

    def run(table: Table, sources: Pinned, targets: Pinned, threads: int = 1) -> None:
        real(table, sources, targets, threads)
        if corrupt.is_set():
            view = next(v for v in targets.values() if v.size > 4)
            # one fixed pattern: a flip in each piece would undo that of the piece before
            view.reshape(-1).view("uint16")[1] = 0x7FC1

    monkeypatch.setattr(Table, "run", run)


def flip_on_the_wire(monkeypatch: pytest.MonkeyPatch, corrupt: threading.Event) -> None:
    """One bit arrives otherwise than it was sent."""
    real = tcp.TcpReceiver.receive

    def receive(self: tcp.TcpReceiver, views: Any, deadline: float, *flow: Any) -> None:
        real(self, views, deadline, *flow)
        if corrupt.is_set():
            view = next(v for v in views.values() if v.size > 4)
            view.reshape(-1).view("uint8")[3] ^= 1

    monkeypatch.setattr(tcp.TcpReceiver, "receive", receive)


@pytest.mark.parametrize(("transport", "flip"), [("shm", flip_in_shm), ("tcp", flip_on_the_wire)])
@pytest.mark.invariant(32)
def test_a_flipped_bit_is_found_and_the_serving_version_stays(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, transport: str, flip: Any
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params, transport), rig.subscriber(transport=transport)
    publisher.publish(params, Version("a", 0))
    _, serving = take(subscriber)
    before, links = convert(params), list(subscriber._links._links.values())
    assert links
    corrupt = threading.Event()
    flip(monkeypatch, corrupt)
    corrupt.set()
    other = trainer_params(seed=3)
    ticket = publisher.publish(other, Version("a", 1))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(MismatchError, match="differ from those sent in: "):
        update.prepare()
    assert subscriber.installed == Version("a", 0) and same_bits(serving, before)
    assert ticket.wait(60).state == "aborted"
    until(lambda: all(link.closed == (transport == "tcp") for link in links))  # a lane may be out of step
    corrupt.clear()
    _, repaired = take(subscriber)
    assert same_bits(repaired, convert(other))


def test_a_stream_of_another_round_is_refused_before_it_is_written(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params, "tcp"), rig.subscriber(transport="tcp")
    publisher.publish(params, Version("a", 0))
    real = tcp.TcpReceiver.expect
    monkeypatch.setattr(tcp.TcpReceiver, "expect", lambda self, round_id: real(self, "another"))
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(ProtocolError, match="of another"):
        update.prepare()
    assert subscriber.installed is None
    assert not any(v.view("uint8").any() for slot in subscriber._slots for v in slot.views.values())
    monkeypatch.undo()
    _, tree = take(subscriber)
    assert same_bits(tree, convert(params))


def until_asleep(receive: Any, asleep: threading.Event) -> Any:
    """A part of a round whose deadline comes soon after the sender has fallen asleep, and not before."""

    def late(link: Inbound, taking: Any, *args: Any) -> Any:
        assert asleep.wait(60)
        return receive(link, dataclasses.replace(taking, deadline=time.monotonic() + 0.2), *args)

    return late


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_sender_that_wakes_up_after_its_round_expired_changes_no_bit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender
    from jaxrl_sync.transfer.transports.tcp import TcpSender

    params = trainer_params()
    publisher, subscriber = rig.publisher(params, transport), rig.subscriber(transport=transport)
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    kind: Any = ShmSender if transport == "shm" else TcpSender
    real, asleep, wake, woken = kind.send, threading.Event(), threading.Event(), threading.Event()

    def send(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        asleep.set()
        wake.wait(120)
        try:
            real(self, ready, sources, deadline, *flow)
        finally:
            woken.set()

    monkeypatch.setattr(kind, "send", send)
    with monkeypatch.context() as patched:
        for name in ("_receive_full", "_parts"):
            patched.setattr(Inbound, name, until_asleep(getattr(Inbound, name), asleep))
        publisher.publish(trainer_params(seed=2), Version("a", 1))
        update = subscriber.poll(60)
        assert update is not None
        with pytest.raises(DeadlineError):
            update.prepare()
    assert asleep.is_set() and subscriber.installed == Version("a", 0)
    monkeypatch.setattr(kind, "send", real)
    last = trainer_params(seed=3)
    publisher.publish(last, Version("a", 2))
    version, tree = take(subscriber)
    assert version == Version("a", 2)
    wake.set()
    assert woken.wait(60)  # the send is over: nothing of it is still to come
    assert same_bits(tree, convert(last))
    assert subscriber.stats()["quarantined"] == 1
    after = trainer_params(seed=4)
    publisher.publish(after, Version("a", 3))
    _, tree = take(subscriber)
    assert same_bits(tree, convert(after))


def test_discarded_updates_are_offered_again(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None
    update.prepare()
    update.discard("not now")
    with pytest.raises(TransferError, match="isn't prepared"):
        update.swap()
    assert subscriber.installed is None
    version, _ = take(subscriber)
    assert version == Version("a", 0)


@pytest.mark.invariant(34)
def test_buffers_stay_until_the_transfer_that_reads_them_has_ended(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from jaxrl_sync.transfer.transports.shm import ShmSender

    params, later = trainer_params(), trainer_params(seed=8)
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    real = ShmSender.send

    def send(self: Any, ready: Any, sources: Any, deadline: float, *flow: Any) -> None:
        if publisher.stats()["published"] == 1:
            publisher.publish(later, Version("a", 1))  # supersedes what is being sent
        real(self, ready, sources, deadline, *flow)

    monkeypatch.setattr(ShmSender, "send", send)
    publisher.publish(params, Version("a", 0))
    version, tree = take(subscriber)
    assert version == Version("a", 0) and same_bits(tree, convert(params))
    version, tree = take(subscriber)
    assert version == Version("a", 1) and same_bits(tree, convert(later))


@pytest.mark.invariant(29)
def test_a_version_that_goes_between_begin_and_ready_is_replaced_by_the_newest(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, later = trainer_params(), trainer_params(seed=8)
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    real = Inbound.take

    def take_late(self: Any, *args: Any) -> Any:
        if publisher.stats()["published"] == 1:
            publisher.publish(later, Version("a", 1))
        return real(self, *args)

    monkeypatch.setattr(Inbound, "take", take_late)
    publisher.publish(params, Version("a", 0))
    update = subscriber.poll(60)
    assert update is not None and update.version == Version("a", 0)
    assert update.prepare().version == update.version == Version("a", 1)
    assert same_bits(update.swap(), convert(later))


@pytest.mark.invariant(65)
def test_hub_restart_is_ridden_out(hub: ServerThread, rig: Rig, token_file: Path) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    port = int(hub.url.rsplit(":", 1)[1])
    hub.close()
    ticket = publisher.publish(params, Version("a", 1))  # training doesn't wait for the hub
    again = ServerThread(token_file, port)
    try:
        version, _ = take(subscriber)
        assert version == Version("a", 1)
        # failed until then, where the engine came back before the publisher and closed its link meanwhile
        until(lambda: ticket.wait(60).state == "committed")
        newest = rig.hub_client().newest()
        assert newest is not None and newest.version == Version("a", 1) and newest.available
        version, _ = take(rig.subscriber("late"))  # layouts were registered again
        assert version == Version("a", 1)
    finally:
        rig.close()
        again.close()


def test_foreign_token_gets_nothing(rig: Rig, hub: ServerThread, tmp_path: Path) -> None:
    from jaxrl_sync.transfer import auth, wire

    params = trainer_params()
    rig.publisher(params)
    auth.create_token(tmp_path / "foreign")
    foreign = auth.load_token(tmp_path / "foreign")
    with pytest.raises(AuthError):
        Subscriber(hub.url, engine_target(), convert, token_file=tmp_path / "foreign")
    address = rig.hub_client().members("publisher")[0].info["address"]
    with wire.dial(address, 60) as sock, pytest.raises(AuthError, match="prove|refused"):
        auth.connect(sock, foreign, rig.hub_client().run_id, {"purpose": "weights"}, 60)


@pytest.mark.invariant(28)
@pytest.mark.invariant(64)
def test_nothing_leaks_over_many_syncs_and_lives(rig: Rig, token_file: Path) -> None:
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, Version("a", 0))
    subscriber = rig.subscriber()
    number = 0

    def sync() -> None:
        nonlocal number
        number += 1
        publisher.publish(params, Version("a", number))
        update = subscriber.poll(60)
        while update is None or update.version.number < number:
            update = subscriber.poll(60)
        update.prepare()
        update.swap()

    take(subscriber)
    for _ in range(10):
        sync()
    fds, names, threads = open_fds(), segments(token_file), threading.active_count()
    for _ in range(200):
        sync()
    assert segments(token_file) == names and len(names) == 2
    # the pool of connections to the hub may grow a little, not with the number of syncs
    until(lambda: open_fds() <= fds + 10 and threading.active_count() <= threads + 1)
    for _ in range(5):
        with rig.open_subscriber("guest", first=6) as guest:
            take(guest)
    # the guests' connections and threads at the hub end a little after them
    until(lambda: publisher.stats()["links"] == 1 and open_fds() <= fds + 12)
    until(lambda: threading.active_count() <= threads + 4)
    assert segments(token_file) == names
    rig.close()
    assert segments(token_file) == []


def test_every_wait_has_a_named_end(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, Version("a", 0))
    take(subscriber)
    ticket = publisher.publish(params, Version("a", 1))
    with pytest.raises(DeadlineError, match=r"a:1 is still open after 0\.2 s at engine-0\.0"):
        ticket.wait(0.2)
    assert not publisher.drain(0.1)
    subscriber.close()
    assert ticket.wait(60).state == "failed"
    with pytest.raises(TransferError, match="closed"):
        subscriber.poll()
    publisher.close()
    with pytest.raises(TransferError, match="closed"):
        publisher.publish(params, Version("a", 2))
