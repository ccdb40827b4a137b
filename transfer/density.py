"""How sparse an update is: changed elements per tensor class, their gaps, their values, and bytes by coding.

All comparisons are on bits. The bound for positions is the entropy of independent changes, H(p) / p bits per
changed element (C. E. Shannon, 1948); entropies of values are of order 0.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.transfer.codec import positions, rice, values
from jaxrl_sync.transfer.codec.bits import Bits, Positions, as_bits, zigzag

Array = npt.NDArray[Any]

_VALUE_KINDS: tuple[tuple[values.Kind, bool], ...] = (
    ("overwrite", False),
    ("overwrite", True),
    ("xor", True),
    ("ulp", True),
)


@dataclasses.dataclass(frozen=True)
class ClassDensity:
    """The tensors of one class: paths that differ only in numbers, as ``layers/*/qkv``."""

    name: str
    tensors: int
    untouched: int
    elements: int
    changed: int

    @property
    def fraction(self) -> float:
        """Share of its elements that changed."""
        return self.changed / self.elements if self.elements else 0.0


@dataclasses.dataclass(frozen=True)
class Density:
    """One update. Bytes are those of the payload without frame headers.

    gaps: between neighbouring changed elements of a tensor, counted by bit length (gap g in [2^(b-1), 2^b)).
    entropy_bits: per changed element, of the new bits, of their XOR with the old ones, of the step in units
        in the last place.
    overlap: share of the changed elements that the update before had changed too; None for the first.
    position_bytes, value_bytes: by coding.
    """

    classes: tuple[ClassDensity, ...]
    full_bytes: int
    gaps: Mapping[int, int]
    entropy_bits: Mapping[str, float]
    overlap: float | None
    position_bytes: Mapping[str, int]
    value_bytes: Mapping[str, int]

    @property
    def elements(self) -> int:
        """Elements of all tensors."""
        return sum(c.elements for c in self.classes)

    @property
    def changed(self) -> int:
        """Changed elements of all tensors."""
        return sum(c.changed for c in self.classes)

    @property
    def fraction(self) -> float:
        """Share of all elements that changed."""
        return self.changed / self.elements if self.elements else 0.0

    @property
    def untouched_tensors(self) -> float:
        """Share of the tensors without any change."""
        return sum(c.untouched for c in self.classes) / max(1, sum(c.tensors for c in self.classes))

    @property
    def position_bound_bits(self) -> float:
        """H(p) / p: bits per changed element of independent positions at this density."""
        p = self.fraction
        if not 0 < p < 1:
            return 0.0
        return -(p * math.log2(p) + (1 - p) * math.log2(1 - p)) / p

    def best_bytes(self, idempotent: bool) -> int:
        """Positions and values in the smallest coding; ``idempotent``: with overwritten values only."""
        kinds = [size for name, size in self.value_bytes.items() if not idempotent or "overwrite" in name]
        return min(self.position_bytes.values(), default=0) + min(kinds, default=0)

    def to_json(self) -> dict[str, Any]:
        """A row for a metrics file."""
        return {
            "elements": self.elements,
            "changed": self.changed,
            "fraction": self.fraction,
            "untouched_tensors": self.untouched_tensors,
            "overlap": self.overlap,
            "full_bytes": self.full_bytes,
            "position_bound_bits": self.position_bound_bits,
            "entropy_bits": dict(self.entropy_bits),
            "gaps": {str(bits): count for bits, count in sorted(self.gaps.items())},
            "position_bytes": dict(self.position_bytes),
            "value_bytes": dict(self.value_bytes),
            "classes": {c.name: dataclasses.asdict(c) | {"fraction": c.fraction} for c in self.classes},
        }


class DensityMeter:
    """Measures updates one after the other; keeps one bit per element of what changed last."""

    def __init__(self) -> None:
        self._last: dict[str, npt.NDArray[np.uint8]] = {}

    def measure(self, before: Mapping[str, Array], after: Mapping[str, Array]) -> Density:
        """The update from ``before`` to ``after`` (path -> array, the same paths, shapes and dtypes).

        Any dtype of 1, 2, 4 or 8 bytes. ValueError names the tensor that does not fit.
        """
        found = [_changes(path, before, after) for path in sorted(after)]
        if before.keys() != after.keys():
            odd = sorted(before.keys() ^ after.keys())[0]
            raise ValueError(f"tensor {odd!r} is in one of the two trees only")
        overlap = self._overlap(found)
        changed = [c for c in found if c.where.size]
        return Density(
            classes=_by_class(found),
            full_bytes=sum(c.elements * c.new.dtype.itemsize for c in found),
            gaps=_gap_histogram(changed),
            entropy_bits=_entropies(changed),
            overlap=overlap,
            position_bytes=_position_bytes(changed),
            value_bytes=_value_bytes(changed),
        )

    def _overlap(self, found: Iterable[_Changes]) -> float | None:
        both = total = 0
        known = bool(self._last)
        for c in found:
            mask = np.zeros(c.elements, np.bool_)
            mask[c.where] = True
            last = self._last.get(c.path)
            if last is not None:
                both += int(np.count_nonzero(np.unpackbits(last, count=c.elements).view(np.bool_)[c.where]))
            total += c.where.size
            self._last[c.path] = np.packbits(mask)
        return both / total if known and total else None


@dataclasses.dataclass(frozen=True, eq=False)
class _Changes:
    path: str
    elements: int
    where: Positions
    new: Bits
    old: Bits


def tensor_class(path: str) -> str:
    """The path with ``*`` for every number: ``layers/3/expert17/up`` -> ``layers/*/expert*/up``."""
    parts = (part.rstrip("0123456789") + "*" if part[-1:].isdigit() else part for part in path.split("/"))
    return "/".join(parts)


def _changes(path: str, before: Mapping[str, Array], after: Mapping[str, Array]) -> _Changes:
    if path not in before:
        raise ValueError(f"tensor {path!r} is in one of the two trees only")
    old, new = np.asarray(before[path]), np.asarray(after[path])
    if (old.shape, old.dtype) != (new.shape, new.dtype):
        raise ValueError(
            f"tensor {path!r}: before {old.dtype}{list(old.shape)}, after {new.dtype}{list(new.shape)}"
        )
    if new.size > 1 << 32:  # positions are uint32, as on the wire
        raise ValueError(f"tensor {path!r} has {new.size} elements, expected at most {1 << 32}")
    old_bits, new_bits = as_bits(np.ascontiguousarray(old)), as_bits(np.ascontiguousarray(new))
    where = np.flatnonzero(old_bits != new_bits).astype(np.uint32)
    return _Changes(path, new_bits.size, where, new_bits[where], old_bits[where])


def _by_class(found: Iterable[_Changes]) -> tuple[ClassDensity, ...]:
    rows: dict[str, list[_Changes]] = {}
    for c in found:
        rows.setdefault(tensor_class(c.path), []).append(c)
    return tuple(
        ClassDensity(
            name,
            len(group),
            sum(not c.where.size for c in group),
            sum(c.elements for c in group),
            sum(c.where.size for c in group),
        )
        for name, group in sorted(rows.items())
    )


def _gap_histogram(changed: Iterable[_Changes]) -> dict[int, int]:
    counts: Counter[int] = Counter()
    for c in changed:
        lengths = np.frexp(np.diff(c.where).astype(np.float64))[1]
        bits, number = np.unique(lengths, return_counts=True)
        counts.update(dict(zip(bits.tolist(), number.tolist(), strict=True)))
    return dict(counts)


def _entropies(changed: list[_Changes]) -> dict[str, float]:
    streams = {
        "new": [c.new for c in changed],
        "xor": [c.new ^ c.old for c in changed],
        "ulp": [zigzag(c.new, c.old) for c in changed],
    }
    return {name: _entropy(parts) for name, parts in streams.items()}


def _entropy(parts: list[Bits]) -> float:
    counts: Counter[int] = Counter()
    for part in parts:
        symbols, number = np.unique(part, return_counts=True)
        counts.update(dict(zip(symbols.tolist(), number.tolist(), strict=True)))
    share = np.array(list(counts.values()), np.float64)
    share /= max(1.0, share.sum())
    return float(np.sum(share * np.log2(1 / share)))


def _position_bytes(changed: Iterable[_Changes]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for c in changed:
        parameter = rice.guess(c.where.size, int(c.where[-1]) + 1)
        codings = [positions.Coding("bitmap"), positions.Coding("bitmap", zstd=True), positions.Coding("u32")]
        codings += [positions.Coding("gap8"), positions.Coding("gap16"), positions.Coding("gap16", zstd=True)]
        for coding in codings:
            sizes[str(coding)] += len(positions.encode(c.where, c.elements, coding)[0])
        rice_coding = positions.Coding("rice", parameter)
        sizes["rice"] += len(positions.encode(c.where, c.elements, rice_coding)[0])
    return dict(sizes)


def _value_bytes(changed: Iterable[_Changes]) -> dict[str, int]:
    sizes: Counter[str] = Counter()
    for c in changed:
        for kind, zstd in _VALUE_KINDS:
            name = kind + ("+zstd" if zstd else "")
            sizes[name] += len(values.encode(values.codes_of(c.new, c.old, kind), kind, zstd))
    return dict(sizes)
