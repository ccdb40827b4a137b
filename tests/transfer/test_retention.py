"""Which versions a publisher keeps: decisions on literal data, then pins with real publishers and engines."""

from __future__ import annotations

import dataclasses
import threading
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, Version
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, TransferError
from jaxrl_sync.transfer.hub.client import HubClient, HubRefused
from jaxrl_sync.transfer.retained import RetentionFull
from jaxrl_sync.transfer.retention import Decision, Stock, decide
from tests.transfer.models import (
    Rig,
    ServerThread,
    convert,
    engine_target,
    same_bits,
    take,
    trainer_params,
    until,
)

V = [Version("a", n) for n in range(6)]


def stock(number: int, copied: bool = False, exported: bool = True) -> Stock:
    return Stock(V[number], 10, copied, exported)


@pytest.mark.parametrize(
    ("held", "pinned", "keep", "limit", "expected"),
    [
        ([stock(0)], [], 1, None, Decision()),
        ([stock(0), stock(1)], [], 1, None, Decision(retire=(V[0],))),
        ([stock(0), stock(1), stock(2)], [], 2, None, Decision(retire=(V[0],))),
        ([stock(0)], [V[0]], 1, None, Decision(copy=(V[0],))),
        ([stock(0, copied=True)], [V[0]], 1, None, Decision()),
        ([stock(0, copied=True), stock(1)], [V[0]], 1, None, Decision(shed=(V[0],))),
        ([stock(0, copied=True, exported=False), stock(1)], [V[0]], 1, None, Decision()),
        ([stock(0, copied=True, exported=False), stock(1)], [], 1, None, Decision(retire=(V[0],))),
        ([stock(0), stock(1)], [V[0]], 1, 9, Decision(wait=(V[0],))),
        ([stock(0), stock(1)], [V[0]], 1, 10, Decision(copy=(V[0],), wait=(V[0],))),
        ([stock(0, True, False), stock(1), stock(2)], [V[0], V[1]], 1, 19, Decision(wait=(V[1],))),
        (
            [stock(0, True, False), stock(1), stock(2)],
            [V[1]],
            1,
            19,
            Decision(retire=(V[0],), copy=(V[1],), wait=(V[1],)),
        ),
        ([stock(0), stock(1)], [V[5]], 1, None, Decision(retire=(V[0],))),
    ],
)
def test_decisions(held: Any, pinned: Any, keep: int, limit: int | None, expected: Decision) -> None:
    assert decide(held, pinned, keep, limit) == expected


def test_the_newest_version_is_never_dropped() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        decide([stock(0)], [], 0)
    for pinned in ([], [V[0]], [V[1]]):
        decision = decide([stock(0), stock(1)], pinned, 1, 0)
        assert V[1] not in decision.retire + decision.shed + decision.wait


@pytest.fixture
def params() -> Any:
    return trainer_params()


def publish(publisher: Publisher, number: int) -> Any:
    tree = trainer_params(number)
    publisher.publish(tree, Version("a", number))
    return tree


def wanting(rig: Rig, engine: str, number: int) -> Subscriber:
    subscriber = rig.subscriber(engine)
    subscriber.want(Version("a", number))
    return subscriber


def test_a_pinned_version_stays_for_late_engines_while_training_moves_on(rig: Rig, params: Any) -> None:
    publisher, early, client = rig.publisher(params), rig.subscriber("early"), rig.hub_client()
    trees = {}
    for number in range(2):
        trees[number] = publish(publisher, number)
        assert take(early)[0] == Version("a", number)
    client.pin(Version("a", 1), "evaluation")
    for number in range(2, 5):
        trees[number] = publish(publisher, number)
        assert take(early)[0] == Version("a", number)
    until(lambda: publisher.stats()["copied_bytes"] > 0)
    version, tree = take(wanting(rig, "late", 1))
    assert version == Version("a", 1) and same_bits(tree, convert(trees[1]))
    until(lambda: [row["state"] for row in held(client)] == ["offloaded", "published"])
    client.unpin(Version("a", 1), "evaluation")
    until(lambda: publisher.stats()["copied_bytes"] == 0)
    until(lambda: [row["version"]["number"] for row in held(client)] == [4])
    with pytest.raises(HubRefused, match="nobody holds"):
        client.pin(Version("a", 1), "evaluation")


def newest(client: HubClient) -> Version | None:
    found = client.newest()
    return None if found is None else found.version


def held(client: Any) -> list[Any]:
    rows = client.status()["replicas"]["policy"]
    return [row for row in rows if row["holder"]["role"] == "publisher"]


def test_a_version_pinned_before_any_engine_came_is_kept_as_a_snapshot(rig: Rig, params: Any) -> None:
    publisher, client = rig.publisher(params), rig.hub_client()
    tree = publish(publisher, 0)
    until(lambda: client.newest() is not None)
    client.pin(Version("a", 0), "evaluation")
    publish(publisher, 1)
    version, mine = take(wanting(rig, "late", 0))
    assert version == Version("a", 0) and same_bits(mine, convert(tree))
    until(lambda: newest(client) == V[1])  # before that, the pinned one is offered to everybody
    version, mine = take(rig.subscriber("later"))
    assert version == Version("a", 1) and same_bits(mine, convert(trainer_params(1)))


def test_a_publish_waits_for_room_and_says_what_is_missing(
    hub: ServerThread, token_file: Path, rig: Rig, params: Any
) -> None:
    config = PublisherConfig(ttl_s=60.0, timeout_s=2.0, offload_limit_bytes=1)
    client = rig.hub_client()
    with Publisher(hub.url, params, token_file=token_file, config=config) as publisher:
        publish(publisher, 0)
        until(lambda: client.newest() is not None)
        client.pin(Version("a", 0), "evaluation")
        with pytest.raises(RetentionFull, match=r"pinned a:0 .*limit 1 bytes"):
            publish(publisher, 1)
        assert publisher.stats()["published"] == 1
        publisher.config = dataclasses.replace(config, timeout_s=60.0)
        release = threading.Timer(0.1, lambda: client.unpin(Version("a", 0), "evaluation"))
        release.start()
        publish(publisher, 1)  # waited until it was released
        release.join()
        until(lambda: newest(client) == Version("a", 1))


def test_pins_end_with_the_lease_of_their_owner(rig: Rig, params: Any) -> None:
    publisher, client = rig.publisher(params), rig.hub_client()
    publish(publisher, 0)
    until(lambda: client.newest() is not None)
    lease = client.register("engine", "engine-0", info={"model": "policy"})
    client.pin(Version("a", 0), "engine-0", lease=lease)
    assert client.status()["pins"] == [
        {"model": "policy", "version": {"lineage": "a", "number": 0}, "by": ["engine-0"]}
    ]
    lease.close()
    until(lambda: client.status()["pins"] == [])


def test_pins_survive_a_restart_of_the_hub(token_file: Path, params: Any) -> None:
    hub = ServerThread(token_file)
    port = int(hub.url.rsplit(":", 1)[1])
    try:
        with Rig(hub, token_file) as rig:
            publisher, client = rig.publisher(params), rig.hub_client()
            tree = publish(publisher, 0)
            until(lambda: client.newest() is not None)
            lease = client.register("engine", "engine-0", ttl_s=60, info={"model": "policy"})
            client.pin(Version("a", 0), "engine-0", lease=lease)
            hub.close()
            hub = ServerThread(token_file, port)
            until(lambda: bool(client.status()["pins"]))
            until(lambda: client.newest() is not None)
            for number in range(1, 4):
                publish(publisher, number)
            version, mine = take(wanting(rig, "late", 0))
            assert version == Version("a", 0) and same_bits(mine, convert(tree))
    finally:
        hub.close()


def test_unpublish_waits_for_its_readers_and_keeps_what_is_needed(rig: Rig, params: Any) -> None:
    publisher, client = rig.publisher(params), rig.hub_client()
    publish(publisher, 0)
    subscriber = rig.subscriber("x")
    update = subscriber.poll(60)
    assert update is not None
    with pytest.raises(TransferError, match="no other reliable copy"):
        publisher.unpublish(Version("a", 0), 5)
    held_back = client.register("subscriber", "slow", info={"model": "policy"})
    round_id = held_back.call("/v1/watch", {"timeout_s": 5})["offer"]["round"]
    held_back.call("/v1/event/advance", {"round": round_id, "to": "begun"})
    with pytest.raises(DeadlineError, match="still read by slow"):
        publisher.unpublish(Version("a", 0), 0.3, force=True)
    done = threading.Thread(target=publisher.unpublish, args=(Version("a", 0), 30), kwargs={"force": True})
    done.start()
    held_back.call("/v1/event/fail", {"round": round_id, "reason": "enough"})
    done.join(90)
    assert not done.is_alive() and held(client) == []
    left = client.newest()
    assert left is not None and not left.available


def test_an_iterator_is_held_against_the_source(rig: Rig, params: Any) -> None:
    from jaxrl_sync.sharding.paths import leaves_by_path

    publisher, subscriber = rig.publisher(params), rig.subscriber()
    flat = leaves_by_path(params)
    first, *others = flat
    publisher.publish(iter(flat.items()), Version("a", 0))
    assert same_bits(take(subscriber)[1], convert(params))
    small = jax.tree.map(lambda x: x[:1], flat[first])
    cases = [
        ([(p, flat[p]) for p in others], rf"missing: {first}"),
        ([*flat.items(), ("other/w", flat[first])], r"not expected: other/w"),
        ([*flat.items(), (first, flat[first])], rf"given twice: {first}"),
        ([(first, small), *((p, flat[p]) for p in others)], rf"'{first}' is .*, expected"),
        ([(first, flat[first].astype("bfloat16")), *((p, flat[p]) for p in others)], r"is bfloat16"),
        ([(first, [1.0]), *((p, flat[p]) for p in others)], r"."),
        ([flat[first]], r"expected \(path, array\)"),
    ]
    for pairs, message in cases:
        with pytest.raises(MismatchError, match=message):
            publisher.publish(iter(pairs), Version("a", 1))
    assert publisher.stats()["published"] == 1


def test_a_kind_of_export_that_nobody_uses_is_forgotten(
    rig: Rig, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_sync.transfer.publisher.KINDS_LINGER", 1)
    publisher = rig.publisher(params)
    publish(publisher, 0)
    subscriber = rig.open_subscriber("x", target=engine_target())
    take(subscriber)
    publish(publisher, 1)
    assert len(publisher._kinds) == 1
    subscriber.close()
    until(lambda: not publisher._kind_of)  # the link has ended, and what it was told of is noted
    for number in (2, 3):
        publish(publisher, number)
    assert publisher._kinds == {}
    tree = publish(publisher, 4)
    version, mine = take(rig.subscriber("y"))
    assert version == Version("a", 4) and same_bits(mine, convert(tree))


def test_a_pin_that_ends_makes_room_for_the_copy_of_another(rig: Rig, params: Any) -> None:
    size = sum(x.nbytes for x in jax.tree.leaves(params))
    publisher = rig.publisher(params, keep_versions=1, offload_limit_bytes=size * 3 // 2)
    client = rig.hub_client()
    publish(publisher, 0)
    until(lambda: newest(client) == V[0])
    client.pin(V[0], "first")
    publish(publisher, 1)
    until(lambda: newest(client) == V[1])
    client.pin(V[1], "second")
    client.unpin(V[0], "first")
    publish(publisher, 2)  # RetentionFull where nobody copies the second
    until(lambda: newest(client) == V[2])
    assert size <= publisher.stats()["copied_bytes"] < 2 * size


def test_a_pin_whose_word_to_the_hub_was_lost_is_told_again(rig: Rig, params: Any) -> None:
    """The pin was noted before its word was lost: it was never confirmed, and who pinned waited in vain."""
    publisher, client = rig.publisher(params, offload_limit_bytes=0), rig.hub_client()
    publish(publisher, 0)
    until(lambda: client.newest() is not None)
    call, lost = publisher._lease.call, list[str]()

    def losing(path: str, *args: Any, **options: Any) -> Any:
        if path == "/v1/event/hold" and not lost:
            lost.append(path)
            raise PeerLost("the hub is away")
        return call(path, *args, **options)

    publisher._lease.call = losing  # type: ignore[method-assign]
    client.pin(V[0], "evaluation")  # DeadlineError where nobody says it again
    assert lost and held(client)[0]["pinned_by"] == ["evaluation"]


def test_a_pin_that_ends_as_a_grace_does_is_dropped(
    rig: Rig, params: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kept while a restarted hub heard of pins, and then for ever: publishing stopped."""
    grace_s, seen = [0.0], list[set[Version]]()
    told = Publisher._pinned

    def ends_in_between(self: Publisher, versions: set[Version]) -> None:
        told(self, versions)
        seen.append(versions)
        if grace_s[0] and not versions:
            grace_s[0] = 0.0

    monkeypatch.setattr(Publisher, "_grace_s", property(lambda self: grace_s[0]))
    monkeypatch.setattr(Publisher, "_pinned", ends_in_between)
    monkeypatch.setattr("jaxrl_sync.transfer.publisher.POLL_S", 0.2)
    publisher = rig.publisher(params, offload_limit_bytes=0)
    client = rig.hub_client()
    publish(publisher, 0)
    until(lambda: client.newest() is not None)
    client.pin(V[0], "evaluation")
    grace_s[0] = 60.0
    client.unpin(V[0], "evaluation")
    until(lambda: bool(seen) and not seen[-1])
    publish(publisher, 1)  # RetentionFull where the pin stays
    until(lambda: newest(client) == V[1])


def test_a_withdrawal_goes_on_over_a_restart_of_the_hub(token_file: Path, params: Any) -> None:
    """The new hub took the version for published, and its withdrawal for none, until the deadline."""
    hub = ServerThread(token_file)
    port = int(hub.url.rsplit(":", 1)[1])
    try:
        with Rig(hub, token_file) as rig:
            publisher, client = rig.publisher(params), rig.hub_client()
            for number in range(2):
                publish(publisher, number)
                until(lambda number=number: newest(client) == V[number])  # type: ignore[misc]
            slow = client.register("subscriber", "slow", info={"model": "policy"}, ttl_s=60)
            round_id = slow.call("/v1/watch", {"timeout_s": 5})["offer"]["round"]
            slow.call("/v1/event/advance", {"round": round_id, "to": "begun"})
            done = threading.Thread(target=publisher.unpublish, args=(V[1], 60), kwargs={"force": True})
            done.start()
            until(lambda: [row["state"] for row in held(client)] == ["draining"])
            hub.close()
            hub = ServerThread(token_file, port)
            done.join(90)
            assert not done.is_alive()
            until(lambda: held(client) == [])
    finally:
        hub.close()


def test_a_hub_that_lost_a_publisher_hears_what_it_holds_though_the_newest_is_withdrawn(
    rig: Rig, params: Any
) -> None:
    """Its older one was refused as the newest version, and with it all that it holds was not heard."""
    publisher, client = rig.publisher(params, keep_versions=2), rig.hub_client()
    for number in range(2):
        publish(publisher, number)
        until(lambda number=number: newest(client) == V[number])  # type: ignore[misc]
    publisher.unpublish(V[1], 20, force=True)
    client.call("/v1/event/leave", publisher._lease.identity)  # as when its lease runs out
    until(lambda: [row["version"]["number"] for row in held(client)] == [0])
    assert newest(client) == V[1]
    assert take(wanting(rig, "late", 0))[0] == V[0]
