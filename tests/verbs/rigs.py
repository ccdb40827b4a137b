"""A publisher and a subscriber over the devices of the fake, for tests."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.verbs.devices import Choice
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from tests.transfer.models import ServerThread, convert, engine_target, same_bits, trainer_params

PLACEMENTS = ("placed", "staged")
FULL = PayloadSettings()
TTL_S = 20.0  # nobody dies here: no lease shall end because a machine was busy for a moment


def settings(*devices: str, **options: Any) -> VerbsSettings:
    values = {"chunk_bytes": 4096, "ring": 4, "queue_pairs": 3, **options}
    return VerbsSettings(choice=Choice(include=devices), rails=len(devices), **values)


class Rig:
    """A hub, one publisher on fake0, one subscriber on fake1."""

    def __init__(
        self,
        token_file: Path,
        transport: Any = "verbs",
        ours: VerbsSettings | None = None,
        theirs: VerbsSettings | None = None,
        timeout_s: float = 60,
        payload: PayloadSettings = FULL,
    ) -> None:
        self.hub = ServerThread(token_file)
        self.params = trainer_params()
        config = PublisherConfig(
            transport=transport, verbs=ours or settings("fake0"), ttl_s=TTL_S, payload=payload
        )
        other = SubscriberConfig(
            transport=transport, verbs=theirs or settings("fake1"), ttl_s=TTL_S, timeout_s=timeout_s
        )
        self.publisher = Publisher(self.hub.url, self.params, token_file=token_file, config=config)
        self.subscriber = Subscriber(
            self.hub.url, engine_target(), convert, token_file=token_file, config=other
        )

    def take(self, number: int, seed: int) -> Any:
        """Publish parameters and take them in; the report. Compares bits."""
        params = trainer_params(seed)
        self.publisher.publish(params, Version("a", number))
        update = self.subscriber.poll(timeout_s=60)
        assert update is not None
        report = update.prepare()
        assert same_bits(update.swap(), convert(params))
        return report

    def fail(self, number: int) -> TransferError:
        """Publish and see the transfer fail."""
        self.publisher.publish(trainer_params(number), Version("a", number))
        update = self.subscriber.poll(timeout_s=60)
        assert update is not None
        with pytest.raises(TransferError) as caught:
            update.prepare()
        return caught.value

    def take_again(self, number: int) -> None:
        """A version that arrives once the link is made again."""
        params, end = trainer_params(number), time.monotonic() + 60
        self.publisher.publish(params, Version("a", number))  # once: it doesn't come after itself
        while True:
            update = self.subscriber.poll(timeout_s=60)
            assert update is not None
            try:
                update.prepare()
            except TransferError:
                assert time.monotonic() < end
                continue
            assert same_bits(update.swap(), convert(params))
            return

    def close(self) -> None:
        self.subscriber.close()
        self.publisher.close()
        self.hub.close()
