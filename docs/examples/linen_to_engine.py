"""A Flax Linen model's parameters, sharded for training, become a hand-written engine's dictionary.

With eight virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=8 python linen_to_engine.py
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import Layout, make_pool, plan, reshard, trace

HEADS, HEAD_DIM, WIDTH, HIDDEN, VOCAB = 4, 8, 32, 64, 96


class Block(nn.Module):
    """Attention projections and a gated feed-forward block; enough of a model to have a layout."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        q = nn.DenseGeneral((HEADS, HEAD_DIM), use_bias=False, name="q")(x)
        k = nn.DenseGeneral((HEADS, HEAD_DIM), use_bias=False, name="k")(x)
        v = nn.DenseGeneral((HEADS, HEAD_DIM), use_bias=False, name="v")(x)
        x = x + nn.DenseGeneral(WIDTH, axis=(-2, -1), use_bias=False, name="o")(q + k + v)
        gate, up = (
            nn.Dense(HIDDEN, use_bias=False, name="gate")(x),
            nn.Dense(HIDDEN, use_bias=False, name="up")(x),
        )
        return x + nn.Dense(WIDTH, use_bias=False, name="down")(nn.silu(gate) * up)


class Model(nn.Module):
    """Two blocks between an embedding and its own head."""

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        for i in range(2):
            x = Block(name=f"block{i}")(x)
        return nn.Dense(VOCAB, use_bias=False, name="head")(x)


def convert(variables: Any) -> dict[str, Any]:
    """The engine wants bf16, fused projections and flat names. This is all that has to be written."""
    params = variables["params"]
    engine: dict[str, Any] = {"embed": params["embed"]["embedding"], "head": params["head"]["kernel"]}
    for i in range(2):
        block = params[f"block{i}"]
        engine[f"qkv{i}"] = jnp.stack([block[n]["kernel"] for n in "qkv"], axis=1)
        engine[f"o{i}"] = block["o"]["kernel"].reshape(HEADS * HEAD_DIM, WIDTH)
        engine[f"gate_up{i}"] = jnp.concatenate([block["gate"]["kernel"], block["up"]["kernel"]], axis=1)
        engine[f"down{i}"] = block["down"]["kernel"]
    return {name: x.astype(jnp.bfloat16) for name, x in engine.items()}


def main() -> None:
    """Train layout on devices 0-3, engine layout on devices 4-5; checks every bit."""
    devices = np.array(jax.devices())
    trainer, engine = Mesh(devices[:4], ("fsdp",)), Mesh(devices[4:6], ("tp",))
    variables = Model().init(jax.random.key(0), jnp.zeros((1, 4), jnp.int32))
    variables = jax.tree.map(
        lambda x: jax.device_put(x, NamedSharding(trainer, PartitionSpec("fsdp"))), variables
    )

    splits = {"qkv": (None, None, "tp"), "o": ("tp",), "down": ("tp",), "head": (None, "tp")}
    target = {
        name: jax.ShapeDtypeStruct(
            x.shape,
            x.dtype,
            sharding=NamedSharding(engine, PartitionSpec(*splits.get(name.rstrip("01"), ()))),
        )
        for name, x in jax.eval_shape(convert, variables).items()
    }
    corr = trace(convert, variables, target)
    print(corr.report())
    made = plan(corr.export_layout, Layout.of(target), corr)
    print(made.report())
    pool = make_pool(made)
    weights = reshard(variables, made, out=pool)  # call this after every optimizer step

    for name, want in jax.jit(convert)(variables).items():
        if np.asarray(want).tobytes() != np.asarray(weights[name]).tobytes():
            raise SystemExit(f"{name} differs")
    print(f"{len(weights)} engine tensors, every bit as converted")


if __name__ == "__main__":
    main()
