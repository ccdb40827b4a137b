"""What codings cost: seconds per coder call as a line in its units, measured once per process.

A unit is an entry for positions and values, a gap word where escapes add some, an element for bitmaps, and a
byte for whole sections and for zstd. Coders are timed on a synthetic delta like those of fine-tuning: 1 % of
normal bfloat16 weights, nine tenths of the changes one unit in the last place.
"""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
from collections.abc import Callable, Mapping

import numpy as np

from jaxrl_sync.transfer.codec import positions, rice, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions

_SIZES = (1 << 10, 1 << 15)
_BITMAP = 1 << 20
_REPEATS = 5
_lock = threading.Lock()


@dataclasses.dataclass(frozen=True)
class Line:
    """``fixed_s + units * unit_s + entries * entry_s`` seconds; the last only where units aren't entries."""

    fixed_s: float
    unit_s: float
    entry_s: float = 0.0

    def seconds(self, units: float, entries: float = 0.0) -> float:
        """The time for so many units, and entries."""
        return self.fixed_s + units * self.unit_s + entries * self.entry_s


@dataclasses.dataclass(frozen=True)
class Speeds:
    """Encode plus decode, by the name of a position or value coding (``gap8``, ``ulp+zstd``, ``all``)."""

    lines: Mapping[str, Line]
    sampled: bool = False
    """Whether the time of zstd is taken from a sample of the content instead of its line."""

    def seconds(self, name: str, units: float, entries: float = 0.0) -> float:
        """Time to encode and to decode. KeyError for a coding that wasn't measured."""
        return self.lines[name].seconds(units, entries)


@functools.cache
def _measured() -> Speeds:
    rng = np.random.default_rng(0)
    found: dict[str, list[float]] = {}
    for count in _SIZES:
        places, new, old = _sample(rng, count)
        for name, work in _works(places, new, old).items():
            found.setdefault(name, []).append(_best(work))
    small, large = _SIZES
    lines = {}
    for name, (a, b) in found.items():
        slope = max(0.0, b - a) / (large - small)
        lines[name] = Line(max(0.0, a - slope * small), slope / (2 if name == "all" else 1))
    for zstd in (False, True):
        coding = positions.Coding("bitmap", zstd=zstd)
        lines[name_of(coding)] = _bitmap_line(coding, rng)
    return Speeds(lines, sampled=True)


def _bitmap_line(coding: positions.Coding, rng: np.random.Generator) -> Line:
    """Seconds per element and per entry, from a sparse and a dense bitmap."""
    counts, times = list[int](), list[float]()
    for share in (0.01, 0.5):
        places = np.flatnonzero(rng.random(_BITMAP) < share).astype(np.uint32)
        counts.append(places.size)
        times.append(_best(functools.partial(_code, places, _BITMAP, coding)))
    entry_s = max(0.0, times[1] - times[0]) / (counts[1] - counts[0])
    return Line(0.0, max(0.0, times[0] - counts[0] * entry_s) / _BITMAP, entry_s)


def _code(places: Positions, elements: int, coding: positions.Coding) -> object:
    data, words = positions.encode(places, elements, coding)
    return positions.decode(memoryview(data), coding, places.size, words, elements)


def measured() -> Speeds:
    """The speeds of this process's coders; the first call measures for about a tenth of a second (C)."""
    with _lock:
        return _measured()


def _sample(rng: np.random.Generator, count: int) -> tuple[Positions, Bits, Bits]:
    """``count`` entries among 100 times as many elements, 16-bit values."""
    places = np.sort(rng.choice(count * 100, count, replace=False)).astype(np.uint32)
    old = (rng.normal(0, 2e-3, count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    steps = rng.choice(np.array([1, -1, 2, -2], np.int32), count, p=[0.45, 0.45, 0.05, 0.05])
    return places, (old + steps).astype(np.uint16), old


def _works(places: Positions, new: Bits, old: Bits) -> dict[str, Callable[[], object]]:
    elements = places.size * 100
    parameter = rice.guess(places.size, elements)
    kinds = [
        positions.Coding("u32"), positions.Coding("gap16"), positions.Coding("gap16", zstd=True),
        positions.Coding("gap8"), positions.Coding("gap8", zstd=True), positions.Coding("rice", parameter),
    ]  # fmt: skip

    def what(kind: values.Kind, zstd: bool) -> object:
        data = values.encode(values.codes_of(new, old, kind), kind, zstd)
        return values.bits_from(values.decode(memoryview(data), new.size, 2, kind, zstd), old, kind)

    works: dict[str, Callable[[], object]] = {
        name_of(c): functools.partial(_code, places, elements, c) for c in kinds
    }
    kinds_of_values: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    for kind in kinds_of_values:
        works[kind] = functools.partial(what, kind, False)
        works[f"{kind}+zstd"] = functools.partial(what, kind, True)
    works["all"] = lambda: np.frombuffer(new.tobytes(), new.dtype).copy()
    works["all+zstd"] = works["overwrite+zstd"]
    return works


def name_of(coding: positions.Coding) -> str:
    """The name under which a position coding's speed is kept: without its parameter."""
    return coding.kind + ("+zstd" if coding.zstd else "")


def _best(work: Callable[[], object]) -> float:
    work()
    times = []
    for _ in range(_REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)
