"""The C kernels inside of jit on CPU, through jax.ffi: XLA's own buffers, no copy.

All functions here are traceable and take whole local buffers: a slice would be a copy, so chunks are given by
``offset`` and ``elements``. Under jit over several devices they belong into shard_map, as `encode` and
`decode` do it: plain jit would gather the operands. vmap adds leading dimensions that the handlers loop over.
"""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import numpy as np
from jax import ShapeDtypeStruct as Shape

from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP, DeltaError, Kind, unsigned

_TARGETS = ("encode", "encode_gaps", "apply", "apply_gaps")


@functools.cache
def available() -> bool:
    """Whether the handlers were built and this jax took them; registers them the first time.

    The backend is brought up first: a handler that XLA refuses would otherwise take the whole backend with
    it.
    """
    log = logging.getLogger(__name__)
    native = kernels()
    if native is None or not hasattr(native, "ffi_delta_encode"):
        log.info("no FFI kernels in this build, deltas are encoded by plain XLA on CPU")
        return False
    jax.devices()
    try:
        for name in _TARGETS:
            capsule = getattr(native, f"ffi_delta_{name}")
            jax.ffi.register_ffi_target(f"jaxrl_sync_delta_{name}", capsule, platform="cpu")
    except (RuntimeError, ValueError, TypeError) as error:
        log.warning("jax refused the FFI kernels, deltas are encoded by plain XLA on CPU: %s", error)
        return False
    return True


def _call(name: str, results: Any, aliases: dict[int, int] | None = None) -> Any:
    return jax.ffi.ffi_call(
        f"jaxrl_sync_delta_{name}", results, vmap_method="broadcast_all", input_output_aliases=aliases
    )


def _check_widths(**widths: tuple[jax.Array, int]) -> None:
    """The handlers take the widths of elements for granted: others would be read past the end of a buffer."""
    for name, (array, expected) in widths.items():
        if array.dtype.itemsize != expected:
            raise DeltaError(
                f"{name} are {array.dtype}, {array.dtype.itemsize} bytes wide, expected {expected} bytes"
            )


def _window(offset: int, elements: int, threads: int) -> dict[str, np.int64]:
    return {"offset": np.int64(offset), "elements": np.int64(elements), "threads": np.int64(threads)}


def encode(
    old: jax.Array, new: jax.Array, capacity: int, offset: int, elements: int, keep_old: bool, threads: int
) -> list[jax.Array]:
    """(count u32, positions u32[capacity], new bits[capacity][, old bits[capacity]]) of a window of a
    buffer.
    """
    _check_widths(old=(old, new.dtype.itemsize))
    bits = Shape((capacity,), unsigned(new.dtype))
    results = [Shape((), np.uint32), Shape((capacity,), np.uint32), bits, *([bits] if keep_old else [])]
    return list(_call("encode", results)(old, new, **_window(offset, elements, threads)))


def encode_mask(
    words: jax.Array, new: jax.Array, capacity: int, offset: int, elements: int, threads: int
) -> list[jax.Array]:
    """The same from the mask words of the window (bit j of word w: element 32 w + j)."""
    _check_widths(words=(words, 4))
    results = [Shape((), np.uint32), Shape((capacity,), np.uint32), Shape((capacity,), unsigned(new.dtype))]
    return list(_call("encode", results)(words, new, mask=np.int64(1), **_window(offset, elements, threads)))


def encode_coded(
    old: jax.Array,
    new: jax.Array,
    kind: Kind,
    rooms: tuple[int, int, int],
    offset: int,
    elements: int,
    threads: int,
) -> list[jax.Array]:
    """(sizes u32[3] = count, bytes of gaps, escapes; u8 gaps, values, escapes) with ``rooms`` for the
    streams.
    """
    _check_widths(old=(old, new.dtype.itemsize))
    bits = unsigned(new.dtype)
    results = [
        Shape((3,), np.uint32),
        Shape((rooms[0],), np.uint8),
        Shape((rooms[1],), np.uint8 if kind == ULP else bits),
        Shape((rooms[2],), bits),
    ]
    call = _call("encode_gaps", results)
    return list(call(old, new, kind=np.int64(kind), **_window(offset, elements, threads)))


def apply(
    buffer: jax.Array,
    positions: jax.Array,
    values: jax.Array,
    count: jax.Array,
    offset: int,
    elements: int,
    kind: Kind = OVERWRITE,
    threads: int = 1,
) -> jax.Array:
    """The buffer with ``count`` values written; in place where it is donated. Bad positions raise."""
    _check_widths(positions=(positions, 4), values=(values, buffer.dtype.itemsize), count=(count, 4))
    if positions.size != values.size:
        raise DeltaError(f"{values.size} values for {positions.size} positions, expected as many")
    call = _call("apply", Shape(buffer.shape, buffer.dtype), {0: 0})
    window = _window(offset, elements, threads)
    result: jax.Array = call(buffer, positions, values, count, kind=np.int64(kind), **window)
    return result


def apply_coded(
    buffer: jax.Array,
    gaps: jax.Array,
    values: jax.Array,
    escapes: jax.Array,
    sizes: jax.Array,
    kind: Kind,
    offset: int,
    elements: int,
    threads: int = 1,
) -> jax.Array:
    """`apply` from the streams of `encode_coded`."""
    width = buffer.dtype.itemsize
    codes = 1 if kind == ULP else width
    _check_widths(gaps=(gaps, 1), values=(values, codes), escapes=(escapes, width), sizes=(sizes, 4))
    call = _call("apply_gaps", Shape(buffer.shape, buffer.dtype), {0: 0})
    window = _window(offset, elements, threads)
    result: jax.Array = call(buffer, gaps, values, escapes, sizes, kind=np.int64(kind), **window)
    return result
