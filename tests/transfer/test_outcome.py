"""What a publisher says of a version when the link to an engine ends at various moments."""

from __future__ import annotations

import concurrent.futures
import threading

import pytest

from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.pairings import Pairings
from tests.transfer.models import Rig, convert, engine_target, same_bits, take, trainer_params, until

A0, A1 = Version("a", 0), Version("a", 1)


def test_a_link_that_ends_after_everything_arrived_leaves_an_unknown_outcome(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, A0)
    take(subscriber)
    ticket = publisher.publish(params, A1)
    update = subscriber.poll(60)
    assert update is not None
    update.prepare()
    (link,) = publisher._listening.links
    until(lambda: link.unconfirmed == A1)
    with subscriber._links._updating:  # a new link would take its place, and leave the outcome to the swap
        link.close()
        outcome = ticket.wait(60)
    assert outcome.state == "unknown" and outcome.engines["engine-0"][0].state == "unknown"
    assert same_bits(update.swap(), convert(params))  # it had everything
    assert subscriber.installed == A1
    client = rig.hub_client()
    until(lambda: client.status()["engines"]["engine-0"]["ranks"]["0"] == {"lineage": "a", "number": 1})


def test_a_link_that_ends_before_is_a_failure(rig: Rig) -> None:
    params = trainer_params()
    publisher, subscriber = rig.publisher(params), rig.subscriber()
    publisher.publish(params, A0)
    take(subscriber)
    until(lambda: all(link.unconfirmed is None for link in publisher._listening.links))
    ticket = publisher.publish(params, A1)
    subscriber.close()
    assert ticket.wait(60).state == "failed"


def test_pairings_that_nobody_asked_for_lately_are_forgotten(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("jaxrl_sync.transfer.pairings.KEPT_PAIRINGS", 2)
    publisher = rig.publisher(trainer_params())
    made: list[str] = []
    real = Pairings._pair

    def counted(self: Pairings, target: str, correspondence: str) -> object:
        made.append(target)
        return real(self, target, correspondence)

    monkeypatch.setattr(Pairings, "_pair", counted)
    for first in (2, 4, 6, 2, 4):
        subscriber = rig.open_subscriber(f"x{first}-{len(made)}", target=engine_target(first))
        until(lambda: publisher.stats()["links"] == 1)
        subscriber.close()
        until(lambda: publisher.stats()["links"] == 0)
    assert len(made) == 5 and len(publisher._pairings._pairings) == 2


def test_who_asks_for_a_layout_that_the_hub_does_not_have_keeps_no_other_engine_waiting(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The blobs were awaited in the turn in which pairings are planned: whoever came stood behind."""
    params = trainer_params()
    publisher = rig.publisher(params)
    publisher.publish(params, A0)
    asked, go_on, real = threading.Event(), threading.Event(), publisher._pairings._hub.get_blob

    def get_blob(digest: str) -> bytes:
        if digest != "not there":
            return real(digest)
        asked.set()
        assert go_on.wait(120)
        raise MismatchError("no such layout")

    monkeypatch.setattr(publisher._pairings._hub, "get_blob", get_blob)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(publisher.pairing, "not there", "not there")
        try:
            assert asked.wait(60)
            assert take(rig.subscriber())[0] == A0
        finally:
            go_on.set()
        with pytest.raises(MismatchError, match="no such layout"):
            stranger.result()
    assert publisher._pairings._turns == {}
