"""Strided copies in numpy, for installations without the C kernels: the same blocks, as views."""

from __future__ import annotations

import ctypes
import dataclasses
import math
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.blocks import ELEMENT_BYTES, Block, Gang

INNER = 2048
"""Longest inner axis of a transposed copy: so many source lines stay in the cache until used up."""

BATCH_BYTES = 1 << 20
"""A thread takes about so much at once; of what is larger, one gang."""

MEMORY = memoryview((ctypes.c_ubyte * (sys.maxsize - 1)).from_address(1))
"""All memory as one buffer (from address 1 on: numpy takes 0 for none), for views without another array."""

Bytes = npt.NDArray[np.uint8]


@dataclasses.dataclass(frozen=True, slots=True)
class Side:
    """A strided view of one buffer; strides in bytes."""

    buffer: int
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    offset: int
    strides: tuple[int, ...]

    def view(self, buffers: Sequence[Bytes]) -> npt.NDArray[Any]:
        """The view, without a copy."""
        return np.ndarray(self.shape, self.dtype, buffers[self.buffer], self.offset, self.strides)

    def view_at(self, addresses: Sequence[int]) -> npt.NDArray[Any]:
        """The view over buffers known by their addresses alone; the caller keeps the memory alive."""
        start = addresses[self.buffer] + self.offset
        return np.ndarray(self.shape, self.dtype, MEMORY, start - 1, self.strides)


Spec = tuple[Side, Side]
"""Target and source of one copy."""

Batch = tuple[Spec, ...]
"""Copies that one thread does one after the other."""

Targets = list[list[npt.NDArray[Any]]]
"""The view of each copy's target, as batches have them."""


def batches_of(gangs: Sequence[Gang]) -> list[Batch]:
    """The views of all blocks, in elements as wide as alignment and strides allow; large gangs first.

    Then threads end at about the same time, and at the start they are away for milliseconds per copy, in
    which Python can make the arrays of the result: a copy that ends needs the GIL for the next one, and gets
    it from a thread that is busy with Python after 5 ms.
    """
    sized = [(sum(b.total_bytes for b in gang), gang) for gang in gangs]
    sized.sort(key=lambda pair: -pair[0])
    batches, some, held = list[Batch](), list[Spec](), 0
    for size, gang in sized:
        some += [_spec(piece) for block in gang for piece in _tiles(block)]
        held += size
        if held >= BATCH_BYTES:
            batches.append(tuple(some))
            some, held = [], 0
    return [*batches, tuple(some)] if some else batches


def targets_of(batches: Sequence[Batch], buffers: Sequence[Bytes]) -> Targets:
    """The target views over these buffers, for `execute`."""
    return [[to.view(buffers) for to, _ in batch] for batch in batches]


def _tiles(block: Block) -> Iterator[Block]:
    inner = block.shape[-1] if len(block.shape) > 1 and block.run <= ELEMENT_BYTES else 0
    if inner <= INNER:
        yield block
        return
    for i in range(0, inner, INNER):
        yield dataclasses.replace(
            block,
            source_offset=block.source_offset + i * block.source_strides[-1],
            target_offset=block.target_offset + i * block.target_strides[-1],
            shape=(*block.shape[:-1], min(INNER, inner - i)),
        )


def _spec(b: Block) -> Spec:
    unit = math.gcd(b.run, 8, b.source_offset, b.target_offset, *b.source_strides, *b.target_strides)
    dtype, shape = np.dtype(f"u{unit}"), (*b.shape, b.run // unit)
    return (
        Side(b.target, shape, dtype, b.target_offset, (*b.target_strides, unit)),
        Side(b.source, shape, dtype, b.source_offset, (*b.source_strides, unit)),
    )


def execute(
    batches: Sequence[Batch],
    source: Callable[[Side], npt.NDArray[Any]],
    targets: Targets,
    threads: int,
) -> None:
    """Runs all copies on ``threads`` threads; numpy gives up the GIL while it copies. Blocks.

    ``source``: makes the view of a copy's source.
    """
    left = zip(batches, targets, strict=True)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    some = next(left, None)
                if some is None:
                    return
                for (_, of), to in zip(*some, strict=True):
                    np.copyto(to, source(of))
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(min(threads, len(batches)) - 1)]
    for t in helpers:
        t.start()
    work()
    for t in helpers:
        t.join()
    if errors:
        raise errors[0]
