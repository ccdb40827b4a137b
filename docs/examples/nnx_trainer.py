"""A Tunix-style GRPO trainer with NNX state: actor and rollout are roles on meshes of their own.

After every step ``sync_weights`` carries the state of the actor into the layout of the rollout, by
`jaxrl_sync.sharding`. The shape is that of Tunix (a cluster of roles, a learner with a train loop); the sync
is the only part that is not ordinary JAX: it takes the place of a table of name patterns.

With eight virtual devices: XLA_FLAGS=--xla_force_host_platform_device_count=8 python nnx_trainer.py
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import Layout, make_pool, plan, reshard, trace

LAYERS, WIDTH, VOCAB, GROUP, LENGTH = 2, 16, 8, 8, 4


class Policy(nnx.Module):
    """Next-token model; layers are stacked in one parameter and scanned, as trainers keep them."""

    def __init__(self, rngs: nnx.Rngs) -> None:
        init = nnx.initializers.lecun_normal()
        self.embed = nnx.Param(init(rngs.params(), (VOCAB, WIDTH)))
        self.layers = nnx.Param(init(rngs.params(), (LAYERS, WIDTH, WIDTH)))
        self.scale = nnx.Param(jnp.zeros((LAYERS, WIDTH)))
        self.head = nnx.Param(jnp.zeros((WIDTH, VOCAB)))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """Log-probabilities of the token after each one."""

        def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            return x + jnp.tanh(x @ w[0] * (1 + w[1])), None

        x = jax.lax.scan(layer, self.embed[...][tokens], (self.layers[...], self.scale[...]))[0]
        return jax.nn.log_softmax(x @ self.head[...])


def convert(state: Any) -> dict[str, Any]:
    """The rollout keeps layers apart and transposed, and 1 + scale, which is arithmetic: a computed leaf."""
    s = nnx.to_pure_dict(state)
    layers = {str(i): {"w": s["layers"][i].T, "scale": 1 + s["scale"][i]} for i in range(LAYERS)}
    return {"embed": s["embed"], "layers": layers, "head": s["head"].T}


class Rollout:
    """The role that samples. Its weights are plain dictionaries, tensor parallel over its own mesh."""

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        self.weights: Any = None

    def layout(self, state: Any) -> Any:
        """What this role wants to be given: shapes with shardings, columns over ``tp``."""

        def place(x: Any) -> jax.ShapeDtypeStruct:
            spec = PartitionSpec("tp" if x.ndim == 2 else None)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(self.mesh, spec))

        return jax.tree.map(place, jax.eval_shape(convert, state))

    def generate(self, prompts: jax.Array, key: jax.Array) -> jax.Array:
        """[rows, 1 + LENGTH] tokens; returns when they are there, so that weights may change afterwards."""
        return jax.block_until_ready(_generate(self.weights, prompts, key))


@jax.jit
def _generate(weights: Any, prompts: jax.Array, key: jax.Array) -> jax.Array:
    tokens = [prompts]
    for i in range(LENGTH):
        x = weights["embed"][tokens[-1]]
        for layer in range(LAYERS):
            w = weights["layers"][str(layer)]
            x = x + jnp.tanh(x @ w["w"].T * w["scale"])
        tokens.append(jax.random.categorical(jax.random.fold_in(key, i), x @ weights["head"].T))
    return jnp.stack(tokens, axis=1)


class Actor:
    """The role that trains: NNX model and optimizer, parameters over ``fsdp``."""

    def __init__(self, mesh: Mesh) -> None:
        self.model = Policy(nnx.Rngs(0))
        dims = {"embed": 0, "layers": 1, "scale": 1, "head": 0}

        def place(path: Any, x: jax.Array) -> jax.Array:
            spec = PartitionSpec(*(None,) * dims[str(path[0].key)], "fsdp")
            return jax.device_put(x, NamedSharding(mesh, spec))

        nnx.update(self.model, jax.tree_util.tree_map_with_path(place, nnx.state(self.model)))
        self.optimizer = nnx.Optimizer(self.model, optax.adam(3e-2), wrt=nnx.Param)

    @property
    def state(self) -> Any:
        """What the rollout needs."""
        return nnx.state(self.model)

    def update(self, tokens: np.ndarray, advantages: np.ndarray) -> None:
        """One policy-gradient step."""
        _update(self.model, self.optimizer, jnp.asarray(tokens), jnp.asarray(advantages))


@nnx.jit
def _update(
    model: Policy, optimizer: nnx.Optimizer[Policy], tokens: jax.Array, advantages: jax.Array
) -> None:
    def loss(model: Policy) -> jax.Array:
        chosen = jnp.take_along_axis(model(tokens[:, :-1]), tokens[:, 1:, None], axis=-1)[..., 0]
        return -jnp.mean(chosen.sum(axis=1) * advantages)

    optimizer.update(model, nnx.grad(loss)(model))


class Cluster:
    """Roles on their meshes, and the way from one to the other: traced and planned once, then one call."""

    def __init__(self, actor: Actor, rollout: Rollout) -> None:
        self.actor, self.rollout = actor, rollout
        target = rollout.layout(actor.state)
        corr = trace(convert, actor.state, target)
        self.plan = plan(corr.export_layout, Layout.of(target), corr)
        self.pool = make_pool(self.plan, target)
        self.sync_weights()  # the first rollouts come from the actor's weights, not from the rollout's own

    def sync_weights(self) -> None:
        """The rollout gets the actor's weights; it must not be generating meanwhile."""
        self.rollout.weights = reshard(self.actor.state, self.plan, out=self.pool)


class GrpoLearner:
    """Groups of rollouts, rewards, advantages within the group, one update and one sync per step."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def train(self, num_steps: int) -> list[float]:
        """The mean reward of every step; a token is right if it is its predecessor's successor."""
        prompts = jnp.repeat(jnp.arange(VOCAB), GROUP)
        rewards = []
        for step in range(num_steps):
            tokens = np.asarray(self.cluster.rollout.generate(prompts, jax.random.key(step)))
            right = (tokens[:, 1:] == (tokens[:, :-1] + 1) % VOCAB).mean(axis=1)
            groups = right.reshape(VOCAB, GROUP)
            spread = groups.std(axis=1, keepdims=True) + 1e-6
            advantages = ((groups - groups.mean(axis=1, keepdims=True)) / spread).reshape(-1)
            self.cluster.actor.update(tokens, advantages.astype(np.float32))
            self.cluster.sync_weights()
            check_bits(self.cluster)
            rewards.append(float(right.mean()))
        return rewards


@functools.cache
def _jitted() -> Any:
    return jax.jit(convert)


def check_bits(cluster: Cluster) -> None:
    """The rollout's weights are what the conversion gives, to the last bit."""
    want = _jitted()(cluster.actor.state)
    for a, b in zip(jax.tree.leaves(want), jax.tree.leaves(cluster.rollout.weights), strict=True):
        if np.asarray(a).tobytes() != np.asarray(b).tobytes():
            raise SystemExit("weights differ")


def main() -> None:
    """Trains on devices 0 to 3, samples on 4 and 5."""
    devices = np.array(jax.devices())
    cluster = Cluster(Actor(Mesh(devices[:4], ("fsdp",))), Rollout(Mesh(devices[4:6], ("tp",))))
    rewards = GrpoLearner(cluster).train(40)
    print(f"reward {np.mean(rewards[:3]):.2f} -> {np.mean(rewards[-3:]):.2f} in {len(rewards)} steps")
    if np.mean(rewards[-3:]) < 0.8:
        raise SystemExit("the policy did not learn: do its rollouts come from its weights?")
    print(f"{len(rewards)} updates, every bit as converted")


if __name__ == "__main__":
    main()
