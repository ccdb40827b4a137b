"""Adversarial bits on the live path: NaN payloads, signed zeros, denormals; all, none, every other one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.codec.deltas import DTYPES, adversarial
from tests.transfer.models import Rig, host, mesh

NAMES = ("bfloat16", "float16", "float32", "float8", "int8", "bool")
SHAPE = (48, 16)


def _bits() -> tuple[dict[str, Any], dict[str, Any]]:
    """Two trees of every dtype that differ in each element, corners of each width among them."""
    trees: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for name in NAMES:
        for tree, bits in zip(trees, adversarial(DTYPES[name], SHAPE[0] * SHAPE[1]), strict=True):
            tree[name] = bits.view(DTYPES[name]).reshape(SHAPE)
    return trees


def _placed(tree: dict[str, Any], grid: Any, spec: P) -> dict[str, jax.Array]:
    return {k: jax.device_put(v, NamedSharding(grid, spec)) for k, v in tree.items()}


@pytest.mark.invariant(39)
@pytest.mark.parametrize("values", ["overwrite", "xor", "ulp"])
@pytest.mark.parametrize("kind", ["sparse", "bitmap"])
def test_adversarial_bits_of_every_dtype(rig: Rig, kind: Any, values: Any) -> None:
    first, second = _bits()
    odd = {k: np.where(np.arange(v.size).reshape(SHAPE) % 2 == 0, v, second[k]) for k, v in first.items()}
    patterns = [first, second, second, odd, first, odd]
    source, target = mesh((2, 2), ("x", "y")), mesh((2,), ("z",), 4)
    shapes = {
        k: jax.ShapeDtypeStruct(SHAPE, v.dtype, sharding=NamedSharding(target, P(None, "z")))
        for k, v in first.items()
    }
    settings = PayloadSettings(kind, CodingRules(values=values, whole=False))
    publisher = rig.publisher(_placed(first, source, P("x", "y")), "tcp", payload=settings)
    subscriber = rig.subscriber(transport="tcp", target=shapes, convert=lambda tree: tree)
    for number, tree in enumerate(patterns):
        publisher.publish(_placed(tree, source, P("x", "y")), Version("a", number))
        update = subscriber.poll(60)
        assert update is not None
        report = update.prepare()
        assert report.payload == ("frame" if number else "full")
        found = host(update.swap())
        for name in NAMES:
            assert found[name].tobytes() == np.ascontiguousarray(tree[name]).tobytes(), (number, name)
        if number == 2:
            assert report.density == 0.0
