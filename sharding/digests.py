"""State digests: per tensor two sums modulo 2^32 of bits x row key x column key, keyed by global position.

Row = leading dimensions flattened, column = last dimension. The sums are additive over any cut of the tensor
into boxes, so a trainer's and an engine's shards give the same pair, and every single changed element changes
both sums (the keys are odd). It guards against faults, not against attackers. All arithmetic is modulo 2^32.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout
from jaxrl_sync.sharding.native import addresses, flat_bytes, kernels
from jaxrl_sync.sharding.rank_plan import MAX_DIMS, Copy

Digest = tuple[int, int]
U32 = npt.NDArray[np.uint32]

_ROW_SEEDS = (0x243F6A88, 0x85A308D3)
_COLUMN_SEEDS = (0x13198A2E, 0x03707344)
_GOLDEN = 0x9E3779B1
_SPLIT_ELEMENTS = 1 << 20

# source, group, offset, itemsize, shape, strides (bytes), row, row strides, column, column strides
SumBlock = tuple[
    int, int, int, int, tuple[int, ...], tuple[int, ...], int, tuple[int, ...], int, tuple[int, ...]
]


def _key(index: npt.NDArray[np.int64], seed: int) -> U32:
    """Odd 32-bit keys of positions: the finaliser of MurmurHash3 over index x golden ratio + seed."""
    x = index.astype(np.uint32) * np.uint32(_GOLDEN) + np.uint32(seed)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x ^= x >> np.uint32(shift)
        x *= np.uint32(factor)
    return (x ^ (x >> np.uint32(16))) | np.uint32(1)


def _bits(buffer: npt.NDArray[np.uint8], block: SumBlock) -> U32:
    _, _, offset, itemsize, shape, strides, *_ = block
    words = np.ndarray(shape, f"<u{itemsize}", buffer, offset, strides)
    if itemsize < 8:
        return words.astype(np.uint32)
    return words.astype(np.uint32) + (words >> np.uint64(32)).astype(np.uint32) * np.uint32(_GOLDEN)


def _positions(start: int, strides: tuple[int, ...], shape: tuple[int, ...]) -> npt.NDArray[np.int64]:
    """start + i . strides, with axes of stride 0 kept at size 1 so that keys are not computed twice."""
    total = np.full((1,) * len(shape), start, np.int64)
    for d, (n, s) in enumerate(zip(shape, strides, strict=True)):
        if s:
            total = total + (np.arange(n, dtype=np.int64) * s).reshape((-1,) + (1,) * (len(shape) - 1 - d))
    return total


def _sum_numpy(blocks: Sequence[SumBlock], buffers: Sequence[npt.NDArray[np.uint8]], sums: U32) -> None:
    with np.errstate(over="ignore"):
        for block in blocks:
            source, group, _, _, shape, _, row, row_strides, column, column_strides = block
            bits = _bits(buffers[source], block)
            for k in range(2):
                keys = _key(_positions(row, row_strides, shape), _ROW_SEEDS[k]) * _key(
                    _positions(column, column_strides, shape), _COLUMN_SEEDS[k]
                )
                sums[group, k] += np.sum(bits * keys, dtype=np.uint32)


@dataclasses.dataclass(frozen=True, eq=False)
class Sums:
    """Blocks of numbered buffers and the paths that their sums belong to: a table made once, summed often."""

    paths: tuple[str, ...]
    _pieces: tuple[SumBlock, ...]
    _rows: npt.NDArray[np.int64]

    @classmethod
    def of(cls, blocks: Sequence[SumBlock], paths: Sequence[str]) -> Sums:
        """Cuts the blocks for threads; a block's group is the index of its path."""
        pieces = [p for b in blocks if math.prod(b[4]) for p in _split(b)]
        return cls(tuple(paths), tuple(pieces), _table(pieces))

    def add(self, buffers: Sequence[npt.NDArray[np.uint8]], sums: U32, threads: int) -> None:
        """Adds the pair of each path to ``sums`` of shape (paths, 2)."""
        native = kernels()
        if native is None:
            _sum_numpy(self._pieces, buffers, sums)
        elif self._pieces:
            native.sum_table(self._rows, addresses(buffers), sums, threads)

    def execute(self, buffers: Sequence[Any], threads: int) -> dict[str, Digest]:
        """Path -> pair over C-contiguous buffers in order of their numbers."""
        sums = np.zeros((len(self.paths), 2), np.uint32)
        self.add([flat_bytes(b) for b in buffers], sums, threads)
        return {path: (int(a), int(b)) for path, (a, b) in zip(self.paths, sums, strict=True)}


def _split(block: SumBlock) -> list[SumBlock]:
    """At most MAX_DIMS axes and about _SPLIT_ELEMENTS per piece, so that threads share the work."""
    source, group, offset, size, shape, strides, row, rows, column, columns = block
    total = math.prod(shape)
    if not shape:
        return [(source, group, offset, size, (1,), (0,), row, (0,), column, (0,))]
    if len(shape) <= MAX_DIMS and total <= _SPLIT_ELEMENTS:
        return [block]
    axis = next(d for d, n in enumerate(shape) if n > 1 or d == len(shape) - 1)
    drop = len(shape) > MAX_DIMS
    step = 1 if drop else max(1, shape[axis] * _SPLIT_ELEMENTS // total)
    if step >= shape[axis] and not drop:
        return [block]
    pieces = []
    for i in range(0, shape[axis], step):
        cut = (*shape[:axis], min(step, shape[axis] - i), *shape[axis + 1 :])
        keep = [d for d in range(len(shape)) if not (drop and d == axis)]
        moved = (offset + i * strides[axis], row + i * rows[axis], column + i * columns[axis])
        at = [tuple(v[d] for d in keep) for v in (cut, strides, rows, columns)]
        pieces.append((source, group, moved[0], size, at[0], at[1], moved[1], at[2], moved[2], at[3]))
    if drop or step == 1:
        return [q for p in pieces for q in (_split(p) if drop else [p])]
    return pieces


def _table(blocks: Sequence[SumBlock]) -> npt.NDArray[np.int64]:
    rows = np.zeros((len(blocks), 7 + 4 * MAX_DIMS), np.int64)
    for row, block in zip(rows, blocks, strict=True):
        source, group, offset, itemsize, shape, strides, first, row_strides, column, column_strides = block
        d = len(shape)
        row[:7] = source, group, offset, itemsize, d, first, column
        for k, values in enumerate((shape, strides, row_strides, column_strides)):
            row[7 + k * MAX_DIMS : 7 + k * MAX_DIMS + d] = values
    return rows


def _box_block(source: int, group: int, itemsize: int, box: Box, shape: tuple[int, ...]) -> SumBlock:
    """A row-major buffer of the box of a tensor of this global shape."""
    local = box.shape
    if not local:
        return (source, group, 0, itemsize, (1,), (itemsize,), 0, (0,), 0, (1,))
    strides, rows = [itemsize] * len(local), [0] * len(local)
    for d in range(len(local) - 2, -1, -1):
        strides[d] = strides[d + 1] * local[d + 1]
        rows[d] = math.prod(shape[d + 1 : -1])
    row = sum(a * r for a, r in zip(box.start, rows, strict=True))
    columns = (0,) * (len(local) - 1) + (1,)
    return (source, group, 0, itemsize, local, tuple(strides), row, tuple(rows), box.start[-1], columns)


def state_digest(
    shards: Mapping[tuple[int, str], Any], layout: Layout, threads: int = 1
) -> dict[str, Digest]:
    """Path -> digest over the given shards, (device, path) -> C-contiguous array of the shard.

    Of the replicas among them each box counts once. With one shard of every box it is the digest of the whole
    tensor; otherwise the part that adds up, modulo 2^32, with what the other processes hold. Blocks; the GIL
    is released where the C kernels are built. A shard that the layout lacks or of another size is an error.
    """
    paths = {path: i for i, path in enumerate(dict.fromkeys(path for _, path in sorted(shards)))}
    blocks, buffers, seen = list[SumBlock](), list[Any](), set[tuple[str, Box]]()
    for (device, path), array in sorted(shards.items(), key=lambda item: item[0]):
        tensor = layout[path]
        shard = tensor.placement.by_device.get(device)
        if shard is None:
            raise MappingError(f"state_digest: device {device} holds nothing of {path!r}")
        expected = shard.box.volume * tensor.itemsize
        if (found := flat_bytes(array).nbytes) != expected:
            raise MappingError(
                f"state_digest: {path!r} on device {device} has {found} bytes, expected {expected}"
            )
        if (path, shard.box) not in seen:
            seen.add((path, shard.box))
            blocks.append(_box_block(len(buffers), paths[path], tensor.itemsize, shard.box, tensor.shape))
            buffers.append(array)
    return Sums.of(blocks, tuple(paths)).execute(buffers, threads)


@dataclasses.dataclass(frozen=True, eq=False)
class CopySums:
    """The digest of what copies carry, read from one side; made once per edge, executed for every version."""

    side: str
    keys: tuple[tuple[int, str], ...]
    _need: tuple[int, ...]
    _sums: Sums

    @classmethod
    def of(cls, copies: Sequence[Copy], side: str) -> CopySums:
        """``side`` "source": what the sender's shards hold; "target": what the receiver's do."""
        paths = {path: i for i, path in enumerate(dict.fromkeys(c.target_path for c in copies))}
        index: dict[tuple[int, str], int] = {}
        blocks, need = list[SumBlock](), dict[int, int]()
        for c in copies:
            if side == "source":
                key, offset, strides = (c.source_device, c.source_path), c.source_offset, c.source_strides
            else:
                key, offset, strides = (c.target_device, c.target_path), c.target_offset, c.target_strides
            number, size = index.setdefault(key, len(index)), c.itemsize
            last = offset + sum(max(0, (n - 1) * s) for n, s in zip(c.shape, strides, strict=True))
            need[number] = max(need.get(number, 0), (last + 1) * size if c.num_elements else 0)
            blocks.append(
                (number, paths[c.target_path], offset * size, size, c.shape, tuple(s * size for s in strides),
                 c.target_row, c.row_strides, c.target_column, c.column_strides)
            )  # fmt: skip
        return cls(
            side, tuple(index), tuple(need[i] for i in range(len(index))), Sums.of(blocks, tuple(paths))
        )

    def execute(self, buffers: Mapping[tuple[int, str], Any], threads: int = 1) -> dict[str, Digest]:
        """Target path -> digest. Blocks; releases the GIL where the C kernels are built.

        Buffers as for `CopyTable.execute`; a missing or short one is a `MappingError`.
        """
        found = []
        for key, need in zip(self.keys, self._need, strict=True):
            if key not in buffers:
                raise MappingError(f"copies_digest: no {self.side} buffer for {key[1]!r} on device {key[0]}")
            flat = flat_bytes(buffers[key])
            if flat.nbytes < need:
                raise MappingError(
                    f"copies_digest: {self.side} buffer {key} has {flat.nbytes} bytes, the copies need {need}"
                )
            found.append(flat)
        return self._sums.execute(found, threads)


_KEPT = 32
_kept: collections.OrderedDict[tuple[int, str], tuple[Sequence[Copy], CopySums]] = collections.OrderedDict()
_kept_lock = threading.Lock()


def copies_digest(
    copies: Sequence[Copy], buffers: Mapping[tuple[int, str], Any], side: str, threads: int = 1
) -> dict[str, Digest]:
    """Target path -> digest over what these copies move, keyed by the position in the target tensor.

    ``side`` "source": read from the sender's shards; "target": recounted from the receiver's. Both give the
    same pairs if and (but for chance) only if every element arrived. Buffers as for `CopyTable.execute`.
    The table of a tuple of copies is made once and kept (of the newest few): pass the same tuple each time.
    """
    if not isinstance(copies, tuple):
        return CopySums.of(copies, side).execute(buffers, threads)
    name = (id(copies), side)
    with _kept_lock:
        held = _kept.get(name)
        if held is not None:
            _kept.move_to_end(name)
    if held is None:  # the entry holds the copies, so no other object can get their id while it is there
        held = copies, CopySums.of(copies, side)
        with _kept_lock:
            _kept[name] = held
            while len(_kept) > _KEPT:
                _kept.popitem(last=False)
    return held[1].execute(buffers, threads)


def entry_sums(
    bits: npt.NDArray[Any], rows: npt.NDArray[np.int64], columns: npt.NDArray[np.int64], starts: Sequence[int]
) -> U32:
    """[len(starts), 2] sums of single elements: unsigned ``bits`` at global ``rows`` and ``columns``.

    Sum k covers the entries from ``starts[k]`` (ascending, none empty) to the next start. The sums of new
    bits less those of old bits are what a tensor's digest changes by. Modulo 2^32.
    """
    words = bits.astype(np.uint32)
    if bits.dtype.itemsize == 8:
        words = words + (bits >> np.uint64(32)).astype(np.uint32) * np.uint32(_GOLDEN)
    sums = np.zeros((len(starts), 2), np.uint32)
    with np.errstate(over="ignore"):
        for k in range(2):
            terms = words * _key(rows, _ROW_SEEDS[k]) * _key(columns, _COLUMN_SEEDS[k])
            sums[:, k] = np.add.reduceat(terms, starts, dtype=np.uint32)
    return sums


def add_digests(*parts: Mapping[str, Digest]) -> dict[str, Digest]:
    """The sum per path modulo 2^32: digests of disjoint pieces become that of the whole."""
    total: dict[str, Digest] = {}
    for part in parts:
        for path, (a, b) in part.items():
            x, y = total.get(path, (0, 0))
            total[path] = ((a + x) & 0xFFFFFFFF, (b + y) & 0xFFFFFFFF)
    return total
