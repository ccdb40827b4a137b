"""Which coding costs least for one section: exact sizes, measured coder speed, measured link rate.

The cost of a coding is the time of its encoder, of its bytes on the link, and of its decoder, one after the
other. Positions and values are chosen apart, because their times add up; then sparse is held against sending
the whole section. Sizes are exact where they follow from the gaps; size and speed of zstd, which depend on
what it is given, come from a sample of that.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.codec import gaps, planes, positions, rice, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions
from jaxrl_sync.transfer.codec.costs import Speeds, name_of
from jaxrl_sync.transfer.codec.frame import Coding
from jaxrl_sync.transfer.codec.rules import CodingRules

SAMPLE = 1 << 16
"""Words that zstd is tried on; less than that many is compressed as a whole."""

LEAST_SHRINK = 0.05
"""zstd isn't expected to shrink below this share: a coding that would need it to isn't tried."""

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Choice:
    """A coding with its estimated bytes and seconds (encode, wire, decode)."""

    coding: Coding
    nbytes: float
    seconds: float


@dataclasses.dataclass(frozen=True, eq=False)
class Delta:
    """Changes of one flat buffer: ascending positions, new bits, old bits where they are known."""

    elements: int
    positions: Positions
    new: Bits
    old: Bits | None = None

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.new.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class _Candidate(Generic[T]):
    """A coding, a lower bound of its seconds, and how to find (bytes, coder seconds): only if it may win."""

    coding: T
    floor_s: float
    measure: Callable[[], tuple[float, float]]


def _cheapest(candidates: Iterable[_Candidate[T]], rate: float) -> tuple[float, float, T]:
    """(seconds, bytes, coding) of the best one; those that can't win are never measured."""
    best: tuple[float, float, T] | None = None
    for candidate in sorted(candidates, key=lambda c: c.floor_s):
        if best is not None and candidate.floor_s >= best[0]:
            break
        size, coder_s = candidate.measure()
        seconds = coder_s + size / rate
        if best is None or seconds < best[0]:
            best = seconds, size, candidate.coding
    assert best is not None
    return best


def choose(delta: Delta, rate_bytes_s: float, speeds: Speeds, rules: CodingRules) -> Choice:
    """The cheapest coding that ``rules`` allow; ``rate_bytes_s`` may be ``math.inf``."""
    if not delta.positions.size:
        return Choice(Coding(positions.Coding("none")), 0.0, 0.0)
    where = _cheapest(_positions(delta, rate_bytes_s, speeds, rules), rate_bytes_s)
    what = _cheapest(_values(delta, rate_bytes_s, speeds, rules), rate_bytes_s)
    best = Choice(Coding(where[2], *what[2]), where[1] + what[1], where[0] + what[0])
    if rules.whole:
        seconds, size, zstd = _cheapest(_whole(delta, rate_bytes_s, speeds, rules), rate_bytes_s)
        if seconds < best.seconds:
            best = Choice(Coding(positions.Coding("all"), "overwrite", zstd), size, seconds)
    return best


def _flags(rules: CodingRules) -> tuple[bool, ...]:
    return {"auto": (False, True), "on": (True,), "off": (False,)}[rules.zstd]


def _positions(
    delta: Delta, rate: float, speeds: Speeds, rules: CodingRules
) -> Iterator[_Candidate[positions.Coding]]:
    count, elements, places = delta.positions.size, delta.elements, delta.positions

    def candidate(
        coding: positions.Coding,
        units: float,
        least: float,
        measure: Callable[[], tuple[float, float, float]],
    ) -> _Candidate[positions.Coding]:
        """``measure`` gives (bytes, units, seconds of zstd where a sample was timed)."""
        name = name_of(coding)

        def measured() -> tuple[float, float]:
            size, exact_units, zstd_s = measure()
            return size, _coder_s(speeds, name, exact_units, count, zstd_s)

        floor_s = _least_coder_s(speeds, name, units, count)
        return _Candidate(coding, floor_s + least / rate, measured)

    wanted = rules.positions
    if wanted in ("auto", "u32"):
        size = 4.0 * count
        yield candidate(positions.Coding("u32"), count, size, lambda: (size, count, 0.0))
    found = functools.cache(lambda: gaps.gaps_of(places))
    if wanted in ("auto", "rice"):
        parameter = rice.guess(count, int(places[-1]) + 1)
        least = count * max(1, parameter) / 8

        def rice_bytes() -> tuple[float, float, float]:
            return rice.num_bits(found(), parameter) / 8, count, 0.0

        yield candidate(positions.Coding("rice", parameter), count, least, rice_bytes)
    kinds: tuple[tuple[positions.Kind, int], ...] = (("gap8", 1), ("gap16", 2))
    for kind, width in kinds:
        if wanted not in ("auto", kind):
            continue
        for zstd in _flags(rules):
            measure = functools.partial(_gap_bytes, places, found, width, zstd)
            least = count * width * (LEAST_SHRINK if zstd else 1.0)
            yield candidate(positions.Coding(kind, zstd=zstd), count, least, measure)
    if wanted in ("auto", "bitmap"):
        for zstd in _flags(rules):
            measure = functools.partial(_bitmap_bytes, delta, zstd)
            least = elements / 8 * (LEAST_SHRINK if zstd else 1.0)
            yield candidate(positions.Coding("bitmap", zstd=zstd), elements, least, measure)


def _gap_bytes(
    places: Positions, found: Callable[[], npt.NDArray[np.uint32]], width: int, zstd: bool
) -> tuple[float, float, float]:
    words = gaps.num_words(found(), width)
    shrink, zstd_s = _tried(_sampled(places, width)) if zstd else (1.0, 0.0)
    return words * width * shrink, words, words * width * zstd_s


def _bitmap_bytes(delta: Delta, zstd: bool) -> tuple[float, float, float]:
    nbytes = delta.elements / 8
    shrink, zstd_s = _tried(_part_of_bitmap(delta)) if zstd else (1.0, 0.0)
    return nbytes * shrink, delta.elements, nbytes * zstd_s


def _coder_s(speeds: Speeds, name: str, units: float, entries: float, zstd_s: float) -> float:
    """The coder's seconds; zstd's own are those of this very content where the speeds ask for that."""
    if zstd_s and speeds.sampled:
        return speeds.seconds(name.removesuffix("+zstd"), units, entries) + zstd_s
    return speeds.seconds(name, units, entries)


def _least_coder_s(speeds: Speeds, name: str, units: float, entries: float) -> float:
    """A lower bound of `_coder_s`: zstd at best four times as fast as on what it was measured on."""
    seconds = speeds.seconds(name, units, entries)
    if not speeds.sampled or not name.endswith("+zstd"):
        return seconds
    plain = speeds.seconds(name.removesuffix("+zstd"), units, entries)
    return plain + max(0.0, seconds - plain) / 4


def _values(
    delta: Delta, rate: float, speeds: Speeds, rules: CodingRules
) -> Iterator[_Candidate[tuple[values.Kind, bool]]]:
    count = delta.positions.size
    units = count * delta.itemsize / 2  # speeds are measured on 16-bit values
    kinds: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    for kind in kinds:
        if rules.values not in ("auto", kind) or (kind != "overwrite" and delta.old is None):
            continue
        least = count * (1 if kind == "ulp" else delta.itemsize)
        for zstd in _flags(rules):
            name = kind + ("+zstd" if zstd else "")
            floor_s = _least_coder_s(speeds, name, units, 0.0)
            floor_s += least * (LEAST_SHRINK if zstd else 1.0) / rate
            measure = functools.partial(_value_cost, delta, kind, zstd, speeds, units)
            yield _Candidate((kind, zstd), floor_s, measure)


def _value_cost(
    delta: Delta, kind: values.Kind, zstd: bool, speeds: Speeds, units: float
) -> tuple[float, float]:
    size, zstd_s = _value_bytes(delta, kind, zstd)
    return size, _coder_s(speeds, kind + ("+zstd" if zstd else ""), units, 0.0, zstd_s)


def _value_bytes(delta: Delta, kind: values.Kind, zstd: bool) -> tuple[float, float]:
    """(bytes, seconds of zstd) of one value coding."""
    if kind != "ulp" and not zstd:
        return float(delta.new.nbytes), 0.0
    pieces = _pieces(delta.new.size)
    new = np.concatenate([delta.new[p] for p in pieces])
    old = None if delta.old is None else np.concatenate([delta.old[p] for p in pieces])
    codes, scale = values.codes_of(new, old, kind), delta.new.size / new.size
    size = len(values.encode(codes, kind, zstd)) * scale
    if not zstd:
        return size, 0.0
    small = np.minimum(codes, codes.dtype.type(255)).astype(np.uint8) if kind == "ulp" else codes
    return size, _tried(small)[1] * small.nbytes * scale


def _whole(delta: Delta, rate: float, speeds: Speeds, rules: CodingRules) -> Iterator[_Candidate[bool]]:
    """Every element; zstd is tried on the changed ones, which are smaller than most and shrink as well."""
    nbytes = float(delta.elements * delta.itemsize)
    for zstd in _flags(rules):
        coder_s = speeds.seconds("all+zstd", nbytes / 2) if zstd else speeds.seconds("all", nbytes)
        floor_s = (coder_s / 4 if zstd and speeds.sampled else coder_s) + nbytes * (
            LEAST_SHRINK if zstd else 1.0
        ) / rate

        def measure(zstd: bool = zstd, coder_s: float = coder_s) -> tuple[float, float]:
            size, zstd_s = _value_bytes(delta, "overwrite", zstd)
            scale = nbytes / delta.new.nbytes
            return size * scale, zstd_s * scale if zstd_s and speeds.sampled else coder_s

        yield _Candidate(zstd, floor_s, measure)


def _pieces(size: int) -> list[slice]:
    """Up to four stretches of SAMPLE words in all, spread over the whole."""
    if size <= SAMPLE:
        return [slice(0, size)]
    length = SAMPLE // 4
    return [slice(i * (size - length) // 3, i * (size - length) // 3 + length) for i in range(4)]


def _sampled(places: Positions, width: int) -> Bits:
    """The gap words of some stretches of the entries, each from the entry in front of it."""
    found = []
    for piece in _pieces(places.size):
        part = places[piece]
        before = places[piece.start - 1] + np.uint32(1) if piece.start else np.uint32(0)
        found.append(gaps.encode(part - before, width))
    return np.concatenate(found)


def _part_of_bitmap(delta: Delta) -> Bits:
    """The bitmap of a stretch in the middle that holds up to SAMPLE entries."""
    first = max(0, delta.positions.size // 2 - SAMPLE // 2)
    part = delta.positions[first : first + SAMPLE]
    stretch = int(part[-1] - part[0]) + 1
    data, _ = positions.encode(part - part[0], stretch, positions.Coding("bitmap"))
    return np.frombuffer(data, np.uint8)


def _tried(words: Bits) -> tuple[float, float]:
    """(compressed bytes, seconds to compress and expand) per byte of a sample, without the cost of a call."""
    size, seconds = _zstd(words)
    nbytes = max(1, words.nbytes)
    per_call_s = words.dtype.itemsize * _call_s() if words.size >= SAMPLE else 0.0  # less is all there is
    return size / nbytes, max(0.0, seconds - per_call_s) / nbytes


@functools.cache
def _call_s() -> float:
    """Seconds per byte plane that don't depend on its length."""
    return min(_zstd(np.zeros(16, np.uint8))[1] for _ in range(5))


def _zstd(words: Bits) -> tuple[int, float]:
    """(compressed bytes, the lesser of two times to compress and to expand)."""
    best, packed = math.inf, b""
    for _ in range(2):
        start = time.perf_counter()
        packed = planes.compress(words)
        planes.expand(memoryview(packed), words.size, words.dtype.itemsize)
        best = min(best, time.perf_counter() - start)
    return len(packed), best
