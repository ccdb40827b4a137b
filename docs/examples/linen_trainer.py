"""A plain Flax Linen and optax training loop whose weights reach `linen_engine.py` after every update.

    python linen_trainer.py FOLDER        # beside: python linen_engine.py FOLDER

What jaxrl_sync needs stands between the markers; without those lines this is the loop as it was before.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.traverse_util import flatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# >>> jaxrl_sync
from jaxrl_sync.transfer import LocalHub, Publisher, Version

# <<< jaxrl_sync

VOCAB, WIDTH, HEADS, LAYERS, LENGTH, STEPS = 16, 32, 4, 2, 12, 60


class Block(nn.Module):
    """Causal attention and a feed-forward block."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        h = nn.RMSNorm(name="norm1")(x)
        q, k, v = (nn.DenseGeneral((HEADS, WIDTH // HEADS), use_bias=False, name=name)(h) for name in "qkv")
        mask = nn.make_causal_mask(x[..., 0])
        y = nn.dot_product_attention(q, k, v, mask=mask)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(y)
        h = nn.RMSNorm(name="norm2")(x)
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(
            nn.silu(nn.Dense(4 * WIDTH, use_bias=False, name="up")(h))
        )


class Model(nn.Module):
    """Next-token logits ``[rows, length, vocab]``."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        x = x + nn.Embed(LENGTH, WIDTH, name="position")(jnp.arange(tokens.shape[1]))
        for i in range(LAYERS):
            x = Block(name=f"block{i}")(x)
        return nn.Dense(VOCAB, use_bias=False, name="head")(x)


def sharded(params: Any) -> Any:
    """Parameters over four devices, by their first dimension."""
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Auto,))
    return jax.tree.map(lambda x: jax.device_put(x, NamedSharding(mesh, PartitionSpec("fsdp"))), params)


def batch(step: int) -> jax.Array:
    """Every token is its predecessor's successor, three further on."""
    first = jax.random.randint(jax.random.key(step), (32, 1), 0, VOCAB)
    return (first + 3 * jnp.arange(LENGTH)) % VOCAB


def main(folder: Path) -> None:
    """Train, then save the parameters."""
    model, optimizer = Model(), optax.adam(1e-2)
    params = sharded(model.init(jax.random.key(0), batch(0)))
    opt_state = optimizer.init(params)

    def loss_of(params: Any, tokens: jax.Array) -> jax.Array:
        logits = model.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    @jax.jit(donate_argnums=(0, 1))
    def train_step(params: Any, opt_state: Any, tokens: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(params, tokens)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    # >>> jaxrl_sync
    hub = LocalHub(folder)
    out = Publisher(hub.url, params, token_file=hub.token_file)
    out.publish(params, Version("linen", 0))
    # <<< jaxrl_sync
    for step in range(1, STEPS + 1):
        params, opt_state, loss = train_step(params, opt_state, batch(step))
        print(json.dumps({"step": step, "loss": float(loss)}), flush=True)
        # >>> jaxrl_sync
        out.publish(params, Version("linen", step))
        # <<< jaxrl_sync
    flat = {"/".join(k): np.asarray(x) for k, x in flatten_dict(params).items()}
    np.savez(folder / "trainer.npz", **flat)
    # >>> jaxrl_sync
    taken = out.drain(timeout_s=120)
    out.close()
    hub.close()
    if not taken:
        raise SystemExit("no engine took the last version within 120 s")
    # <<< jaxrl_sync


if __name__ == "__main__":
    main(Path(sys.argv[1]))
