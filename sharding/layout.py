"""Layouts: for every tensor path its global shape, its dtype and the box that each device holds.

Tensors that are sharded alike share one `Placement`, so that a layout of 70,000 tensors over hundreds of
devices stays small in memory and on the wire.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, Sharding

from jaxrl_sync.sharding import codec
from jaxrl_sync.sharding.box import Box, overlap_of
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.manifest import MAGIC, Manifest
from jaxrl_sync.sharding.paths import leaves_by_path, nearest, nested


@dataclasses.dataclass(frozen=True)
class Shard:
    """What one device holds of one tensor."""

    device: int
    process: int
    box: Box


@dataclasses.dataclass(frozen=True)
class Placement:
    """The shards of all tensors of one shape that are sharded alike, in order of the device number."""

    shape: tuple[int, ...]
    shards: tuple[Shard, ...]

    def __post_init__(self) -> None:
        whole = Box.whole(self.shape)
        if len(self.by_device) != len(self.shards):
            raise MappingError(f"shape {self.shape}: a device holds two shards of one tensor")
        for shard in self.shards:
            if len(shard.box.start) != len(self.shape) or not whole.contains(shard.box):
                raise MappingError(f"device {shard.device}: box {shard.box} is outside of shape {self.shape}")

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.shape, self.shards))

    @functools.cached_property
    def by_box(self) -> dict[Box, tuple[Shard, ...]]:
        """The replicas of each distinct box, boxes in order of their first device."""
        groups: dict[Box, list[Shard]] = {}
        for shard in self.shards:
            groups.setdefault(shard.box, []).append(shard)
        return {box: tuple(shards) for box, shards in groups.items()}

    @functools.cached_property
    def by_device(self) -> dict[int, Shard]:
        """Device number -> its shard."""
        return {shard.device: shard for shard in self.shards}

    @functools.cached_property
    def defect(self) -> str | None:
        """Why the distinct boxes don't cover the tensor exactly once, or None if they do."""
        boxes = list(self.by_box)
        if not boxes:
            return "no device holds it"
        start = np.array([b.start for b in boxes], np.int64).reshape(len(boxes), -1)
        stop = np.array([b.stop for b in boxes], np.int64).reshape(len(boxes), -1)
        if (hit := overlap_of(start, stop)) is not None:
            return f"boxes {boxes[hit[0]]} and {boxes[hit[1]]} overlap partly"
        held, size = sum(b.volume for b in boxes), math.prod(self.shape)
        return None if held == size else f"devices hold {held} of {size} elements"


@dataclasses.dataclass(frozen=True)
class TensorLayout:
    """One tensor: global shape, dtype name ("bfloat16") and the shards of its placement."""

    dtype: str
    placement: Placement

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.placement.shape

    @property
    def shards(self) -> tuple[Shard, ...]:
        """One shard per device, in order of the device number; replicas have equal boxes."""
        return self.placement.shards

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return dtype_of(self.dtype).itemsize

    @property
    def total_bytes(self) -> int:
        """Bytes of one copy of the whole tensor."""
        return math.prod(self.shape) * self.itemsize


@functools.cache
def dtype_of(name: str) -> np.dtype[Any]:
    """The numpy dtype of a name, with the ml_dtypes ones (bfloat16, float8_e4m3fn, ...)."""
    try:
        dtype = np.dtype(jax.numpy.dtype(name))
    except (TypeError, ValueError, SyntaxError) as error:  # numpy parses a name as a description of fields
        raise MappingError(f"unknown dtype {name!r}") from error
    if (
        dtype.kind not in "biufcV"
        or dtype.names
        or dtype.subdtype
        or dtype.name != name
        or not dtype.itemsize
    ):
        raise MappingError(f"dtype {name!r} is no number type of jax")
    return dtype


def is_packed(dtype: np.dtype[Any]) -> bool:
    """Whether jax keeps several elements of this type in one byte: int4, uint4, int2, float4_e2m1fn, ..."""
    if dtype.kind != "V":
        return False
    integer = jax.numpy.issubdtype(dtype, jax.numpy.integer)
    return int((jax.numpy.iinfo if integer else jax.numpy.finfo)(dtype).bits) < 8


def chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Interval ``index`` of ``size`` elements in ``parts`` pieces of equal, rounded-up length."""
    step = -(-size // parts)
    return min(size, step * index), min(size, step * (index + 1))


def _named_boxes(shape: tuple[int, ...], sharding: NamedSharding) -> dict[Any, Box]:
    """Box per device of a NamedSharding, also where the dimension does not divide: short last shards.

    ``NamedSharding.devices_indices_map`` refuses those; a compiler that pads uses the same rule.
    """
    if len(sharding.spec) > len(shape):
        raise MappingError(f"{sharding.spec} has {len(sharding.spec)} entries, the tensor rank {len(shape)}")
    spec = (*sharding.spec, *(None,) * (len(shape) - len(sharding.spec)))
    mesh = sharding.mesh
    axes = [
        () if s is None or not isinstance(s, str | tuple) else (s,) if isinstance(s, str) else s for s in spec
    ]
    boxes = {}
    for position, device in np.ndenumerate(mesh.devices):
        at = dict(zip(mesh.axis_names, position, strict=True))
        edges = []
        for size, names in zip(shape, axes, strict=True):
            index = 0
            for name in names:
                index = index * mesh.shape[name] + at[name]
            edges.append(chunk(size, math.prod(mesh.shape[n] for n in names), index))
        boxes[device] = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
    return boxes


def _placement(shape: tuple[int, ...], sharding: Any) -> Placement:
    try:
        if isinstance(sharding, NamedSharding):
            boxes = _named_boxes(shape, sharding)
        else:
            boxes = {
                device: Box(
                    tuple(s.indices(n)[0] for s, n in zip(index, shape, strict=True)),
                    tuple(s.indices(n)[1] for s, n in zip(index, shape, strict=True)),
                )
                for device, index in sharding.devices_indices_map(shape).items()
            }
    except ValueError as error:
        raise MappingError(f"shape {shape} does not fit sharding {sharding}: {error}") from error
    shards = (Shard(d.id, d.process_index, box) for d, box in boxes.items())
    return Placement(shape, tuple(sorted(shards, key=lambda s: s.device)))


@dataclasses.dataclass(frozen=True)
class Layout(Mapping[str, TensorLayout]):
    """Path -> `TensorLayout`, in order of the path."""

    tensors: dict[str, TensorLayout]

    def __post_init__(self) -> None:
        object.__setattr__(self, "tensors", dict(sorted(self.tensors.items())))

    @classmethod
    def of(cls, tree: Any) -> Layout:
        """The layout of a tree of jax.Array or of ``jax.ShapeDtypeStruct`` with a sharding.

        Reads no data. Of a multi-process array, the shards of all processes are listed. A leaf without a
        sharding is a `MappingError`.
        """
        if isinstance(tree, Layout):
            return tree
        cache: dict[Any, Placement] = {}
        tensors = {}
        for path, leaf in leaves_by_path(tree, "Layout.of").items():
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, Sharding):
                found = "a sharding" if sharding is None else f"a mesh (its sharding is {sharding!r})"
                raise MappingError(
                    f"Layout.of: leaf {path!r} is a {type(leaf).__name__} without {found}; "
                    "give a jax.Array or a jax.ShapeDtypeStruct with sharding=NamedSharding(mesh, spec)"
                )
            key = (tuple(leaf.shape), sharding)
            if key not in cache:
                try:
                    cache[key] = _placement(*key)
                except MappingError as error:
                    raise MappingError(f"Layout.of: leaf {path!r}: {error}") from error
            if not isinstance(leaf.dtype, np.dtype):
                raise MappingError(f"Layout.of: leaf {path!r} is of type {leaf.dtype}, no number type of jax")
            tensors[path] = TensorLayout(str(leaf.dtype), cache[key])
        return cls(tensors)

    def __getitem__(self, path: str) -> TensorLayout:
        try:
            return self.tensors[path]
        except KeyError:
            raise MappingError(f"no tensor {path!r} in this layout{nearest(path, self.tensors)}") from None

    def __contains__(self, path: object) -> bool:
        return path in self.tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def devices(self) -> dict[int, int]:
        """Device number -> process, for every device that holds something."""
        found = {s.device: s.process for p in self._placements for s in p.shards}
        return dict(sorted(found.items()))

    @property
    def _placements(self) -> dict[Placement, int]:
        # Interned by identity first: equal placements are usually the same object.
        seen: dict[int, None] = {}
        unique: dict[Placement, int] = {}
        for tensor in self.tensors.values():
            if id(tensor.placement) not in seen:
                seen[id(tensor.placement)] = None
                unique.setdefault(tensor.placement, len(unique))
        return unique

    @property
    def total_bytes(self) -> int:
        """Bytes of one copy of all tensors."""
        return sum(t.total_bytes for t in self.tensors.values())

    def shapes(self) -> Any:
        """Nested dictionaries of ``jax.ShapeDtypeStruct`` without shardings, for tracing a conversion."""
        return nested({p: jax.ShapeDtypeStruct(t.shape, dtype_of(t.dtype)) for p, t in self.tensors.items()})

    def to_bytes(self) -> bytes:
        """Canonical bytes: equal layouts give equal bytes on every version of Python, numpy and jax."""
        return self._bytes

    @functools.cached_property
    def _bytes(self) -> bytes:
        out = codec.Writer(MAGIC)
        placements = self._placements
        out.integer(len(placements))
        for placement in placements:
            out.integers(placement.shape)
            out.integer(len(placement.shards))
            for shard in placement.shards:
                out.integer(shard.device)
                out.integer(shard.process)
                for edge in (*shard.box.start, *shard.box.stop):
                    out.integer(edge)
        by_id = {id(t.placement): placements[t.placement] for t in self.tensors.values()}
        out.integer(len(self.tensors))
        for path, tensor in self.tensors.items():
            out.text(path)
            out.text(tensor.dtype)
            out.integer(by_id[id(tensor.placement)])
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Layout:
        """Reads `to_bytes`; anything else is a `MappingError`."""
        manifest = Manifest.parse(data)
        placements = [
            Placement(shape, tuple(Shard(device, process, Box(a, b)) for device, process, a, b in shards))
            for shape, shards in manifest.placements
        ]
        tensors = {
            path: TensorLayout(str(dtype_of(dtype)), placements[index])
            for path, (dtype, index) in manifest.tensors.items()
        }
        return cls(tensors)

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over `to_bytes`."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return codec.digest(self._bytes)

    def __repr__(self) -> str:
        devices = self.devices
        head = (
            f"Layout: {len(self)} tensors, {self.total_bytes:,} bytes, {len(devices)} devices in "
            f"{len(set(devices.values()))} processes, digest {self.digest[:12]}"
        )
        lines = [head]
        for path, tensor in list(self.tensors.items())[:40]:
            lines.append(f"  {path}: {tensor.dtype}{list(tensor.shape)} {_describe(tensor.placement)}")
        if len(self) > 40:
            lines.append(f"  ... and {len(self) - 40} more")
        return "\n".join(lines)


def _describe(placement: Placement) -> str:
    groups = placement.by_box
    boxes = list(groups)
    cuts = [len({(b.start[d], b.stop[d]) for b in boxes}) for d in range(len(placement.shape))]
    copies = len(placement.shards) // max(1, len(groups))
    split = "x".join(map(str, cuts)) if cuts else "scalar"
    return f"split {split}, {copies} replica{'s' if copies != 1 else ''}"
