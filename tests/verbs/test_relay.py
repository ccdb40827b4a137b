"""Relays over verbs (the fake): whole versions handed on, placed and staged, also while they arrive."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version
from tests.transfer.models import ServerThread, convert, engine_target, same_bits, trainer_params
from tests.verbs.fakelib import Fake
from tests.verbs.rigs import PLACEMENTS, TTL_S, settings


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_chain_over_verbs_brings_every_version(token_file: Path, fake: Fake, placement: Any) -> None:  # noqa: F811
    hub = ServerThread(token_file)
    ours, theirs = settings("fake0", placement=placement), settings("fake1", placement=placement)
    sending = PublisherConfig(transport="verbs", verbs=ours, ttl_s=TTL_S, fanout="chain")
    publisher = Publisher(hub.url, trainer_params(), token_file=token_file, config=sending)
    engines = []
    try:
        for name, devices in (("a", theirs), ("b", ours), ("c", theirs)):
            config = SubscriberConfig(engine=name, transport="verbs", verbs=devices, ttl_s=TTL_S, relay=True)
            engines.append(
                Subscriber(hub.url, engine_target(), convert, token_file=token_file, config=config)
            )
        for number in range(2):
            params = trainer_params(number)
            publisher.publish(params, Version("a", number))
            found: dict[str, Any] = {}

            def run(engine: Subscriber, found: dict[str, Any] = found) -> None:
                update = engine.poll(60)
                assert update is not None
                found[engine.config.engine] = update.prepare(), update.swap()

            threads = [threading.Thread(target=run, args=(e,)) for e in engines]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(90)
            assert sorted(found) == ["a", "b", "c"]
            for report, tree in found.values():
                assert report.transport == "verbs"
                assert same_bits(tree, convert(params))
            assert sum(report.source == "publisher.trainer" for report, _ in found.values()) == 1
    finally:
        for engine in engines:
            engine.close()
        publisher.close()
        hub.close()
