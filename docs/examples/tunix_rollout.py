"""Tunix's vanilla rollout as a process of its own, with the weights of `tunix_trainer.py`.

    python tunix_rollout.py FOLDER        # prompts on stdin, one JSON list of strings of a to p per line

What jaxrl_sync needs stands between the markers; without those lines this is the rollout as it was before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import numpy as np
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl.reshard import reshard_model_to_mesh
from tunix.rl.rollout.base_rollout import CacheConfig, RolloutConfig
from tunix.rl.rollout.vanilla_rollout import VanillaRollout

# >>> jaxrl_sync
from jaxrl_sync.transfer import Subscriber, find_hub, take_latest

# <<< jaxrl_sync

CONFIG = qwen3.ModelConfig(
    num_layers=2,
    vocab_size=20,
    embed_dim=32,
    hidden_dim=64,
    num_heads=4,
    head_dim=8,
    num_kv_heads=2,
    rope_theta=10_000,
    norm_eps=1e-6,
)


class Letters:
    """The tokenizer: 0 padding, 1 begin, 2 end, then letters from a on."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [3 + ord(letter) - ord("a") for letter in text]

    def decode(self, ids: Any, **_: Any) -> str:
        return "".join(chr(ord("a") + int(i) - 3) if i >= 3 else "." for i in ids)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 2

    def pad_id(self) -> int:
        return 0


def make_rollout() -> VanillaRollout:
    """With weights of its own, tensor parallel over two devices."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(1, 2), ("fsdp", "tp"))
    model = reshard_model_to_mesh(qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(1)), mesh)
    return VanillaRollout(model, Letters(), CacheConfig(32, CONFIG.num_layers, CONFIG.num_kv_heads, 8))


def generate(rollout: VanillaRollout, prompts: list[str]) -> list[str]:
    """Greedy completions."""
    config = RolloutConfig(max_tokens_to_generate=8, temperature=0.0, max_prompt_length=8, kv_cache_size=32)
    return list(rollout.generate(prompts, config).text)


def main(folder: Path) -> None:
    """Answer every line of prompts; save the weights that served last."""
    rollout = make_rollout()
    # >>> jaxrl_sync
    state = nnx.state(rollout.model(), nnx.Param)
    hub = find_hub(folder)
    weights = Subscriber(hub.url, state, lambda tree: tree, token_file=hub.token_file)

    def refresh(timeout_s=None):
        tree = take_latest(weights, timeout_s)
        if tree is not None:
            nnx.replace_by_pure_dict(state, tree)
            rollout.update_params(state)

    refresh(timeout_s=120)
    # <<< jaxrl_sync
    for line in sys.stdin:
        # >>> jaxrl_sync
        refresh()
        # <<< jaxrl_sync
        print(json.dumps(generate(rollout, json.loads(line))), flush=True)
    leaves = jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(rollout.model(), nnx.Param)))
    np.savez(
        folder / "engine.npz", **{"/".join(str(k.key) for k in path): np.asarray(x) for path, x in leaves}
    )
    # >>> jaxrl_sync
    weights.close()
    # <<< jaxrl_sync


if __name__ == "__main__":
    main(Path(sys.argv[1]))
