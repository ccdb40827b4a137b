"""A Tunix trainer (google-tunix: `PeftTrainer` on its Qwen3) whose weights reach `tunix_rollout.py`.

    python tunix_trainer.py FOLDER        # beside: python tunix_rollout.py FOLDER

What jaxrl_sync needs stands between the markers; without those lines this is the trainer as it was before.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import numpy as np
import optax
from flax import nnx
from tunix.models.qwen3 import model as qwen3
from tunix.rl.reshard import reshard_model_to_mesh
from tunix.sft import hooks, utils
from tunix.sft.peft_trainer import PeftTrainer, TrainingConfig, TrainingInput

# >>> jaxrl_sync
from jaxrl_sync.transfer import LocalHub, Publisher, Version

# <<< jaxrl_sync

BOS, LETTERS, STEPS, ROWS, LENGTH = 1, 16, 40, 16, 12
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


def batches() -> Iterator[TrainingInput]:
    """Every letter is its predecessor's successor, three further on; tokens 3 and up are letters."""
    rng = np.random.default_rng(0)
    for _ in range(STEPS):
        letters = (rng.integers(0, LETTERS, (ROWS, 1)) + 3 * np.arange(LENGTH - 1)) % LETTERS
        tokens = np.concatenate([np.full((ROWS, 1), BOS), 3 + letters], axis=1)
        yield TrainingInput(input_tokens=tokens, input_mask=np.ones_like(tokens, bool))


def model_input(x: TrainingInput) -> dict[str, Any]:
    """What the loss is called with."""
    return {
        "input_tokens": x.input_tokens,
        "input_mask": x.input_mask,
        "positions": utils.build_positions_from_mask(x.input_mask),
        "attention_mask": utils.make_causal_attn_mask(x.input_mask),
    }


class Hooks(hooks.TrainingHooks):
    """Prints losses."""

    def on_train_start(self, train_ctx: Any) -> None:
        pass

    def on_train_step_start(self, train_ctx: Any) -> None:
        # >>> jaxrl_sync
        publish(train_ctx.train_steps)
        # <<< jaxrl_sync
        pass

    def on_train_step_end(self, train_ctx: Any, train_step: int, train_loss: float) -> None:
        print(json.dumps({"step": int(train_step), "loss": float(train_loss)}), flush=True)

    def on_train_end(self, train_ctx: Any) -> None:
        # >>> jaxrl_sync
        publish(train_ctx.train_steps)
        # <<< jaxrl_sync
        pass

    def on_eval_step_start(self, train_ctx: Any) -> None:
        pass

    def on_eval_step_end(self, train_ctx: Any, eval_loss: float) -> None:
        pass


folder = Path(sys.argv[1])
mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 1), ("fsdp", "tp"))
model = reshard_model_to_mesh(qwen3.Qwen3(CONFIG, rngs=nnx.Rngs(0)), mesh)
# >>> jaxrl_sync
hub = LocalHub(folder)
params = nnx.state(model, nnx.Param)
out = Publisher(hub.url, params, token_file=hub.token_file)
where = jax.tree.map(lambda x: x.sharding, params)  # the compiled train step chooses others for the norms


def publish(step):
    out.publish(jax.device_put(nnx.state(model, nnx.Param), where), Version("tunix", step))


# <<< jaxrl_sync
trainer = PeftTrainer(model, optax.adam(1e-2), TrainingConfig(eval_every_n_steps=1000, max_steps=STEPS))
trainer.with_gen_model_input_fn(model_input).with_training_hooks(Hooks())
with mesh:
    trainer.train(batches())
state = nnx.to_pure_dict(nnx.state(model, nnx.Param))
leaves = jax.tree_util.tree_leaves_with_path(state)
np.savez(folder / "trainer.npz", **{"/".join(str(k.key) for k in path): np.asarray(x) for path, x in leaves})
# >>> jaxrl_sync
taken = out.drain(timeout_s=120)
out.close()
hub.close()
if not taken:
    raise SystemExit("no engine took the last version within 120 s")
# <<< jaxrl_sync
