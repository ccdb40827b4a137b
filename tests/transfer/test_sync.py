"""Weights from a trainer mesh to engine meshes inside one process, over every transport."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version
from tests.transfer.models import (
    ServerThread,
    convert,
    engine_target,
    same_bits,
    trainer_params,
)


@contextlib.contextmanager
def peers(
    hub: ServerThread, token_file: Path, source: Any, **options: Any
) -> Iterator[tuple[Publisher, Subscriber]]:
    """A publisher and a subscriber of the small model."""
    transport = options.get("transport", "auto")
    pub = PublisherConfig(transport=transport, chunk_bytes=4096, ttl_s=2.0)
    sub = SubscriberConfig(transport=transport, ttl_s=2.0)
    with (
        Publisher(hub.url, source, token_file=token_file, config=pub) as publisher,
        Subscriber(hub.url, engine_target(), convert, token_file=token_file, config=sub) as subscriber,
    ):
        yield publisher, subscriber


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(7)
def test_every_version_arrives_bit_for_bit_while_training_donates(
    hub: ServerThread, token_file: Path, transport: str
) -> None:
    params = trainer_params()
    step = jax.jit(lambda p, k: jax.tree.map(lambda x: x * 1.01 + k, p), donate_argnums=0)
    with peers(hub, token_file, params, transport=transport) as (publisher, subscriber):
        trees = []
        for number in range(6):
            expected = jax.jit(convert)(params)
            ticket = publisher.publish(params, Version("a", number))
            params = step(params, 0.001)  # donates what was published
            params = step(params, 0.001)
            update = subscriber.poll(timeout_s=10)
            assert update is not None and update.version == Version("a", number)
            report = update.prepare()
            assert report.transport == transport and report.nbytes > 0
            tree = update.swap()
            assert same_bits(tree, expected)
            if number:
                outcome = ticket.wait(10)
                assert outcome.state == "committed", outcome
                assert outcome.nbytes == report.nbytes
                assert set(outcome.seconds) >= {"export", "queue", "wire", "swap", "commit"}
            trees.append(tree)
        assert trees[0] is trees[2] and trees[1] is trees[3]  # two slots, built once
        assert subscriber.installed == Version("a", 5)
