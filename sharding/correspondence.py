"""Correspondences: for every target tensor, which source elements it consists of.

A correspondence is data: fragments over numbered *leaves*. A leaf is a parameter as it is, a parameter after
casts, a computed value, or a constant. It serialises, so the engine's side can send it to the trainer's;
`bind` gives a deserialised one the program that its computed leaves need.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import codec
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.fragments import Axis, Fragment
from jaxrl_sync.sharding.layout import Layout, dtype_of

_MAGIC = b"jaxrl.correspondence\x01"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One thing that is moved: ``name`` in the exported tree, with the shape and dtype it has there.

    ``kind`` is "param", "computed" or "constant". ``path``: the parameter (of a param). ``casts``: dtypes it
    is converted to in order. ``params``: the parameters it depends on. ``reason``: the operation that could
    not be followed. ``values``: the elements of a constant, row-major bytes.
    """

    kind: str
    name: str
    shape: tuple[int, ...]
    dtype: str
    path: str = ""
    casts: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    reason: str = ""
    values: bytes = b""


@dataclasses.dataclass(frozen=True)
class TensorMap:
    """A target tensor: its fragments' ``source`` numbers the leaves of the correspondence."""

    shape: tuple[int, ...]
    dtype: str
    fragments: tuple[Fragment, ...]


@dataclasses.dataclass(frozen=True)
class Correspondence:
    """Leaves, and for each target path the fragments that it is made of. See `trace`.

    ``params``: path -> (shape, dtype) of every source parameter, moved or not. ``source``: the layout of the
    source, if it was known when the program was traced.
    """

    leaves: tuple[Leaf, ...]
    tensors: dict[str, TensorMap]
    params: dict[str, tuple[tuple[int, ...], str]]
    source: Layout | None = None
    program: Any = dataclasses.field(default=None, repr=False, compare=False)

    def to_bytes(self) -> bytes:
        """Canonical bytes: the map, then the source layout if it is known. Computed programs don't travel."""
        out = codec.Writer(b"")
        out.raw(self._map_bytes)
        out.raw(self.source.to_bytes() if self.source is not None else b"")
        return out.getvalue()

    @classmethod
    def from_bytes(cls, data: bytes) -> Correspondence:
        """Reads `to_bytes`; anything else is a `MappingError`."""
        read = codec.Reader(data, b"", "correspondence")
        body, layout = read.raw(), read.raw()
        read.end()
        return dataclasses.replace(_read_map(body), source=Layout.from_bytes(layout) if layout else None)

    @functools.cached_property
    def _map_bytes(self) -> bytes:
        out = codec.Writer(_MAGIC)
        out.integer(len(self.params))
        for path, (shape, dtype) in self.params.items():
            out.text(path)
            out.integers(shape)
            out.text(dtype)
        out.integer(len(self.leaves))
        for leaf in self.leaves:
            out.texts((leaf.kind, leaf.name, leaf.dtype, leaf.path, leaf.reason))
            out.integers(leaf.shape)
            out.texts(leaf.casts)
            out.texts(leaf.params)
            out.raw(leaf.values)
        out.integer(len(self.tensors))
        for path, tensor in self.tensors.items():
            out.text(path)
            out.text(tensor.dtype)
            out.integers(tensor.shape)
            out.integer(len(tensor.fragments))
            for f in tensor.fragments:
                out.integers((f.source, f.offset, f.start, *(x for axis in f.axes for x in axis)))
        return out.getvalue()

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over the map alone: equal for equal maps, whatever the layouts."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        return codec.digest(self._map_bytes)

    def __hash__(self) -> int:
        return hash(self.digest)

    def bind(self, convert: Callable[[Any], Any], source: Any, target: Any) -> Correspondence:
        """This correspondence with the program for its computed leaves, from the same function.

        Traces ``convert`` again and compares digests: a function that maps differently is a `MappingError`.
        """
        from jaxrl_sync.sharding.tracing import trace

        own = trace(convert, source, target)
        if own.digest != self.digest:
            raise MappingError(
                f"this side's convert gives correspondence {own.digest}, the other side's is {self.digest}: "
                f"{self._difference(own)}"
            )
        return own

    def _difference(self, other: Correspondence) -> str:
        for path in (*self.tensors, *other.tensors):
            if self.tensors.get(path) != other.tensors.get(path):
                return f"tensor {path!r} differs first"
        return "leaves differ"

    @property
    def exported(self) -> tuple[Leaf, ...]:
        """The leaves that travel: all but the constants."""
        return tuple(leaf for leaf in self.leaves if leaf.kind != "constant")

    @property
    def constants(self) -> dict[str, npt.NDArray[Any]]:
        """Name -> elements (flat) of each constant leaf."""
        return {
            leaf.name: np.frombuffer(leaf.values, dtype_of(leaf.dtype))
            for leaf in self.leaves
            if leaf.kind == "constant"
        }

    @property
    def export_layout(self) -> Layout:
        """The layout of what `export` returns: the plan's source."""
        if self.source is None:
            raise MappingError("the source had no shardings when it was traced; use export_layout_of(layout)")
        return self.export_layout_of(self.source)

    def export_layout_of(self, source: Layout) -> Layout:
        """The layout of the exported tree when the parameters are laid out like ``source``."""
        from jaxrl_sync.sharding.exporting import export_layout

        return export_layout(self, source)

    def export(self, params: Any, into: dict[str, Any] | None = None) -> dict[str, Any]:
        """The exported leaves of real parameters, by name: what the plan's source layout describes.

        Cast once, computed leaves evaluated, all sharded on the source mesh, in one jitted program that every
        process of the source must call. The results are fresh buffers, also where nothing is cast: the caller
        may donate ``params`` as soon as they are ready (``jax.block_until_ready``). Does not block.

        ``into``: what an earlier export returned. Its arrays are given up and the results lie in their
        memory, except where a host view of it is still alive: that one keeps its memory and its bits.
        """
        from jaxrl_sync.sharding.exporting import export

        return export(self, params, into)

    @functools.cached_property
    def _export_cache(self) -> dict[Any, Any]:
        return {}

    def kind_of(self, path: str) -> str:
        """One word for a target tensor: moved, cast, computed, constant or mixed; see `report`."""
        kinds = set()
        for f in self.tensors[path].fragments:
            leaf = self.leaves[f.source]
            kinds.add("cast" if leaf.kind == "param" and leaf.casts else leaf.kind.replace("param", "moved"))
        kinds -= {"constant"} if len(kinds) > 1 else set()
        return kinds.pop() if len(kinds) == 1 else ("mixed" if kinds else "moved")

    @functools.cached_property
    def unused(self) -> tuple[str, ...]:
        """Parameters that no target tensor depends on."""
        used = {p for f in self._fragments for p in self.leaves[f.source].params}
        return tuple(p for p in self.params if p not in used)

    @property
    def _fragments(self) -> list[Fragment]:
        return [f for t in self.tensors.values() for f in t.fragments]

    def report(self) -> str:
        """Per target tensor: moved, cast, computed (and why), constant or mixed, with what it is made of."""
        users: dict[int, set[str]] = {}
        for path, tensor in self.tensors.items():
            for f in tensor.fragments:
                users.setdefault(f.source, set()).add(path)
        lines = [
            f"{len(self.tensors)} target tensors from {len(self.params)} parameters, digest {self.digest}"
        ]
        for path, tensor in self.tensors.items():
            parts = []
            for number in dict.fromkeys(f.source for f in tensor.fragments):
                leaf = self.leaves[number]
                whole = [f for f in tensor.fragments if f.source == number and f.num_elements > 1]
                tied = len(users[number]) > 1 and any(f.num_elements == math.prod(leaf.shape) for f in whole)
                parts.append(_describe(leaf, tied and leaf.kind == "param"))
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            lines.append(
                f"  {path} {tensor.dtype}[{shape}]: {self.kind_of(path)} from {'; '.join(parts) or '-'}"
            )
        lines += [f"  unused source: {path}" for path in self.unused]
        return "\n".join(lines)


def _describe(leaf: Leaf, tied: bool) -> str:
    if leaf.kind == "constant":
        return f"constant {leaf.dtype}[{'x'.join(map(str, leaf.shape))}]"
    if leaf.kind == "computed":
        cast = "".join(f" -> {c}" for c in leaf.casts)
        return f"{leaf.reason} of {', '.join(leaf.params) or 'constants'}{cast}"
    return leaf.path + "".join(f" -> {c}" for c in leaf.casts) + (" (tied)" if tied else "")


def _read_map(body: bytes) -> Correspondence:
    read = codec.Reader(body, _MAGIC, "correspondence")
    params = {}
    for _ in range(read.count()):
        path, shape = read.text(), read.shape()
        params[path] = (shape, str(dtype_of(read.text())))
    leaves = []
    for _ in range(read.count()):
        kind, name, dtype, path, reason, *more = read.texts(5)
        shape, casts, used, values = read.shape(), read.texts(), read.texts(), read.raw()
        leaf = Leaf(kind, name, shape, str(dtype_of(dtype)), path, casts, used, reason, values)
        _check_leaf(leaf, params, bool(more))
        leaves.append(leaf)
    tensors = {}
    for _ in range(read.count()):
        path, dtype, shape = read.text(), read.text(), read.shape()
        fragments = []
        for _ in range(read.count()):
            source, offset, start, *rest = read.integers(3)
            if not 0 <= source < len(leaves) or len(rest) % 3:
                raise MappingError(f"correspondence: tensor {path!r} names leaf {source} of {len(leaves)}")
            axes = tuple(Axis(*rest[i : i + 3]) for i in range(0, len(rest), 3))
            fragments.append(Fragment(source, offset, start, axes))
            _check_fragment(fragments[-1], path, math.prod(shape), dtype, leaves[source])
        tensors[path] = TensorMap(shape, str(dtype_of(dtype)), tuple(fragments))
    read.end()
    return Correspondence(tuple(leaves), tensors, params, program=None)


def _check_leaf(leaf: Leaf, params: dict[str, tuple[tuple[int, ...], str]], more: bool) -> None:
    """What came as bytes must be something that `trace` could have made."""
    if more or leaf.kind not in ("param", "computed", "constant"):
        raise MappingError(f"correspondence: leaf {leaf.name!r} is of kind {leaf.kind!r}")
    if strange := sorted(set(leaf.params) - set(params)):
        raise MappingError(f"correspondence: leaf {leaf.name!r} depends on {strange[0]!r}, no parameter")
    if leaf.kind == "param" and params.get(leaf.path, ((), ""))[0] != leaf.shape:
        raise MappingError(
            f"correspondence: leaf {leaf.name!r} is not of the shape of parameter {leaf.path!r}"
        )
    size = math.prod(leaf.shape) * dtype_of(leaf.dtype).itemsize if leaf.kind == "constant" else 0
    if len(leaf.values) != size:
        raise MappingError(f"correspondence: leaf {leaf.name!r} has {len(leaf.values)} bytes of {size}")


def _check_fragment(f: Fragment, path: str, size: int, dtype: str, leaf: Leaf) -> None:
    reach = [(n - 1) * step for n, _, step in f.axes]
    low, high = f.offset + sum(min(0, r) for r in reach), f.offset + sum(max(0, r) for r in reach)
    last = f.start + sum((n - 1) * stride for n, stride, _ in f.axes)
    inside = 0 <= f.start <= last < size and 0 <= low <= high < math.prod(leaf.shape)
    if not inside or leaf.dtype != dtype or any(n < 1 or stride < 1 for n, stride, _ in f.axes):
        raise MappingError(
            f"correspondence: a fragment of {path!r} does not fit into it or into {leaf.name!r}"
        )
