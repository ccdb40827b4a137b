"""Byte planes under zstd: all first bytes of the words, then all second ones, each plane compressed alone.

Per plane: u64 length, one zstd frame whose header names its content size. Nothing is decompressed before that
size and the length are what the receiver expects.
"""

from __future__ import annotations

import struct
import threading

import numpy as np
import numpy.typing as npt
import zstandard

from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype
from jaxrl_sync.transfer.codec.errors import FrameError

LEVEL = 1
_LENGTH = struct.Struct("<Q")
_local = threading.local()


def _compressor() -> zstandard.ZstdCompressor:
    if not hasattr(_local, "compressor"):
        _local.compressor = zstandard.ZstdCompressor(level=LEVEL)
    made: zstandard.ZstdCompressor = _local.compressor
    return made


def compress(words: Bits) -> bytes:
    """The planes of a flat array of words of 1 to 8 bytes."""
    width = words.dtype.itemsize
    planes = np.ascontiguousarray(words).view(np.uint8).reshape(-1, width)
    pieces = []
    for k in range(width):
        packed = _compressor().compress(np.ascontiguousarray(planes[:, k]).data)
        pieces += [_LENGTH.pack(len(packed)), packed]
    return b"".join(pieces)


def expand(data: memoryview, count: int, itemsize: int) -> tuple[Bits, memoryview]:
    """``count`` words from the start of ``data``, and the rest. FrameError names what doesn't fit."""
    packed = []
    for k in range(itemsize):
        if len(data) < _LENGTH.size:
            raise FrameError(f"byte plane {k} has no length: {len(data)} bytes are left")
        (length,) = _LENGTH.unpack(data[: _LENGTH.size])
        if length > len(data) - _LENGTH.size:
            raise FrameError(f"byte plane {k} says {length} bytes, {len(data) - _LENGTH.size} are left")
        packed.append(data[_LENGTH.size : _LENGTH.size + length])
        _check_size(packed[k], count, k)
        data = data[_LENGTH.size + length :]
    planes = [_plane(p, count, k) for k, p in enumerate(packed)]
    joined = planes[0] if itemsize == 1 else np.stack(planes, axis=1)
    return joined.reshape(-1).view(bits_dtype(itemsize)), data


def _check_size(packed: memoryview, count: int, number: int) -> None:
    try:
        size = zstandard.frame_content_size(packed)
    except zstandard.ZstdError as error:
        raise FrameError(f"byte plane {number} is no zstd frame: {error}") from error
    if size != count:  # -1 where the header doesn't say
        raise FrameError(f"byte plane {number} says {size} bytes of content, expected {count}")


def _plane(packed: memoryview, count: int, number: int) -> npt.NDArray[np.uint8]:
    try:
        data = zstandard.ZstdDecompressor().decompress(packed, max_output_size=count, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise FrameError(f"byte plane {number} is no whole zstd frame: {error}") from error
    if len(data) != count:
        raise FrameError(f"byte plane {number} holds {len(data)} bytes, expected {count}")
    return np.frombuffer(data, np.uint8)
