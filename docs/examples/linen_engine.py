"""A hand-written JAX decode loop, tensor parallel over two devices, with the weights of `linen_trainer.py`.

    python linen_engine.py FOLDER         # prompts on stdin, one JSON list of lists of tokens per line

It has its own names, fused projections and a transposed head. What jaxrl_sync needs stands between the
markers; without those lines this is the loop as it was before, with weights of its own.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=2")

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

# >>> jaxrl_sync
from jaxrl_sync.transfer import Subscriber, find_hub, take_latest

# <<< jaxrl_sync

VOCAB, WIDTH, HEADS, LAYERS, LENGTH = 16, 32, 4, 2, 12
HEAD_DIM = WIDTH // HEADS
SHAPES: dict[str, tuple[tuple[int, ...], tuple[str | None, ...]]] = {
    "qkv": ((WIDTH, 3, HEADS, HEAD_DIM), (None, None, "tp")),
    "out": ((HEADS, HEAD_DIM, WIDTH), ("tp",)),
    "up": ((WIDTH, 4 * WIDTH), (None, "tp")),
    "down": ((4 * WIDTH, WIDTH), ("tp",)),
    "norm1": ((WIDTH,), ()),
    "norm2": ((WIDTH,), ()),
}
TOP = {
    "tokens": ((VOCAB, WIDTH), ()),
    "position": ((LENGTH, WIDTH), ()),
    "head": ((VOCAB, WIDTH), ("tp",)),
}


def random_params() -> dict[str, Any]:
    """The engine's tree, sharded as its decode step wants it."""
    mesh = jax.make_mesh((2,), ("tp",), axis_types=(AxisType.Auto,))
    tree = {**TOP, **{str(i): SHAPES for i in range(LAYERS)}}
    rng = np.random.default_rng(0)

    def make(leaf: Any) -> jax.Array:
        shape, spec = leaf
        values = 0.1 * rng.standard_normal(shape, np.float32)
        return jax.device_put(values, NamedSharding(mesh, PartitionSpec(*spec)))

    return jax.tree.map(make, tree, is_leaf=lambda x: isinstance(x, tuple))


# >>> jaxrl_sync
def layer(block):
    leaves = {name: leaf for name, module in block.items() for leaf in module.values()}
    qkv = jnp.stack([leaves.pop(name) for name in "qkv"], axis=1)
    return {"qkv": qkv, "out": leaves.pop("o"), **leaves}


def convert(variables):
    p = variables["params"]
    top = {"tokens": p["embed"]["embedding"], "position": p["position"]["embedding"]}
    layers = {str(i): layer(p[f"block{i}"]) for i in range(LAYERS)}
    return {**top, **layers, "head": p["head"]["kernel"].T}


# <<< jaxrl_sync


def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """RMS norm."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


@jax.jit(donate_argnums=1)
def decode_step(params: Any, cache: Any, tokens: jax.Array, position: jax.Array) -> tuple[Any, jax.Array]:
    """One token of every row into the cache; the cache and the greedy next tokens ``[rows]``."""
    x = params["tokens"][tokens] + params["position"][position]
    new_cache = []
    for i, (keys, values) in enumerate(cache):
        p = params[str(i)]
        q, k, v = jnp.einsum("bw,wthd->tbhd", norm(x, p["norm1"]), p["qkv"])
        keys, values = keys.at[:, position].set(k), values.at[:, position].set(v)
        scores = jnp.einsum("bhd,blhd->bhl", q, keys) / HEAD_DIM**0.5
        scores = jnp.where(jnp.arange(LENGTH) <= position, scores, -jnp.inf)
        y = jnp.einsum("bhl,blhd->bhd", jax.nn.softmax(scores), values)
        x = x + jnp.einsum("bhd,hdw->bw", y, p["out"])
        x = x + jax.nn.silu(norm(x, p["norm2"]) @ p["up"]) @ p["down"]
        new_cache.append((keys, values))
    return new_cache, jnp.argmax(x @ params["head"].T, axis=-1)


def generate(params: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Prompts of one length, filled up to ``LENGTH`` tokens."""
    rows = np.asarray(prompts, np.int32)
    cache: Any = [tuple(jnp.zeros((len(rows), LENGTH, HEADS, HEAD_DIM)) for _ in "kv") for _ in range(LAYERS)]
    for position in range(LENGTH - 1):
        cache, found = decode_step(params, cache, jnp.asarray(rows[:, position]), jnp.int32(position))
        if position + 1 == rows.shape[1]:
            rows = np.concatenate([rows, np.asarray(found, np.int32)[:, None]], axis=1)
    return [[int(token) for token in row] for row in rows]


def main(folder: Path) -> None:
    """Answer every line of prompts; save the weights that served last."""
    params = random_params()
    # >>> jaxrl_sync
    hub = find_hub(folder)
    weights = Subscriber(hub.url, params, convert, token_file=hub.token_file)
    params = take_latest(weights, timeout_s=120)
    # <<< jaxrl_sync
    for line in sys.stdin:
        # >>> jaxrl_sync
        params = take_latest(weights) or params
        # <<< jaxrl_sync
        print(json.dumps(generate(params, json.loads(line))), flush=True)
    leaves = jax.tree_util.tree_leaves_with_path(params)
    np.savez(folder / "engine.npz", **{"/".join(k.key for k in path): np.asarray(x) for path, x in leaves})
    # >>> jaxrl_sync
    weights.close()
    # <<< jaxrl_sync


if __name__ == "__main__":
    main(Path(sys.argv[1]))
