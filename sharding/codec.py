"""The canonical binary form of integers and strings that layouts, correspondences and plans are made of.

Integers are zigzag LEB128 (any size), strings length-prefixed UTF-8. The same value has one encoding, so a
hash of the bytes is a digest that any Python, numpy or jax version reproduces.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable

from jaxrl_sync.sharding.errors import MappingError

_MOST_BITS = 1024
"""Of an integer that is read: strangers could else send one whose decoding takes minutes."""


def digest(data: bytes) -> str:
    """BLAKE2b-128 of ``data`` as 32 hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class Writer:
    """Appends canonical values to a growing byte string."""

    def __init__(self, magic: bytes) -> None:
        self._out = bytearray(magic)

    def integer(self, value: int) -> None:
        """One signed integer of any size."""
        value = int(value)
        rest = value << 1 if value >= 0 else ((-value) << 1) - 1
        out = self._out
        while rest > 127:
            out.append(rest & 127 | 128)
            rest >>= 7
        out.append(rest)

    def integers(self, values: Iterable[int]) -> None:
        """A list of integers, its length first."""
        items = tuple(values)
        self.integer(len(items))
        for item in items:
            self.integer(item)

    def raw(self, value: bytes) -> None:
        """A byte string, its length first."""
        self.integer(len(value))
        self._out += value

    def text(self, value: str) -> None:
        """A string as UTF-8, its length first."""
        self.raw(value.encode())

    def texts(self, values: Iterable[str]) -> None:
        """A list of strings, its length first."""
        items = tuple(values)
        self.integer(len(items))
        for item in items:
            self.text(item)

    def getvalue(self) -> bytes:
        """Everything written so far."""
        return bytes(self._out)


def as_bytes(data: object, what: str) -> bytes:
    """What any buffer holds; a `MappingError` of ``what`` for anything else, such as a string."""
    if isinstance(data, bytes):
        return data
    try:
        return bytes(memoryview(data))  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise MappingError(f"{what}: expected bytes, found a {type(data).__name__}") from error


class Reader:
    """Reads what a `Writer` wrote; a wrong magic or a short input is a `MappingError`."""

    def __init__(self, data: bytes, magic: bytes, what: str) -> None:
        data = as_bytes(data, what)
        if data[: len(magic)] != magic:
            raise MappingError(f"{what}: expected header {magic!r}, found {data[: len(magic)]!r}")
        self._data, self._at, self._what = data, len(magic), what

    def integer(self) -> int:
        """One signed integer."""
        rest = shift = 0
        while True:
            if self._at >= len(self._data):
                raise MappingError(f"{self._what}: input ends in the middle, after {self._at} bytes")
            byte = self._data[self._at]
            self._at += 1
            rest |= (byte & 127) << shift
            if byte < 128:
                break
            shift += 7
            if shift > _MOST_BITS:
                raise MappingError(f"{self._what}: an integer of more than {_MOST_BITS} bits at {self._at}")
        return -((rest + 1) >> 1) if rest & 1 else rest >> 1

    def count(self) -> int:
        """A length, which can't be negative or larger than the input."""
        value = self.integer()
        if not 0 <= value <= len(self._data):
            raise MappingError(f"{self._what}: impossible length {value} at byte {self._at}")
        return value

    def integers(self, at_least: int = 0) -> tuple[int, ...]:
        """A list of integers; a shorter one than ``at_least`` is an error."""
        return tuple(self.integer() for _ in range(self._long_enough(self.count(), at_least)))

    def _long_enough(self, count: int, at_least: int) -> int:
        if count < at_least:
            raise MappingError(f"{self._what}: {count} values at byte {self._at}, expected {at_least}")
        return count

    def shape(self) -> tuple[int, ...]:
        """A list of sizes: not negative, and of fewer than 2^56 elements in all."""
        sizes = self.integers()
        if any(n < 0 for n in sizes) or math.prod(max(1, n) for n in sizes) >= 1 << 56:
            raise MappingError(f"{self._what}: impossible shape {sizes[:8]} at byte {self._at}")
        return sizes

    def raw(self) -> bytes:
        """A byte string."""
        size = self.count()
        part = self._data[self._at : self._at + size]
        if len(part) != size:
            raise MappingError(f"{self._what}: input ends in the middle, after {len(self._data)} bytes")
        self._at += size
        return part

    def text(self) -> str:
        """A string."""
        try:
            return self.raw().decode()
        except UnicodeDecodeError as error:
            raise MappingError(f"{self._what}: not UTF-8 before byte {self._at}") from error

    def texts(self, at_least: int = 0) -> tuple[str, ...]:
        """A list of strings; a shorter one than ``at_least`` is an error."""
        return tuple(self.text() for _ in range(self._long_enough(self.count(), at_least)))

    def end(self) -> None:
        """Asserts that everything was read."""
        if self._at != len(self._data):
            raise MappingError(f"{self._what}: {len(self._data) - self._at} bytes too many")
