"""LoRA: what is trained, what it equals, and the three forms in which an engine gets it."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.config import load
from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.config.errors import ConfigError
from jaxrl_sync.inference.checkpoint import load_trainer, save_engine, save_trainer
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.sharding import Layout, plan, reshard, trace
from jaxrl_sync.sharding.presets.lora import TARGETS, Lora
from jaxrl_sync.sharding.presets.quantization import Quantization
from jaxrl_sync.sharding.presets.qwen3 import convert, is_trained, trainer_shapes
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.trained import combine, frozen, trained, with_fresh_adapters
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import ask, generate, tp_mesh
from tests.trainer.batches import MODEL, build, host, micros, packed, same_bits, samples, trainer_config

ROOT = Path(__file__).parents[2]
LORA = dataclasses.replace(MODEL, lora=Lora(2, 4.0))
SOME = dataclasses.replace(MODEL, lora=Lora(3, 3.0, ("attn/q_proj", "attn/v_proj", "mlp/up_proj")))
PLAIN = EngineConfig(slots=8, max_len=24, prefill_lengths=(16,), prefill_rows=2)


def adapted(model: Any, seed: int = 1) -> Any:
    """A trainer tree of random weights, adapters included (fresh ones have B = 0)."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, x: jax.ShapeDtypeStruct) -> Any:
        drawn = 0.3 * rng.standard_normal(x.shape)
        return (drawn + 1.0 if path[-1].key == "scale" else drawn).astype(np.float32)

    return jax.tree_util.tree_map_with_path(leaf, trainer_shapes(model))


def merged_by_hand(tree: Any, model: Any) -> Any:
    """The plain trainer tree with W + (alpha / rank) A B in place of W: float64, one layer at a time."""
    out = frozen(tree, model)
    for target, inner in TARGETS.items():
        block, name = target.split("/")
        part = tree["layers"][block][name]
        if "lora_a" not in part:
            continue
        layers = []
        for w, a, b in zip(part["kernel"], part["lora_a"], part["lora_b"], strict=True):
            rank = a.shape[-1]
            low = a.reshape(-1, rank).astype(np.float64) @ b.reshape(rank, -1).astype(np.float64)
            layers.append(w + model.lora.alpha / rank * low.reshape(w.shape))
            assert a.shape == (*w.shape[:inner], rank)
        out["layers"][block][name] = {"kernel": np.stack(layers).astype(np.float32)}
    return out


@pytest.mark.parametrize("model", [LORA, SOME], ids=["all", "some"])
def test_trainer_and_merged_model_give_the_same_logprobs(model: Any) -> None:
    step, state = build(trainer_config(), model=model)
    plain_step, plain = build(trainer_config())
    tree = adapted(model)
    batch = packed(samples(8, seed=3))
    (micro,) = micros(step, batch)
    found = step.logprobs(jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, state.params), micro)
    by_hand = merged_by_hand(tree, model)
    wanted = plain_step.logprobs(
        jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), by_hand, plain.params), micro
    )
    np.testing.assert_allclose(found, wanted, atol=3e-4)


def test_updates_change_adapters_alone_and_moments_exist_for_nothing_else() -> None:
    step, state = build(trainer_config(fsdp=2, tp=2), model=LORA)
    before = host(state.params)
    batch = packed(samples(12, seed=4))
    accumulator = step.zeros()
    info: dict[str, float] = {}
    for _ in range(3):
        state, accumulator, info = step.update(
            state, accumulator, micros(step, batch), batch.num_valid_tokens
        )
    assert info["grad_norm"] > 0 and info["skipped"] == 0
    after = host(state.params)
    assert same_bits(frozen(before, LORA), frozen(after, LORA))
    moved = jax.tree.map(lambda a, b: bool((a != b).any()), trained(before, LORA), trained(after, LORA))
    assert all(jax.tree.leaves(moved))
    adapters = sum(x.size for x in jax.tree.leaves(trained(before, LORA)))
    assert sum(x.size for x in jax.tree.leaves(accumulator.grads)) == adapters
    moments = sum(x.size for x in jax.tree.leaves(state.opt_state) if x.ndim)
    assert moments == 2 * adapters < LORA.num_params / 2
    assert same_bits(combine(trained(after, LORA), frozen(after, LORA)), after)


def test_the_first_update_is_that_of_any_mesh() -> None:
    batch = packed(samples(12, seed=5))
    norms = []
    for sizes in ({}, {"fsdp": 2, "tp": 2}, {"dp": 2, "tp": 4}):
        step, state = build(trainer_config(**sizes), model=LORA)
        _, _, info = step.update(state, step.zeros(), micros(step, batch), batch.num_valid_tokens)
        norms.append(info["grad_norm"])
    np.testing.assert_allclose(norms[1:], norms[0], rtol=1e-4)


@pytest.mark.parametrize("model", [LORA, SOME], ids=["all", "some"])
@pytest.mark.parametrize("tp", [1, 2, 8])
def test_merged_and_adapters_beside_serve_alike(model: Any, tp: int) -> None:
    tree, mesh, results = adapted(model), tp_mesh(tp), []
    by_hand = jax.jit(lambda p: convert(p, MODEL, tp, jnp.float32))(merged_by_hand(tree, model))
    for config in (PLAIN, dataclasses.replace(PLAIN, adapters=True)):
        made = jax.jit(engine_convert(model, config, tp, "float32"))(tree)
        target = target_tree(model, config, mesh, jnp.float32)
        placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), made, target)
        engine = Engine(config, model, mesh, placed, version=Version("test", 0))
        results.append(generate(engine, ask("a", (5, 9, 13), temperature=0.0, max_tokens=8))[0].samples[0])
        if not config.adapters:
            jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), made, by_hand)
    assert results[0].tokens == results[1].tokens
    np.testing.assert_allclose(results[0].logprobs, results[1].logprobs, atol=1e-4)


def test_adapters_beside_are_moved_and_only_they_change() -> None:
    config = dataclasses.replace(PLAIN, adapters=True)
    step, state = build(trainer_config(fsdp=2, tp=2), model=LORA)
    params = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), adapted(LORA), state.params)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[4:6]), ("tp",), axis_types=(jax.sharding.AxisType.Auto,))
    target = target_tree(LORA, config, mesh, jnp.bfloat16)
    move = engine_convert(LORA, config, 2, "bfloat16")
    correspondence = trace(move, params, target)
    assert {correspondence.kind_of(path) for path in correspondence.tensors} == {"cast"}
    copies = plan(correspondence.export_layout, Layout.of(target), correspondence)
    first = host(reshard(params, copies))
    state = dataclasses.replace(state, params=params)
    batch = packed(samples(12, seed=4))
    state, _, _ = step.update(state, step.zeros(), micros(step, batch), batch.num_valid_tokens)
    second = host(reshard(state.params, copies))
    assert same_bits(second, jax.jit(move)(host(state.params)))
    changed = jax.tree.map(lambda a, b: a.tobytes() != b.tobytes(), first, second)
    for path, differs in jax.tree_util.tree_leaves_with_path(changed):
        assert differs == (path[-1].key not in ("base",) and len(path) == 4), path


def test_adapters_stand_beside_quantised_matrices(tmp_path: Path) -> None:
    config = dataclasses.replace(PLAIN, adapters=True, quantization=Quantization("fp8"))
    tree, mesh = adapted(LORA), tp_mesh(2)
    made = jax.jit(engine_convert(LORA, config, 2, "float32"))(tree)
    target = target_tree(LORA, config, mesh, jnp.float32)
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), made, target)
    assert placed["layers"]["0"]["qkv"]["base"]["values"].dtype == jnp.float8_e4m3fn
    engine = Engine(config, LORA, mesh, placed, version=Version("test", 0))
    (result,) = generate(engine, ask("a", (5, 9), temperature=0.0, max_tokens=6))
    save_engine(tmp_path / "widened", made, LORA)
    abstract = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=mesh_whole()), shapes())
    plain = load_trainer(tmp_path / "widened", MODEL, abstract)
    again = jax.jit(engine_convert(MODEL, PLAIN, 2, "float32"))(plain)
    target = target_tree(MODEL, PLAIN, mesh, jnp.float32)
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), again, target)
    widened = Engine(PLAIN, MODEL, mesh, placed, version=Version("test", 0))
    (wanted,) = generate(widened, ask("a", (5, 9), temperature=0.0, max_tokens=6))
    assert result.samples[0].tokens == wanted.samples[0].tokens
    np.testing.assert_allclose(result.samples[0].logprobs, wanted.samples[0].logprobs, atol=1e-4)


def shapes() -> Any:
    return trainer_shapes(MODEL)


def mesh_whole() -> jax.sharding.NamedSharding:
    return jax.sharding.NamedSharding(tp_mesh(1), jax.sharding.PartitionSpec())


def test_a_checkpoint_is_the_base_of_fresh_adapters_and_is_written_merged(tmp_path: Path) -> None:
    config = trainer_config(fsdp=2)
    base = frozen(adapted(LORA), LORA)
    save_trainer(tmp_path / "base", base, MODEL)
    step, _ = build(config, model=LORA)
    wanted = frozen(train_state.abstract(LORA, config, step.mesh).params, LORA)
    loaded = load_trainer(tmp_path / "base", LORA, wanted)
    params = with_fresh_adapters(loaded, LORA, config, step.mesh, seed=3)
    assert same_bits(frozen(params, LORA), base)
    assert not any(np.asarray(x).any() for x in leaves_named(params, "lora_b"))
    assert all(np.asarray(x).any() for x in leaves_named(params, "lora_a"))
    whole = adapted(LORA)
    save_trainer(tmp_path / "merged", whole, LORA)
    abstract = jax.tree.map(lambda t: jax.ShapeDtypeStruct(t.shape, t.dtype, sharding=mesh_whole()), shapes())
    found = load_trainer(tmp_path / "merged", MODEL, abstract)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), found, merged_by_hand(whole, LORA))


def leaves_named(tree: Any, name: str) -> list[Any]:
    return [x for path, x in jax.tree_util.tree_leaves_with_path(tree) if path[-1].key == name]


def test_config_and_refusals() -> None:
    changes = {"model.lora.rank": 4, "model.lora.alpha": 8.0, "engine.adapters": "beside"}
    config = load(ROOT / "experiments" / "addition" / "run.toml", changes)
    assert to_decoder(config).lora == Lora(4, 8.0) and to_engine(config).adapters
    assert not to_engine(load(ROOT / "experiments" / "addition" / "run.toml")).adapters
    with pytest.raises(ConfigError, match="needs model.lora, found none"):
        load(ROOT / "experiments" / "addition" / "run.toml", {"engine.adapters": "beside"})
    assert is_trained("layers/attn/q_proj/kernel", MODEL)
    assert not is_trained("layers/attn/q_proj/kernel", LORA)
    with pytest.raises(ValueError, match="rank >= 1"):
        Lora(0, 1.0)
    with pytest.raises(ValueError, match=r"lora.targets: expected some of .*embed"):
        Lora(1, 1.0, ("embed",))
    assert functools.reduce(lambda n, x: n + x.size, jax.tree.leaves(trained(adapted(SOME), SOME)), 0) > 0
