"""A trainer with NNX state pushes its weights to a rollout model after every step, as Tunix-style loops do.

The trainer's model and optimizer are NNX objects; the rollout worker has per-layer weights on other devices.
With eight virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=8 python nnx_trainer.py
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import Layout, make_pool, plan, reshard, trace

LAYERS, WIDTH = 3, 16


class Policy(nnx.Module):
    """Scanned layers: one parameter with a leading layer dimension, as trainers keep them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.layers = nnx.Param(init(rngs.params(), (LAYERS, WIDTH, WIDTH)))
        self.scale = nnx.Param(jnp.zeros((LAYERS, WIDTH)))

    def __call__(self, x: jax.Array) -> jax.Array:
        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return jnp.tanh(x @ w[0] * (1 + w[1])), None

        return jax.lax.scan(layer, x, (self.layers[...], self.scale[...]))[0]


def convert(state: Any) -> dict[str, Any]:
    """Per-layer weights; the rollout model wants 1 + scale, which is arithmetic: a computed leaf."""
    state = nnx.to_pure_dict(state)
    return {f"layer{i}": {"w": state["layers"][i].T, "scale": 1 + state["scale"][i]} for i in range(LAYERS)}


class RolloutWorker:
    """Owns the engine-side layout, the plan and the memory; ``update`` is what a trainer calls."""

    def __init__(self, state: Any, mesh: Mesh) -> None:
        target = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(mesh, PartitionSpec(*("tp",) * (x.ndim - 1)))
            ),
            jax.eval_shape(convert, state),
        )
        corr = trace(convert, state, target)
        self.plan = plan(corr.export_layout, Layout.of(target), corr)
        self.pool = make_pool(self.plan)
        self.weights: Any = None

    def update(self, state: Any) -> None:
        """Takes new weights; nothing of this worker may be computing meanwhile."""
        self.weights = reshard(state, self.plan, out=self.pool)


def main() -> None:
    """Three optimizer steps, an update after each, every bit compared."""
    devices = np.array(jax.devices())
    trainer, engine = Mesh(devices[:4], ("fsdp",)), Mesh(devices[4:6], ("tp",))
    model = Policy(nnx.Rngs(0))
    sharding = NamedSharding(trainer, PartitionSpec(None, "fsdp"))
    nnx.update(model, jax.tree.map(lambda x: jax.device_put(x, sharding), nnx.state(model)))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    worker = RolloutWorker(nnx.state(model), engine)

    @nnx.jit
    def step(model: Policy, optimizer: nnx.Optimizer[Policy], x: jax.Array) -> None:
        grads = nnx.grad(lambda m: jnp.mean((m(x) - 1) ** 2))(model)
        optimizer.update(model, grads)

    for number in range(3):
        step(model, optimizer, jax.random.normal(jax.random.key(number), (8, WIDTH)))
        worker.update(nnx.state(model))
        want = jax.jit(convert)(nnx.state(model))
        for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(worker.weights), strict=True):
            if np.asarray(a).tobytes() != np.asarray(b).tobytes():
                raise SystemExit(f"step {number}: weights differ")
    print("3 updates, every bit as converted")


if __name__ == "__main__":
    main()
