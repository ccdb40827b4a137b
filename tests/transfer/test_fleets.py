"""Fleets: worlds of several ranks that relay, sites that are seeded once, joiners without a trainer."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.ports import free_port
from tests.transfer import models
from tests.transfer.models import Rig, convert, same_bits, take, trainer_params, until
from tests.transfer.peer import bits, shard_bits
from tests.transfer.test_in_place import changed
from tests.transfer.test_processes import Cast, cast, expected_trees, reach  # noqa: F401

BYTES = 49_920


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_joiner_is_served_although_the_trainer_is_gone(rig: Rig, transport: str) -> None:
    params = trainer_params()
    expected = jax.device_get(jax.jit(convert)(params))
    publisher = rig.publisher(params, transport)
    relay = rig.subscriber("a", transport, relay=True)
    publisher.publish(params, Version("a", 3))
    take(relay)
    publisher.close()
    joiner = rig.subscriber("b", transport, relay=True, first=6)
    version, tree = take(joiner)
    assert version == Version("a", 3)
    assert same_bits(tree, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), tree, expected))
    relay.close()  # and it serves the next one, without the first
    version, tree = take(rig.subscriber("c", transport, first=0))
    assert same_bits(tree, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), tree, expected))


def test_a_site_is_seeded_once_also_with_what_changed(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(
        params, "tcp", payload=PayloadSettings("sparse", CodingRules(whole=False)), fanout="tree"
    )
    places = {"a": 0, "b": 2, "c": 4}
    there = [rig.subscriber(n, "tcp", site="far", relay=True, first=f) for n, f in places.items()]
    sent = []
    for number in range(3):
        params = changed(params)
        publisher.publish(params, Version("a", number))
        outside = []
        for engine in there:
            update = engine.poll(60)
            assert update is not None
            report = update.prepare()
            outside += [report.nbytes] if report.source == "publisher.trainer" else []
            assert report.nbytes <= BYTES
            update.swap()
        assert len(outside) == 1
        sent.append(outside[0])
        until(lambda: publisher.stats()["bytes_sent"] == sum(sent))
    assert sent[0] == BYTES and max(sent[1:]) < BYTES / 8
    for engine in there:
        serving = engine._slots[engine._state.serving or 0].tree()
        expected = jax.device_get(jax.jit(convert)(params))
        assert same_bits(serving, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), serving, expected))


@pytest.mark.slow
def test_an_engine_of_two_processes_serves_others_of_one_and_of_two(cast: Cast) -> None:  # noqa: F811
    worlds: dict[str, dict[str, Any]] = {
        w: {"coordinator": f"127.0.0.1:{free_port()}", "size": 2} for w in ("trainer", "x", "y")
    }
    # a round that began anew would be another source's, and its bytes be counted twice
    patient: dict[str, Any] = {"ttl_s": models.LEASE_S, "timeout_s": 120.0}
    chained = {"config": {"fanout": "chain"}, "ttl_s": models.LEASE_S}
    relays = {"config": {"relay": True}, **patient}
    trainers = [cast.trainer("a", 2, rank=r, **chained, **worlds["trainer"]) for r in range(2)]
    first = [cast.engine("x", 1, rank=r, **relays, **worlds["x"]) for r in range(2)]
    for peer in (*trainers, *first):
        peer.expect("ready")
    (expected,) = expected_trees(1)
    for peer in trainers:
        peer.tell(publish=0)
    put = jax.tree.map(lambda t, x: jax.device_put(x, t.sharding), models.engine_target(), expected)
    for rank, peer in enumerate(first):
        assert reach(peer, "a:0", 120)["digest"] == shard_bits(put, rank)
    second = [cast.engine("y", 1, rank=r, **relays, **worlds["y"]) for r in range(2)]
    seen = [reach(peer, "a:0", 120) for peer in second]
    assert [s["digest"] for s in seen] == [shard_bits(put, r) for r in range(2)]
    assert {s["source"] for s in seen} == {"relay.x"}
    last = reach(cast.engine("z", **patient), "a:0", 120)
    assert last["digest"] == bits(expected) and last["source"].startswith("relay.")

    def sent() -> int:
        for peer in trainers:
            peer.tell(stats=1)
        return sum(int(peer.expect("bytes_sent")["bytes_sent"]) for peer in trainers)

    until(lambda: sent() >= BYTES)  # counted a moment after the engine has it
    assert sent() == BYTES
