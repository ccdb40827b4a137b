"""An engine with one slot: it stands still while a version lands in its weights, and refuses half of one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.engine_thread import EngineThread
from jaxrl_sync.inference.errors import PoisonedError, SwapTimeoutError
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.inference.updater import Updater
from jaxrl_sync.transfer import Publisher, Subscriber, SubscriberConfig, Version, auth
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.transports.shm import ShmSender
from tests.inference.engine_helpers import SMALL, TINY, ask, reference_logprobs, tp_mesh, trainer_weights
from tests.transfer.models import ServerThread

PROMPT = (3, 1, 4, 1, 5)


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    auth.create_token(tmp_path / "token")
    server = ServerThread(tmp_path / "token")
    yield server.url, tmp_path / "token"
    server.close()


def params_of(seed: int) -> Any:
    return jax.tree.map(jnp.asarray, trainer_weights(seed))


def check(engine: Engine, seed: int) -> None:
    """New samples are those of the weights of ``seed``."""
    sample = engine.submit(ask(f"check-{seed}", PROMPT, max_tokens=8)).result(30).samples[0]
    np.testing.assert_allclose(sample.logprobs, reference_logprobs(seed, PROMPT, sample.tokens), atol=2e-5)


@pytest.mark.invariant(32)
@pytest.mark.invariant(31)
def test_versions_that_overwrite_the_serving_one_are_whole_or_refused(
    hub: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (url, token), mesh = hub, tp_mesh()
    convert, target = engine_convert(TINY, SMALL, 1, "float32"), target_tree(TINY, SMALL, mesh, jnp.float32)
    config = SubscriberConfig(transport="shm", slots=1, timeout_s=5.0)
    with (
        Publisher(url, params_of(0), token_file=token) as publisher,
        Subscriber(url, target, convert, token_file=token, config=config) as subscriber,
        Engine(SMALL, TINY, mesh, dtype=np.dtype("float32"), warm_up=True) as engine,
        EngineThread(engine, lambda *_, **__: None),
    ):
        updater = Updater(engine, subscriber, "approved", record=lambda *_, **__: None)
        updater.start()
        publisher.publish(params_of(0), Version("a", 0))
        assert updater.ready.wait(60)
        check(engine, 0)
        running = engine.submit(ask("over", PROMPT, n=4, max_tokens=24))
        publisher.publish(params_of(1), Version("a", 1))
        assert updater.swap(Version("a", 1), 30.0).result(40)["number"] == 1
        assert {s.finish_reason for s in running.result(30).samples} == {"length"}  # they went on
        check(engine, 1)

        pinned = engine.submit(ask("pinned", PROMPT, n=4, max_tokens=24, version=Version("a", 1)))
        publisher.publish(params_of(4), Version("a", 2))
        assert updater.swap(Version("a", 2), 30.0).result(40)["number"] == 2
        assert {v for s in pinned.result(30).samples for v in s.versions} == {1}, "not frozen, not poisoned"
        check(engine, 4)

        real = ShmSender._copy

        def breaks(sender: Any, *args: Any) -> None:
            real(sender, *args)
            raise TransferError("one part is written")

        with monkeypatch.context() as patched:
            patched.setattr(ShmSender, "_copy", breaks)
            publisher.publish(params_of(2), Version("a", 3))
            deadline = time.monotonic() + 120
            while engine.state != "poisoned":  # the first part may not even be there within a second
                assert time.monotonic() < deadline
                with pytest.raises(SwapTimeoutError):
                    updater.swap(Version("a", 3), 1.0).result(20)
        assert engine.stats().state == "poisoned" and engine.version == Version("a", 2)
        with pytest.raises(PoisonedError, match="written over the serving one"):
            engine.submit(ask("refused", PROMPT))
        assert updater.swap(Version("a", 3), 30.0).result(40)["number"] == 3
        assert engine.stats().state == "ready"
        check(engine, 2)
        updater.close()


def test_an_engine_goes_back_to_the_version_before(hub: tuple[str, Path]) -> None:
    (url, token), mesh = hub, tp_mesh()
    convert, target = engine_convert(TINY, SMALL, 1, "float32"), target_tree(TINY, SMALL, mesh, jnp.float32)
    with (
        Publisher(url, params_of(0), token_file=token) as publisher,
        Subscriber(url, target, convert, token_file=token, config=SubscriberConfig()) as subscriber,
        Engine(SMALL, TINY, mesh, dtype=np.dtype("float32"), warm_up=True) as engine,
        EngineThread(engine, lambda *_, **__: None),
    ):
        for number in range(2):
            publisher.publish(params_of(number), Version("a", number))
            update = subscriber.poll(30)
            assert update is not None
            update.prepare()
            engine.request_swap(update.version, update.swap).result(60)
            check(engine, number)
        engine.request_swap(Version("a", 0), subscriber.rollback).result(30)
        assert engine.version == subscriber.installed == Version("a", 0)
        sample = engine.submit(ask("again", PROMPT, max_tokens=8)).result(30).samples[0]
        assert set(sample.versions) == {0}
        expected = reference_logprobs(0, PROMPT, sample.tokens)
        np.testing.assert_allclose(sample.logprobs, expected, atol=2e-5)
