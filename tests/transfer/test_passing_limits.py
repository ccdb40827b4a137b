"""What frames that are kept, made ahead or handed on may cost."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Mapping
from typing import Any

import pytest

from jaxrl_sync.transfer.errors import PeerLost, TransferError
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.inbound import Inbound
from jaxrl_sync.transfer.payload.chains import Chains, Use
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.transfer.models import Rig, trainer_params, until
from tests.transfer.test_passing import SPARSE, changed, relay_and_reader, taken, version


def test_frames_are_kept_by_relays_only(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    alone, relay = rig.subscriber("a", "tcp"), rig.subscriber("b", "tcp", relay=True)
    for number in range(3):
        publisher.publish(params, version(number))
        for engine in (alone, relay):
            taken(engine, params)
        params = changed(params, number)
    kept = [[len(c.passing._frames) for c in e._holding._contents.values()] for e in (alone, relay)]
    assert kept == [[0, 0], [1, 1]]


def _waiting(publisher: Any, count: int) -> bool:
    return bool(publisher._encoder._work_queue.qsize() == count)


def test_versions_that_wait_to_be_encoded_keep_no_buffers(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    engine = rig.subscriber("a", "tcp")
    publisher.publish(params, version(0))
    taken(engine, params)
    for pool in (publisher._finder, publisher._encoder):  # it may still be looked up, and encoded ahead
        pool.submit(int).result(60)
    reached, go_on, made = threading.Event(), threading.Event(), list[int]()

    def ahead(chains: Any, links: Any, about: Any, shards: Any) -> None:
        made.append(about.number)
        reached.set()
        assert go_on.wait(120)

    monkeypatch.setattr(Chains, "ahead", ahead)
    shards = list[weakref.ref[Any]]()
    for number in range(1, 7):
        publisher.publish(params, version(number))
        held = publisher._retained.find(version(number))
        assert held is not None
        shards.append(weakref.ref(next(iter(held._shards.values()))))
        del held
        assert reached.wait(60)
        until(functools.partial(_waiting, publisher, number - 1))
    alive = [number for number, ref in enumerate(shards, 1) if ref() is not None]
    assert alive[0] == 1 and len(alive) <= 1 + publisher.config.keep_versions
    go_on.set()
    until(lambda: publisher._encoder._work_queue.qsize() == 0)
    until(lambda: made == [1, 6])


def test_anchors_come_as_often_where_frames_are_handed_on(rig: Rig) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE, fanout="chain")
    every = PayloadSettings("sparse", anchor_every=2)
    relay, reader = (rig.subscriber(n, "tcp", relay=True, payload=every) for n in "ab")
    kinds = []
    for number in range(6):
        publisher.publish(params, version(number))
        taken(relay, params)
        kinds.append(taken(reader, params).payload)
        params = changed(params, number)
    assert kinds == ["full", "frame", "frame", "full", "frame", "frame"]


def test_an_anchor_asked_for_during_a_round_does_not_change_what_was_wished_for(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    params, publisher, relay, reader = relay_and_reader(rig)
    params = changed(params, 0)
    publisher.publish(params, version(1))
    taken(relay, params)
    real = Inbound._receive_frame

    def receive(link: Inbound, nbytes: object, deadline: float) -> bytearray:
        data = real(link, nbytes, deadline)
        reader.request_anchor()
        return data

    monkeypatch.setattr(Inbound, "_receive_frame", receive)
    update = reader.poll(60)
    assert update is not None
    with pytest.raises(TransferError, match="base"):
        update.prepare()
    monkeypatch.undo()
    report = taken(reader, params)
    assert (report.payload, report.version) == ("full", version(1))


@pytest.mark.parametrize("told", [float("inf"), float("nan"), -1.0, 1e300, "long", 10**400])
def test_times_that_can_not_be_are_not_believed(
    rig: Rig, told: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, "tcp", payload=SPARSE)
    engine = rig.subscriber("a", "tcp")
    heard, real = list[Any](), Use.confirmed

    def confirmed(use: Use, about: Any, nbytes: int, times: Mapping[str, float]) -> None:
        heard.append(times)
        real(use, about, nbytes, times)

    monkeypatch.setattr(Use, "confirmed", confirmed)
    monkeypatch.setattr(Inbound, "times", lambda link, offer: {"arrive_s": told, "round_s": told})
    assert publisher.publish(params, version(0)) and taken(engine, params)
    until(lambda: heard == [{}])
    publisher.publish(params, version(1))
    assert taken(engine, params).payload == "frame"  # the link goes on


def test_a_round_that_was_begun_for_an_engine_that_never_heard_is_given_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The hub's answer was lost, and meanwhile the engine went back: it was offered nothing else for ever."""
    real, back, lost, heard = HubClient.call, threading.Event(), threading.Event(), threading.Event()

    def call(client: HubClient, path: str, body: dict[str, Any], *args: Any, **options: Any) -> Any:
        if path == "/v1/watch" and not lost.is_set():  # as in a poll from before the engine went back
            body = {**body, "begin_s": 60.0}
        seen = real(client, path, body, *args, **options)
        begun = path == "/v1/watch" and (seen.get("offer") or {}).get("begun")
        if begun and back.is_set() and not lost.is_set():
            lost.set()
            raise PeerLost("the answer is lost")
        if path == "/v1/event/fail" and lost.is_set():
            heard.set()
        return seen

    monkeypatch.setattr(HubClient, "call", call)
    params = trainer_params()
    publisher = rig.publisher(params, "tcp")
    engine = rig.subscriber("a", "tcp", eager=True)
    for number in range(2):
        publisher.publish(params, version(number))
        taken(engine, params)
    back.set()
    engine.rollback()
    assert lost.wait(60) and heard.wait(60)
    publisher.publish(params, version(2))
    assert taken(engine, params).version == version(2)
