"""Deltas on the host: lists of changes of one flat buffer, compared, merged and applied, in C or in numpy.

This is the form that the wire codec takes. The C kernels and numpy give the same bits.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.codec.bits import unzigzag
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP, XOR, DeltaError, Kind, host_bits

Bits = npt.NDArray[Any]
Positions = npt.NDArray[np.uint32]

FIRST_ROOM = 64
"""Entries per 4096 elements that a first compare has room for; more are found by a second pass."""


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of a flat buffer (or chunk) of ``elements``: ``positions`` strictly ascending, one of ``new``
    each.

    ``new``, ``old``: unsigned bits of the elements' width; ``old`` is None where nobody asked for it.
    """

    elements: int
    positions: Positions
    new: Bits
    old: Bits | None = None

    @property
    def count(self) -> int:
        """Number of changed elements."""
        return int(self.positions.size)

    @property
    def fraction(self) -> float:
        """Share of the elements that changed."""
        return self.count / self.elements if self.elements else 0.0


def _take(delta_room: int, elements: int) -> int:
    return min(elements, max(delta_room, 1024))


def compare(
    old: Bits, new: Bits, *, keep_old: bool = False, room: int | None = None, threads: int = 1
) -> Delta:
    """The elements whose bits differ. Blocks; the C form releases the GIL and uses ``threads``.

    ``old``, ``new``: C-contiguous, same dtype (any of 1, 2 or 4 bytes) and size, at most 2^32 elements.
    ``room``: entries expected; too few costs a second pass, never an error.
    """
    a, b = host_bits(old), host_bits(new)
    if old.dtype != new.dtype or a.size != b.size:
        raise DeltaError(f"compare of {a.size} {old.dtype} with {b.size} {new.dtype}, expected the same")
    native = kernels()
    if native is None:
        at = np.flatnonzero(a != b).astype(np.uint32)
        return Delta(a.size, at, b[at], a[at] if keep_old else None)
    wanted = _take(a.size // 4096 * FIRST_ROOM if room is None else room, a.size)
    while True:
        positions, values = np.empty(wanted, np.uint32), np.empty(wanted, a.dtype)
        before = np.empty(wanted, a.dtype) if keep_old else None
        count = native.delta_compare(a, b, a.itemsize, positions, values, before, threads)
        if count <= wanted:
            kept = None if before is None else before[:count]
            return Delta(a.size, positions[:count], values[:count], kept)
        wanted = count


def from_mask(words: npt.NDArray[np.uint32], new: Bits, *, threads: int = 1) -> Delta:
    """The elements that a mask names (bit j of word w: element 32 w + j), with their bits in ``new``."""
    b = host_bits(new)
    if words.size != -(-b.size // 32):
        raise DeltaError(f"mask of {words.size} words for {b.size} elements, expected {-(-b.size // 32)}")
    native = kernels()
    if native is None:
        at = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[: b.size]).astype(
            np.uint32
        )
        return Delta(b.size, at, b[at])
    wanted = int(np.bitwise_count(words).sum(dtype=np.int64))
    positions, values = np.empty(wanted, np.uint32), np.empty(wanted, b.dtype)
    count = native.delta_mask(words, b, b.itemsize, positions, values, threads)
    return Delta(b.size, positions[:count], values[:count])


@dataclasses.dataclass(frozen=True, eq=False)
class Coded:
    """A delta as the codec's streams: u8 gaps, values (bytes of ulp codes or whole elements), escapes."""

    elements: int
    count: int
    kind: Kind
    gaps: npt.NDArray[np.uint8]
    values: Bits
    escapes: Bits


def compare_coded(old: Bits, new: Bits, kind: Kind, *, room: int | None = None, threads: int = 1) -> Coded:
    """Compare, u8 gaps and value coding in one pass over the buffers: what the codec writes, byte for byte.

    The second reading of old values, which costs more than the coding itself, falls away.
    """
    a, b = host_bits(old), host_bits(new)
    native = kernels()
    if native is None:
        return _coded(compare(old, new, keep_old=True), kind)
    if old.dtype != new.dtype or a.size != b.size:
        raise DeltaError(f"compare of {a.size} {old.dtype} with {b.size} {new.dtype}, expected the same")
    wanted = _take(a.size // 4096 * FIRST_ROOM if room is None else room, a.size)
    rooms = (wanted + a.size // 255, wanted, wanted if kind == ULP else 0)
    while True:
        gaps = np.empty(rooms[0], np.uint8)
        values = np.empty(rooms[1], np.uint8 if kind == ULP else a.dtype)
        escapes = np.empty(rooms[2], a.dtype)
        count, gap_bytes, large = native.delta_fused(a, b, a.itemsize, kind, gaps, values, escapes, threads)
        if gap_bytes <= rooms[0] and count <= rooms[1] and large <= rooms[2]:
            return Coded(a.size, count, kind, gaps[:gap_bytes], values[:count], escapes[:large])
        rooms = (gap_bytes, count, large)


def _coded(delta: Delta, kind: Kind) -> Coded:
    from jaxrl_sync.transfer.codec import gaps, values

    assert delta.old is not None
    kinds: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    codes = values.codes_of(delta.new, delta.old, kinds[kind])
    escapes = codes[:0]
    if kind == ULP and codes.itemsize > 1:
        escapes = codes[codes >= values.ESCAPE]
        codes = np.minimum(codes, codes.dtype.type(values.ESCAPE)).astype(np.uint8)
    return Coded(delta.elements, delta.count, kind, gaps.encode(delta.positions, 1), codes, escapes)


def apply_into(
    buffer: Bits, delta: Delta, *, kind: Kind = OVERWRITE, keep_old: bool = False, threads: int = 1
) -> Bits | None:
    """Writes a delta into host memory outside of jit; for slots that jax arrays alias. Blocks, releases the
    GIL.

    ``buffer``: C-contiguous and writable; the caller keeps readers away. With ``kind`` XOR or ULP
    ``delta.new`` holds codes, and the buffer must hold exactly the base. Returns the old bits if
    ``keep_old``. A delta that doesn't fit is a DeltaError before anything is written.
    """
    flat = host_bits(buffer)
    if not flat.flags.writeable:
        raise DeltaError("the buffer to apply a delta to is read-only")
    if flat.size != delta.elements or flat.dtype != delta.new.dtype or delta.new.size != delta.count:
        raise DeltaError(
            f"delta of {delta.count} positions and {delta.new.size} {delta.new.dtype} values in "
            f"{delta.elements} elements, onto a buffer of {flat.size} {flat.dtype}"
        )
    native = kernels()
    if native is None:
        return _apply_numpy(flat, delta, kind, keep_old)
    old = np.empty(delta.count, flat.dtype) if keep_old else None
    try:
        native.delta_apply(flat, flat.itemsize, delta.positions, delta.new, kind, old, threads)
    except ValueError as error:
        raise DeltaError(f"delta of {delta.count} changes in {flat.size} elements: {error}") from error
    return old


def _apply_numpy(flat: Bits, delta: Delta, kind: Kind, keep_old: bool) -> Bits | None:
    at = delta.positions
    if np.any(at[1:] <= at[:-1]):
        raise DeltaError(f"delta of {delta.count} changes in {flat.size} elements: positions do not ascend")
    if at.size and at[-1] >= flat.size:
        raise DeltaError(
            f"delta of {delta.count} changes in {flat.size} elements: a position lies past the end"
        )
    old = flat[at] if keep_old or kind != OVERWRITE else None
    if old is None or kind == OVERWRITE:
        flat[at] = delta.new
    elif kind == XOR:
        flat[at] = old ^ delta.new
    else:
        flat[at] = unzigzag(delta.new, old)
    return old if keep_old else None


def apply_coded(buffer: Bits, coded: Coded, *, threads: int = 1) -> None:
    """`apply_into` straight from the codec's streams: decode and write in one pass. DeltaError as there."""
    flat = host_bits(buffer)
    native = kernels()
    if native is None:
        apply_into(buffer, _decoded(coded, flat.dtype), kind=coded.kind)
        return
    if flat.size != coded.elements or not flat.flags.writeable:
        raise DeltaError(f"delta of {coded.elements} elements onto {flat.size} (or a read-only buffer)")
    try:
        native.delta_apply_gaps(
            flat, flat.itemsize, coded.gaps, coded.values, coded.escapes, coded.count, coded.kind, threads
        )
    except ValueError as error:
        raise DeltaError(f"coded delta of {coded.count} changes in {flat.size} elements: {error}") from error


def _decoded(coded: Coded, dtype: np.dtype[Any]) -> Delta:
    from jaxrl_sync.transfer.codec import gaps, values
    from jaxrl_sync.transfer.codec.errors import FrameError

    codes, wide = coded.values, coded.kind == ULP and dtype.itemsize > 1
    escapes = int(np.count_nonzero(codes == values.ESCAPE)) if wide else 0
    if (codes.size, coded.escapes.size) != (coded.count, escapes):
        raise DeltaError(
            f"coded delta of {coded.count} changes has {codes.size} values and {coded.escapes.size} escapes, "
            f"expected {coded.count} and {escapes}"
        )
    try:
        positions = gaps.decode(coded.gaps, coded.count, coded.elements)
        if wide:
            stream = memoryview(codes.tobytes() + coded.escapes.tobytes())
            codes = values.decode(stream, coded.count, dtype.itemsize, "ulp", False)
    except FrameError as error:
        raise DeltaError(f"coded delta of {coded.count} changes: {error}") from error
    return Delta(coded.elements, positions, codes)


def union(earlier: Delta, later: Delta) -> Delta:
    """The changes of both, with the later bits where both changed: what a receiver that missed one needs.

    Both of the same buffer, with new bits (not codes); old bits are dropped, because they have two bases.
    """
    if (earlier.elements, earlier.new.dtype) != (later.elements, later.new.dtype):
        raise DeltaError(
            f"union of deltas of {earlier.elements} {earlier.new.dtype} and "
            f"{later.elements} {later.new.dtype}"
        )
    positions = np.union1d(earlier.positions, later.positions)
    new = np.empty(positions.size, later.new.dtype)
    new[np.searchsorted(positions, earlier.positions)] = earlier.new
    new[np.searchsorted(positions, later.positions)] = later.new
    return Delta(later.elements, positions, new)
