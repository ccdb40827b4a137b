"""Small engines for the tests of this room: one model shape, random weights by seed, virtual meshes."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxrl_sync.inference import probe
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.front import Handle
from jaxrl_sync.inference.model import logits
from jaxrl_sync.inference.request import GroupResult, Request, Sampling
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer.version import Version

TINY = qwen3.DecoderConfig(
    vocab_size=24, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=48
)
SMALL = EngineConfig(
    slots=8, max_len=32, prefill_lengths=(8,), prefill_rows=4, decode_steps_per_dispatch=2, max_stop_ids=3
)


def tp_mesh(tp: int = 1) -> Mesh:
    """A mesh of the first ``tp`` virtual devices."""
    return jax.make_mesh((tp,), ("tp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:tp])


@functools.lru_cache
def trainer_weights(seed: int, cfg: qwen3.DecoderConfig = TINY) -> Any:
    """A random trainer tree (float32) with norms around 1."""
    rng = np.random.default_rng(seed)

    def leaf(path: Any, x: jax.ShapeDtypeStruct) -> np.ndarray:
        drawn: np.ndarray = rng.standard_normal(x.shape)
        drawn = 1.0 + 0.1 * drawn if path[-1].key == "scale" else 0.3 * drawn
        single: np.ndarray = drawn.astype(np.float32)
        return single

    return jax.tree_util.tree_map_with_path(leaf, qwen3.trainer_shapes(cfg))


def engine_weights(
    seed: int, mesh: Mesh, cfg: qwen3.DecoderConfig = TINY, config: EngineConfig = SMALL, stamp: int = 0
) -> Any:
    """The engine tree of ``trainer_weights(seed)`` on ``mesh``, stamped when the config has the probe on."""
    tree = qwen3.convert(trainer_weights(seed, cfg), cfg, mesh.shape["tp"], jnp.float32)
    if config.version_probe:
        tree = probe.with_leaf(tree, np.array([stamp], np.int32))
    target = target_tree(cfg, config, mesh, jnp.float32)
    return jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)


def make_engine(config: EngineConfig = SMALL, tp: int = 1, seed: int = 0, **more: Any) -> Engine:
    """An engine that serves version ("test", 0) of ``trainer_weights(seed)``."""
    mesh = tp_mesh(tp)
    weights = engine_weights(seed, mesh, config=config)
    return Engine(config, TINY, mesh, weights, version=Version("test", 0), **more)


@functools.partial(jax.jit, static_argnums=(0, 3))
def _reference(cfg: qwen3.DecoderConfig, tree: Any, tokens: jax.Array, temperature: float) -> jax.Array:
    scaled = logits(tree, cfg, tokens, jnp.dtype(jnp.float32)) / temperature
    return jax.nn.log_softmax(scaled, axis=-1)


def reference_logprobs(
    seed: int, prompt: tuple[int, ...], tokens: tuple[int, ...], temperature: float = 1.0
) -> np.ndarray:
    """Log-probs of ``tokens`` after ``prompt`` by one whole forward pass over ``trainer_weights(seed)``."""
    sequence = np.zeros((1, SMALL.max_len), np.int32)
    sequence[0, : len(prompt) + len(tokens)] = prompt + tokens
    tree = qwen3.convert(trainer_weights(seed), TINY, 1, jnp.float32)
    all_logprobs = np.asarray(_reference(TINY, tree, sequence, temperature))[0]
    start = len(prompt) - 1
    chosen: np.ndarray = all_logprobs[np.arange(start, start + len(tokens)), list(tokens)]
    return chosen


def run_until(engine: Engine, handles: Iterable[Handle], max_steps: int = 400) -> list[GroupResult]:
    """Step the engine on this thread until all handles are done."""
    waiting = list(handles)
    for _ in range(max_steps):
        if all(h.future.done() for h in waiting):
            return [h.result(0) for h in waiting]
        engine.step()
    raise AssertionError(f"not done after {max_steps} steps: {engine.stats()}")


def generate(engine: Engine, *requests: Request) -> list[GroupResult]:
    """Submit and run to the end."""
    return run_until(engine, [engine.submit(r) for r in requests])


def ask(request_id: str = "r", prompt: tuple[int, ...] = (1, 2, 3), n: int = 1, **sampling: Any) -> Request:
    """A request with ``max_tokens`` 6 unless said otherwise."""
    timeout_s, version = sampling.pop("timeout_s", None), sampling.pop("version", None)
    sampling.setdefault("max_tokens", 6)
    return Request(request_id, prompt, n, Sampling(**sampling), version=version, timeout_s=timeout_s)
