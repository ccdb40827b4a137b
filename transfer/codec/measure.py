"""What every coding costs for one delta, measured: the yardstick for the automatic choice."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator

import numpy as np

from jaxrl_sync.transfer.codec import positions, rice, values
from jaxrl_sync.transfer.codec.choose import Delta
from jaxrl_sync.transfer.codec.frame import Coding


@dataclasses.dataclass(frozen=True)
class Measured:
    """One coding of one half of a delta: bytes, and seconds to encode and decode (the least of several)."""

    nbytes: int
    seconds: float


def codings(delta: Delta) -> Iterator[positions.Coding]:
    """Every position coding but those for nothing and for everything."""
    yield positions.Coding("u32")
    yield positions.Coding("rice", rice.guess(delta.positions.size, int(delta.positions[-1]) + 1))
    kinds: tuple[positions.Kind, ...] = ("bitmap", "gap16", "gap8")
    for kind, zstd in itertools.product(kinds, (False, True)):
        yield positions.Coding(kind, zstd=zstd)


def measure_positions(delta: Delta, repeats: int = 5) -> dict[positions.Coding, Measured]:
    """Bytes and seconds of every position coding."""
    found = {}
    for coding in codings(delta):

        def work(coding: positions.Coding = coding) -> int:
            data, words = positions.encode(delta.positions, delta.elements, coding)
            positions.decode(memoryview(data), coding, delta.positions.size, words, delta.elements)
            return len(data)

        found[coding] = _least(work, repeats)
    return found


def measure_values(delta: Delta, repeats: int = 5) -> dict[tuple[values.Kind, bool], Measured]:
    """Bytes and seconds of every value coding; of XOR and ulp where the old bits are known."""
    kinds: tuple[values.Kind, ...] = ("overwrite",) if delta.old is None else ("overwrite", "xor", "ulp")
    found = {}
    for kind, zstd in itertools.product(kinds, (False, True)):

        def work(kind: values.Kind = kind, zstd: bool = zstd) -> int:
            data = values.encode(values.codes_of(delta.new, delta.old, kind), kind, zstd)
            codes = values.decode(memoryview(data), delta.new.size, delta.itemsize, kind, zstd)
            values.bits_from(codes, delta.new if delta.old is None else delta.old, kind)
            return len(data)

        found[kind, zstd] = _least(work, repeats)
    return found


def measure_whole(
    new: np.ndarray[tuple[int], np.dtype[np.generic]], repeats: int = 5
) -> dict[bool, Measured]:
    """Bytes and seconds of sending every element, without and with zstd."""

    def plain() -> int:
        data = new.tobytes()
        np.frombuffer(data, new.dtype).copy()
        return len(data)

    def packed() -> int:
        data = values.encode(new, "overwrite", True)
        values.decode(memoryview(data), new.size, new.dtype.itemsize, "overwrite", True)
        return len(data)

    return {False: _least(plain, repeats), True: _least(packed, repeats)}


def all_codings(delta: Delta, whole: np.ndarray[tuple[int], np.dtype[np.generic]]) -> dict[Coding, Measured]:
    """Every pair of a position and a value coding, and the whole buffer; times add up."""
    where, what = measure_positions(delta), measure_values(delta)
    found = {
        Coding(p, kind, zstd): Measured(a.nbytes + b.nbytes, a.seconds + b.seconds)
        for p, a in where.items()
        for (kind, zstd), b in what.items()
    }
    everything = {Coding(positions.Coding("all"), "overwrite", z): m for z, m in measure_whole(whole).items()}
    return {**found, **everything}


def _least(work: Callable[[], int], repeats: int) -> Measured:
    nbytes, times = work(), []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return Measured(nbytes, min(times))
