"""Make ``qwen3.npz`` or ``llama.npz``: logits of tiny random models by the transformers library.

Run it in an environment of its own (Python 3.11, ``pip install torch==2.13.0 transformers numpy``):

    python tests/inference/golden/make_golden.py qwen3 tests/inference/golden/qwen3.npz
    python tests/inference/golden/make_golden.py llama tests/inference/golden/llama.npz

Weights are drawn by numpy, rounded to float16 (they are stored so) and computed with in float32. Keys of the
file: ``<name>/weights/<name in the state dict>``, ``<name>/tokens`` int32 [P, T], ``<name>/logits`` float32
[P, T, V], ``<name>/greedy`` int32 [P, T + 8], and ``<name>/config``, ``DecoderConfig``'s fields as JSON.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import torch  # type: ignore[import-not-found]
from transformers import (  # type: ignore[import-not-found]
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

FAMILIES: dict[str, tuple[Any, Any]] = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position": 16}
QWEN3_MODELS: dict[str, dict[str, Any]] = {
    "untied": {
        "vocab_size": 40,
        "num_layers": 2,
        "d_model": 32,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 16,
        "d_ff": 48,
        "rope_theta": 5_000.0,
        "norm_eps": 1e-6,
        "tied_embeddings": False,
    },
    "tied": {
        "vocab_size": 36,
        "num_layers": 3,
        "d_model": 24,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 8,
        "d_ff": 40,
        "rope_theta": 1_000_000.0,
        "norm_eps": 1e-5,
        "tied_embeddings": True,
    },
}


LLAMA_MODELS: dict[str, dict[str, Any]] = {
    name: shape | {"qk_norm": False, **({"rope_scaling": LLAMA3} if name == "untied" else {})}
    for name, shape in QWEN3_MODELS.items()
}
MODELS = {"qwen3": QWEN3_MODELS, "llama": LLAMA_MODELS}


def rope(shape: dict[str, Any]) -> dict[str, Any]:
    """The ``rope_parameters`` of a model."""
    if "rope_scaling" not in shape:
        return {"rope_type": "default", "rope_theta": shape["rope_theta"]}
    scaling = dict(shape["rope_scaling"])
    original = scaling.pop("original_max_position")
    return scaling | {
        "rope_type": "llama3",
        "rope_theta": shape["rope_theta"],
        "original_max_position_embeddings": original,
    }


def build(family: str, shape: dict[str, Any], rng: np.random.Generator) -> tuple[Any, dict[str, np.ndarray]]:
    """A model with random weights (norms around 1) and those weights as float16."""
    make_config, make_model = FAMILIES[family]
    config = make_config(
        vocab_size=shape["vocab_size"],
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["d_model"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["d_ff"],
        rope_parameters=rope(shape),
        rms_norm_eps=shape["norm_eps"],
        tie_word_embeddings=shape["tied_embeddings"],
        max_position_embeddings=512,
        attention_bias=False,
        attn_implementation="eager",
    )
    model = make_model(config).float().eval()
    weights = {}
    for name, value in model.state_dict().items():
        if name == "lm_head.weight" and shape["tied_embeddings"]:
            continue
        drawn = rng.standard_normal(tuple(value.shape))
        drawn = 1.0 + 0.2 * drawn if value.ndim == 1 else 0.35 * drawn
        weights[name] = drawn.astype(np.float16)
    loaded = {name: torch.from_numpy(w.astype(np.float32)) for name, w in weights.items()}
    missing = model.load_state_dict(loaded, strict=False).missing_keys
    assert missing == (["lm_head.weight"] if shape["tied_embeddings"] else [])
    model.tie_weights()
    return model, weights


def greedy(model: Any, tokens: np.ndarray, steps: int) -> np.ndarray:
    """Append the most likely token ``steps`` times, without any cache."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    for _ in range(steps):
        following = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    appended: np.ndarray = ids.numpy().astype(np.int32)
    return appended


def main(family: str, path: str) -> None:
    """Write the golden file of one family to ``path``."""
    rng = np.random.default_rng(20)
    arrays: dict[str, Any] = {}
    for name, shape in MODELS[family].items():
        model, weights = build(family, shape, rng)
        tokens = rng.integers(0, shape["vocab_size"], (3, 12)).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()
            arrays[f"{name}/greedy"] = greedy(model, tokens, 8)
        arrays |= {f"{name}/weights/{key}": w for key, w in weights.items()}
        arrays |= {f"{name}/tokens": tokens, f"{name}/logits": logits.astype(np.float32)}
        arrays[f"{name}/config"] = np.array(json.dumps(shape))
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
