"""Frames of what engines hold other than bfloat16 matrices: casts, quantised bytes with scales, adapters.

Between a live publisher and a live subscriber, by the conversion that an engine's process itself makes.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.sharding.presets.lora import Lora
from jaxrl_sync.sharding.presets.quantization import Quantization
from jaxrl_sync.sharding.presets.qwen3 import is_trained
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.transfer.models import CONFIG, Rig, host, mesh, same_bits, trainer_params

SMALL = dataclasses.replace(CONFIG, num_layers=1)
ADAPTED = dataclasses.replace(SMALL, lora=Lora(2, 4.0, ("attn/q_proj", "attn/o_proj", "mlp/down_proj")))
PLAIN = EngineConfig(slots=4)
VERSIONS = 5
BOTH = ["host", "device"]


def _quantised(format: Any, block: Any = "128x128", **options: Any) -> EngineConfig:
    return EngineConfig(slots=4, quantization=Quantization(format, block), **options)


def _step(params: Any, model: Any, number: int) -> Any:
    """An update of a tenth of what is trained, by a few percent: fewer bytes move in 8 bits than in 16."""

    def moved(path: Any, x: jax.Array) -> jax.Array:
        name = "/".join(p.key for p in path)
        drawn = np.random.default_rng([number, len(name)]).standard_normal(x.shape, np.float32)
        return x * (1 + 0.02 * drawn * (abs(drawn) > 1.6)) if is_trained(name, model) else x

    return jax.tree_util.tree_map_with_path(moved, params)


@pytest.mark.slow
@pytest.mark.invariant(39)
@pytest.mark.parametrize(
    ("engine", "model", "dtype", "compares"),
    [
        (PLAIN, SMALL, "float16", BOTH),
        (PLAIN, SMALL, "float32", ["host"]),
        (_quantised("fp8"), SMALL, "bfloat16", BOTH),
        (_quantised("fp8", "1x128"), SMALL, "bfloat16", ["host"]),
        (_quantised("int8"), SMALL, "bfloat16", ["host"]),
        (_quantised("int8", "1x128"), SMALL, "float16", BOTH),
        (PLAIN, ADAPTED, "bfloat16", ["host"]),
        (dataclasses.replace(PLAIN, adapters=True), ADAPTED, "bfloat16", ["device"]),
        (_quantised("fp8", adapters=True), ADAPTED, "bfloat16", ["host"]),
    ],
    ids=["fp16", "fp32", "fp8", "fp8-1x128", "int8", "int8-fp16", "merged", "beside", "beside-fp8"],
)
def test_frames_bring_what_an_engine_holds(
    rig: Rig, engine: EngineConfig, model: Any, dtype: str, compares: list[Any]
) -> None:
    for compare in compares:
        with rig:  # closes what the one before opened
            _check(rig, engine, model, dtype, compare)


def _check(rig: Rig, engine: EngineConfig, model: Any, dtype: str, compare: Any) -> None:
    convert = engine_convert(model, engine, 2, dtype)
    target = target_tree(model, engine, mesh((2,), ("tp",), 4), jnp.dtype(dtype))
    settings = PayloadSettings("sparse", CodingRules(values="auto", whole=False), compare=compare)
    params = trainer_params(config=model)
    publisher = rig.publisher(params, "tcp", payload=settings, convert=convert)
    subscriber = rig.subscriber(transport="tcp", target=target, convert=convert)
    sent, full_bytes = jax.jit(convert), 0
    before: dict[str, Any] = {}
    for number in range(VERSIONS):
        publisher.publish(params, Version(compare, number))
        update = subscriber.poll(60)
        assert update is not None
        report, expected = update.prepare(), sent(params)
        found = update.swap()
        assert same_bits(found, expected), number
        assert all(x.dtype == leaves_by_path(target)[p].dtype for p, x in leaves_by_path(found).items())
        bits = host(expected)
        moved = {p for p in bits if number and not (bits[p] == before[p]).all()}
        if number:
            assert report.payload == "frame" and 0 < report.density < 1 and moved
            assert report.nbytes < full_bytes
        else:
            assert report.payload == "full"
            full_bytes = report.nbytes
        if number and engine.adapters:  # what is frozen didn't change
            assert all(re.fullmatch(r".*/(\w+_)?[ab]", p) for p in moved)
        before, params = bits, _step(params, model, number)
    assert subscriber.stats()["frames"] == VERSIONS - 1
    held = {p.rsplit("/", 1)[-1] for p in before}
    assert ({"values", "scale"} <= held) == (engine.quantization is not None)
