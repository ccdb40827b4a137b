"""The C forms of the coders where they were built: same bytes, same refusals. None where they were not."""

from __future__ import annotations

import types

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.codec.bits import Bits, Positions, bits_dtype
from jaxrl_sync.transfer.codec.errors import FrameError


def coders() -> types.ModuleType | None:
    """The kernels module if it was built and has the coders."""
    found = kernels()
    return found if found is not None and hasattr(found, "places_apply") else None


def aligned(array: Bits) -> Bits:
    """The array itself, or a copy where it isn't aligned (a view into a frame): C reads whole elements.

    numpy takes an empty one for aligned wherever it lies.
    """
    return np.require(array, requirements=["C", "A"]) if array.size else np.empty(0, array.dtype)


def encode_gaps(positions: Positions, width: int) -> Bits | None:
    """See `gaps.encode`."""
    if (c := coders()) is None:
        return None
    out = np.empty(positions.size + positions.size // 8 + 64, bits_dtype(width))
    size = c.gaps_encode(positions, width, out) // width
    if size > out.size:
        out = np.empty(size, out.dtype)
        c.gaps_encode(positions, width, out)
    return out[:size]


def decode_gaps(words: Bits, count: int, elements: int) -> Positions | None:
    """See `gaps.decode`."""
    if (c := coders()) is None:
        return None
    positions = np.empty(count, np.uint32)
    try:
        c.gaps_decode(aligned(words), words.dtype.itemsize, elements, positions)
    except ValueError as error:
        raise FrameError(
            f"{words.size} gap words of {count} entries in {elements} elements: {error}"
        ) from error
    return positions


def encode_rice(positions: Positions, parameter: int) -> npt.NDArray[np.uint8] | None:
    """See `rice.encode`."""
    if (c := coders()) is None:
        return None
    out = np.empty(positions.size * (parameter + 3) // 8 + 64, np.uint8)
    size = c.rice_encode(positions, parameter, out)
    if size > out.size:
        out = np.empty(size, np.uint8)
        c.rice_encode(positions, parameter, out)
    return out[:size]


def decode_rice(stream: npt.NDArray[np.uint8], parameter: int, count: int, elements: int) -> Positions | None:
    """See `rice.decode`."""
    if (c := coders()) is None:
        return None
    positions = np.empty(count, np.uint32)
    try:
        c.rice_decode(stream, parameter, elements, positions)
    except ValueError as error:
        raise FrameError(f"a Rice stream of {count} entries in {elements} elements: {error}") from error
    return positions
