"""The binary frame that carries one data rank's share of a step, and its decoder.

    offset 0    prefix, 64 bytes: magic (8), format u16, zero u16, header bytes u32, payload bytes u64,
                xxh3-128 digest (16) of everything after the prefix, zeros
    offset 64   header, UTF-8 JSON, padded with zeros to 64
    then        the arrays in the header's order, C order, little-endian, each padded with zeros to 64

All offsets follow from the header, so that no offset travels. The decoder trusts nothing: sizes are checked
against limits before memory is taken, dtypes come from a list, shapes must give the payload's exact size.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from jaxrl_sync.batch.pack import FIELDS, Fields

MAGIC = b"JRLBATCH"
FORMAT = 1
ALIGN_BYTES = 64
PREFIX_BYTES = 64
DTYPES = (
    "bool",
    "uint8",
    "int8",
    "uint16",
    "int16",
    "uint32",
    "int32",
    "int64",
    "float16",
    "float32",
    "float64",
)

_PREFIX = struct.Struct("<8sHHIQ16s24x")


class FrameError(ValueError):
    """Bytes that are not a frame, or not the frame expected: names the part, its value and the limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class FrameLimits:
    """Most that a decoder takes from a peer."""

    header_bytes: int = 1 << 20
    payload_bytes: int = 1 << 32
    fields: int = 64
    dims: int = 8


@dataclasses.dataclass(frozen=True, slots=True)
class Prefix:
    """Sizes and digest of a frame, read from its first 64 bytes. ``body_bytes`` are what follow."""

    header_bytes: int
    payload_bytes: int
    digest: bytes

    @property
    def body_bytes(self) -> int:
        """Bytes after the prefix."""
        return _aligned(self.header_bytes) + self.payload_bytes


@dataclasses.dataclass(frozen=True, slots=True)
class BatchHeader:
    """What the trainer must know about a batch beside its arrays; ``cursor`` is saved with the update."""

    step: int
    data_rank: int
    micro_batches: int
    rows: int
    seq_len: int
    num_valid_tokens: int
    checkpoint: bool = False
    last: bool = False
    cursor: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(micro_batches, rows, seq_len)."""
        return (self.micro_batches, self.rows, self.seq_len)


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class BatchFrame:
    """A decoded batch: ``fields`` [micro, rows, S] are read-only views of the received bytes."""

    header: BatchHeader
    fields: Fields


def encode(header: Mapping[str, Any], arrays: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """One frame of a JSON header and named arrays; raises ``FrameError`` for a dtype that does not travel."""
    specs = {}
    for name, array in arrays.items():
        if array.dtype.name not in DTYPES:
            raise FrameError(
                f"field {name!r} has dtype {array.dtype.name}, expected one of {', '.join(DTYPES)}"
            )
        specs[name] = {"dtype": array.dtype.name, "shape": list(array.shape)}
    text = json.dumps({**header, "fields": specs}, separators=(",", ":"), allow_nan=False).encode()
    sizes = [_aligned(a.nbytes) for a in arrays.values()]
    frame = bytearray(PREFIX_BYTES + _aligned(len(text)) + sum(sizes))
    frame[PREFIX_BYTES : PREFIX_BYTES + len(text)] = text
    offset = PREFIX_BYTES + _aligned(len(text))
    for array, size in zip(arrays.values(), sizes, strict=True):
        little = np.ascontiguousarray(array, array.dtype.newbyteorder("<"))
        frame[offset : offset + array.nbytes] = little.tobytes()
        offset += size
    digest = xxhash.xxh3_128_digest(memoryview(frame)[PREFIX_BYTES:])
    frame[:PREFIX_BYTES] = _PREFIX.pack(MAGIC, FORMAT, 0, len(text), sum(sizes), digest)
    return bytes(frame)


def read_prefix(data: bytes | bytearray | memoryview, limits: FrameLimits | None = None) -> Prefix:
    """Checks the first 64 bytes of a frame against the limits; raises ``FrameError``."""
    limits = limits or FrameLimits()
    if len(data) < PREFIX_BYTES:
        raise FrameError(f"frame of {len(data)} bytes, expected at least {PREFIX_BYTES}")
    magic, version, zero, header_bytes, payload_bytes, digest = _PREFIX.unpack(bytes(data[:PREFIX_BYTES]))
    if magic != MAGIC or zero or any(bytes(data[40:PREFIX_BYTES])):
        raise FrameError(f"frame starts with {magic!r}, expected {MAGIC!r}")
    if version != FORMAT:
        raise FrameError(f"frame format {version}, expected {FORMAT}")
    if header_bytes > limits.header_bytes:
        raise FrameError(f"frame header of {header_bytes} bytes, expected at most {limits.header_bytes}")
    if payload_bytes > limits.payload_bytes or payload_bytes % ALIGN_BYTES:
        raise FrameError(
            f"frame payload of {payload_bytes} bytes, expected a multiple of {ALIGN_BYTES} up to"
            f" {limits.payload_bytes}"
        )
    return Prefix(header_bytes, payload_bytes, digest)


def decode(
    data: bytes | bytearray | memoryview, limits: FrameLimits | None = None
) -> tuple[dict[str, Any], Fields]:
    """Header (without ``fields``) and arrays of a whole frame; the arrays are read-only views of ``data``.

    Raises ``FrameError`` for anything but an intact frame; takes no memory beyond the header's objects.
    """
    limits = limits or FrameLimits()
    prefix = read_prefix(data, limits)
    view = memoryview(data).toreadonly()
    if len(view) != PREFIX_BYTES + prefix.body_bytes:
        raise FrameError(f"frame of {len(view)} bytes, expected {PREFIX_BYTES + prefix.body_bytes}")
    digest = xxhash.xxh3_128_digest(view[PREFIX_BYTES:])
    if digest != prefix.digest:
        raise FrameError(f"frame digest {digest.hex()}, expected {prefix.digest.hex()}")
    header = _read_header(bytes(view[PREFIX_BYTES : PREFIX_BYTES + prefix.header_bytes]))
    specs = header.pop("fields", None)
    if not isinstance(specs, dict) or len(specs) > limits.fields:
        raise FrameError(f"frame header needs 'fields', an object of at most {limits.fields} entries")
    offset = PREFIX_BYTES + _aligned(prefix.header_bytes)
    arrays: Fields = {}
    for name, spec in specs.items():
        dtype, shape = _read_spec(name, spec, limits)
        size = dtype.itemsize * math.prod(shape)
        if size > len(view) - offset:
            raise FrameError(f"field {name!r} of {size} bytes, but {len(view) - offset} bytes are left")
        raw = np.frombuffer(view[offset : offset + size], dtype)
        if dtype == np.bool_ and raw.view(np.uint8).max(initial=0) > 1:
            raise FrameError(f"field {name!r} is bool and holds a byte above 1")
        try:
            arrays[name] = raw.reshape(shape)
        except ValueError as e:  # an empty array with absurd other dimensions
            raise FrameError(f"field {name!r} has shape {shape}: {e}") from e
        offset += _aligned(size)
    if offset != len(view):
        raise FrameError(f"frame holds {len(view) - offset} bytes more than its fields")
    return header, arrays


def encode_batch(header: BatchHeader, fields: Mapping[str, npt.NDArray[Any]]) -> bytes:
    """The frame of one data rank's fields [micro, rows, S]; raises ``FrameError`` if they do not fit."""
    _check_batch(header, fields)
    return encode(dataclasses.asdict(header), fields)


def decode_batch(data: bytes | bytearray | memoryview, limits: FrameLimits | None = None) -> BatchFrame:
    """The batch in a frame; raises ``FrameError`` unless it has every field of ``FIELDS`` in its shape."""
    raw, fields = decode(data, limits)
    names = {f.name for f in dataclasses.fields(BatchHeader)}
    if raw.keys() != names:
        raise FrameError(f"batch header has {sorted(raw)}, expected {sorted(names)}")
    for name in ("step", "data_rank", "micro_batches", "rows", "seq_len", "num_valid_tokens"):
        if type(raw[name]) is not int or raw[name] < 0:
            raise FrameError(f"batch header {name!r} is {raw[name]!r}, expected an integer from 0")
    for name in ("checkpoint", "last"):
        if type(raw[name]) is not bool:
            raise FrameError(f"batch header {name!r} is {raw[name]!r}, expected true or false")
    if not isinstance(raw["cursor"], dict):
        raise FrameError(f"batch header 'cursor' is {raw['cursor']!r}, expected an object")
    header = BatchHeader(**raw)
    _check_batch(header, fields)
    return BatchFrame(header, fields)


def _check_batch(header: BatchHeader, fields: Mapping[str, npt.NDArray[Any]]) -> None:
    """Fields beyond ``FIELDS`` are named extras, [micro, rows, S, ...] of any dtype that travels."""
    for name, dtype in FIELDS.items():
        if name not in fields:
            raise FrameError(f"batch has no field {name!r}, expected {', '.join(FIELDS)}")
        if fields[name].dtype != dtype:
            raise FrameError(f"field {name!r} has dtype {fields[name].dtype.name}, expected {dtype.name}")
    for name, array in fields.items():
        if array.shape[:3] != header.shape or (name in FIELDS and array.ndim != 3):
            raise FrameError(f"field {name!r} has shape {array.shape}, expected {header.shape}")


def _read_header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text.decode(), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as e:
        raise FrameError(f"frame header is not JSON: {e}") from e
    if not isinstance(header, dict):
        raise FrameError(f"frame header is a {type(header).__name__}, expected an object")
    return header


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"number {name}")


def _read_spec(name: str, spec: Any, limits: FrameLimits) -> tuple[np.dtype[Any], tuple[int, ...]]:
    if not isinstance(spec, dict) or spec.keys() != {"dtype", "shape"}:
        raise FrameError(f"field {name!r} is {spec!r}, expected an object of dtype and shape")
    dtype, shape = spec["dtype"], spec["shape"]
    if dtype not in DTYPES:
        raise FrameError(f"field {name!r} has dtype {dtype!r}, expected one of {', '.join(DTYPES)}")
    if not isinstance(shape, list) or len(shape) > limits.dims:
        raise FrameError(f"field {name!r} has shape {shape!r}, expected a list of at most {limits.dims}")
    for n in shape:
        if type(n) is not int or not 0 <= n <= limits.payload_bytes:
            raise FrameError(f"field {name!r} has shape {shape!r}, expected integers from 0")
    return np.dtype(dtype).newbyteorder("<"), tuple(shape)


def _aligned(size: int) -> int:
    return -(-size // ALIGN_BYTES) * ALIGN_BYTES
