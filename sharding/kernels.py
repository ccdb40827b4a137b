"""Copy tables: many strided copies between flat buffers as one call, in C where built and in numpy where not.

A table is made once from the copies of an edge and executed for every version; only addresses change.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import numpy_copies
from jaxrl_sync.sharding.blocks import SPLIT_BYTES, Block, IntArray, extents, gangs_of, table_of
from jaxrl_sync.sharding.digests import Digest, Sums, add_digests
from jaxrl_sync.sharding.digests import copies_digest as copies_digest
from jaxrl_sync.sharding.digests import state_digest as state_digest
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.native import addresses as addresses_of
from jaxrl_sync.sharding.native import flat_bytes, kernels
from jaxrl_sync.sharding.rank_plan import Copy
from jaxrl_sync.sharding.summed import SummedTable, source_sums
from jaxrl_sync.sharding.weaves import Piece, Weave, pieces_of

Key = tuple[int, str]
Bytes = npt.NDArray[np.uint8]
STREAM: Key = (-1, "stream")
"""Key of the packed side: all copies' elements one after the other, in order; rows in turns where woven."""

STREAMING_BYTES = 8 << 20
"""From this size on a table bypasses the caches when it writes: the result would not stay in them anyway."""

NUMPY_BYTES = 16 << 20
"""In numpy, blocks that are alone are cut to about this size; smaller tables into 32."""


@dataclasses.dataclass(frozen=True, eq=False)
class CopyTable:
    """Copies from source buffers to target buffers, each buffer known by its (device, path).

    Made by `direct` (shard to shard), `pack` (shards to one stream) or `scatter` (one stream to shards).
    The table holds no buffer. ``total_bytes`` are moved per execution.
    """

    source_keys: tuple[Key, ...]
    target_keys: tuple[Key, ...]
    total_bytes: int
    _weaves: tuple[Weave, ...]
    _mode: str
    _offset: int
    _blocks: tuple[Block, ...]
    _rows: IntArray
    _source_extent: IntArray
    _target_extent: IntArray

    @classmethod
    def direct(cls, copies: Sequence[Copy]) -> CopyTable:
        """Each copy from its source shard to its place in the target shard."""
        return cls._make(copies, "direct", 0, None)

    @classmethod
    def pack(cls, copies: Sequence[Copy | Weave], offset: int = 0, length: int | None = None) -> CopyTable:
        """From the source shards to a stream: the copies' elements one after the other, woven ones in turns.

        With ``offset`` and ``length`` (bytes, both at element borders, or where all woven copies have the
        same rows behind them) only that window of the stream, written from the start of the buffer.
        """
        return cls._make(copies, "pack", offset, length)

    @classmethod
    def scatter(cls, copies: Sequence[Copy | Weave], offset: int = 0, length: int | None = None) -> CopyTable:
        """From such a stream, or a window of it, to the target shards."""
        return cls._make(copies, "scatter", offset, length)

    @classmethod
    def _make(cls, copies: Sequence[Copy | Weave], mode: str, offset: int, length: int | None) -> CopyTable:
        weaves = tuple(c if isinstance(c, Weave) else Weave((c,)) for c in copies)
        total = sum(w.total_bytes for w in weaves)
        end = total if length is None else offset + length
        if not 0 <= offset <= end <= total:
            raise MappingError(f"window {offset}:{end} is outside of a stream of {total} bytes")
        groups, sources, targets = _groups(weaves, mode, offset, end)
        gangs = gangs_of([[p.block for p in group] for group in groups], gather=mode == "direct")
        blocks = [b for gang in gangs for b in gang]
        return cls(
            tuple(sources), tuple(targets), end - offset, weaves, mode, offset, tuple(blocks),
            table_of(gangs), extents(blocks, "source", len(sources)), extents(blocks, "target", len(targets)),
        )  # fmt: skip

    def windows(self, chunk_bytes: int) -> list[CopyTable]:
        """This pack or scatter table cut into windows of at most ``chunk_bytes`` (at least 64).

        Windows end at element borders, the same ones on both sides; ``total_bytes`` of each says its length.
        MappingError where a window can't hold a row of each woven copy.
        """
        limit = max(64, chunk_bytes)
        if (unit := max((w.unit_bytes for w in self._weaves), default=0)) > limit:
            raise MappingError(f"windows of {limit} bytes, expected {unit} for a row of each woven copy")
        borders, starts, at = [0], [0], 0
        for woven in self._weaves:
            starts.append(starts[-1] + woven.total_bytes)
        total = starts[-1]
        while borders[-1] < total:
            end = min(borders[-1] + limit, total)
            while starts[at + 1] < end:
                at += 1
            borders.append(end - (end - starts[at]) % self._weaves[at].unit_bytes)
        return [self._make(self._weaves, self._mode, a, b - a) for a, b in itertools.pairwise(borders)]

    def execute(
        self, sources: Any, targets: Any, threads: int = 1, sums: dict[str, Digest] | None = None
    ) -> None:
        """Runs all copies. Blocks; releases the GIL where the C kernels are built.

        ``sources``, ``targets``: mapping of (device, path) to a C-contiguous array over the whole shard; the
        packed side is one buffer. The caller keeps readers and writers of these buffers away meanwhile.
        ``sums``: if given, the digest of what was read is added to it, per target path, as `copies_digest`
        counts it; in C in the same pass where the copy has rows to sum. Over all windows of a table it is
        that of the whole edge. A missing, short or read-only buffer is a `MappingError` before anything is
        written.
        """
        source = self.resolve_sources(sources)
        target = _resolve(self.target_keys, targets, self._target_extent, "target")
        for key, buffer in zip(self.target_keys, target, strict=True):
            if not buffer.flags.writeable:
                raise MappingError(f"target buffer {key} is read-only")
        if sums is not None:
            sums.update(add_digests(self._nothing, sums, self._execute_summed(source, target, threads)))
            return
        native = kernels()
        if native is None:
            self.execute_numpy(source, target, threads)
            return
        native.copy_table(self._rows, addresses_of(source), addresses_of(target), threads, self._streaming)

    def _execute_summed(self, source: list[Bytes], target: list[Bytes], threads: int) -> dict[str, Digest]:
        if kernels() is not None:
            return self._summed.execute(source, target, threads, self._streaming)
        self.execute_numpy(source, target, threads)
        return self._sums.execute(source, threads)

    @property
    def _streaming(self) -> int:
        return int(self.total_bytes >= STREAMING_BYTES)

    @property
    def rows(self) -> IntArray:
        """The entries as the C kernels read them (``copy_entry`` of cext/kernels.h); not to be changed."""
        return self._rows

    @property
    def native(self) -> bool:
        """Whether the C kernels are there, so that `execute_at` works."""
        return kernels() is not None

    def execute_at(
        self, sources: npt.NDArray[np.uint64], targets: npt.NDArray[np.uint64], threads: int = 1
    ) -> None:
        """`execute` for callers who have checked every buffer themselves: addresses in order of the keys.

        Needs the C kernels. The caller keeps the memory alive; a wrong address corrupts or ends the process.
        """
        native = kernels()
        if native is None or (len(sources), len(targets)) != (len(self.source_keys), len(self.target_keys)):
            raise MappingError("execute_at needs the C kernels and one address per key")
        native.copy_table(self._rows, sources, targets, threads, self._streaming)

    def execute_numpy(
        self,
        source: Sequence[Bytes],
        target: Sequence[Bytes],
        threads: int = 1,
    ) -> None:
        """The same in numpy; buffers in order of `source_keys` and `target_keys`."""
        targets = self.numpy_targets(target)
        numpy_copies.execute(self._batches, lambda side: side.view(source), targets, threads)

    def numpy_targets(self, target: Sequence[Bytes]) -> numpy_copies.Targets:
        """The view of each copy's target, for `execute_numpy_at`."""
        return numpy_copies.targets_of(self._batches, target)

    def execute_numpy_at(
        self, sources: Sequence[int], targets: numpy_copies.Targets, threads: int = 1
    ) -> None:
        """`execute_at` in numpy, with target views that were made once."""
        if len(sources) != len(self.source_keys):
            raise MappingError("execute_numpy_at needs one address per key")
        numpy_copies.execute(self._batches, lambda side: side.view_at(sources), targets, threads)

    def resolve_sources(self, sources: Any) -> list[Bytes]:
        """The source buffers as flat bytes, in order of `source_keys`; `MappingError` if one is missing."""
        return _resolve(self.source_keys, sources, self._source_extent, "source")

    @functools.cached_property
    def _batches(self) -> list[numpy_copies.Batch]:
        alone = min(NUMPY_BYTES, max(SPLIT_BYTES // 4, self.total_bytes // 32))
        groups = [[p.block for p in group] for group in self._groups()]
        return numpy_copies.batches_of(gangs_of(groups, self._mode == "direct", alone))

    @functools.cached_property
    def _nothing(self) -> dict[str, Digest]:
        return {c.target_path: (0, 0) for woven in self._weaves for c in woven.copies}

    @functools.cached_property
    def _summed(self) -> SummedTable:
        return SummedTable.of(self._pieces())

    @functools.cached_property
    def _sums(self) -> Sums:
        pieces = self._pieces()
        return source_sums(pieces, tuple(dict.fromkeys(p.copy.target_path for p in pieces)))

    def _pieces(self) -> list[Piece]:
        return [piece for group in self._groups() for piece in group]

    def _groups(self) -> list[list[Piece]]:
        return _groups(self._weaves, self._mode, self._offset, self._offset + self.total_bytes)[0]


def _groups(
    weaves: Sequence[Weave], mode: str, offset: int, end: int
) -> tuple[list[list[Piece]], dict[Key, int], dict[Key, int]]:
    """What bytes ``offset:end`` of the stream consist of, in groups, and the numbers of the buffers."""
    sources: dict[Key, int] = {}
    targets: dict[Key, int] = {}
    groups: list[list[Piece]] = []
    at = 0
    for woven in weaves:
        low, high = max(offset, at), min(end, at + woven.total_bytes)
        if low < high:
            keys = []
            for copy in woven.copies:
                s = STREAM if mode == "scatter" else (copy.source_device, copy.source_path)
                t = STREAM if mode == "pack" else (copy.target_device, copy.target_path)
                keys.append((sources.setdefault(s, len(sources)), targets.setdefault(t, len(targets))))
            groups += pieces_of(woven, mode, keys, low - at, high - at, at - offset)
        at += woven.total_bytes
    return groups, sources, targets


def _resolve(keys: Sequence[Key], buffers: Any, need: IntArray, side: str) -> list[Bytes]:
    found = []
    for key, size in zip(keys, need, strict=True):
        if isinstance(buffers, Mapping):
            if key not in buffers:
                raise MappingError(f"no {side} buffer for {key[1]!r} on device {key[0]}")
            flat = flat_bytes(buffers[key])
        else:
            flat = flat_bytes(buffers)
        if flat.nbytes < size:
            raise MappingError(f"{side} buffer {key} has {flat.nbytes} bytes, the copies need {size}")
        found.append(flat)
    return found
