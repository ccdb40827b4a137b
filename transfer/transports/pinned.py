"""Copy tables over shards that stay where they are: checked once, later rounds only look up addresses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import CopyTable
from jaxrl_sync.sharding.kernels import STREAM
from jaxrl_sync.sharding.native import flat_bytes

MAX_FOUND = 1 << 16
"""So many groups of shards are remembered with their addresses: tables of interrupted rounds come and go."""

Key = tuple[int, str]
Places = tuple[npt.NDArray[np.uint64], bytes]


class Pinned(Mapping[Key, npt.NDArray[Any]]):
    """(device, path) -> C-contiguous array. Nobody replaces an array while this is in use."""

    def __init__(self, shards: Mapping[Key, npt.NDArray[Any]]) -> None:
        self._arrays: dict[Key, npt.NDArray[Any]] = dict(shards)
        self._at = {key: (a.__array_interface__["data"][0], a.nbytes) for key, a in shards.items()}
        self._found: dict[int, tuple[tuple[Key, ...], Places]] = {}

    def __getitem__(self, key: Key) -> npt.NDArray[Any]:
        return self._arrays[key]

    def __iter__(self) -> Iterator[Key]:
        return iter(self._arrays)

    def __len__(self) -> int:
        return len(self._arrays)

    def __contains__(self, key: object) -> bool:
        return key in self._arrays

    def places(self, keys: tuple[Key, ...]) -> Places:
        """(addresses, sizes) of these shards, in order. KeyError names one that isn't there."""
        found = self._found.get(id(keys))
        if found is None or found[0] is not keys:
            if len(self._found) >= MAX_FOUND:
                self._found.clear()
            at = [self._at[key] for key in keys]
            places = np.array([a for a, _ in at], np.uint64), np.array([n for _, n in at], np.int64).tobytes()
            self._found[id(keys)] = found = keys, places
        return found[1]


def pinned_stream(buffer: memoryview) -> Pinned:
    """The packed side of a table."""
    return Pinned({STREAM: flat_bytes(buffer)})


class Table:
    """A copy table whose buffers have the same sizes in every round: checked in full the first time."""

    def __init__(self, table: CopyTable) -> None:
        self.table = table
        self._checked: tuple[bytes, bytes] | None = None

    @property
    def total_bytes(self) -> int:
        """Bytes per run."""
        return self.table.total_bytes

    def run(self, sources: Pinned, targets: Pinned, threads: int = 1) -> None:
        """All copies. Blocks, without the GIL. MappingError, before anything is written, as for `execute`."""
        table = self.table
        if self._checked is not None and table.native:
            source, target = sources.places(table.source_keys), targets.places(table.target_keys)
            if self._checked == (source[1], target[1]):
                table.execute_at(source[0], target[0], threads)
                return
        table.execute(sources, targets, threads)
        self._checked = sources.places(table.source_keys)[1], targets.places(table.target_keys)[1]
