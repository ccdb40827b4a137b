"""One rank's device side: the weights, the device state, and the execution of step plans."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_sync.inference import probe
from jaxrl_sync.inference.config import EngineConfig, EngineConfigError
from jaxrl_sync.inference.errors import EngineError
from jaxrl_sync.inference.plan import NUM_FLOATS, NUM_INTS, Prefill, StepOutput, StepPlan
from jaxrl_sync.inference.steps import DecodeOutput, compiled_part, initial_state, step_functions
from jaxrl_sync.sharding.presets.quantized import quantized_abstract
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, engine_abstract
from jaxrl_sync.transfer.version import Version

Take = Callable[[Version], Any]


class TreeMismatchError(EngineError, ValueError):
    """An engine tree whose paths, shapes, dtypes or shardings are not those the engine was built for."""


def target_tree(cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, dtype: Any, axis: str = "tp") -> Any:
    """The abstract tree, shardings included, that this engine installs: a subscriber's target."""
    tree = engine_abstract(cfg, mesh, dtype, axis, config.adapters)
    if config.quantization is not None:
        tree = quantized_abstract(tree, config.quantization, mesh.shape[axis])
    return probe.stamped_abstract(tree, mesh) if config.version_probe else tree


class SwapFailedError(EngineError):
    """The weights of a plan's swap could not be had (the cause tells why); the old ones are still in use."""


class Runner:
    """Owns the weights in use and the donated state of one rank. Every call comes from one thread.

    ``take(version)`` gives the tree of a version that a plan's swap names; it runs when all outputs of the
    last step are ready, so the slot of the old weights is free when it returns.
    """

    def __init__(
        self,
        cfg: DecoderConfig,
        config: EngineConfig,
        mesh: Mesh,
        take: Take,
        dtype: Any = np.float32,
        axis: str = "tp",
    ) -> None:
        _check_mesh(cfg, config, mesh, axis)
        self.cfg, self.config, self.mesh = cfg, config, mesh
        self.target = target_tree(cfg, config, mesh, dtype, axis)
        self._take, self._axis = take, axis
        self._params: Any = None
        self._state: Any = initial_state(cfg, config, mesh, axis)
        self._prefill, self._decode = step_functions(cfg, compiled_part(config), mesh, axis)

    def execute(self, plan: StepPlan) -> StepOutput:
        """Swap, warm up, prefill, decode; blocks until the outputs are on the host.

        Raises SwapFailedError with nothing done: the rest of the plan can be executed without the swap.
        """
        t0 = time.perf_counter()
        if plan.swap is not None:
            self._swap(plan.swap)
        if plan.warm_up:
            self.warm_up()
        t1 = time.perf_counter()
        spans = [self._run_prefill(p) for p in plan.prefills]
        if spans:
            jax.block_until_ready(self._state.token)
        t2 = time.perf_counter()
        out = self._run_decode(plan) if plan.steps else None
        t3 = time.perf_counter()
        return self._output(plan, out, spans, (t1 - t0, t2 - t1, t3 - t2))

    def install(self, tree: Any) -> None:
        """Use ``tree`` from the next step on; raises TreeMismatchError, with the old weights still in use."""
        _check_tree(tree, self.target)
        self._params = tree

    @property
    def has_weights(self) -> bool:
        """Whether there is a version to execute plans with."""
        return self._params is not None

    def sleep(self, *, release_cache: bool) -> int:
        """Let go of the weights, and of cache and slot state if told so; bytes of this process's memory that
        were freed. The next swap in a plan ends it."""
        freed = 0
        if release_cache and self._state is not None:
            leaves = jax.block_until_ready(jax.tree.leaves(self._state))
            freed = sum(s.data.nbytes for x in leaves for s in x.addressable_shards)
            for leaf in leaves:
                leaf.delete()
            self._state = None
        self._params = None
        return freed

    def warm_up(self) -> None:
        """Compile every shape with idle slots: prefill per bucket, decode per cache length. Needs weights."""
        S, config = self.config.slots, self.config
        for length in config.prefill_buckets:
            self._run_prefill(
                Prefill(
                    np.zeros((config.prefill_rows, length), np.int32),
                    np.full(S, -1, np.int32),
                    np.zeros((S, NUM_INTS + config.max_stop_ids), np.int32),
                    np.zeros((S, NUM_FLOATS), np.float32),
                )
            )
        for attend in config.attend_buckets:
            self._run_decode(StepPlan(0, np.zeros(S, bool), 1, attend))
        jax.block_until_ready(self._state.token)

    def compiled(self) -> dict[str, int]:
        """Entries in the jit caches: they must not grow over swaps."""
        return {"prefill": self._prefill._cache_size(), "decode": self._decode._cache_size()}  # type: ignore[attr-defined]

    def _swap(self, version: Version) -> None:
        jax.block_until_ready(self._state)
        try:
            self.install(self._take(version))
        except Exception as error:
            raise SwapFailedError(f"swap to {version}: {error}") from error
        if self._state is None:  # after a sleep
            self._state = initial_state(self.cfg, self.config, self.mesh, self._axis)

    def _run_prefill(self, p: Prefill) -> tuple[jax.Array, jax.Array]:
        self._state, low, high = self._prefill(self._params, self._state, p.tokens, p.row, p.ints, p.floats)
        return low, high

    def _run_decode(self, plan: StepPlan) -> DecodeOutput:
        steps = np.int32(min(plan.steps, self.config.decode_steps_per_dispatch))
        self._state, out = self._decode(self._params, self._state, plan.active, steps, attend=plan.attend)
        return DecodeOutput(*(np.asarray(x.addressable_data(0)) for x in out))  # type: ignore[arg-type]

    def _output(
        self,
        plan: StepPlan,
        out: DecodeOutput | None,
        spans: list[tuple[jax.Array, jax.Array]],
        seconds: tuple[float, float, float],
    ) -> StepOutput:
        S = self.config.slots
        bounds = [
            (int(np.asarray(x.addressable_data(0))), int(np.asarray(y.addressable_data(0)))) for x, y in spans
        ]
        if out is not None and int(out.steps):
            bounds.append((int(out.low), int(out.high)))
        stamps = (min(b[0] for b in bounds), max(b[1] for b in bounds)) if bounds else None
        return StepOutput(
            tokens=np.asarray(out.tokens) if out else np.zeros((0, S), np.int32),
            logprobs=np.asarray(out.logprobs) if out else np.zeros((0, S), np.float32),
            extras={"entropy": np.asarray(out.entropy)} if out and "entropy" in self.config.extras else {},
            status=np.asarray(out.status) if out else np.zeros(S, np.int32),
            steps=int(out.steps) if out else 0,
            stamps=stamps if self.config.version_probe else None,
            swapped=plan.swap,
            pause_s=seconds[0],
            prefill_s=seconds[1],
            decode_s=seconds[2],
        )


def _check_mesh(cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, axis: str) -> None:
    if axis not in mesh.shape or mesh.size != mesh.shape[axis]:
        raise EngineConfigError(f"engine mesh: expected one axis {axis!r}, got {dict(mesh.shape)}")
    tp = mesh.shape[axis]
    if config.slots % tp:
        raise EngineConfigError(f"engine.slots: expected a multiple of tp={tp}, got {config.slots}")
    sizes = {"d_ff": cfg.d_ff} | ({} if cfg.tied_embeddings else {"vocab_size": cfg.vocab_size})
    for name, size in sizes.items():
        if size % tp:
            raise EngineConfigError(f"model.{name}: expected a multiple of the engine's tp={tp}, got {size}")


def _check_tree(tree: Any, target: Any) -> None:
    found = dict(jax.tree_util.tree_leaves_with_path(tree))
    for path, want in jax.tree_util.tree_leaves_with_path(target):
        name = "/".join(str(key.key) for key in path)
        leaf = found.pop(path, None)
        if leaf is None:
            raise TreeMismatchError(f"engine tree: {name} is missing")
        if leaf.shape != want.shape or leaf.dtype != want.dtype:
            raise TreeMismatchError(
                f"engine tree: {name}: expected {want.dtype}{list(want.shape)}, "
                f"got {leaf.dtype}{list(leaf.shape)}"
            )
        if not leaf.sharding.is_equivalent_to(want.sharding, leaf.ndim):
            raise TreeMismatchError(f"engine tree: {name}: expected {want.sharding}, got {leaf.sharding}")
    if found:
        name = "/".join(str(key.key) for key in next(iter(found)))
        raise TreeMismatchError(f"engine tree: unexpected tensor {name}")
