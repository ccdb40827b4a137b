"""Bits of weights as unsigned integers, and the maps between them that value codings use.

Everything here is a bijection modulo 2^W, so that any bits survive: NaN payloads, signed zeros, denormals,
integers and booleans alike.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[Any]
"""Unsigned integers of 1, 2, 4 or 8 bytes."""

Positions = npt.NDArray[np.uint32]
"""Ascending element numbers below 2^32."""

ITEMSIZES = (1, 2, 4, 8)


def bits_dtype(itemsize: int) -> np.dtype[Any]:
    """The unsigned little-endian dtype of ``itemsize`` bytes."""
    return np.dtype(f"<u{itemsize}")


def as_bits(array: npt.NDArray[Any]) -> Bits:
    """A flat view of a C-contiguous array as unsigned integers of its own width; never a copy."""
    if not array.flags.c_contiguous:
        raise ValueError(f"an array with strides {array.strides} of shape {array.shape} isn't C-contiguous")
    return array.reshape(-1).view(bits_dtype(array.dtype.itemsize))


def ordered(bits: Bits) -> Bits:
    """Sign-magnitude floats as integers of the same order: neighbours in value differ by one.

    ``v ^ (all ones if the sign is set, else the sign bit)``, branch-free.
    """
    width = bits.dtype.itemsize * 8
    sign = (bits >> bits.dtype.type(width - 1)).astype(bits.dtype)
    top = bits.dtype.type(1 << (width - 1))
    with np.errstate(over="ignore"):
        keys: Bits = bits ^ ((bits.dtype.type(0) - sign) | top)
    return keys


def unordered(keys: Bits) -> Bits:
    """The inverse of `ordered`."""
    width = keys.dtype.itemsize * 8
    positive = (keys >> keys.dtype.type(width - 1)).astype(keys.dtype)
    top = keys.dtype.type(1 << (width - 1))
    with np.errstate(over="ignore"):
        bits: Bits = keys ^ ((positive - keys.dtype.type(1)) | top)
    return bits


def zigzag(new: Bits, old: Bits) -> Bits:
    """The signed difference in `ordered` units, modulo 2^W, as 0, -1, 1, -2, ... -> 0, 1, 2, 3, ..."""
    kind = new.dtype.type
    with np.errstate(over="ignore"):
        step = ordered(new) - ordered(old)
        negative = step >> kind(new.dtype.itemsize * 8 - 1)
        codes: Bits = (step << kind(1)) ^ (kind(0) - negative)
    return codes


def unzigzag(codes: Bits, old: Bits) -> Bits:
    """The new bits from `zigzag` codes and the old bits."""
    kind = old.dtype.type
    with np.errstate(over="ignore"):
        step = (codes >> kind(1)) ^ (kind(0) - (codes & kind(1)))
        return unordered(ordered(old) + step)
