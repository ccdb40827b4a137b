"""Gather and scatter with static indices, as slices that are put side by side.

Index rows that follow each other at a constant distance are taken as one strided slice, so that a permutation
of experts costs one piece per run and a repeat or an interleave costs one in all.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.fragments import MAX_FRAGMENTS, TooManyFragments, coalesce
from jaxrl_sync.sharding.values import (
    Shape,
    Value,
    broadcast_in_dim,
    concatenate,
    overwrite,
    reshape,
    reverse,
    slice_box,
    slice_dim,
    transpose,
)

Rows = npt.NDArray[np.int64]


def _runs(starts: Rows, single: Sequence[bool]) -> list[tuple[int, int, int, int]]:
    """Maximal runs (first row, rows, dimension, distance) of rows that differ in one single-index dimension.

    ``starts``: int64 [rows, dims]; ``single[d]``: slices of dimension d are one index wide.
    """
    n = len(starts)
    if n == 0:
        return []
    steps = np.diff(starts, axis=0)
    moves = (steps != 0).sum(axis=1)
    changes = np.flatnonzero((steps[1:] != steps[:-1]).any(axis=1)) + 1
    if len(changes) > 2 * MAX_FRAGMENTS:  # a run has a change at each end
        raise TooManyFragments(f"indices have more than {MAX_FRAGMENTS} runs")
    runs, at = [], 0
    while at < n:
        if at + 1 == n or moves[at] > 1:
            runs.append((at, 1, 0, 0))
            at += 1
            continue
        dim = int(np.argmax(steps[at] != 0))
        distance = int(steps[at, dim])
        change = int(np.searchsorted(changes, at, side="right"))
        count = (int(changes[change]) if change < len(changes) else n - 1) - at + 1
        if distance and not single[dim]:
            count = 1
        runs.append((at, count, dim, distance))
        at += count
        if len(runs) > MAX_FRAGMENTS:
            raise TooManyFragments(f"indices have more than {MAX_FRAGMENTS} runs")
    return runs


def _take_run(operand: Value, first: Rows, sizes: Shape, count: int, dim: int, distance: int) -> Value:
    """[count, *sizes]: ``count`` slices whose start moves by ``distance`` along ``dim``."""
    low = [int(i) for i in first]
    high = [a + n for a, n in zip(low, sizes, strict=True)]
    if distance == 0 or count == 1:
        one = slice_box(operand, low, high)
        return broadcast_in_dim(reshape(one, (1, *sizes)), (count, *sizes), range(len(sizes) + 1))
    last = low[dim] + distance * (count - 1)
    low[dim], high[dim] = min(low[dim], last), max(low[dim], last) + 1
    lines = slice_box(operand, low, high)
    lines = slice_dim(lines, dim, 0, lines.shape[dim], abs(distance))
    if distance < 0:
        lines = reverse(lines, (dim,))
    order = (dim, *(d for d in range(len(sizes)) if d != dim))
    return reshape(transpose(lines, order), (count, *sizes))


def _starts(indices: npt.NDArray[Any], numbers: Any, rank: int, batching: Sequence[tuple[int, int]]) -> Rows:
    """int64 [rows, operand dims]: where each slice begins."""
    batch = indices.shape[:-1]
    starts = np.zeros((math.prod(batch), rank), np.int64)
    flat = indices.reshape(-1, indices.shape[-1]).astype(np.int64)
    for column, dim in enumerate(numbers):
        starts[:, dim] = flat[:, column]
    grid = np.indices(batch).reshape(len(batch), -1) if batch else np.zeros((0, 1), np.int64)
    for dim, axis in batching:
        starts[:, dim] = grid[axis]
    return starts


def gather(operand: Value, indices: npt.NDArray[Any], fill: Value, params: dict[str, Any]) -> Value:
    """lax.gather with known indices. ``fill`` is the scalar for what lies outside in mode FILL_OR_DROP."""
    numbers, sizes = params["dimension_numbers"], tuple(params["slice_sizes"])
    rank = len(operand.shape)
    batching = list(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    starts = _starts(indices, numbers.start_index_map, rank, batching)
    limit = np.array([n - s for n, s in zip(operand.shape, sizes, strict=True)], np.int64)
    wild: npt.NDArray[np.bool_] = np.any((starts < 0) | (starts > limit), axis=1)
    if "FILL" not in str(params["mode"]):
        wild[:] = False
    starts = np.clip(starts, 0, np.maximum(limit, 0))
    rows = len(starts)
    parts = []
    borders = np.flatnonzero(np.diff(wild)) + 1
    for a, b in zip([0, *borders], [*borders, rows], strict=True):
        if a == b:
            continue
        if wild[a]:
            parts.append(broadcast_in_dim(fill, (int(b - a), *sizes), ()))
            continue
        for first, count, dim, distance in _runs(starts[a:b], [n == 1 for n in sizes]):
            parts.append(_take_run(operand, starts[a + first], sizes, count, dim, distance))
    gone = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    kept = tuple(n for d, n in enumerate(sizes) if d not in gone)
    batch = indices.shape[:-1]
    if not parts:
        joined = Value((0, *sizes), operand.dtype, ())
    else:
        joined = concatenate(parts, 0)
        joined = Value(joined.shape, joined.dtype, coalesce(joined.fragments))
    # Dimensions come as (batch..., offset...); offset_dims says where the offsets belong in the result.
    value = reshape(joined, (*batch, *kept))
    total = len(batch) + len(kept)
    offsets = iter(range(len(batch), total))
    batches = iter(range(len(batch)))
    order = [next(offsets) if d in numbers.offset_dims else next(batches) for d in range(total)]
    return transpose(value, order)


def scatter(operand: Value, indices: npt.NDArray[Any], updates: Value, params: dict[str, Any]) -> Value:
    """lax.scatter (overwriting) with known indices; later rows win, rows outside are dropped."""
    numbers = params["dimension_numbers"]
    rank = len(operand.shape)
    batching = list(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    starts = _starts(indices, numbers.scatter_dims_to_operand_dims, rank, batching)
    windows = list(numbers.update_window_dims)
    order = [d for d in range(len(updates.shape)) if d not in windows] + windows
    rows = transpose(updates, order)
    gone = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
    window_sizes = iter(updates.shape[d] for d in windows)
    sizes = tuple(1 if d in gone else next(window_sizes) for d in range(rank))
    rows = reshape(rows, (len(starts), *sizes))
    limit = np.array([n - s for n, s in zip(operand.shape, sizes, strict=True)], np.int64)
    if "CLIP" in str(params["mode"]):
        starts = np.clip(starts, 0, np.maximum(limit, 0))
    for first, count, dim, distance in _runs(starts, [n == 1 for n in sizes]):
        # Only neighbours along one dimension form a box; other runs go row by row.
        block = count if distance == 1 else 1
        for row in range(first, first + count, block):
            low = [int(i) for i in starts[row]]
            high = starts[row + block - 1]
            if (starts[row] < 0).any() or (high > limit).any():
                if block > 1:
                    raise TooManyFragments("scatter with indices partly outside")
                continue
            lines = slice_dim(rows, 0, row, row + block)
            shape = tuple(block if block > 1 and d == dim else n for d, n in enumerate(sizes))
            operand = overwrite(operand, low, _rows_to_box(lines, shape, dim, block))
    return operand


def _rows_to_box(lines: Value, shape: Shape, dim: int, block: int) -> Value:
    """[block, *sizes] -> the box in the operand: the row axis becomes dimension ``dim``."""
    if block == 1:
        return reshape(lines, shape)
    rest = [d for d in range(len(shape)) if d != dim]
    middle = reshape(lines, (block, *(shape[d] for d in rest)))
    order = list(np.argsort([dim, *rest]))
    return transpose(middle, [int(i) for i in order])
