"""Positions as Rice-coded gaps: within 3 % of the entropy of independent changes, in twice the time of bytes.

Bit stream, lowest bit of a byte first; per entry ``gap >> r`` ones, a zero, then the r low bits of the gap,
lowest first; zeros fill the last byte. (R. F. Rice, "Some practical universal noiseless coding techniques",
JPL 79-22.)
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.codec import native
from jaxrl_sync.transfer.codec.bits import Positions
from jaxrl_sync.transfer.codec.errors import FrameError
from jaxrl_sync.transfer.codec.gaps import gaps_of, positions_of

MAX_PARAMETER = 30
CHUNK = 1 << 18
"""Entries (or bytes of a stream) that the numpy forms spread out to one byte per bit at a time."""

Gaps = npt.NDArray[np.uint32]
Stream = npt.NDArray[np.uint8]


def num_bits(gaps: Gaps, parameter: int) -> int:
    """Exact length of the stream in bits."""
    return int(np.sum(gaps >> np.uint32(parameter), dtype=np.uint64)) + gaps.size * (1 + parameter)


def guess(count: int, span: int) -> int:
    """The best parameter for ``count`` independent changes in ``span`` elements.

    The least r with 2^r >= ln(golden ratio) x mean gap (Gallager and van Voorhis, "Optimal source codes for
    geometrically distributed integer alphabets", IEEE Trans. Inf. Theory 21, 1975).
    """
    scale = math.log((1 + math.sqrt(5)) / 2) * max(1.0, span / count - 1)
    return min(max(math.floor(math.log2(scale)) + 1, 0), MAX_PARAMETER)


def encode(positions: Positions, parameter: int) -> Stream:
    """The stream of ascending positions."""
    if (fast := native.encode_rice(positions, parameter)) is not None:
        return fast
    return encode_numpy(positions, parameter)


def encode_numpy(positions: Positions, parameter: int) -> Stream:
    """`encode` in numpy."""
    gaps = gaps_of(positions)
    pieces, rest = list[Stream](), np.zeros(0, np.uint8)
    for at in range(0, gaps.size, CHUNK):
        part = gaps[at : at + CHUNK]
        ones = (part >> np.uint32(parameter)).astype(np.int64)
        ends = np.cumsum(ones + (1 + parameter)) + rest.size
        bits = np.zeros(int(ends[-1]), np.uint8)
        bits[: rest.size] = rest
        zero = ends - parameter - 1  # where each entry's zero stands: its ones are in front of it
        bits[_ragged(zero - ones, ones)] = 1
        for b in range(parameter):
            bits[zero + 1 + b] = (part >> np.uint32(b)) & np.uint32(1)
        whole = bits.size // 8 * 8
        pieces.append(np.packbits(bits[:whole], bitorder="little"))
        rest = bits[whole:]
    pieces.append(np.packbits(rest, bitorder="little"))
    return np.concatenate(pieces)


def _ragged(starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """start, start + 1, ... (length of them) for each pair, one after the other."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(starts - before, lengths) + np.arange(int(lengths.sum()))


def decode(stream: Stream, parameter: int, count: int, elements: int) -> Positions:
    """Positions from a stream. FrameError unless it holds exactly ``count`` entries and a zero fill."""
    if not 0 <= parameter <= MAX_PARAMETER:
        raise FrameError(f"Rice parameter {parameter}, expected 0 to {MAX_PARAMETER}")
    least = count * (1 + parameter)
    most = least + (elements >> parameter)  # all gaps together are at most the elements
    if not least <= stream.size * 8 < most + 8:
        raise FrameError(
            f"{stream.size} bytes of {count} Rice codes among {elements} elements, "
            f"expected {(least + 7) // 8} to {(most + 7) // 8}"
        )
    if (fast := native.decode_rice(stream, parameter, count, elements)) is not None:
        return fast
    return decode_numpy(stream, parameter, count, elements)


def decode_numpy(stream: Stream, parameter: int, count: int, elements: int) -> Positions:
    """`decode` in numpy: entries are found one by one, their bits are read all at once."""
    bits = np.unpackbits(stream, bitorder="little")
    zeros = np.flatnonzero(bits == 0)
    where, starts, ends = zeros.tolist(), np.empty(count, np.int64), np.empty(count, np.int64)
    found, at = 0, 0
    ranks = np.searchsorted(zeros, np.arange(0, bits.size + 64, 64)).tolist()
    for i in range(count):
        found = max(found, ranks[at >> 6]) if at >> 6 < len(ranks) else len(where)
        while found < len(where) and where[found] < at:
            found += 1
        if found >= len(where):
            raise FrameError(f"the Rice stream ends in entry {i} of {count}")
        starts[i], ends[i] = at, where[found]
        at = where[found] + 1 + parameter
    if at > bits.size or bits.size - at >= 8 or bits[at:].any():
        raise FrameError(f"a Rice stream of {bits.size} bits has its last of {count} entries end at {at}")
    gaps = (ends - starts).astype(np.uint64) << np.uint64(parameter)
    for b in range(parameter):
        gaps |= bits[ends + 1 + b].astype(np.uint64) << np.uint64(b)
    return positions_of(gaps, elements, "Rice gaps")
