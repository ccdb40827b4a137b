"""Positions of changed elements in one flat buffer, in one of seven codings."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Literal

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.codec import gaps, planes, rice
from jaxrl_sync.transfer.codec.bits import Positions
from jaxrl_sync.transfer.codec.errors import FrameError

Kind = Literal["none", "all", "bitmap", "u32", "gap16", "gap8", "rice"]
BITMAP_CHUNK = 1 << 13
"""Bytes of a bitmap that are spread to one byte per bit at a time: what they need stays in the cache."""

GAP_BYTES = {"gap8": 1, "gap16": 2}


@dataclasses.dataclass(frozen=True)
class Coding:
    """How positions are written. ``zstd`` goes with bitmap, gap16 and gap8, ``parameter`` with rice."""

    kind: Kind
    parameter: int = 0
    zstd: bool = False

    def __str__(self) -> str:
        return (
            self.kind + (f"{self.parameter}" if self.kind == "rice" else "") + ("+zstd" if self.zstd else "")
        )


def encode(positions: Positions | None, elements: int, coding: Coding) -> tuple[bytes, int]:
    """(bytes, words): ``words`` is the number of gap words, which escapes make differ from the entries.

    None stands for every element; it goes with the coding "all" and no other does.
    """
    if positions is None or coding.kind in ("none", "all"):
        if (positions is None) != (coding.kind == "all"):
            raise ValueError(
                f"coding {coding} can't write {'every element' if positions is None else 'a list'}"
            )
        return b"", 0
    if coding.kind == "bitmap":
        packed = _to_bitmap(positions, elements)
        return planes.compress(packed) if coding.zstd else packed.tobytes(), 0
    if coding.kind == "u32":
        return positions.astype("<u4").tobytes(), 0
    if coding.kind == "rice":
        return rice.encode(positions, coding.parameter).tobytes(), 0
    words = gaps.encode(positions, GAP_BYTES[coding.kind])
    return planes.compress(words) if coding.zstd else words.tobytes(), words.size


def decode(data: memoryview, coding: Coding, count: int, words: int, elements: int) -> Positions | None:
    """Exactly ``count`` ascending positions below ``elements``, None for all of them.

    FrameError before any allocation that the data don't pay for.
    """
    if count > elements:
        raise FrameError(f"{count} changed elements of {elements}")
    if coding.kind in ("none", "all"):
        if len(data) or count != (elements if coding.kind == "all" else 0):
            raise FrameError(f"{coding.kind!r} positions with {len(data)} bytes and {count} of {elements}")
        return None if coding.kind == "all" else np.zeros(0, np.uint32)
    if coding.kind == "bitmap":
        return _from_bitmap(data, coding, count, elements)
    if coding.kind == "u32":
        return _from_u32(data, count, elements)
    if coding.kind == "rice":
        return rice.decode(np.frombuffer(data, np.uint8), coding.parameter, count, elements)
    width = GAP_BYTES[coding.kind]
    if not count <= words <= gaps.max_words(count, elements, width):
        raise FrameError(f"{words} gap words of {count} entries among {elements} elements")
    if coding.zstd:
        found, rest = planes.expand(data, words, width)
        if len(rest):
            raise FrameError(f"{len(rest)} bytes follow the gap words")
    elif len(data) != words * width:
        raise FrameError(f"{len(data)} bytes of gap words, expected {words * width}")
    else:
        found = np.frombuffer(data, f"<u{width}")
    return gaps.decode(found, count, elements)


def _to_bitmap(positions: Positions, elements: int) -> npt.NDArray[np.uint8]:
    size, step = (elements + 7) // 8, BITMAP_CHUNK * 8
    packed, mask = np.empty(size, np.uint8), np.zeros(min(elements, step), np.uint8)
    borders = np.arange(0, elements + step, step, dtype=np.int64)
    cuts = [int(c) for c in np.searchsorted(positions, borders)]
    for number, (first, last) in enumerate(itertools.pairwise(cuts)):
        inside = positions[first:last] - np.uint32(number * step)
        mask[inside] = 1
        length = min(step, elements - number * step)
        part = np.packbits(mask[:length], bitorder="little")
        packed[number * BITMAP_CHUNK : number * BITMAP_CHUNK + part.size] = part
        mask[inside] = 0
    return packed


def _from_bitmap(data: memoryview, coding: Coding, count: int, elements: int) -> Positions:
    size = (elements + 7) // 8
    if coding.zstd:
        packed, rest = planes.expand(data, size, 1)
        if len(rest):
            raise FrameError(f"{len(rest)} bytes follow the bitmap")
    elif len(data) != size:
        raise FrameError(f"a bitmap of {len(data)} bytes, expected {size} for {elements} elements")
    else:
        packed = np.frombuffer(data, np.uint8)
    if elements % 8 and packed[-1] >> (elements % 8):
        raise FrameError(f"the bitmap sets bits beyond its {elements} elements")
    set_bits = int(np.bitwise_count(packed).sum(dtype=np.int64))
    if set_bits != count:
        raise FrameError(f"the bitmap sets {set_bits} bits, expected {count}")
    found, filled = np.empty(count, np.uint32), 0
    for at in range(0, size, BITMAP_CHUNK):
        mask = np.unpackbits(packed[at : at + BITMAP_CHUNK], bitorder="little").view(np.bool_)
        part = np.flatnonzero(mask)
        np.add(part, at * 8, out=found[filled : filled + part.size], casting="unsafe")
        filled += part.size
    return found


def _from_u32(data: memoryview, count: int, elements: int) -> Positions:
    if len(data) != 4 * count:
        raise FrameError(f"{len(data)} bytes of positions, expected {4 * count}")
    found = np.frombuffer(data, "<u4").astype(np.uint32)
    if count and (int(found[-1]) >= elements or not bool(np.all(found[1:] > found[:-1]))):
        raise FrameError(f"positions don't ascend below {elements}")
    return found
