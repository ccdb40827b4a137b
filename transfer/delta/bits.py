"""Tensors as unsigned bits: the integer view of a dtype, and chunks that 32-bit positions can address.

Everything in this package compares and moves bits, never values: NaN payloads, signed zeros, denormals stay.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax

from jaxrl_sync.transfer.errors import TransferError

NO_POSITION = np.uint32(0xFFFFFFFF)
"""Fills position slots past the count; no chunk has such an element."""

CHUNK_ELEMENTS = 1 << 30
"""A shard with more elements is encoded in chunks of this many: indices stay below 2^31, sums are exact."""

Kind = int
OVERWRITE, XOR, ULP = 0, 1, 2
"""What a value of a delta is: the new bits, old ^ new, or the zigzag code of `transfer.codec.bits.zigzag`."""


class DeltaError(TransferError):
    """A delta does not fit what it is applied to; the message names the value found and the expected one."""


def unsigned(dtype: Any) -> np.dtype[Any]:
    """The unsigned integer of the same width: 1, 2 or 4 bytes. DeltaError for any other width."""
    found = np.dtype(dtype)
    if found.itemsize not in (1, 2, 4) or jnp.dtype(found).name in ("int4", "uint4", "float4_e2m1fn"):
        raise DeltaError(f"no deltas of {found.name}: its elements are not 1, 2 or 4 whole bytes")
    return np.dtype(f"u{found.itemsize}")


def bits_of(x: jax.Array) -> jax.Array:
    """``x`` as unsigned integers of its width, same shape; traceable, fused into what reads it."""
    target = unsigned(x.dtype)
    if x.dtype == target:
        return x
    if x.dtype == jnp.bool_:
        return x.astype(target)
    return lax.bitcast_convert_type(x, target)


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """The inverse of `bits_of`."""
    if bits.dtype == dtype:
        return bits
    return bits.astype(jnp.bool_) if dtype == jnp.bool_ else lax.bitcast_convert_type(bits, dtype)


def host_bits(buffer: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A flat unsigned view of a C-contiguous host array, never a copy. DeltaError if it isn't contiguous."""
    if not buffer.flags.c_contiguous:
        raise DeltaError(
            f"buffer must be C-contiguous, found strides {buffer.strides} of shape {buffer.shape}"
        )
    return buffer.reshape(-1).view(unsigned(buffer.dtype))


def chunks(elements: int, chunk_elements: int = CHUNK_ELEMENTS) -> list[tuple[int, int]]:
    """(offset, length) of the chunks of a flat buffer, in order; one empty chunk of an empty buffer."""
    if elements == 0:
        return [(0, 0)]
    return [(at, min(chunk_elements, elements - at)) for at in range(0, elements, chunk_elements)]
