"""Entries of a flat buffer: which elements have other bits than before, found on the host and merged."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from jaxrl_sync.transfer.codec import native
from jaxrl_sync.transfer.codec.bits import Bits, Positions, bits_dtype
from jaxrl_sync.transfer.payload.sections import Section

Entries = tuple[Positions, Bits, Bits]
"""Ascending positions of one section, new bits, old bits."""


def compare(old: Bits, new: Bits, threads: int = 1) -> Entries:
    """Positions where two flat buffers differ in bits, with the new and the old bits. Copies, never views."""
    coders = native.coders()
    if coders is None or old.dtype.itemsize > 4:
        return compare_numpy(old, new)
    room = max(64, old.size // 16)
    while True:
        positions = np.empty(room, np.uint32)
        found, before = np.empty(room, new.dtype), np.empty(room, old.dtype)
        count = coders.delta_compare(old, new, old.dtype.itemsize, positions, found, before, threads)
        if count <= room:
            return positions[:count].copy(), found[:count].copy(), before[:count].copy()
        room = count


def compare_numpy(old: Bits, new: Bits) -> Entries:
    """`compare` in numpy."""
    positions = np.flatnonzero(old != new).astype(np.uint32)
    return positions, new[positions], old[positions]


def joined(parts: Sequence[Entries], section: Section) -> Entries:
    """Several lists one after the other."""
    if not parts:
        empty = np.empty(0, bits_dtype(section.itemsize))
        return np.empty(0, np.uint32), empty, empty
    return (
        np.concatenate([p for p, _, _ in parts]),
        np.concatenate([n for _, n, _ in parts]),
        np.concatenate([o for _, _, o in parts]),
    )


def union(steps: Sequence[Entries], section: Section) -> Entries:
    """One step that does what several do in order, without elements that came back to their old bits."""
    if len(steps) <= 1:
        return steps[0] if steps else joined([], section)
    positions, new, old = joined(steps, section)
    order = np.argsort(positions, kind="stable")
    ordered = positions[order]
    first = np.flatnonzero(np.diff(ordered, prepend=np.int64(-1)))
    last = np.append(first[1:] - 1, ordered.size - 1) if ordered.size else first
    merged: tuple[Any, Any, Any] = ordered[first], new[order[last]], old[order[first]]
    keep = merged[1] != merged[2]
    return merged[0][keep], merged[1][keep], merged[2][keep]
