"""Deltas in plain XLA, for any backend: mask words, prefix sums by triangular matmul, a search per entry.

`jnp.nonzero` is many times slower. The steps: 32 elements make a mask word; the words of a block of 128
elements get inclusive prefixes of popcounts; block starts are scattered over the result's slots and summed
up, so that every slot knows its block; the slot then finds its word by halvings in the block's prefixes, and
its bit by halvings of partial counts. Work per changed element is constant, clustered
changes are no special case, and the result is dense and sorted. All buffers are flat and local; see `encode`
for several devices.

Barriers stand between the steps: without them XLA may fuse a step into each of its readers, and put a prefix
sum together again for every slot that reads it. On jax 0.12 they do that on CPUs too; the CPU backend of
0.10.2 drops them before it fuses. Indices of gathers are in bounds by construction, so none is checked.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from jaxrl_sync.transfer.delta.bits import NO_POSITION, OVERWRITE, XOR, Kind, bits_of, from_bits

WORD = 32
SQUARE = WORD * WORD
BLOCK_WORDS = 4
_LANES = 64

_apart = lax.optimization_barrier


def _ones_above(n: int) -> jax.Array:
    return jnp.triu(jnp.ones((n, n), jnp.float32))


def _exchange(low: jax.Array, high: jax.Array, distance: int) -> tuple[jax.Array, jax.Array]:
    """Two rows of a square of bits, with blocks of ``distance`` bits exchanged (Hacker's Delight 7-3)."""
    mask = sum(((1 << distance) - 1) << at for at in range(0, WORD, 2 * distance))
    moved = ((low >> distance) ^ high) & jnp.uint32(mask)
    return low ^ (moved << distance), high ^ moved


def _exchange_twice(words: jax.Array, distance: int) -> jax.Array:
    """Exchanges rows at ``distance`` and at half of it in one pass: fewer passes cost less than few steps."""
    quarter = distance // 2
    quads = words.reshape(-1, 4, quarter)
    a, b, c, d = (quads[:, k] for k in range(4))
    a, c = _exchange(a, c, distance)
    b, d = _exchange(b, d, distance)
    return jnp.stack([*_exchange(a, b, quarter), *_exchange(c, d, quarter)], 1)


def _transpose_bits(columns: jax.Array) -> jax.Array:
    """Squares of 32 x 32 bits, u16[squares, 2, 32] (upper and lower half of each column), as u32 rows."""
    upper, lower = (columns[:, k].astype(jnp.uint32) for k in (0, 1))
    half = WORD // 2
    x = jnp.stack([rows[:, :half] | rows[:, half:] << half for rows in (upper, lower)], 1)
    return _exchange_twice(_exchange_twice(x, 8), 2).reshape(-1)


def mask_words(old: jax.Array, new: jax.Array) -> jax.Array:
    """u32[ceil(n / 32)]: bit j of word w says that element 32 w + j of two flat buffers differs in its bits.

    Whole squares of 1024 elements are summed by half columns, which vectorises, and transposed; the rest by
    rows.
    """
    n = new.size
    changed = bits_of(old.reshape(-1)) != bits_of(new.reshape(-1))
    whole = n - n % SQUARE
    parts = []
    if whole:
        shifts = jnp.arange(WORD // 2, dtype=jnp.uint16)[:, None]
        squares = changed[:whole].reshape(-1, 2, WORD // 2, WORD).astype(jnp.uint16)
        parts.append(_transpose_bits((squares << shifts).sum(2, dtype=jnp.uint16)))
    if n % SQUARE:
        shifts = jnp.arange(WORD, dtype=jnp.uint32)
        rest = jnp.pad(changed[whole:], (0, -n % WORD)).reshape(-1, WORD).astype(jnp.uint32)
        parts.append((rest << shifts).sum(1, dtype=jnp.uint32))
    return jnp.concatenate(parts) if parts else jnp.zeros(0, jnp.uint32)


def _prefix(x: jax.Array, levels: int = 2) -> jax.Array:
    """Inclusive prefix sums of int32 below 512, or of at most 2^23 in all: the matmuls stay exact."""
    n = x.shape[0]
    if n <= 32 * _LANES or levels == 0:
        return jnp.cumsum(x)
    rows = jnp.pad(x, (0, -n % _LANES)).reshape(-1, _LANES).astype(jnp.float32)
    inner = jnp.matmul(rows, _ones_above(_LANES), precision=lax.Precision.HIGHEST).astype(jnp.int32)
    totals = inner[:, -1]
    before = _prefix(totals, levels - 1) - totals
    return (inner + before[:, None]).reshape(-1)[:n]


def _kth_bit(word: jax.Array, k: jax.Array) -> jax.Array:
    """Where the k-th set bit (from 0) of each word is: partial counts once, then five halvings."""
    twos = word - ((word >> 1) & 0x55555555)
    fours = (twos & 0x33333333) + ((twos >> 2) & 0x33333333)
    eights = (fours + (fours >> 4)) & 0x0F0F0F0F
    sixteens = (eights + (eights >> 8)) & 0x00FF00FF
    at = jnp.zeros_like(word)
    for half, counts in ((16, sixteens), (8, eights), (4, fours), (2, twos), (1, word)):
        count = (counts >> at) & min(2 * half - 1, 31)
        upper = k >= count
        at = jnp.where(upper, at + half, at)
        k = jnp.where(upper, k - count, k)
    return at


def _take(x: jax.Array, at: jax.Array) -> jax.Array:
    return x.at[at].get(mode="promise_in_bounds")


def _counts_in_blocks(words: jax.Array) -> jax.Array:
    """u8[blocks, BLOCK_WORDS]: changes in each block up to and with each of its words."""
    counts = lax.population_count(words).astype(jnp.uint8).reshape(-1, BLOCK_WORDS)
    sums = [counts[:, 0]]
    for k in range(1, BLOCK_WORDS):
        sums.append(sums[-1] + counts[:, k])
    return jnp.stack(sums, 1)


def _find_words(inclusive: jax.Array, starts: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """For each slot: the word that holds its entry, and the entry's number among the word's set bits.

    A slot past the count finds some word of some block.
    """
    marks = jnp.zeros(capacity, jnp.int32).at[starts].add(1, mode="drop", indices_are_sorted=True)
    block = _apart(_prefix(marks) - 1)
    rank = _apart(jnp.arange(capacity, dtype=jnp.int32) - _take(starts, block))
    flat, base = inclusive.reshape(-1), block * BLOCK_WORDS
    word = jnp.zeros(capacity, jnp.int32)
    before = jnp.zeros(capacity, jnp.int32)
    half = BLOCK_WORDS // 2
    while half:
        count = _take(flat, base + word + (half - 1)).astype(jnp.int32)
        upper = count <= rank
        before = jnp.where(upper, count, before)
        word = jnp.where(upper, word + half, word)
        half //= 2
    found: tuple[jax.Array, jax.Array] = _apart((base + word, rank - before))
    return found


def positions_of(words: jax.Array, capacity: int) -> tuple[jax.Array, jax.Array]:
    """(true count u32, positions u32[capacity]) of the set bits of mask words; slots past the count
    NO_POSITION.
    """
    if words.size == 0 or capacity == 0:
        count = lax.population_count(words).sum(dtype=jnp.uint32)
        return count, jnp.full(capacity, NO_POSITION, jnp.uint32)
    words = _apart(jnp.pad(words, (0, -words.size % BLOCK_WORDS)))
    inclusive = _apart(_counts_in_blocks(words))
    per_block = inclusive[:, -1].astype(jnp.int32)
    ends = _apart(_prefix(per_block))
    word, rank = _find_words(inclusive, _apart(ends - per_block), capacity)
    found = word.astype(jnp.uint32) * WORD + _kth_bit(_take(words, word), rank.astype(jnp.uint32))
    valid = jnp.arange(capacity, dtype=jnp.int32) < ends[-1]
    return ends[-1].astype(jnp.uint32), _apart(jnp.where(valid, found, NO_POSITION))


def gather(buffer: jax.Array, positions: jax.Array) -> jax.Array:
    """Bits at the positions; 0 where NO_POSITION."""
    if buffer.size == 0:
        return jnp.zeros(positions.shape, bits_of(buffer).dtype)
    at = jnp.minimum(positions, jnp.uint32(buffer.size - 1)).astype(jnp.int32)
    bits = _take(bits_of(buffer.reshape(-1)), at)
    return jnp.where(positions == NO_POSITION, jnp.zeros((), bits.dtype), bits)


def encode(old: jax.Array, new: jax.Array, capacity: int, keep_old: bool) -> list[jax.Array]:
    """(count, positions, new bits[, old bits]) as `ffi.encode`, of whole flat buffers."""
    count, positions = positions_of(mask_words(old, new), capacity)
    return [count, positions, gather(new, positions), *([gather(old, positions)] if keep_old else [])]


def encode_mask(words: jax.Array, new: jax.Array, capacity: int) -> list[jax.Array]:
    """The same from mask words."""
    count, positions = positions_of(words, capacity)
    return [count, positions, gather(new, positions)]


def _ordered(bits: jax.Array) -> jax.Array:
    top = jnp.array(1 << (8 * bits.dtype.itemsize - 1), bits.dtype)
    return jnp.where(bits >= top, ~bits, bits | top)


def _unordered(keys: jax.Array) -> jax.Array:
    top = jnp.array(1 << (8 * keys.dtype.itemsize - 1), keys.dtype)
    return jnp.where(keys >= top, keys ^ top, ~keys)


def combine(old: jax.Array, values: jax.Array, kind: Kind) -> jax.Array:
    """The new bits from the old ones and a delta's values of that kind."""
    if kind == OVERWRITE:
        return values
    if kind == XOR:
        return old ^ values
    one = jnp.ones((), values.dtype)
    step = (values >> one) ^ (jnp.zeros((), values.dtype) - (values & one))
    return _unordered(_ordered(old) + step)


def apply(
    buffer: jax.Array, positions: jax.Array, values: jax.Array, count: jax.Array, kind: Kind = OVERWRITE
) -> jax.Array:
    """The buffer with the first ``count`` values written; positions past its end and overflowed deltas are
    dropped.

    Scatters integers: on jax 0.10.2 a scatter of bfloat16 changes the bits of NaNs.
    """
    n, capacity = buffer.size, positions.size
    if n == 0 or capacity == 0:
        return buffer
    if capacity == 1:  # XLA makes one constant value a select, which LLVM may do in floats: AVX2 changed NaNs
        positions = jnp.pad(positions, (0, 1), constant_values=NO_POSITION)
        values = jnp.pad(values, (0, 1))
    slot = jnp.arange(positions.size, dtype=jnp.int32)
    keep = (slot.astype(jnp.uint32) < count) & (count <= capacity) & (positions < n)
    at = jnp.where(keep, positions.astype(jnp.int32), n + slot)
    flat = bits_of(buffer.reshape(-1))
    if kind != OVERWRITE:
        values = combine(flat.at[at].get(mode="fill", fill_value=0), values, kind)
    flat = flat.at[at].set(values, mode="drop", unique_indices=True)
    return from_bits(flat, buffer.dtype).reshape(buffer.shape)


def decode_gaps(gaps: jax.Array, gap_bytes: jax.Array, capacity: int) -> jax.Array:
    """Positions u32[capacity] of a u8 gap stream ("255 carries on") of which ``gap_bytes`` bytes count."""
    valid = jnp.arange(gaps.size, dtype=jnp.uint32) < gap_bytes
    ends = valid & (gaps != 255)
    steps = jnp.where(valid, gaps.astype(jnp.int32), 0) + ends
    at = _prefix(steps).astype(jnp.uint32) - 1
    entry = jnp.where(ends, _prefix(ends.astype(jnp.int32)) - 1, capacity)
    result = jnp.full(capacity, NO_POSITION, jnp.uint32)
    return result.at[entry].set(at, mode="drop")


def widen(codes: jax.Array, escapes: jax.Array) -> jax.Array:
    """Bytes of ulp codes with their escape stream as codes of the elements' width."""
    if escapes.dtype.itemsize == 1:
        return codes
    large = codes == 255
    which = jnp.clip(_prefix(large.astype(jnp.int32)) - 1, 0, max(escapes.size - 1, 0))
    wide = escapes[which] if escapes.size else jnp.zeros(codes.shape, escapes.dtype)
    return jnp.where(large, wide, codes.astype(escapes.dtype))
