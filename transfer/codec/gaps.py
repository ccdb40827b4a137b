"""Positions as gaps: one byte or one 16-bit word per entry, the largest word says "carry on".

A gap is the number of unchanged elements before an entry. With top = 255 (or 65535): ``gap // top`` words
of ``top``, then one word ``gap % top``. Any gap can be written, so no run of unchanged rows is too long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.codec import native
from jaxrl_sync.transfer.codec.bits import Positions
from jaxrl_sync.transfer.codec.errors import FrameError

Words = npt.NDArray[Any]


def gaps_of(positions: Positions) -> npt.NDArray[np.uint32]:
    """Unchanged elements in front of each entry."""
    gaps = np.empty_like(positions)
    if positions.size:
        gaps[0] = positions[0]
        np.subtract(positions[1:], positions[:-1], out=gaps[1:])
        gaps[1:] -= np.uint32(1)
    return gaps


def positions_of(gaps: npt.NDArray[Any], elements: int, what: str) -> Positions:
    """Positions from gaps (any unsigned dtype). FrameError when they run past ``elements``."""
    at = np.cumsum(gaps, dtype=np.uint64)
    at += np.arange(at.size, dtype=np.uint64)
    if at.size and int(at[-1]) >= elements:
        raise FrameError(f"{what} reach element {int(at[-1])} of {elements}")
    return at.astype(np.uint32)


def num_words(gaps: npt.NDArray[np.uint32], width: int) -> int:
    """Words that `encode` would write for these gaps with words of ``width`` bytes."""
    top = (1 << 8 * width) - 1
    if not gaps.size or int(gaps.max()) < top:
        return gaps.size
    return gaps.size + int(np.sum(gaps // np.uint32(top), dtype=np.uint64))


def max_words(count: int, elements: int, width: int) -> int:
    """The most words that ``count`` entries among ``elements`` can need."""
    return count + elements // ((1 << 8 * width) - 1)


def encode(positions: Positions, width: int) -> Words:
    """Ascending positions as gap words of ``width`` bytes (1 or 2)."""
    if (fast := native.encode_gaps(positions, width)) is not None:
        return fast
    return encode_numpy(positions, width)


def encode_numpy(positions: Positions, width: int) -> Words:
    """`encode` in numpy."""
    gaps = gaps_of(positions)
    dtype = np.dtype(f"<u{width}")
    top = (1 << 8 * width) - 1
    if not gaps.size or int(gaps.max()) < top:
        return gaps.astype(dtype)
    carries = gaps // np.uint32(top)
    ends = np.cumsum(carries + np.uint32(1), dtype=np.int64) - 1
    words = np.full(int(ends[-1]) + 1, top, dtype)
    words[ends] = gaps - carries * np.uint32(top)
    return words


def decode(words: Words, count: int, elements: int) -> Positions:
    """Positions from words. FrameError unless exactly ``count`` entries end inside of ``elements``."""
    if (fast := native.decode_gaps(words, count, elements)) is not None:
        return fast
    return decode_numpy(words, count, elements)


def decode_numpy(words: Words, count: int, elements: int) -> Positions:
    """`decode` in numpy."""
    top = (1 << 8 * words.dtype.itemsize) - 1
    if words.size == count:
        if count and int(words.max()) == top:
            raise FrameError(f"gaps of {count} entries in {words.size} words end in the middle of an entry")
        return positions_of(words, elements, "gaps")
    ends = np.flatnonzero(words != top)
    if ends.size != count or (words.size and (not count or int(ends[-1]) != words.size - 1)):
        raise FrameError(f"{words.size} gap words hold {ends.size} entries, expected {count} and no rest")
    sums = np.cumsum(words, dtype=np.uint64)[ends]
    return positions_of(np.diff(sums, prepend=np.uint64(0)), elements, "gaps")
