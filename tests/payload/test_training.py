"""Hundreds of versions of a real training run arrive bit for bit by frames, while much goes wrong."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import Subscriber, Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.inbound import Inbound
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.trainer.batches import MODEL, OPTIMIZER, build, micros, packed, samples, trainer_config
from tests.transfer.models import Rig, mesh, same_bits

CONFIG = trainer_config(fsdp=2, tp=2, optimizer=OPTIMIZER)


def _convert(params: Any) -> Any:
    return qwen3.convert(params, MODEL, 2, jnp.bfloat16)


class Training:
    """Real updates of a small policy on random groups; ``version`` is what was published last."""

    def __init__(self, seed: int) -> None:
        self.step, self.state = build(CONFIG)
        self._accumulator = self.step.zeros()
        self._batches = [packed(samples(14, seed=seed + i, longest=16)) for i in range(4)]
        self.version = Version("a0", 0)

    def update(self) -> None:
        """One optimizer step; the old weights are donated."""
        batch = self._batches[self.version.number % len(self._batches)]
        self.state, self._accumulator, _ = self.step.update(
            self.state, self._accumulator, micros(self.step, batch), batch.num_valid_tokens
        )
        self.version = Version(self.version.lineage, self.version.number + 1)


def _take(subscriber: Subscriber, wanted: Version, expected: Any) -> str:
    """Take versions until ``wanted`` serves, which must have these bits; the last payload."""
    payload = ""
    while subscriber.installed != wanted:
        update = subscriber.poll(60)
        assert update is not None, (subscriber.installed, wanted)
        payload = update.prepare().payload
        tree = update.swap()
        if subscriber.installed == wanted:
            assert same_bits(tree, expected), wanted
    return payload


@pytest.mark.slow
@pytest.mark.invariant(39)
@pytest.mark.parametrize(
    ("versions", "values", "compare"),
    [
        (40, "overwrite", "host"),
        (40, "auto", "host"),
        (40, "auto", "device"),
        pytest.param(500, "overwrite", "host", marks=pytest.mark.full),
        pytest.param(500, "auto", "host", marks=pytest.mark.full),
    ],
)
@pytest.mark.timeout(900)
def test_sparse_and_full_agree_over_a_training_run_with_faults(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, versions: int, values: Any, compare: Any
) -> None:
    dice = random.Random(f"{versions} {values}")
    training = Training(seed=1)
    settings = PayloadSettings("sparse", CodingRules(values=values), history=4, compare=compare)
    sparse = rig.publisher(training.state.params, "tcp", payload=settings)
    target = qwen3.engine_abstract(MODEL, mesh((2,), ("tp",), 4))
    expected_of = jax.jit(_convert)
    true_tell = Inbound.tell

    def lossy(self: Inbound, message: dict[str, Any], timeout_s: float) -> None:
        if message.get("kind") != "installed" or dice.random() < 0.7:
            true_tell(self, message, timeout_s)

    monkeypatch.setattr(Inbound, "tell", lossy)

    def open_one(name: str) -> Subscriber:
        return rig.open_subscriber(name, "tcp", target, _convert)

    engines = {"engine-0": open_one("engine-0"), "engine-1": open_one("engine-1")}
    payloads: dict[str, int] = {}
    try:
        for number in range(versions):
            if number:
                training.update()
            if dice.random() < 0.02:
                training.version = Version(f"a{number}", training.version.number)  # resumed: another lineage
            expected = expected_of(training.state.params)
            sparse.publish(training.state.params, training.version)
            if dice.random() < 0.02 and len(engines) < 4:
                engines[f"late-{number}"] = open_one(f"late-{number}")
            for name in list(engines):
                if number + 1 < versions and dice.random() < 0.25:
                    continue  # skips this version
                if dice.random() < 0.03:
                    engines[name].close()
                    engines[name] = open_one(name)
                payload = _take(engines[name], training.version, expected)
                payloads[payload] = payloads.get(payload, 0) + 1
    finally:
        for engine in engines.values():
            engine.close()
    assert payloads["frame"] > payloads["full"] > 0, payloads
