"""The engine's model against an independent implementation, and its decode against its own prefill."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.model import apply_rope, logits, rms_norm, rope_angles
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.sharding.presets import qwen3
from tests.inference.engine_helpers import ask, generate, tp_mesh

GOLDEN = Path(__file__).parent / "golden"
MODELS = ["qwen3/untied", "qwen3/tied", "llama/untied", "llama/tied"]  # the untied Llama has scaled RoPE


def load(model: str) -> tuple[qwen3.DecoderConfig, Any, dict[str, np.ndarray]]:
    """The config, the trainer tree and the recorded arrays of one golden model."""
    family, _, name = model.partition("/")
    with np.load(GOLDEN / f"{family}.npz") as file:
        arrays = {k.removeprefix(f"{name}/"): file[k] for k in file.files if k.startswith(f"{name}/")}
    fields = json.loads(str(arrays.pop("config")))
    scaling = fields.pop("rope_scaling", None)
    cfg = qwen3.DecoderConfig(**fields, rope_scaling=qwen3.RopeScaling(**scaling) if scaling else None)
    w = {
        k.removeprefix("weights/"): v.astype(np.float32) for k, v in arrays.items() if k.startswith("weights")
    }

    def stack(part: str, shape: tuple[int, ...]) -> np.ndarray:
        layers = [w[f"model.layers.{i}.{part}.weight"].T for i in range(cfg.num_layers)]
        return np.stack(layers).reshape(cfg.num_layers, *shape)

    D, H, KV, K, F = cfg.d_model, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.d_ff
    tree = {
        "embed": {"embedding": w["model.embed_tokens.weight"]},
        "layers": {
            "attn": {
                "q_proj": {"kernel": stack("self_attn.q_proj", (D, H, K))},
                "k_proj": {"kernel": stack("self_attn.k_proj", (D, KV, K))},
                "v_proj": {"kernel": stack("self_attn.v_proj", (D, KV, K))},
                "o_proj": {"kernel": stack("self_attn.o_proj", (H, K, D))},
                **{n: {"scale": stack(f"self_attn.{n}", (K,))} for n in qwen3.QK_NORMS if cfg.qk_norm},
            },
            "mlp": {
                "gate_proj": {"kernel": stack("mlp.gate_proj", (D, F))},
                "up_proj": {"kernel": stack("mlp.up_proj", (D, F))},
                "down_proj": {"kernel": stack("mlp.down_proj", (F, D))},
            },
            "input_norm": {"scale": stack("input_layernorm", (D,))},
            "post_attn_norm": {"scale": stack("post_attention_layernorm", (D,))},
        },
        "final_norm": {"scale": w["model.norm.weight"]},
    }
    if not cfg.tied_embeddings:
        tree["lm_head"] = {"kernel": w["lm_head.weight"].T}
    return cfg, tree, arrays


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_those_of_transformers(name: str) -> None:
    cfg, tree, golden = load(name)
    engine_tree = qwen3.convert(tree, cfg, 1, jnp.float32)
    found = jax.jit(lambda p, t: logits(p, cfg, t, jnp.float32))(engine_tree, golden["tokens"])
    assert golden["logits"].std() > 0.5
    np.testing.assert_allclose(found, golden["logits"], atol=2e-5 * np.abs(golden["logits"]).max())


@pytest.mark.parametrize(("name", "tp"), [("qwen3/untied", 4), ("qwen3/tied", 2), ("llama/untied", 2)])
def test_greedy_decode_through_the_engine_equals_transformers(name: str, tp: int) -> None:
    cfg, tree, golden = load(name)
    mesh = tp_mesh(tp)
    config = EngineConfig(slots=4, max_len=24, prefill_lengths=(16,), prefill_rows=2)
    converted = qwen3.convert(tree, cfg, tp, jnp.float32)
    target = target_tree(cfg, config, mesh, jnp.float32)
    engine = Engine(
        config, cfg, mesh, jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), converted, target)
    )
    rows = [tuple(row.tolist()) for row in golden["greedy"]]
    requests = [ask(str(i), row[:12], temperature=0.0, max_tokens=8) for i, row in enumerate(rows)]
    for row, result in zip(rows, generate(engine, *requests), strict=True):
        assert result.samples[0].tokens == row[12:]


def test_rope_turns_the_two_halves() -> None:
    cfg = qwen3.DecoderConfig(8, 1, 4, 1, 1, 4, 4, rope_theta=100.0)
    cos, sin = rope_angles(jnp.array([0, 3]), cfg)
    turned = apply_rope(jnp.array([[1.0, 2.0, 3.0, 4.0]] * 2), cos, sin)
    a, b = 3.0, 3.0 * 100.0**-0.5
    expected = [
        np.cos(a) * 1 - np.sin(a) * 3,
        np.cos(b) * 2 - np.sin(b) * 4,
        np.cos(a) * 3 + np.sin(a) * 1,
        np.cos(b) * 4 + np.sin(b) * 2,
    ]
    np.testing.assert_allclose(turned[0], [1, 2, 3, 4])
    np.testing.assert_allclose(turned[1], expected, rtol=1e-6)


def test_norm_is_computed_in_float32_and_keeps_the_dtype() -> None:
    x = jnp.array([3.0, 4.0], jnp.bfloat16)
    y = rms_norm(x, jnp.array([1.0, 2.0], jnp.bfloat16), 0.0)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(y.astype(jnp.float32), [3 / 12.5**0.5, 8 / 12.5**0.5], rtol=4e-3)
