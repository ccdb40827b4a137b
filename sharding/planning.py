"""Plans: all copies between the devices of two layouts, kept factored.

A *template* is the geometry of one class of tensors: which part of a block goes from which source device to
which target device. An *instance* applies a template to one target tensor and one source leaf; layers and
experts differ by a shift along dimensions that no source device splits. So the size of a plan follows the
number of tensors plus the number of device pairs per class, never their product.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection
from typing import Any

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding import codec
from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.correspondence import Correspondence
from jaxrl_sync.sharding.coverage import prove_coverage
from jaxrl_sync.sharding.errors import MappingError
from jaxrl_sync.sharding.layout import Layout, Placement, Shard, dtype_of
from jaxrl_sync.sharding.matching import Block, Reduced, blocks_of, reduce
from jaxrl_sync.sharding.paths import nearest
from jaxrl_sync.sharding.rank_plan import RankPlan, materialise
from jaxrl_sync.sharding.rounds import rounds
from jaxrl_sync.sharding.templates import Builder, Draft, Template
from jaxrl_sync.sharding.topology import Policy, Topology

_MAGIC = b"jaxrl.plan\x01"
CONSTANT_DEVICE = -1


@dataclasses.dataclass(frozen=True)
class Instance:
    """A template for one tensor; ``shift`` is added to the block's source start, per merged dimension."""

    template: int
    target_path: str
    leaf: str
    shift: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Plan:
    """See `plan`. Deterministic: both sides build the same one and compare digests."""

    source: Layout
    target: Layout
    correspondence: Correspondence
    templates: tuple[Template, ...] = dataclasses.field(repr=False)
    instances: tuple[Instance, ...] = dataclasses.field(repr=False)
    topology: Topology = dataclasses.field(default_factory=Topology, repr=False)
    policy: Policy = dataclasses.field(default_factory=Policy, repr=False)

    @property
    def constant_values(self) -> dict[str, npt.NDArray[Any]]:
        """Leaf name -> flat elements of every constant, which receivers write themselves."""
        return self.correspondence.constants

    @functools.cached_property
    def kept(self) -> dict[str, Any]:
        """What executing this plan in a process keeps for the next time: buffers, prepared programs."""
        return {}

    def for_rank(self, process: int, side: str = "source", paths: Collection[str] | None = None) -> RankPlan:
        """The copies that one process sends (side "source") or receives ("target").

        An edge lists the same copies in the same order on both sides. ``paths``: only these target tensors.
        """
        if side not in ("source", "target"):
            raise MappingError(f'side must be "source" or "target", found {side!r}')
        layout = self.source if side == "source" else self.target
        processes = set(layout.devices.values())
        if process not in processes:
            raise MappingError(f"{side} has processes {sorted(processes)}, not {process}")
        return materialise(self, process, side, paths)

    def rounds(self, limit_bytes: int) -> list[tuple[str, ...]]:
        """Target paths in order, grouped so that no process handles more than ``limit_bytes`` per group.

        Each group is for `for_rank(..., paths=group)`. A tensor that alone needs more is a `MappingError`.
        """
        return rounds(self, limit_bytes)

    def to_bytes(self) -> bytes:
        """Canonical bytes of the plan with its layouts and correspondence."""
        out = codec.Writer(_MAGIC)
        for part in (
            self.source.to_bytes(),
            self.target.to_bytes(),
            self.correspondence.to_bytes(),
            self._moves,
        ):
            out.raw(part)
        self.topology.write(out)
        self.policy.write(out)
        out.text(self.digest)
        body = out.getvalue()
        return body + codec.digest(body).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Plan:
        """Reads `to_bytes`: plans again from the layouts and compares. Corrupted or stale: `MappingError`."""
        data = codec.as_bytes(data, "plan")
        body, check = data[:-32], data[-32:]
        if codec.digest(body).encode() != check:
            raise MappingError("plan is corrupted: its bytes don't match their digest")
        read = codec.Reader(body, _MAGIC, "plan")
        source, target, corr, moves = read.raw(), read.raw(), read.raw(), read.raw()
        topology, policy, claimed = Topology.read(read), Policy.read(read), read.text()
        read.end()
        layouts = Layout.from_bytes(source), Layout.from_bytes(target)
        made = plan(*layouts, Correspondence.from_bytes(corr), topology, policy)
        if made._moves != moves or made.digest != claimed:
            raise MappingError(
                f"plan is stale: it says digest {claimed}, this version plans {made.digest} for its layouts"
            )
        return made

    @property
    def digest(self) -> str:
        """32 hexadecimal digits over layouts, correspondence and every move."""
        return self._digest

    @functools.cached_property
    def _digest(self) -> str:
        parts = (
            self.source.digest,
            self.target.digest,
            self.correspondence.digest,
            codec.digest(self._moves),
        )
        return codec.digest("/".join(parts).encode())

    def __hash__(self) -> int:
        return hash(self.digest)

    @functools.cached_property
    def _moves(self) -> bytes:
        out = codec.Writer(b"")
        out.integer(len(self.templates))
        for t in self.templates:
            for a in t.block.links:
                out.integers((a.size, a.target_dim, a.target_stride, a.source_dim, a.source_stride))
            out.integers(t.block.target_start)
            out.integers(t.block.source_start)
            moves = np.concatenate(
                [t.source_device[:, None], t.target_device[:, None], t.low, t.high], axis=1
            )
            fanout = np.stack([t.fanout_from, t.fanout_to, t.fanout_move], axis=1)
            for table in (moves, fanout):
                out.integers(table.shape)
                out.raw(np.ascontiguousarray(table, "<i8").tobytes())
        out.integer(len(self.instances))
        for i in self.instances:
            out.integers((i.template, *i.shift))
            out.text(i.target_path)
            out.text(i.leaf)
        return out.getvalue()

    def report(self) -> str:
        """Bytes per node, bound, balance, redundancy, edges, run lengths and memory per device, in words."""
        from jaxrl_sync.sharding.describe import report

        return report(self)

    def explain(self, path: str) -> str:
        """Where one target tensor comes from and who sends it, in words."""
        from jaxrl_sync.sharding.describe import explain

        return explain(self, path)

    def figure(self) -> Any:
        """A matplotlib Figure: megabytes from every source node to every target node."""
        from jaxrl_sync.sharding.describe import figure

        return figure(self)


def plan(
    source: Layout,
    target: Layout,
    correspondence: Correspondence,
    topology: Topology | None = None,
    policy: Policy | None = None,
) -> Plan:
    """All copies that turn ``source`` into ``target``, proved complete and disjoint.

    ``source``: `Correspondence.export_layout`, or the layout of the parameters (from which it follows).
    Every element of every target shard is written exactly once. Source replicas share the load so that the
    largest time of any node (bytes over rate, ``topology``) is least; ``policy`` says whether each receiving
    device or each receiving node gets a copy. Raises `MappingError` if a layout does not hold each element
    exactly once, or a tensor is missing or of another shape.
    """
    topology, policy = topology or Topology(), policy or Policy()
    _check_type("source", source, Layout)
    _check_type("target", target, Layout)
    _check_type("correspondence", correspondence, Correspondence)
    source = _export_layout(source, correspondence)
    _check_target(target, correspondence)
    makers: dict[Any, int] = {}
    drafts: list[Draft] = []
    instances: list[Instance] = []
    sources = [_leaf_placement(leaf, source) for leaf in correspondence.leaves]
    cuts: dict[Any, list[Block]] = {}
    for path, tensor in correspondence.tensors.items():
        prove_coverage(path, tensor)
        to = target[path].placement
        reduced_to = reduce(to, True)
        for f in tensor.fragments:
            leaf, place = correspondence.leaves[f.source], sources[f.source]
            reduced = reduce(place, False)
            for block in _blocks(cuts, f, to, reduced_to, place, reduced):
                still, shift = _stilled(block, reduced)
                itemsize = dtype_of(leaf.dtype).itemsize
                key = (id(to), id(place), itemsize, still)
                if key not in makers:
                    makers[key] = len(drafts)
                    drafts.append(Draft(place, to, itemsize, still, path))
                instances.append(Instance(makers[key], path, leaf.name, shift))
    counts = np.bincount(np.array([i.template for i in instances], np.int64), minlength=len(drafts)).tolist()
    nodes = topology.nodes(source, "source") | {CONSTANT_DEVICE: CONSTANT_DEVICE}
    rates = {n: topology.rate_of(n, "source") for n in nodes.values()}
    builder = Builder(nodes, topology.nodes(target, "target"), rates, policy)
    templates = builder.build(drafts, counts)
    return Plan(source, target, correspondence, templates, tuple(instances), topology, policy)


def _check_type(name: str, given: Any, kind: type) -> None:
    if not isinstance(given, kind):
        of = "; Layout.of(tree) makes one" if kind is Layout else ""
        raise MappingError(f"plan: {name} is a {type(given).__name__}, expected a {kind.__name__}{of}")


def _stilled(block: Block, reduced: Reduced) -> tuple[Block, tuple[int, ...]]:
    """The block moved to the beginning of every dimension that no source device splits, and by how much."""
    start = list(block.source_start)
    for d, full in enumerate(reduced.full):
        if full:  # the lowest index that the block touches becomes 0
            back = [a for a in block.links if a.source_dim == d and a.source_stride < 0]
            start[d] = sum((a.size - 1) * -a.source_stride for a in back)
    shift = tuple(i - k for i, k in zip(block.source_start, start, strict=True))
    return dataclasses.replace(block, source_start=tuple(start)), shift


def _blocks(
    cuts: dict[Any, list[Block]],
    fragment: Any,
    to: Placement,
    reduced_to: Reduced,
    place: Placement,
    reduced: Reduced,
) -> list[Block]:
    """Blocks of a fragment; equal fragments but for whole rows of an unsplit first dimension are cut once."""
    row = math.prod(reduced.shape[1:]) if reduced.full and reduced.full[0] else 0
    rows = fragment.offset // row if row else 0
    if rows and sum(min(0, (n - 1) * t) for n, _, t in fragment.axes) + fragment.offset % row < 0:
        rows = 0
    still = fragment._replace(offset=fragment.offset - rows * row, source=0)
    key = (id(to), id(place), still)
    if key not in cuts:
        cuts[key] = blocks_of(still, reduced_to, reduced)
    if not rows:
        return cuts[key]
    return [
        dataclasses.replace(b, source_start=(b.source_start[0] + rows, *b.source_start[1:]))
        for b in cuts[key]
    ]


def _leaf_placement(leaf: Any, source: Layout) -> Placement:
    if leaf.kind != "constant":
        return source[leaf.name].placement
    shape = (math.prod(leaf.shape),)
    return Placement(shape, (Shard(CONSTANT_DEVICE, CONSTANT_DEVICE, Box.whole(shape)),))


def _export_layout(source: Layout, corr: Correspondence) -> Layout:
    names = {leaf.name for leaf in corr.exported}
    if set(source) >= names and all(source[leaf.name].dtype == leaf.dtype for leaf in corr.exported):
        return source if set(source) == names else Layout({n: source[n] for n in names})
    return corr.export_layout_of(source)


def _check_target(target: Layout, corr: Correspondence) -> None:
    for path, tensor in corr.tensors.items():
        if path not in target:
            near = nearest(path, target)
            raise MappingError(f"the target layout lacks {path!r}, which the correspondence makes{near}")
        found = target[path]
        if (found.shape, found.dtype) != (tensor.shape, tensor.dtype):
            raise MappingError(
                f"target {path!r} is {found.dtype}{list(found.shape)}, the correspondence makes "
                f"{tensor.dtype}{list(tensor.shape)}"
            )
    for path in target:
        if path not in corr.tensors:
            raise MappingError(f"target tensor {path!r} is not part of the correspondence")
