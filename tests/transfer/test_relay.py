"""Engines that serve engines: equal and other meshes, chains that pass parts on, readers that hold a slot."""

from __future__ import annotations

import threading
from typing import Any

import jax
import pytest

from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.transports import tcp
from jaxrl_sync.transfer.transports.shm import ShmSender
from jaxrl_sync.transfer.transports.tcp import TcpSender
from tests.transfer.models import (
    CONFIG,
    Rig,
    convert,
    engine_target,
    mesh,
    same_bits,
    take,
    trainer_params,
    until,
)

BYTES = 49_920
"""Of one version of the small model in bf16 on two devices."""


PLACES = {"a": 0, "b": 2, "c": 4}
"""Three engines and the first of each one's two devices."""


def whole_target(device: int) -> Any:
    """The engine tree on one device."""
    return qwen3.engine_abstract(CONFIG, mesh((1,), ("tp",), device))


def expected_of(params: Any) -> Any:
    return jax.device_get(jax.jit(convert)(params))


def right(tree: Any, expected: Any) -> bool:
    """Whether the tree has the bits of the trainer's conversion, whatever its mesh."""
    return same_bits(tree, jax.tree.map(lambda t, e: jax.device_put(e, t.sharding), tree, expected))


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.parametrize("mesh_of_reader", ["equal", "other devices", "one device"])
@pytest.mark.invariant(7)
def test_a_replica_is_served_by_another_engine(rig: Rig, transport: str, mesh_of_reader: str) -> None:
    target = {"equal": engine_target(4), "other devices": engine_target(6), "one device": whole_target(3)}
    params = trainer_params()
    publisher = rig.publisher(params, transport, fanout="chain")
    relay = rig.subscriber("a", transport, relay=True)
    publisher.publish(params, Version("a", 0))
    take(relay)
    until(lambda: publisher.stats()["bytes_sent"] == BYTES)
    reader = rig.subscriber("b", transport, target[mesh_of_reader])
    update = reader.poll(60)
    assert update is not None
    report = update.prepare()
    assert right(update.swap(), expected_of(params))
    assert (report.source, report.transport) == ("relay.a", transport)
    assert publisher.stats()["bytes_sent"] == BYTES
    until(lambda: relay.stats()["relayed_bytes"] == report.nbytes)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_chain_of_three_costs_the_trainer_one_copy_of_every_version(rig: Rig, transport: str) -> None:
    params = trainer_params()
    publisher = rig.publisher(params, transport, fanout="chain")
    engines = [rig.subscriber(name, transport, relay=True, first=f) for name, f in PLACES.items()]
    until(lambda: publisher.stats()["links"] == 3)  # else the first ticket waits for none of them
    for number in range(3):
        params = trainer_params(seed=number)
        ticket = publisher.publish(params, Version("a", number))
        sources = []
        for engine in engines:
            update = engine.poll(60)
            assert update is not None and update.version == Version("a", number)
            sources.append(update.prepare().source)
            assert right(update.swap(), expected_of(params))
        assert sources[0] == "publisher.trainer" and {s.split(".")[0] for s in sources[1:]} == {"relay"}
        assert ticket.wait(60).state == "committed"
        assert publisher.stats()["bytes_sent"] == (number + 1) * BYTES
    until(lambda: sum(e.stats()["relayed_bytes"] for e in engines) == 2 * 3 * BYTES)


class Throttle:
    """Stops senders after ``allowed`` parts (of one thread), until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, thread: str) -> None:
        self.open, self.seen, self.reached = threading.Event(), 0, threading.Event()
        for kind, name in ((ShmSender, "_copy"), (TcpSender, "_send_piece"), (TcpSender, "_send_chunk")):
            monkeypatch.setattr(kind, name, self._wrapped(getattr(kind, name), thread))

    def _wrapped(self, real: Any, thread: str) -> Any:
        def piece(sender: Any, *args: Any) -> Any:
            if threading.current_thread().name == thread and not self.open.is_set():
                self.seen += 1
                if self.seen > 2:
                    self.reached.set()
                    assert self.open.wait(120)
            return real(sender, *args)

        return piece


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_parts_are_handed_on_while_others_are_still_to_come(
    rig: Rig, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "CHUNKS_PER_PART", 1)  # a small model in several parts
    params = trainer_params()
    publisher = rig.publisher(params, transport, fanout="chain")
    engines = [rig.subscriber(n, transport, relay=True, first=f) for n, f in PLACES.items()]
    throttle = Throttle(monkeypatch, "link-a.0")
    publisher.publish(params, Version("a", 0))
    reports: dict[str, Any] = {}

    def run(engine: Any) -> None:
        update = engine.poll(60)
        report = update.prepare()
        reports[engine.config.engine] = report, update.swap()

    threads = [threading.Thread(target=run, args=(e,)) for e in engines]
    threads[0].start()
    assert throttle.reached.wait(60)  # the trainer has sent some parts and stands still

    def has_parts(engine: Any) -> bool:
        contents = list(engine._holding._contents.values())
        return any(0 < len(c.progress.complete) < 19 for c in contents)

    for thread, engine in zip(threads[1:], engines[1:], strict=True):
        thread.start()
        until(lambda e=engine: has_parts(e))  # type: ignore[misc]  # down to the end of the chain
    assert not reports
    throttle.open.set()
    for thread in threads:
        thread.join(90)
    for name_of_engine, source in (("a", "publisher.trainer"), ("b", "relay.a"), ("c", "relay.b")):
        report, tree = reports[name_of_engine]
        assert report.source == source
        assert right(tree, expected_of(params))
    until(lambda: publisher.stats()["bytes_sent"] == BYTES)


@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_what_changed_is_handed_on_as_what_changed(rig: Rig, transport: str) -> None:
    sparse = PayloadSettings("sparse", CodingRules(whole=False))
    params = trainer_params()
    publisher = rig.publisher(params, transport, payload=sparse, fanout="chain")
    engines = [rig.subscriber(n, transport, relay=True, payload=sparse, first=f) for n, f in PLACES.items()]
    reports: dict[tuple[str, int], Any] = {}

    def run(engine: Any, number: int) -> None:
        update = engine.poll(60)
        assert update.version.number == number
        reports[engine.config.engine, number] = update.prepare(), update.swap()

    def followed(version: Version) -> bool:
        chains = [c for e in engines if e._relay for c in e._relay.chains._chains.values()]
        return all(c.head == version for c in chains)

    for number in range(4):
        if number:
            params = jax.tree.map(lambda x: x.at[(0,) * x.ndim].add(1.0), params)
        publisher.publish(params, Version("a", number))
        threads = [threading.Thread(target=run, args=(e, number)) for e in engines]
        for thread, engine in zip(threads, engines, strict=True):
            thread.start()  # the next one begins once this one has: the chain is the same every time
            until(lambda e=engine, t=thread: e._state.filling is not None or not t.is_alive())  # type: ignore[misc]
        for thread in threads:
            thread.join(90)
        for engine in engines:
            assert right(reports[engine.config.engine, number][1], expected_of(params))
        version = Version("a", number)
        until(lambda v=version: followed(v))  # type: ignore[misc]
    assert [reports[n, 0][0].payload for n in PLACES] == ["full"] * 3
    for name in PLACES:
        for number in range(1, 4):
            before, report = reports[name, number - 1][0], reports[name, number][0]
            assert report.payload == "frame" or report.source != before.source, (name, number)
    assert sum(e.stats()["relayed_bytes"] for e in engines) < 5 * BYTES


def test_a_source_is_free_once_its_reader_has_everything_before_that_swaps(rig: Rig) -> None:
    params = trainer_params()
    publisher, client = rig.publisher(params, "tcp", fanout="chain"), rig.hub_client()
    a, b = (rig.subscriber(n, transport="tcp", relay=True) for n in ("a", "b"))
    publisher.publish(params, Version("a", 0))
    take(a)
    update = b.poll(60)
    assert update is not None
    assert update.prepare().source == "relay.a"
    until(
        lambda: [r["ranks"] for r in client.status()["rounds"] if r["engine"] == "b"] == [{"0": "prepared"}]
    )
    for number in (1, 2):
        publisher.publish(params, Version("a", number))
        assert take(a)[0] == Version("a", number)
    update.swap()
    until(lambda: client.status()["engines"]["b"]["ranks"]["0"] == {"lineage": "a", "number": 0})
