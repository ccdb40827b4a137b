"""Values of changed elements: the new bits (overwrite), XOR with the old ones, or the step in units of order.

Overwrite may be applied any number of times and on any base. XOR and ulp need exactly the base they were made
against, and exactly one application; they are 1.7 to 2.2 times smaller after zstd, because most changes of
trained weights are one unit in the last place (arXiv 2602.03839).

Ulp: one byte per entry, the `zigzag` code or 255 where that is larger; then the codes of the latter in full.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from jaxrl_sync.transfer.codec import planes
from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype, unzigzag, zigzag
from jaxrl_sync.transfer.codec.errors import FrameError

Kind = Literal["overwrite", "xor", "ulp"]
ESCAPE = 255


def codes_of(new: Bits, old: Bits | None, kind: Kind) -> Bits:
    """What is written for each entry, as wide as the elements. ``old`` may be None for overwrite only."""
    if kind == "overwrite":
        return new
    if old is None:
        raise ValueError(f"coding {kind!r} needs the old bits")
    return new ^ old if kind == "xor" else zigzag(new, old)


def bits_from(codes: Bits, old: Bits, kind: Kind) -> Bits:
    """The new bits: the inverse of `codes_of`."""
    if kind == "overwrite":
        return codes
    return codes ^ old if kind == "xor" else unzigzag(codes, old)


def encode(codes: Bits, kind: Kind, zstd: bool) -> bytes:
    """Codes as bytes."""
    if kind != "ulp" or codes.dtype.itemsize == 1:
        return planes.compress(codes) if zstd else codes.tobytes()
    large = codes >= ESCAPE
    small = np.minimum(codes, codes.dtype.type(ESCAPE)).astype(np.uint8)
    head = planes.compress(small) if zstd else small.tobytes()
    return head + codes[large].tobytes()


def decode(data: memoryview, count: int, itemsize: int, kind: Kind, zstd: bool) -> Bits:
    """``count`` codes from bytes, nothing left over. FrameError."""
    width = 1 if kind == "ulp" else itemsize
    if zstd:
        codes, rest = planes.expand(data, count, width)
    else:
        size = count * width
        if len(data) < size:
            raise FrameError(f"{len(data)} bytes of values, expected at least {size} for {count} entries")
        codes, rest = np.frombuffer(data[:size], bits_dtype(width)), data[size:]
    if kind == "ulp" and itemsize > 1:
        large = np.flatnonzero(codes == ESCAPE)
        codes = codes.astype(bits_dtype(itemsize))
        if len(rest) != large.size * itemsize:
            raise FrameError(f"{len(rest)} bytes of escaped values, expected {large.size * itemsize}")
        escaped = np.frombuffer(rest, bits_dtype(itemsize))
        if escaped.size and int(escaped.min()) < ESCAPE:
            raise FrameError(f"an escaped value is {int(escaped.min())}, expected at least {ESCAPE}")
        codes[large] = escaped
    elif len(rest):
        raise FrameError(f"{len(rest)} bytes follow the values of {count} entries")
    return codes
