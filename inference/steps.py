"""The two jitted functions of the engine, prefill and decode, with donated state.

Both run under ``jax.shard_map`` over the tensor-parallel axis. Weights are plain arguments: a swap is another
tree in the next call, without a compilation. The state is donated: cache, last tokens, positions, limits and
the random identity of every slot live on the device from step to step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.inference import plan, probe
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.kv_cache import Cache, LayerCache, cache_spec, empty_cache, write_prefix
from jaxrl_sync.inference.model import decode_hidden, head_logits, my_rows, prefill_hidden
from jaxrl_sync.inference.sampler import SamplingRows, draw, sample_keys
from jaxrl_sync.sharding.presets.quantized import quantized_specs
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig, engine_specs

Params = dict[str, Any]


class DeviceState(NamedTuple):
    """Everything that lives on the devices between steps, beside the weights; one entry per slot.

    token, position, remaining: int32 ``[S]``, the last token (not yet in the cache), its position, and how
    many tokens the slot may still draw. stop: int32 ``[S, M]``, -1 where unused.
    """

    cache: Cache
    token: jax.Array
    position: jax.Array
    remaining: jax.Array
    stop: jax.Array
    rows: SamplingRows


class DecodeOutput(NamedTuple):
    """Replicated outputs of one dispatch; see ``plan.StepOutput``. steps, low and high are int32 scalars."""

    tokens: jax.Array
    logprobs: jax.Array
    entropy: jax.Array
    status: jax.Array
    steps: jax.Array
    low: jax.Array
    high: jax.Array


class StepFunctions(NamedTuple):
    """The two jitted functions, see ``_make_prefill`` and ``_make_decode``."""

    prefill: Callable[..., tuple[DeviceState, jax.Array, jax.Array]]
    decode: Callable[..., tuple[DeviceState, DecodeOutput]]


class _Carry(NamedTuple):
    state: DeviceState
    status: jax.Array
    out: DecodeOutput


def initial_state(cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, axis: str) -> DeviceState:
    """Empty slots, committed to their shardings (so that the jit cache keeps one entry per shape)."""
    S = config.slots

    def zeros() -> tuple[jax.Array, ...]:
        return (
            jnp.zeros(S, jnp.int32),
            jnp.zeros(S, jnp.int32),
            jnp.zeros(S, jnp.int32),
            jnp.full((S, config.max_stop_ids), -1, jnp.int32),
            jnp.ones(S, jnp.float32),
            jnp.zeros(S, jnp.int32),
            jnp.ones(S, jnp.float32),
            jnp.zeros((S, 2), jnp.uint32),
        )

    token, position, remaining, stop, *rows = jax.jit(
        zeros, out_shardings=NamedSharding(mesh, PartitionSpec())
    )()
    cache = empty_cache(cfg, mesh, S, config.max_len, jnp.dtype(config.compute_dtype), axis)
    return DeviceState(cache, token, position, remaining, stop, SamplingRows(*rows))


def state_specs(cfg: DecoderConfig, axis: str) -> DeviceState:
    """Partition specs of ``DeviceState``."""
    whole, kv = PartitionSpec(), cache_spec(axis)
    cache = tuple(LayerCache(kv, kv) for _ in range(cfg.num_layers))  # type: ignore[arg-type]
    rows = SamplingRows(*(whole,) * 4)  # type: ignore[arg-type]
    return DeviceState(cache, whole, whole, whole, whole, rows)  # type: ignore[arg-type]


@functools.lru_cache(maxsize=16)
def step_functions(cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, axis: str) -> StepFunctions:
    """The jitted prefill and decode; engines of one shape in one process share them, compiled."""
    specs = engine_specs(cfg, axis, config.adapters)
    if config.quantization is not None:
        specs = quantized_specs(specs)
    if config.version_probe:
        specs = probe.with_leaf(specs, PartitionSpec())
    return StepFunctions(
        _make_prefill(cfg, config, mesh, specs, axis), _make_decode(cfg, config, mesh, specs, axis)
    )


def compiled_part(config: EngineConfig) -> EngineConfig:
    """``config`` with everything reset that the jitted functions don't depend on: the key to share them."""
    return EngineConfig(
        slots=config.slots,
        decode_steps_per_dispatch=config.decode_steps_per_dispatch,
        max_stop_ids=config.max_stop_ids,
        compute_dtype=config.compute_dtype,
        extras=config.extras,
        version_probe=config.version_probe,
        quantization=config.quantization,
        adapters=config.adapters,
    )


def _make_prefill(
    cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, specs: Any, axis: str
) -> Callable[..., tuple[DeviceState, jax.Array, jax.Array]]:
    """``prefill(params, state, tokens, row, ints, floats) -> (state, low, high)``, state donated.

    Arguments as in ``plan.Prefill``; low and high are the version stamps that the pass used.
    """
    dtype = jnp.dtype(config.compute_dtype)

    def prefill(
        params: Params,
        state: DeviceState,
        tokens: jax.Array,
        row: jax.Array,
        ints: jax.Array,
        floats: jax.Array,
    ) -> tuple[DeviceState, jax.Array, jax.Array]:
        hidden, prefix = prefill_hidden(params, cfg, tokens, axis, dtype)
        low, high = probe.span(params, cfg, hidden)
        cache = tuple(
            LayerCache(write_prefix(old.k, new.k, row), write_prefix(old.v, new.v, row))
            for old, new in zip(state.cache, prefix, strict=True)
        )
        return _admit(state._replace(cache=cache), row >= 0, ints, floats), low, high

    state, whole = state_specs(cfg, axis), PartitionSpec()
    mapped = jax.shard_map(
        prefill,
        mesh=mesh,
        in_specs=(specs, state, whole, whole, whole, whole),
        out_specs=(state, whole, whole),
        check_vma=False,
    )
    shardings = _shardings((state, whole, whole), mesh)
    return jax.jit(mapped, donate_argnums=1, out_shardings=shardings)


def _make_decode(
    cfg: DecoderConfig, config: EngineConfig, mesh: Mesh, specs: Any, axis: str
) -> Callable[..., tuple[DeviceState, DecodeOutput]]:
    """``decode(params, state, active, steps, attend=static) -> (state, DecodeOutput)``, state donated.

    Runs up to ``steps`` decode steps (at most ``config.decode_steps_per_dispatch``), fewer when no slot is
    left running. A slot stops by itself at a stop token or at its limit, so the number of steps per dispatch
    never shows in the result.
    """

    layout, whole = state_specs(cfg, axis), PartitionSpec()
    out_specs = (layout, DecodeOutput(*(whole,) * 7))  # type: ignore[arg-type]

    @functools.partial(
        jax.jit, donate_argnums=1, static_argnames="attend", out_shardings=_shardings(out_specs, mesh)
    )
    def decode(
        params: Params, state: DeviceState, active: jax.Array, steps: jax.Array, attend: int
    ) -> tuple[DeviceState, DecodeOutput]:
        body = functools.partial(_decode_loop, cfg=cfg, config=config, attend=attend, axis=axis)
        mapped = jax.shard_map(
            body,
            mesh=mesh,
            in_specs=(specs, layout, whole, whole),
            out_specs=out_specs,
            check_vma=False,
        )
        return mapped(params, state, active, steps)

    return decode


def _shardings(specs: Any, mesh: Mesh) -> Any:
    """Specs as shardings. Stated on the outputs, so that the donated state never changes its representation
    (over one device, the compiler would normalise it, and the next call would compile again)."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def _admit(state: DeviceState, taken: jax.Array, ints: jax.Array, floats: jax.Array) -> DeviceState:
    """Replace the per-slot numbers of the slots in ``taken``."""

    def pick(new: jax.Array, old: jax.Array) -> jax.Array:
        return jnp.where(taken.reshape(-1, *(1,) * (old.ndim - 1)), new, old)

    unsigned = jax.lax.bitcast_convert_type(ints, jnp.uint32)
    key = sample_keys(unsigned[:, plan.SEED], unsigned[:, plan.HASH], ints[:, plan.SAMPLE])
    rows = SamplingRows(floats[:, plan.TEMPERATURE], ints[:, plan.TOP_K], floats[:, plan.TOP_P], key)
    return DeviceState(
        state.cache,
        pick(ints[:, plan.TOKEN], state.token),
        pick(ints[:, plan.POSITION], state.position),
        pick(ints[:, plan.REMAINING], state.remaining),
        pick(ints[:, plan.NUM_INTS :], state.stop),
        SamplingRows(*(pick(new, old) for new, old in zip(rows, state.rows, strict=True))),
    )


def _decode_loop(
    params: Params,
    state: DeviceState,
    active: jax.Array,
    steps: jax.Array,
    *,
    cfg: DecoderConfig,
    config: EngineConfig,
    attend: int,
    axis: str,
) -> tuple[DeviceState, DecodeOutput]:
    K, S = config.decode_steps_per_dispatch, config.slots
    status = jnp.where(active, plan.RUNNING, plan.FULL).astype(jnp.int32)
    zero = jnp.zeros((), jnp.int32)
    blank = DecodeOutput(
        jnp.full((K, S), -1, jnp.int32),
        jnp.zeros((K, S), jnp.float32),
        jnp.zeros((K, S), jnp.float32),
        status,
        zero,
        jnp.full((), 2**31 - 1, jnp.int32),
        jnp.full((), -(2**31), jnp.int32),
    )

    def more(carry: _Carry) -> jax.Array:
        return (carry.out.steps < steps) & jnp.any(carry.status == plan.RUNNING)

    def one(carry: _Carry) -> _Carry:
        return _decode_one(params, carry, cfg, config, attend, axis)

    last = jax.lax.while_loop(more, one, _Carry(state, status, blank))
    return last.state, last.out._replace(status=last.status)


def _decode_one(
    params: Params, carry: _Carry, cfg: DecoderConfig, config: EngineConfig, attend: int, axis: str
) -> _Carry:
    """One forward pass and one token for every running slot."""
    state, out = carry.state, carry.out
    running = carry.status == plan.RUNNING
    dtype = jnp.dtype(config.compute_dtype)
    hidden, cache = decode_hidden(params, cfg, state.cache, state.token, state.position, attend, axis, dtype)
    low, high = probe.span(params, cfg, hidden)
    mine = SamplingRows(*(my_rows(x, axis) for x in state.rows))
    logits, position = head_logits(params, hidden, axis), my_rows(state.position, axis) + 1
    drawn = draw(logits, mine, position, with_entropy="entropy" in config.extras)
    token, logprob, entropy = (jax.lax.all_gather(x, axis, tiled=True) for x in drawn)
    remaining = jnp.where(running, state.remaining - 1, state.remaining)
    stopped = running & jnp.any(token[:, None] == state.stop, axis=-1)
    full = running & ~stopped & (remaining <= 0)
    status = jnp.where(stopped, plan.STOPPED, jnp.where(full, plan.FULL, carry.status))
    step = out.steps
    return _Carry(
        state._replace(
            cache=cache,
            token=jnp.where(running, token, state.token),
            position=jnp.where(running, state.position + 1, state.position),
            remaining=remaining,
        ),
        status,
        out._replace(
            tokens=out.tokens.at[step].set(jnp.where(running, token, -1)),
            logprobs=out.logprobs.at[step].set(jnp.where(running, logprob, 0.0)),
            entropy=out.entropy.at[step].set(jnp.where(running, entropy, 0.0)),
            steps=step + 1,
            low=jnp.minimum(out.low, low),
            high=jnp.maximum(out.high, high),
        ),
    )
