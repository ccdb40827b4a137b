"""Deltas as Pallas kernels for GPUs (Triton): two passes that read the buffers at the speed of memory.

The first reads both buffers once and leaves a mask word per 32 elements. Popcounts of the words, an eighth to
a thirty-second of the buffers, are summed up by XLA. The second reads the words, finds the place of each set
bit and stores position and value there; of the buffers it touches only sectors with a change. Positions, bits
and counts equal those of `xla` exactly. ``interpret=True`` runs the same kernels on CPU, for tests.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from jaxrl_sync.transfer.delta import xla
from jaxrl_sync.transfer.delta.bits import NO_POSITION, OVERWRITE, Kind, bits_of, from_bits, unsigned

WORD = 32
TILE_WORDS = 128
TILE = WORD * TILE_WORDS
ENTRIES = 1024


def _params() -> Any:
    return plgpu.CompilerParams(num_warps=4)


def _mask_kernel(old_ref: Any, new_ref: Any, words_ref: Any) -> None:
    old_WxB, new_WxB = bits_of(old_ref[...]), bits_of(new_ref[...])
    shift_WxB = lax.broadcasted_iota(jnp.int32, (TILE_WORDS, WORD), 1)
    changed_WxB = jnp.where(old_WxB != new_WxB, jnp.int32(1), jnp.int32(0)) << shift_WxB
    words_ref[...] = lax.bitcast_convert_type(jnp.sum(changed_WxB, axis=1), jnp.uint32)


def mask_words(old: jax.Array, new: jax.Array, interpret: bool = False) -> jax.Array:
    """As `xla.mask_words`: whole tiles of 4096 elements by the kernel, the rest by XLA."""
    old, new = old.reshape(-1), new.reshape(-1)
    if interpret or old.dtype == jnp.bool_:
        old, new = bits_of(old), bits_of(new)  # interpret mode on CPU may change the bits of bfloat16 NaNs
    tiles = old.size // TILE
    if tiles == 0:
        return xla.mask_words(old, new)
    whole = tiles * TILE
    spec = pl.BlockSpec((TILE_WORDS, WORD), lambda i: (i, 0))
    words: jax.Array = pl.pallas_call(
        _mask_kernel,
        grid=(tiles,),
        in_specs=[spec, spec],
        out_specs=pl.BlockSpec((TILE_WORDS,), lambda i: (i,)),
        out_shape=jax.ShapeDtypeStruct((tiles * TILE_WORDS,), jnp.uint32),
        compiler_params=_params(),
        interpret=interpret,
        name="delta_mask",
    )(old[:whole].reshape(-1, WORD), new[:whole].reshape(-1, WORD))
    if whole == old.size:
        return words
    return jnp.concatenate([words, xla.mask_words(old[whole:], new[whole:])])


def _compact_kernel(
    starts_ref: Any, words_ref: Any, new_ref: Any, *refs: Any, capacity: int, elements: int
) -> None:
    """One tile of mask words; ``refs``: initial positions and values (aliased), then the results."""
    positions_ref, values_ref = refs[2:]
    tile = pl.program_id(0)
    words_W = lax.bitcast_convert_type(words_ref[...], jnp.int32)
    counts_W = lax.population_count(words_W)
    before_W = starts_ref[0] + jnp.cumsum(counts_W) - counts_W
    bit_WxB = lax.broadcasted_iota(jnp.int32, (TILE_WORDS, WORD), 1)
    word_WxB = lax.broadcast_in_dim(words_W, (TILE_WORDS, WORD), (0,))
    below_WxB = word_WxB & ((jnp.int32(1) << bit_WxB) - 1)
    slot_WxB = before_W[:, None] + lax.population_count(below_WxB)
    row_WxB = lax.broadcasted_iota(jnp.int32, (TILE_WORDS, WORD), 0)
    at_WxB = tile * TILE + row_WxB * WORD + bit_WxB
    changed_WxB = ((word_WxB >> bit_WxB) & 1) == 1
    keep_WxB = changed_WxB & (slot_WxB < capacity)
    slot_WxB = jnp.where(keep_WxB, slot_WxB, capacity)
    inside_WxB = jnp.where(at_WxB < elements, at_WxB, 0)
    value_WxB = plgpu.load(new_ref.at[inside_WxB], mask=keep_WxB, other=0)
    plgpu.store(positions_ref.at[slot_WxB], at_WxB.astype(jnp.uint32), mask=keep_WxB)
    plgpu.store(values_ref.at[slot_WxB], value_WxB, mask=keep_WxB)


def encode_mask(words: jax.Array, new: jax.Array, capacity: int, interpret: bool = False) -> list[jax.Array]:
    """(count, positions, new bits) as `xla.encode_mask`."""
    flat = bits_of(new.reshape(-1))
    n = flat.size
    if n == 0 or capacity == 0:
        return xla.encode_mask(words, new, capacity)
    words = jnp.pad(words, (0, -words.size % TILE_WORDS))
    tiles = words.size // TILE_WORDS
    per_tile = (
        lax.population_count(words).reshape(tiles, TILE_WORDS).sum(1, dtype=jnp.uint32).astype(jnp.int32)
    )
    ends = jnp.cumsum(per_tile)
    whole = pl.BlockSpec(memory_space=pl.ANY)
    room = capacity + 1  # masked lanes point at the last slot: interpret mode writes old values back there
    shapes = (jax.ShapeDtypeStruct((room,), jnp.uint32), jax.ShapeDtypeStruct((room,), flat.dtype))
    positions, values = pl.pallas_call(
        functools.partial(_compact_kernel, capacity=capacity, elements=n),
        grid=(tiles,),
        in_specs=[
            pl.BlockSpec((1,), lambda i: (i,)),
            pl.BlockSpec((TILE_WORDS,), lambda i: (i,)),
            whole,
            whole,
            whole,
        ],
        out_specs=(whole, whole),
        out_shape=shapes,
        input_output_aliases={3: 0, 4: 1},
        compiler_params=_params(),
        interpret=interpret,
        name="delta_compact",
    )(
        ends - per_tile,
        words,
        flat,
        jnp.full(room, NO_POSITION, jnp.uint32),
        jnp.zeros(room, flat.dtype),
    )
    return [ends[-1].astype(jnp.uint32), positions[:capacity], values[:capacity]]


def encode(
    old: jax.Array, new: jax.Array, capacity: int, keep_old: bool, interpret: bool = False
) -> list[jax.Array]:
    """(count, positions, new bits[, old bits]) as `xla.encode`."""
    found = encode_mask(mask_words(old, new, interpret), new, capacity, interpret)
    return [*found, *([xla.gather(old, found[1])] if keep_old else [])]


def _apply_kernel(
    positions_ref: Any, values_ref: Any, count_ref: Any, _: Any, out_ref: Any, *, elements: int, capacity:
    int, kind: Kind,
) -> None:  # fmt: skip
    slot_E = pl.program_id(0) * ENTRIES + lax.iota(jnp.int32, ENTRIES)
    count = count_ref[0]
    position_E = positions_ref[...].astype(jnp.int32)
    keep_E = (slot_E < count) & (count <= capacity) & (position_E >= 0) & (position_E < elements)
    # A lane without an entry repeats the first one: interpret mode writes old values under a mask.
    low = jnp.min(jnp.where(keep_E, position_E, jnp.int32(0x7FFFFFFF)))
    any_E = jnp.broadcast_to(low < elements, (ENTRIES,))
    at_E = jnp.where(keep_E, position_E, jnp.where(low < elements, low, 0))
    value_E = values_ref[...]
    first = jnp.where(keep_E & (position_E == low), value_E.astype(jnp.int32), 0)
    value_E = jnp.where(keep_E, value_E, jnp.sum(first).astype(value_E.dtype))
    if kind != OVERWRITE:
        old_E = plgpu.load(out_ref.at[at_E], mask=any_E, other=0)
        value_E = xla.combine(bits_of(old_E), value_E, kind)
    plgpu.store(out_ref.at[at_E], from_bits(value_E, out_ref.dtype), mask=any_E)


def apply(
    buffer: jax.Array,
    positions: jax.Array,
    values: jax.Array,
    count: jax.Array,
    kind: Kind = OVERWRITE,
    interpret: bool = False,
) -> jax.Array:
    """As `xla.apply`, in place where the buffer is donated; no arithmetic touches the bits."""
    flat, capacity = buffer.reshape(-1), positions.size
    if flat.size == 0 or capacity == 0:
        return buffer
    if interpret or unsigned(flat.dtype).itemsize == 1:
        flat = bits_of(flat)  # stores of interpret mode are scatters, which may change the bits of NaNs
    pad = -capacity % ENTRIES
    whole, entries = pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((ENTRIES,), lambda i: (i,))
    result = pl.pallas_call(
        functools.partial(_apply_kernel, elements=flat.size, capacity=capacity, kind=kind),
        grid=((capacity + pad) // ENTRIES,),
        in_specs=[entries, entries, pl.BlockSpec((1,), lambda i: (0,)), whole],
        out_specs=whole,
        out_shape=jax.ShapeDtypeStruct(flat.shape, flat.dtype),
        input_output_aliases={3: 0},
        compiler_params=_params(),
        interpret=interpret,
        name="delta_apply",
    )(
        jnp.pad(positions, (0, pad), constant_values=NO_POSITION),
        jnp.pad(values, (0, pad)),
        jnp.minimum(count, jnp.uint32(0x7FFFFFFF)).astype(jnp.int32).reshape(1),
        flat,
    )
    return from_bits(result, buffer.dtype).reshape(buffer.shape)
