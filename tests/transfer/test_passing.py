"""Frames that a relay hands on as they came, frames made ahead, rounds that begin with their offer."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_sync.transfer import Publisher, Subscriber, Version
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.inbound import Inbound
from jaxrl_sync.transfer.passing import Passed, Passing, Wish, parted
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.transfer.models import Rig, convert, same_bits, trainer_params, until

SPARSE = PayloadSettings("sparse")


def version(number: int) -> Version:
    return Version("l", number)


def frame(source: int, base: int, data: bytes = b"frame") -> Passed:
    return Passed("plan", source, version(base), data)


def wish(base: int, plan: str = "plan") -> Wish:
    return Wish(plan, version(base))


def soon() -> float:
    return time.monotonic() + 0.05


def changed(params: Any, number: int) -> Any:
    """About one element in twenty is another one."""

    def one(leaf: jax.Array) -> jax.Array:
        hit = jax.random.uniform(jax.random.key(number), leaf.shape) < 0.05
        return jnp.where(hit, leaf * 1.5 + 0.1, leaf)

    return jax.tree.map(lambda leaf: jax.device_put(one(leaf), leaf.sharding), params)


def expected_of(params: Any) -> Any:
    return jax.device_get(jax.jit(convert)(params))


def right(tree: Any, params: Any) -> bool:
    """Whether the tree has the bits of the trainer's conversion."""
    expected = expected_of(params)
    return same_bits(tree, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), tree, expected))


def linked(publisher: Publisher, count: int) -> None:
    """Wait until so many engines are linked: the tickets of what is published then wait for them, too."""
    until(lambda: publisher.stats()["links"] == count)


def taken(engine: Any, params: Any) -> Any:
    """Take what is on offer and compare its bits; the report."""
    update = engine.poll(60)
    assert update is not None
    report = update.prepare()
    assert right(update.swap(), params)
    return report


# What is kept.


def test_frames_are_there_when_every_edge_has_brought_one() -> None:
    passing = Passing(2, 1 << 20)
    passing.put([frame(0, 1)])
    with pytest.raises(DeadlineError):
        passing.wait(wish(1), soon())
    passing.put([frame(1, 1)])
    found = passing.wait(wish(1), soon())
    assert found is not None and [f.source for f in found] == [0, 1]
    assert passing.wait(wish(0), soon()) is None
    assert passing.wait(wish(1, "another plan"), soon()) is None


def test_an_edge_that_came_otherwise_leaves_nothing_to_hand_on() -> None:
    passing = Passing(2, 1 << 20)
    passing.put([frame(0, 1)])
    passing.refuse()
    passing.put([frame(1, 1)])
    assert passing.wait(wish(1), soon()) is None
    assert Passing(0, 1 << 20).wait(wish(1), soon()) is None


def test_frames_as_large_as_the_weights_are_not_kept() -> None:
    passing = Passing(1, 1 << 10)
    passing.put([frame(0, 1, bytes((1 << 20) + 1))])
    assert passing.wait(wish(1), soon()) is None


def test_sums_of_edges_add_up() -> None:
    passing = Passing(2, 1 << 20)
    passing.verified({"x": (1, 2), "y": (3, 4)})
    passing.verified({"x": (0xFFFFFFFF, 1)})
    assert passing.digests == {"x": (0, 3), "y": (3, 4)}


@pytest.mark.parametrize(
    "told",
    [None, "text", [[0, 3]], [[0, 3], [0, 2]], [[0, 3], [1, 3]], [[0, 3], [1, -1]], [[0, 3], [1, 2.0]]],
)
def test_what_does_not_add_up_is_refused(told: object) -> None:
    with pytest.raises(ProtocolError):
        parted(told, bytearray(b"abcde"), "plan", version(0), [0, 1])


def test_frames_are_parted_as_they_were_joined() -> None:
    found = parted([[1, 3], [0, 2]], bytearray(b"abcde"), "plan", version(0), [0, 1])
    assert [(f.source, bytes(f.data)) for f in found] == [(1, b"abc"), (0, b"de")]


@pytest.mark.parametrize("told", ["text", {"plan": 1}, {"plan": "p"}, {"plan": "p", "base": {"lineage": 3}}])
def test_a_wish_that_says_nothing_is_refused(told: object) -> None:
    with pytest.raises(ProtocolError):
        Wish.from_json(told)
    assert Wish.from_json(None) is None
    assert Wish.from_json(wish(3).to_json()) == wish(3)


# Relays.


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_the_trainers_frame_goes_on_to_equal_replicas_as_it_is(rig: Rig, transport: str) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, transport, payload=SPARSE, fanout="chain")
    names = {"relay": True, "payload": SPARSE}
    engines = [rig.subscriber(name, transport, **names) for name in "abc"]
    linked(publisher, 3)
    for number in range(5):
        ticket = publisher.publish(params, version(number))
        order = engines[number % 3 :] + engines[: number % 3]  # another one is the first each time
        reports = [taken(engine, params) for engine in order]
        sources = [r.source.split(".")[0] for r in reports]
        assert sources == ["publisher", "relay", "relay"]
        assert {r.payload for r in reports} == {"frame" if number else "full"}
        assert len({r.nbytes for r in reports}) == 1
        assert ticket.wait(60).state == "committed"
        params = changed(params, number)
    relays = [e._relay for e in engines if e._relay is not None]
    assert [r.chains.stats()["frames_encoded"] for r in relays] == [0] * len(engines)
    copies = [s.copied for e in engines for s in e._links._shadows()]
    assert sum(copies) == len(engines)  # the second slot's first frame; after that changes are enough


@pytest.mark.parametrize("verify", [True, False])
def test_a_reader_that_is_behind_gets_what_the_relay_makes_from_its_slots(rig: Rig, verify: bool) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE, fanout="chain", verify=verify)
    first, late = (rig.subscriber(n, "tcp", relay=True, payload=SPARSE, verify=verify) for n in "ab")
    hub = rig.hub_client()
    for number in range(3):
        publisher.publish(params, version(number))
        taken(first, params)
        if number != 1:
            report = taken(late, params)
            assert report.source == "relay.a" and report.version == version(number)
        else:
            until(lambda: (found := hub.newest()) is not None and found.version == version(1))
        params = changed(params, number)


def test_a_reader_of_another_mesh_is_not_handed_frames(rig: Rig) -> None:
    from tests.transfer.test_relay import whole_target

    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE, fanout="chain")
    relay = rig.subscriber("a", "tcp", first=0, relay=True, payload=SPARSE)
    other = rig.subscriber("b", "tcp", target=whole_target(3), payload=SPARSE)
    for number in range(3):
        publisher.publish(params, version(number))
        for engine in (relay, other):
            assert taken(engine, params).version == version(number)
        params = changed(params, number)


class Gate:
    """Holds the verification of one engine, then lets it go on or fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
        self.reached, self.open, self.error = threading.Event(), threading.Event(), ""
        real = Inbound.verify

        def verify(link: Any, taking: Any) -> None:
            if link._config.engine == engine and taking.offer.version.number == 1 and not self.open.is_set():
                self.reached.set()
                assert self.open.wait(120)
                if self.error:
                    raise MismatchError(self.error)
            real(link, taking)

        monkeypatch.setattr(Inbound, "verify", verify)


def relay_and_reader(rig: Rig) -> tuple[Any, Publisher, Subscriber, Subscriber]:
    """Parameters, who published them as version 0, and two engines that took it: one reads from the other."""
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE, fanout="chain")
    relay, reader = (rig.subscriber(n, "tcp", relay=True, payload=SPARSE) for n in "ab")
    linked(publisher, 2)
    ticket = publisher.publish(params, version(0))
    for engine in (relay, reader):
        taken(engine, params)
    assert ticket.wait(60).state == "committed"  # the publisher has its baseline: what follows is a frame
    return params, publisher, relay, reader


@pytest.mark.parametrize("fails", [False, True])
def test_a_frame_is_handed_on_before_the_relay_has_verified_its_own(
    rig: Rig, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, publisher, relay, reader = relay_and_reader(rig)
    gate = Gate(monkeypatch, "a")
    params = changed(params, 0)
    publisher.publish(params, version(1))
    ends: dict[str, Any] = {}

    def run(engine: Any, name: str) -> None:
        update = engine.poll(60)
        assert update is not None
        try:
            ends[name] = update.prepare()
            update.swap()
        except (MismatchError, PeerLost) as error:
            ends[name] = error

    threads = [threading.Thread(target=run, args=(relay, "a"))]
    threads[0].start()
    assert gate.reached.wait(60)
    threads.append(threading.Thread(target=run, args=(reader, "b")))
    threads[1].start()
    until(lambda: any(link._applied for link in reader._links.all))
    assert not ends  # it waits for the sums
    gate.error = "wrong bits" if fails else ""
    gate.open.set()
    for thread in threads:
        thread.join(90)
    if not fails:
        assert (ends["a"].payload, ends["b"].payload, ends["b"].source) == ("frame", "frame", "relay.a")
        return
    assert isinstance(ends["a"], MismatchError) and isinstance(ends["b"], PeerLost)
    assert reader.installed == version(0) and not reader.poisoned
    for engine in (relay, reader):
        assert taken(engine, params).version == version(1)


def test_a_frame_with_other_sums_is_not_installed(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params, publisher, relay, reader = relay_and_reader(rig)
    params = changed(params, 0)
    publisher.publish(params, version(1))
    taken(relay, params)
    real = vars(Passing)["digests"].fget
    assert real is not None
    monkeypatch.setattr(
        Passing, "digests", property(lambda p: {k: (a ^ 1, b) for k, (a, b) in real(p).items()})
    )
    update = reader.poll(60)
    assert update is not None
    with pytest.raises(MismatchError, match="differ"):
        update.prepare()
    assert reader.installed == version(0)
    monkeypatch.undo()
    assert taken(reader, params).version == version(1)


# Ahead of the question.


def test_a_frame_is_made_before_anybody_asks_for_it(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    engine = rig.subscriber("a", "tcp")
    linked(publisher, 1)
    ticket = publisher.publish(params, version(0))
    taken(engine, params)
    assert ticket.wait(60).state == "committed"  # else nobody is known who will ask for a frame
    params = changed(params, 0)
    publisher.publish(params, version(1))
    until(lambda: publisher.stats()["frames_encoded"] == 1)
    assert taken(engine, params).payload == "frame"
    assert publisher.stats()["frames_encoded"] == 1


class Begins:
    """Counts the calls by which engines begin rounds, and which engines let the hub begin them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.eager, real = 0, set[str](), HubClient.call

        def call(client: Any, path: str, body: dict[str, Any], *args: Any, **options: Any) -> Any:
            self.count += path == "/v1/event/advance" and body["to"] == "begun"
            if path == "/v1/watch" and body["begin_s"]:
                self.eager.add(body["name"])
            return real(client, path, body, *args, **options)

        monkeypatch.setattr(HubClient, "call", call)


def test_an_eager_engine_begins_with_the_offer(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", fanout="chain")
    options = {"relay": True, "eager": True}
    begins = Begins(monkeypatch)
    monkeypatch.setattr("jaxrl_sync.transfer.holding.APPEAR_S", 60.0)  # however late the first is
    engines = [rig.subscriber(n, "tcp", **options) for n in "ab"]
    until(lambda: begins.eager == {"a", "b"})  # once their links are there
    for number in range(3):
        ticket = publisher.publish(params, version(number))
        with concurrent.futures.ThreadPoolExecutor(2) as pool:
            reports = list(pool.map(lambda engine, tree=params: taken(engine, tree), engines))
        assert sorted(r.source.split(".")[0] for r in reports) == ["publisher", "relay"]
        assert ticket.wait(60).state == "committed"
    assert begins.count == 0


def test_an_eager_engine_that_rolled_back_takes_the_next_version(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp")
    engine = rig.subscriber("a", "tcp", eager=True)
    for number in range(2):
        publisher.publish(params, version(number))
        taken(engine, params)
    engine.rollback()
    assert engine.installed == version(0)
    assert engine.poll(1.0) is None
    publisher.publish(params, version(2))
    assert taken(engine, params).version == version(2)


def test_an_eager_engine_with_one_slot_begins_itself(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp")
    engine = rig.subscriber("a", "tcp", eager=True, slots=1)
    begins = Begins(monkeypatch)
    publisher.publish(params, version(0))
    assert taken(engine, params).version == version(0)
    assert begins.count == 1
    assert not engine.poisoned
