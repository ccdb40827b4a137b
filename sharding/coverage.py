"""The proof that the fragments of a tensor cover each of its elements exactly once, by box algebra.

The flat index is written in a mixed radix whose digits are the strides that occur; in it a fragment is a box,
or few of them, and boxes are disjoint and complete if none overlap and their volumes add up.
"""

from __future__ import annotations

import math

import numpy as np

from jaxrl_sync.sharding.box import overlap_of
from jaxrl_sync.sharding.correspondence import TensorMap
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import Fragment, by_dimension

_proved: set[object] = set()


def prove_coverage(path: str, tensor: TensorMap) -> None:
    """Raises `MappingError` unless every element of the tensor comes from exactly one fragment element."""
    size = math.prod(tensor.shape)
    shapes = tuple((f.start, tuple((a.size, a.stride) for a in f.axes)) for f in tensor.fragments)
    if (size, shapes) in _proved:
        return
    covered = sum(f.num_elements for f in tensor.fragments)
    if covered != size:
        raise MappingError(f"{path!r}: fragments cover {covered} of {size} elements")
    digits = _radix(tensor.fragments, size)
    low, high = [], []
    for f in tensor.fragments:
        ends = f.start + sum((a.size - 1) * a.stride for a in f.axes)
        if f.start < 0 or ends >= size:
            raise MappingError(f"{path!r}: a fragment reaches outside of the tensor")
        for start, stop in _boxes(f, digits):
            low.append(start)
            high.append(stop)
    count = (len(low), len(digits))
    hit = overlap_of(np.array(low, np.int64).reshape(count), np.array(high, np.int64).reshape(count))
    if hit is not None:
        raise MappingError(f"{path!r}: two fragments write the same elements")
    if len(_proved) > 100_000:
        _proved.clear()
    _proved.add((size, shapes))


def _radix(fragments: tuple[Fragment, ...], size: int) -> tuple[int, ...]:
    """Digit sizes, most significant first: a divisor chain through as many strides as possible."""
    marks = sorted({m for f in fragments for a in f.axes for m in (a.stride, a.stride * a.size)})
    chain = [1]
    for mark in marks:
        if mark > chain[-1] and mark % chain[-1] == 0 and size % mark == 0 and mark < size:
            chain.append(mark)
    chain.append(size)
    return tuple(b // a for a, b in zip(chain[-2::-1], chain[:0:-1], strict=True))


def _boxes(fragment: Fragment, digits: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The fragment as boxes of digits; strides that are no digit are written out one index at a time."""
    found = []
    for piece in by_dimension(fragment, digits):
        boxes = [(list(piece.start), [i + 1 for i in piece.start])]
        for a in sorted(piece.axes, key=lambda a: a.stride):
            grown = []
            for low, high in boxes:
                if a.stride <= high[a.dim] - low[a.dim]:
                    high[a.dim] += (a.size - 1) * a.stride
                    grown.append((low, high))
                    continue
                for i in range(a.size):
                    shifted_low, shifted_high = list(low), list(high)
                    shifted_low[a.dim] += i * a.stride
                    shifted_high[a.dim] += i * a.stride
                    grown.append((shifted_low, shifted_high))
            boxes = grown
        found += boxes
    return found
