"""A hub that comes back empty, with real publishers, engines and relays: what they say again is enough."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import pytest

from jaxrl_sync.transfer import HubClient, Version
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

A0, A1 = Version("a", 0), Version("a", 1)


class Lives:
    """A hub on one port that can be restarted."""

    def __init__(self, token_file: Path) -> None:
        self._token_file = token_file
        self.server = ServerThread(token_file)

    def restart(self) -> None:
        port = int(self.server.url.rsplit(":", 1)[1])
        self.server.close()
        self.server = ServerThread(self._token_file, port)


@pytest.fixture
def lives(token_file: Path) -> Iterator[Lives]:
    made = Lives(token_file)
    yield made
    made.server.close()


def test_without_the_trainer_engines_serve_late_joiners_of_a_restarted_hub(
    lives: Lives, token_file: Path
) -> None:
    params = trainer_params()
    with Rig(lives.server, token_file) as rig:
        client = rig.hub_client()
        publisher, relay = rig.publisher(params), rig.subscriber("a", relay=True)
        publisher.publish(params, A0)
        take(relay)
        publisher.publish(trainer_params(1), A1)
        take(relay)
        until(lambda: client.status()["engines"]["a"]["ranks"]["0"] == {"lineage": "a", "number": 1})
        publisher.close()
        lives.restart()
        until(lambda: any(m.role == "relay" for m in client.members()))
        until(lambda: client.newest() is not None)
        newest = client.newest()
        assert newest is not None and newest.version == A1 and newest.available
        version, tree = take(rig.subscriber("late", target=engine_target(6)))
        assert version == A1 and same_bits(tree, convert_at(tree))
        rows = client.status()["replicas"]["policy"]
        assert {(r["holder"]["name"], r["state"]) for r in rows} >= {("a", "published")}


def convert_at(tree: Any) -> Any:
    made = jax.jit(convert)(trainer_params(1))
    return jax.tree.map(lambda x, y: jax.device_put(jax.device_get(y), x.sharding), tree, made)


@pytest.mark.parametrize("heard", [False, True], ids=["swapped first", "offered first"])
def test_a_restart_in_the_middle_of_a_round_costs_at_most_that_round(
    lives: Lives, token_file: Path, monkeypatch: pytest.MonkeyPatch, heard: bool
) -> None:
    """Whether the engine swaps before it finds the new hub, or is offered the version again before that."""
    params = trainer_params()
    with Rig(lives.server, token_file) as rig:
        publisher, subscriber = rig.publisher(params), rig.subscriber()
        publisher.publish(params, A0)
        take(subscriber)
        publisher.publish(trainer_params(1), A1)
        update = subscriber.poll(60)
        assert update is not None
        update.prepare()
        http, found, offered = subscriber._hub._http, threading.Event(), subscriber._state.offer
        real = http.request

        def request(*call: Any, **about: Any) -> Any:
            if not (heard or found.is_set()):
                raise httpx.ConnectError("still away")
            return real(*call, **about)

        monkeypatch.setattr(http, "request", request)
        lives.restart()  # it forgets the round, whose version is swapped in all the same
        if heard:
            until(lambda: subscriber._state.offer not in (None, offered))
        assert same_bits(update.swap(), convert(trainer_params(1)))
        found.set()
        if heard:
            assert take(subscriber)[0] == A1  # the round alone: nothing moves
        client = rig.hub_client()

        def known() -> bool:
            status = client.status()
            ranks = status["engines"].get("engine-0", {}).get("ranks", {})
            return bool(ranks) and ranks["0"] == {"lineage": "a", "number": 1} and not status["rounds"]

        until(known)
        assert subscriber.poll(0.2) is None
        tree = trainer_params(2)
        publisher.publish(tree, Version("a", 2))
        version, mine = take(subscriber)
        assert version == Version("a", 2) and same_bits(mine, convert(tree))


def test_what_a_restarted_hub_must_know_is_said_again_whichever_call_finds_it(
    lives: Lives, token_file: Path
) -> None:
    said = threading.Event()
    with HubClient(lives.server.url, token_file) as client:
        lease = client.register("subscriber", "e", info={"model": "policy"}, ttl_s=600, on_rejoin=said.set)
        lives.restart()
        lease.update(want=None)  # registers again: no later heartbeat will find that the hub forgot us
        assert said.wait(60)
