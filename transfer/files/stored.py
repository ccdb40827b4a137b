"""What a channel stores of a version: every exported tensor once, in boxes of a regular grid, cut into slabs.

A *box* is what one device of the trainer held; of replicas, the process with the least to write owns it. A
*slab* is a contiguous piece of a box of at most about 4 MiB: the unit that is read, digested and verified.
Writer and readers compute the same from the correspondence alone, which a channel keeps as its *schema*.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Iterable, Iterator

from jaxrl_sync.sharding import Correspondence, Layout
from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.correspondence import Leaf
from jaxrl_sync.sharding.layout import Placement, Shard, TensorLayout
from jaxrl_sync.sharding.rank_plan import Copy
from jaxrl_sync.transfer.errors import MismatchError

SLAB_BYTES = 4 << 20
MAX_SLABS = 1 << 22

Key = tuple[int, str]
"""(device, tensor) of a box."""


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One exported leaf. ``keys`` name it in the anchor's tree; ``folder`` holds its chunks there."""

    name: str
    keys: tuple[str, ...]
    dtype: str
    shape: tuple[int, ...]
    chunk: tuple[int, ...]

    @property
    def folder(self) -> str:
        """The folder of its chunks, as orbax names it."""
        return ".".join(self.keys)


@dataclasses.dataclass(frozen=True)
class Slab:
    """A contiguous piece of a box; ``chunk`` is the box's file in the tensor's folder, ``offset`` in bytes.

    ``start`` and ``elements`` say the same within the box, in elements.
    """

    number: int
    tensor: str
    device: int
    process: int
    box: Box
    chunk: str
    itemsize: int
    start: int

    @property
    def key(self) -> Key:
        """The box that it is in."""
        return self.device, self.tensor

    @property
    def elements(self) -> int:
        """Its size in elements."""
        return self.box.volume

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return self.box.volume * self.itemsize

    @property
    def offset(self) -> int:
        """Where it starts in the chunk file, in bytes."""
        return self.start * self.itemsize


@dataclasses.dataclass(frozen=True, eq=False)
class Stored:
    """Tensors, owners and slabs of one correspondence. ``layout`` has every box once, at its owner."""

    correspondence: Correspondence
    layout: Layout
    tensors: dict[str, StoredTensor]
    slabs: tuple[Slab, ...]

    @classmethod
    def of(cls, correspondence: Correspondence) -> Stored:
        """Of a correspondence that knows its source layout. MismatchError for what can't be stored."""
        exported = correspondence.export_layout
        layout = _owned(exported)
        tensors = _tensors(correspondence.exported, layout)
        slabs: list[Slab] = []
        for name, tensor in layout.items():
            for shard in tensor.shards:
                slabs += _slabs_of(tensors[name], shard, tensor.itemsize, len(slabs))
        if len(slabs) > MAX_SLABS:
            raise MismatchError(f"{len(slabs)} pieces of weights, a channel stores at most {MAX_SLABS}")
        return cls(correspondence, layout, tensors, tuple(slabs))

    @property
    def schema(self) -> bytes:
        """What `Stored.of` needs, for others."""
        return self.correspondence.to_bytes()

    @functools.cached_property
    def digest(self) -> str:
        """32 hexadecimal digits over the schema."""
        return hashlib.sha256(self.schema).hexdigest()[:32]

    @property
    def processes(self) -> tuple[int, ...]:
        """The trainer processes that own something, and 0."""
        return tuple(sorted({0, *(s.process for s in self.slabs)}))

    def of_rank(self, process: int) -> tuple[Slab, ...]:
        """The slabs that one trainer process writes, in order."""
        return tuple(s for s in self.slabs if s.process == process)

    def box_shape(self, key: Key) -> tuple[int, ...]:
        """The shape of a box."""
        return self.layout[key[1]].placement.by_device[key[0]].box.shape

    @property
    def total_bytes(self) -> int:
        """Bytes of a whole version."""
        return self.layout.total_bytes

    def copies(self, slabs: Iterable[Slab]) -> tuple[Copy, ...]:
        """Slabs as copies within their box, under its number as target path: sums are counted by it."""
        return tuple(self._copy(s) for s in slabs)

    def _copy(self, slab: Slab) -> Copy:
        whole = self.tensors[slab.tensor].shape
        shape, box = slab.box.shape, self.box_shape(slab.key)
        strides = _row_major(box)
        rows = tuple(math.prod(whole[d + 1 : -1]) for d in range(len(whole) - 1)) + (0,) * bool(whole)
        columns = (0,) * (len(whole) - 1) + (1,) * bool(whole)
        row = sum(a * r for a, r in zip(slab.box.start, rows, strict=True))
        column = slab.box.start[-1] if whole else 0
        where = slab.device, slab.tensor, slab.device, str(slab.number)
        return Copy(
            *where, slab.itemsize, shape, slab.start, strides, slab.start, strides, row, rows, column, columns
        )


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(shape[d + 1 :]) for d in range(len(shape)))


def _owned(exported: Layout) -> Layout:
    """Every box at one of the devices that hold it: at the process with the least to write so far."""
    load = {process: 0 for process in exported.devices.values()}
    tensors = {}
    for path, tensor in exported.items():
        if (defect := tensor.placement.defect) is not None:
            raise MismatchError(f"{path!r} can't be stored: {defect}")
        owners: list[Shard] = []
        for box, replicas in tensor.placement.by_box.items():
            owner = min(replicas, key=lambda s: (load[s.process], s.device))
            load[owner.process] += box.volume * tensor.itemsize
            owners.append(owner)
        owners.sort(key=lambda s: s.device)
        tensors[path] = TensorLayout(tensor.dtype, Placement(tensor.shape, tuple(owners)))
    return Layout(tensors)


def _tensors(leaves: Iterable[Leaf], layout: Layout) -> dict[str, StoredTensor]:
    """Names that a file system and orbax take: parameters under their path where only one leaf is of it."""
    exported = list(leaves)
    found: dict[str, StoredTensor] = {}
    taken: set[str] = set()
    for leaf in sorted(exported, key=lambda x: x.name):
        alone = leaf.kind == "param" and sum(x.path == leaf.path for x in exported) == 1
        path = leaf.path if alone else f"{leaf.kind}/{leaf.name}"
        keys = tuple(re.sub(r"[^A-Za-z0-9_\-]", "_", part) or "_" for part in path.split("/"))
        while ".".join(keys) in taken or len(".".join(keys)) > 180:
            keys = (*(k[:12] for k in keys[:-1][:8]), f"{keys[-1][:12]}_{len(taken)}")
        taken.add(".".join(keys))
        tensor = layout[leaf.name]
        chunk = _grid(leaf.name, tensor)
        found[leaf.name] = StoredTensor(leaf.name, keys, tensor.dtype, tensor.shape, chunk)
    return found


def _grid(name: str, tensor: TensorLayout) -> tuple[int, ...]:
    """The shape of all its boxes. MismatchError where they aren't a regular grid."""
    shapes = {s.box.shape for s in tensor.shards}
    if len(shapes) != 1:
        raise MismatchError(f"{name!r} is cut into boxes of shapes {sorted(shapes)[:3]}, expected equal ones")
    chunk = next(iter(shapes))
    for shard in tensor.shards:
        if any(c and a % c for a, c in zip(shard.box.start, chunk, strict=True)):
            raise MismatchError(f"{name!r}: box {shard.box} isn't in the grid of {chunk}")
    return chunk


def _slabs_of(tensor: StoredTensor, shard: Shard, itemsize: int, first: int) -> Iterator[Slab]:
    index = (a // c if c else 0 for a, c in zip(shard.box.start, tensor.chunk, strict=True))
    chunk = ".".join(map(str, index)) or "0"
    start = 0
    for number, box in enumerate(_cut(shard.box, max(1, SLAB_BYTES // itemsize))):
        where = first + number, tensor.name, shard.device, shard.process
        yield Slab(*where, box, chunk, itemsize, start)
        start += box.volume


def _cut(box: Box, limit: int) -> Iterator[Box]:
    """Contiguous pieces of at most ``limit`` elements, in row-major order; nothing of an empty box."""
    if not box.volume:
        return
    shape = box.shape
    axis = next((d for d, n in enumerate(shape) if n > 1), None)
    if axis is None or box.volume <= limit:
        yield box
        return
    step = max(1, limit // (box.volume // shape[axis]))
    for at in range(box.start[axis], box.stop[axis], step):
        end = min(box.stop[axis], at + step)
        start = (*box.start[:axis], at, *box.start[axis + 1 :])
        yield from _cut(Box(start, (*box.stop[:axis], end, *box.stop[axis + 1 :])), limit)
