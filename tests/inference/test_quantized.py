"""Quantised engine trees: against a numpy oracle, through the mapper bit for bit, served by the engine."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.sharding import Layout, plan, reshard, trace
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.sharding.presets.quantization import Quantization
from jaxrl_sync.sharding.presets.quantized import (
    block_lengths,
    dequantize,
    quantize,
    quantize_tree,
    quantized_convert,
)
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import ask, generate, tp_mesh, trainer_weights

CFG = qwen3.DecoderConfig(64, 2, 64, 4, 2, 16, 96)
SCHEMES = [
    Quantization("fp8"),
    Quantization("fp8", "1x128"),
    Quantization("int8"),
    Quantization("int8", "1x128"),
]


def oracle(
    weight: np.ndarray[Any, Any], blocks: tuple[int, ...], format: str
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The formula, block by block, with ml_dtypes' own rounding."""
    largest = {"fp8": np.float32(448), "int8": np.float32(127)}[format]
    values = np.zeros(weight.shape, {"fp8": ml_dtypes.float8_e4m3fn, "int8": np.int8}[format])
    scale = np.ones([n // b for n, b in zip(weight.shape, blocks, strict=True)], np.float32)
    for cell in np.ndindex(*scale.shape):
        where = tuple(slice(i * b, (i + 1) * b) for i, b in zip(cell, blocks, strict=True))
        block = weight[where].astype(np.float32)
        if peak := np.abs(block).max():
            scale[cell] = np.float32(peak) * (np.float32(1) / largest)
        ratio = np.clip(block * (np.float32(1) / scale[cell]), -largest, largest)
        values[where] = (np.rint(ratio) if format == "int8" else ratio).astype(values.dtype)
    return values, scale


@pytest.mark.parametrize("format", ["fp8", "int8"])
@pytest.mark.parametrize("blocks", [(128, 128), (128, 1), (1, 1), (256, 64)])
def test_values_and_scales_equal_the_formula_bit_for_bit(format: Any, blocks: tuple[int, int]) -> None:
    rng = np.random.default_rng(3)
    weight = (rng.standard_normal((256, 256)) * np.exp(rng.standard_normal((256, 1)))).astype(
        ml_dtypes.bfloat16
    )
    weight[:128, :128] = 0  # a block without a peak
    weight[130, 200] = -1000
    values, scale = jax.jit(quantize, static_argnums=(1, 2))(jnp.asarray(weight), blocks, format)
    wanted_values, wanted_scale = oracle(weight, blocks, format)
    np.testing.assert_array_equal(np.asarray(scale), wanted_scale)
    np.testing.assert_array_equal(np.asarray(values).view(np.uint8), wanted_values.view(np.uint8))
    back = np.asarray(dequantize(values, scale, jnp.float32))
    grid = np.kron(wanted_scale, np.ones(blocks, np.float32))
    np.testing.assert_array_equal(back, wanted_values.astype(np.float32) * grid)
    half_step = {"fp8": np.maximum(np.abs(back) / 16, grid * 2**-9), "int8": grid / 2}[format]
    assert (np.abs(back - weight.astype(np.float32)) <= half_step * 1.001).all()


def test_blocks_lie_on_one_device_and_are_128_where_the_model_allows() -> None:
    square, rows = Quantization("fp8"), Quantization("fp8", "1x128")
    assert block_lengths((4096, 8, 6, 128), "qkv", square, 8) == (128, 1, 1, 128)
    assert block_lengths((8, 4, 128, 4096), "o", square, 8) == (1, 1, 128, 128)
    assert block_lengths((4096, 2, 12288), "gate_up", square, 8) == (128, 1, 128)
    assert block_lengths((12288, 4096), "down", rows, 8) == (128, 1)
    assert block_lengths((96, 64), "down", square, 2) == (16, 64)  # 48 rows on a device


@pytest.mark.parametrize("scheme", SCHEMES, ids=str)
def test_trainer_to_quantised_engine_through_the_mapper(scheme: Quantization) -> None:
    weights = trainer_weights(1, CFG)
    grid = jax.make_mesh((2, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4])
    placed = jax.tree.map(lambda x: jax.device_put(x, NamedSharding(grid, _spec(x))), weights)
    to = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[4:6])
    target = target_tree(CFG, EngineConfig(slots=4, quantization=scheme), to, jnp.bfloat16)
    convert = quantized_convert(
        functools.partial(qwen3.convert, cfg=CFG, tp=2, dtype=jnp.bfloat16), scheme, 2
    )
    correspondence = trace(convert, placed, target)
    for part in ("values", "scale"):
        assert correspondence.kind_of(f"layers/0/down/{part}") == "computed"
    assert correspondence.kind_of("layers/0/q_norm") == correspondence.kind_of("embed") == "cast"
    moves = plan(correspondence.export_layout, Layout.of(target), correspondence)
    moved = reshard(placed, moves)
    wanted = jax.jit(convert)(weights)
    for path, leaf in jax.tree_util.tree_leaves_with_path(wanted):
        found = functools.reduce(lambda tree, key: tree[key.key], path, moved)
        assert found.dtype == leaf.dtype and len(found.sharding.device_set) == 2
        assert np.asarray(found).tobytes() == np.asarray(leaf).tobytes(), path


@pytest.mark.parametrize("scheme", SCHEMES[:3], ids=str)
def test_the_engine_serves_what_the_quantised_bytes_say(scheme: Quantization) -> None:
    mesh = tp_mesh(2)
    plain = qwen3.convert(trainer_weights(2, CFG), CFG, 2, jnp.float32)
    placed = jax.tree.map(
        lambda x, t: jax.device_put(x, t.sharding),
        plain,
        target_tree(CFG, EngineConfig(slots=4), mesh, jnp.float32),
    )
    config = EngineConfig(slots=4, max_len=24, prefill_lengths=(16,), prefill_rows=2, quantization=scheme)
    engine = Engine(config, CFG, mesh, quantize_tree(placed, scheme, 2), version=Version("test", 0))
    request = ask("a", (5, 9, 13), temperature=0.0, max_tokens=8)
    (quantised,) = generate(engine, request)

    def rounded(leaf: Any) -> Any:
        return dequantize(leaf["values"], leaf["scale"], jnp.float32) if isinstance(leaf, dict) else leaf

    tree = quantize_tree(placed, scheme, 2)
    layers = {i: {n: rounded(x) for n, x in layer.items()} for i, layer in tree["layers"].items()}
    flat = Engine(
        EngineConfig(slots=4, max_len=24, prefill_lengths=(16,), prefill_rows=2),
        CFG,
        mesh,
        tree | {"layers": layers},
        version=Version("test", 0),
    )
    (wanted,) = generate(flat, request)
    assert quantised.samples[0].tokens == wanted.samples[0].tokens
    np.testing.assert_allclose(quantised.samples[0].logprobs, wanted.samples[0].logprobs, atol=1e-5)


def test_an_engine_of_float16_weights_computes_with_what_they_are() -> None:
    mesh, results = tp_mesh(2), []
    config = EngineConfig(slots=4, max_len=24, prefill_lengths=(16,), prefill_rows=2)
    half = qwen3.convert(trainer_weights(4, CFG), CFG, 2, jnp.float16)
    for tree in (half, jax.tree.map(lambda x: x.astype(jnp.float32), half)):
        dtype = tree["embed"].dtype
        target = target_tree(CFG, config, mesh, dtype)
        placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)
        engine = Engine(config, CFG, mesh, placed, version=Version("test", 0), dtype=dtype)
        request = ask("a", (5, 9, 13), temperature=0.0, max_tokens=8)
        results.append(generate(engine, request)[0].samples[0])
    assert results[0].tokens == results[1].tokens
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=1e-5)


def test_a_block_that_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match="dimension 1: expected a divisor of 10, got 4"):
        quantize(jnp.zeros((8, 10)), (8, 4), "int8")
    with pytest.raises(ValueError, match="expected fp8 or int8, got 'fp4'"):
        Quantization("fp4")  # type: ignore[arg-type]


def _spec(x: np.ndarray[Any, Any]) -> jax.sharding.PartitionSpec:
    dims = ["fsdp" if d and n % 2 == 0 else None for d, n in enumerate(x.shape)]
    first = dims.index("fsdp") if "fsdp" in dims else None
    return jax.sharding.PartitionSpec(*(a if d == first else None for d, a in enumerate(dims)))
