"""Meshes and layouts on paper: for planning with devices that this machine does not have."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping

from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout, Placement, Shard, TensorLayout, chunk

MOST_DEVICES = 1 << 20
"""Of a mesh on paper: each of them is written out."""

Spec = tuple[str | tuple[str, ...] | None, ...]


@dataclasses.dataclass(frozen=True)
class PaperMesh:
    """Named axes over devices 0, 1, ... in row-major order; ``per_process`` devices form a process."""

    axes: tuple[tuple[str, int], ...]
    per_process: int = 8

    @classmethod
    def parse(cls, text: str, per_process: int = 8) -> PaperMesh:
        """ "fsdp=256" or "tp=8,ep=16"."""
        axes = []
        for part in text.split(","):
            name, equals, size = part.strip().partition("=")
            if not (name and equals and size.isascii() and size.isdigit() and int(size) > 0):
                raise MappingError(f"mesh {text!r}: expected NAME=SIZE[,NAME=SIZE...], found {part!r}")
            axes.append((name, int(size)))
        if len({n for n, _ in axes}) != len(axes):
            raise MappingError(f"mesh {text!r} names an axis twice")
        made = cls(tuple(axes), per_process)
        if made.size > MOST_DEVICES:
            raise MappingError(f"mesh {text!r} has {made.size:,} devices, expected at most {MOST_DEVICES:,}")
        return made

    @property
    def size(self) -> int:
        """Number of devices."""
        return math.prod(n for _, n in self.axes)

    @property
    def sizes(self) -> dict[str, int]:
        """Axis name -> size."""
        return dict(self.axes)

    def placement(
        self, shape: tuple[int, ...], spec: Spec, only: Mapping[str, int] | None = None, path: str = ""
    ) -> Placement:
        """Shards of one tensor; ``only`` keeps the devices at these positions of some axes.

        An axis that the mesh lacks is a `MappingError` that names it and the tensor, ``path``.
        """
        for name in itertools.chain(*map(_names, spec), only or ()):
            if name not in self.sizes:
                raise MappingError(
                    f"{f'{path!r} ' if path else ''}{shape}: spec {spec} names axis {name!r}; "
                    f"the mesh has {', '.join(map(repr, self.sizes))}"
                )
        return _placement(self, shape, spec, tuple(sorted((only or {}).items())))


def _names(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return (entry,) if isinstance(entry, str) else entry or ()


@functools.lru_cache(maxsize=4096)
def _placement(
    mesh: PaperMesh, shape: tuple[int, ...], spec: Spec, only: tuple[tuple[str, int], ...]
) -> Placement:
    sizes, fixed = mesh.sizes, dict(only)
    parts = [_names(s) for s in (*spec, *(None,) * len(shape))]
    shards = []
    for device, position in enumerate(itertools.product(*(range(n) for _, n in mesh.axes))):
        at = dict(zip(sizes, position, strict=True))
        if any(at[name] != where for name, where in fixed.items()):
            continue
        edges = []
        for size, names in zip(shape, parts, strict=False):
            index = 0
            for name in names:
                index = index * sizes[name] + at[name]
            edges.append(chunk(size, math.prod(sizes[n] for n in names), index))
        box = Box(tuple(a for a, _ in edges), tuple(b for _, b in edges))
        shards.append(Shard(device, device // mesh.per_process, box))
    return Placement(shape, tuple(shards))


def split_first(mesh: PaperMesh, shape: tuple[int, ...], skip: int = 0) -> Spec:
    """All mesh axes on the first dimension, from ``skip`` on, that they divide."""
    for d in range(skip, len(shape)):
        if shape[d] and shape[d] % mesh.size == 0:
            return (*(None,) * d, tuple(n for n, _ in mesh.axes))
    return ()


def layout(placements: Mapping[str, Placement], dtype: str) -> Layout:
    """One dtype for all."""
    return Layout({path: TensorLayout(dtype, p) for path, p in placements.items()})
