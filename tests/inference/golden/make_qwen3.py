"""Make ``qwen3.npz``: logits of two tiny random Qwen3 models by the transformers library, as a golden file.

Run it in an environment of its own (Python 3.11, ``pip install torch==2.13.0 transformers numpy``):

    python tests/inference/golden/make_qwen3.py tests/inference/golden/qwen3.npz

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
    Qwen3Config,
    Qwen3ForCausalLM,
)

MODELS: dict[str, dict[str, Any]] = {
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


def build(shape: dict[str, Any], rng: np.random.Generator) -> tuple[Qwen3ForCausalLM, dict[str, np.ndarray]]:
    """A model with random weights (norms around 1) and those weights as float16."""
    config = Qwen3Config(
        vocab_size=shape["vocab_size"],
        num_hidden_layers=shape["num_layers"],
        hidden_size=shape["d_model"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["head_dim"],
        intermediate_size=shape["d_ff"],
        rope_parameters={"rope_type": "default", "rope_theta": shape["rope_theta"]},
        rms_norm_eps=shape["norm_eps"],
        tie_word_embeddings=shape["tied_embeddings"],
        max_position_embeddings=512,
        attention_bias=False,
        attn_implementation="eager",
    )
    model = Qwen3ForCausalLM(config).float().eval()
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


def greedy(model: Qwen3ForCausalLM, tokens: np.ndarray, steps: int) -> np.ndarray:
    """Append the most likely token ``steps`` times, without any cache."""
    ids = torch.from_numpy(tokens.astype(np.int64))
    for _ in range(steps):
        following = model(ids, use_cache=False).logits[:, -1].argmax(-1, keepdim=True)
        ids = torch.cat([ids, following], dim=1)
    appended: np.ndarray = ids.numpy().astype(np.int32)
    return appended


def main(path: str) -> None:
    """Write the golden file to ``path``."""
    rng = np.random.default_rng(20)
    arrays: dict[str, Any] = {}
    for name, shape in MODELS.items():
        model, weights = build(shape, rng)
        tokens = rng.integers(0, shape["vocab_size"], (3, 12)).astype(np.int32)
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens.astype(np.int64)), use_cache=False).logits.numpy()
            arrays[f"{name}/greedy"] = greedy(model, tokens, 8)
        arrays |= {f"{name}/weights/{key}": w for key, w in weights.items()}
        arrays |= {f"{name}/tokens": tokens, f"{name}/logits": logits.astype(np.float32)}
        arrays[f"{name}/config"] = np.array(json.dumps(shape))
    np.savez_compressed(path, **arrays)


if __name__ == "__main__":
    main(sys.argv[1])
