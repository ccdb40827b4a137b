"""Strided copies in numpy, for installations without the C kernels: the same blocks, as views."""

from __future__ import annotations

import dataclasses
import itertools
import math
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.blocks import ELEMENT_BYTES, Block

INNER = 2048
"""Longest inner axis of a transposed copy: so many source lines stay in the cache until used up."""

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


Spec = tuple[Side, Side]
"""Target and source of one copy."""


def specs_of(blocks: Sequence[Block]) -> list[Spec]:
    """The views of all blocks, in elements as wide as alignment and strides allow."""
    return [_spec(piece) for block in blocks for piece in _tiles(block)]


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
    specs: Sequence[Spec], source: Sequence[Bytes], targets: Sequence[npt.NDArray[Any]], threads: int
) -> None:
    """Runs all copies on ``threads`` threads; numpy gives up the GIL while it copies. Blocks.

    ``source``: the buffers by number; ``targets``: the view of each copy's target, in order.
    """
    left = zip(specs, targets, strict=True)
    lock = threading.Lock()
    errors: list[BaseException] = []

    def work() -> None:
        try:
            while True:
                with lock:
                    some = list(itertools.islice(left, 4))
                if not some:
                    return
                for (_, of), to in some:
                    np.copyto(to, of.view(source))
        except BaseException as error:
            errors.append(error)

    helpers = [threading.Thread(target=work) for _ in range(min(threads, len(specs)) - 1)]
    for t in helpers:
        t.start()
    work()
    for t in helpers:
        t.join()
    if errors:
        raise errors[0]
