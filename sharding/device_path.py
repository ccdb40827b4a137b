"""reshard on accelerators: jitted gather, copies between devices, jitted scatter; no byte passes the host.

Target tensors of one class (equal templates: the same matrix of every layer) are handled in *batches*. In a
batch every source device gathers one flat buffer per receiving device, `jax.device_put` takes the buffers
over, and every target device scatters them into its shards. Two batches are in flight at once, so staging
memory stays within twice the limit per device, however large the model is. With policy "node" a second wave
spreads boxes among the target devices of a node in the same way.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from jaxrl_sync.sharding.device_programs import Devices, apart, together
from jaxrl_sync.sharding.device_work import Group, groups, sender, shards_of, taker
from jaxrl_sync.sharding.errors import DeviceCopyError
from jaxrl_sync.sharding.kernels import CopyTable
from jaxrl_sync.sharding.layout import Layout, dtype_of
from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.sharding.planning import CONSTANT_DEVICE, Plan
from jaxrl_sync.sharding.rank_plan import Copy
from jaxrl_sync.sharding.rounds import device_loads
from jaxrl_sync.sharding.templates import Template

Key = tuple[int, str]

STAGING_BYTES = 256 << 20
"""Packed bytes on one device per batch."""

MAX_BLOCKS = 16
"""Blocks that one program reads or writes: what a compiler does with more costs more than in proportion."""


@dataclasses.dataclass(frozen=True)
class _Batch:
    """Target tensors handled at once. The outer wave comes from the source, the inner one from the target."""

    paths: tuple[str, ...]
    gathers: tuple[Group, ...]
    scatters: tuple[Group, ...]
    inner_gathers: tuple[Group, ...]
    inner_scatters: tuple[Group, ...]

    @functools.cached_property
    def programs(self) -> frozenset[tuple[Any, Devices]]:
        """(shape, devices) of every gather and scatter."""
        every = (*self.gathers, *self.scatters, *self.inner_gathers, *self.inner_scatters)
        return frozenset((g.shape, g.devices) for g in every)


class DevicePath:
    """One plan prepared for its devices: tables of where blocks start lie there, programs compile on use."""

    def __init__(self, plan: Plan, staging_bytes: int = STAGING_BYTES) -> None:
        self._plan = plan
        self._devices = {d.id: d for d in jax.devices()}
        self._constants = plan.constant_values
        self._proved: set[Any] = set()
        self._batches = tuple(self._prepare(paths) for paths in batches(plan, staging_bytes))

    @property
    def programs(self) -> frozenset[tuple[Any, Devices]]:
        """What is compiled at most: (shape, devices) of every gather and scatter."""
        return frozenset(itertools.chain.from_iterable(b.programs for b in self._batches))

    def execute(
        self, arrays: Mapping[str, Any], old: dict[Key, Any] | None, done: Callable[[str], None] | None = None
    ) -> dict[Key, Any]:
        """(device, path) -> new target shard. Dispatches, and waits only to bound memory.

        ``arrays``: the plan's source leaves. ``old``: all shards of an earlier result, to be written over
        (they are donated), or None. ``done(name)`` is called once a source leaf has been read for good.
        What a program makes the first time is compared with plain copies in host memory: compilers have read
        wrong elements here (`device_words`). `DeviceCopyError` if it differs.
        """
        sources = {(d.id, name): s for name, a in arrays.items() for d, s in apart(a).items()}
        last = {n: i for i, b in enumerate(self._batches) for g in b.gathers for row in g.names for n in row}
        made = self._empty_shards()
        waiting: list[Any] = []
        for i, batch in enumerate(self._batches):
            fresh = self._wave(batch.gathers, batch.scatters, sources, old)
            if batch.inner_gathers:
                fresh |= self._wave(batch.inner_gathers, batch.inner_scatters, fresh, fresh)
            if not batch.programs <= self._proved:
                self._prove(batch, sources, fresh)
                self._proved |= batch.programs
            made |= fresh
            waiting.append(list(fresh.values()))
            if len(waiting) > 1:
                jax.block_until_ready(waiting.pop(0))
            if done is not None:
                jax.block_until_ready(waiting)
                for name in [n for n, at in last.items() if at == i]:
                    sources = {key: shard for key, shard in sources.items() if key[1] != name}
                    done(name)
        return made

    def _empty_shards(self) -> dict[Key, Any]:
        """Shards without elements, which no program makes."""
        made = {}
        for path, tensor in self._plan.target.items():
            for s in tensor.shards:
                if not s.box.volume:
                    zeros = np.zeros(s.box.shape, dtype_of(tensor.dtype))
                    made[s.device, path] = jax.device_put(
                        zeros, SingleDeviceSharding(self._devices[s.device])
                    )
        return made

    def _copies(self, paths: Sequence[str]) -> tuple[list[Copy], list[Copy]]:
        """The copies of both waves of these target tensors."""
        outer: list[Copy] = []
        inner: list[Copy] = []
        for process in sorted(set(self._plan.target.devices.values())):
            rank = self._plan.for_rank(process, "target", frozenset(paths))
            outer += [*rank.constants, *(c for e in rank.edges for c in e.copies)]
            inner += rank.fanout
        return outer, inner

    def _prepare(self, paths: tuple[str, ...]) -> _Batch:
        outer, inner = self._copies(paths)
        handed_on: dict[int, dict[str, None]] = {}
        for c in inner:
            handed_on.setdefault(c.target_device, {})[c.target_path] = None
        return _Batch(
            paths,
            *self._groups(outer, self._plan.source, shards_of(self._plan.target, paths)),
            *self._groups(inner, self._plan.target, {d: tuple(names) for d, names in handed_on.items()}),
        )

    def _prove(self, batch: _Batch, sources: Mapping[Key, Any], made: Mapping[Key, Any]) -> None:
        outer, inner = self._copies(batch.paths)
        fixed = {(CONSTANT_DEVICE, name): value for name, value in self._constants.items()}
        used = {(c.source_device, c.source_path) for c in outer}
        views = fixed | {key: np.asarray(sources[key], order="C") for key in used - set(fixed)}
        want = {key: np.zeros(shard.shape, shard.dtype) for key, shard in made.items()}
        CopyTable.direct(outer).execute(views, want)
        CopyTable.direct(inner).execute(want, want)
        for (device, path), shard in made.items():
            if flat_bytes(np.asarray(shard, order="C")).tobytes() != flat_bytes(want[device, path]).tobytes():
                raise DeviceCopyError(
                    f"reshard: as compiled for {shard.device.platform}, the gather and scatter of {path!r} "
                    f"gave other bytes on device {device} than a plain copy does; use path='host' here, and "
                    "report this to the compiler's makers"
                )

    def _groups(
        self, copies: Sequence[Copy], source: Layout, names: Mapping[int, Sequence[str]]
    ) -> tuple[tuple[Group, ...], tuple[Group, ...]]:
        """Gathers and scatters of one wave; ``names``: the shards that each target device gets written."""
        senders = sorted({c.source_device for c in copies} - {CONSTANT_DEVICE})
        gathers = [sender(d, source, copies) for d in senders]
        scatters = [taker(d, self._plan.target, copies, names[d], self._constants) for d in sorted(names)]
        return groups(gathers, self._devices, {}), groups(scatters, self._devices, self._constants)

    def _wave(
        self, gathers: Sequence[Group], scatters: Sequence[Group], sources: Mapping[Key, Any],
        old: Mapping[Key, Any] | None,
    ) -> dict[Key, Any]:  # fmt: skip
        sent: dict[tuple[int, int], Any] = {}
        for g in gathers:
            inputs = [_column(g, k, sources) for k in range(len(g.shape.arrays))]
            for k, buffer in enumerate(g.program(g.starts, *inputs)):
                pieces = apart(buffer)
                sent |= {(d.id, g.peers[i][k]): pieces[d] for i, d in enumerate(g.devices)}
        moved = jax.device_put(list(sent.values()), [SingleDeviceSharding(self._devices[t]) for _, t in sent])
        arrived = dict(zip(sent, moved, strict=True))
        made: dict[Key, Any] = {}
        for g in scatters:
            buffers = _buffers(g, arrived)
            if old is None:
                outs = g.program(g.starts, *buffers, *g.constants)
            else:
                over = [_column(g, k, old) for k in range(len(g.shape.arrays))]
                outs = g.program_over_old(g.starts, *buffers, *g.constants, *over)
            for k, out in enumerate(outs):
                pieces = apart(out)
                made |= {(d.id, g.names[i][k]): pieces[d] for i, d in enumerate(g.devices)}
        return made


def _column(group: Group, k: int, shards: Mapping[Key, Any]) -> Any:
    """Shard number k of every device of a group, as one array."""
    shape = group.shape.arrays[k][0]
    row = [shards[d.id, names[k]] for d, names in zip(group.devices, group.names, strict=True)]
    return together(group.devices, shape, row)


def _buffers(group: Group, arrived: dict[tuple[int, int], Any]) -> list[Any]:
    """The incoming buffers of a group, as one array per number; they are taken out of ``arrived``."""
    count = len(group.peers[0])
    made = []
    for k in range(count):
        row = [arrived.pop((peers[k], d.id)) for d, peers in zip(group.devices, group.peers, strict=True)]
        made.append(together(group.devices, row[0].shape, row))
    return made


def most_blocks(template: Template) -> int:
    """Blocks of one instance that the busiest device reads or writes."""
    sides = template.source_device + 1, template.target_device + 1  # constants are from device -1
    return max((int(np.bincount(side).max()) for side in sides if len(side)), default=0)


def batches(plan: Plan, staging_bytes: int) -> list[tuple[str, ...]]:
    """Target paths in batches of one class; a device stages at most ``staging_bytes`` per batch.

    Only a single tensor that alone needs more makes a batch that is larger. A program has at most about
    `MAX_BLOCKS` blocks. Batches of a class are equal in size up to one tensor: at most two are compiled.
    """
    loads = device_loads(plan)
    of: dict[str, list[int]] = {}
    for instance in plan.instances:
        of.setdefault(instance.target_path, []).append(instance.template)
    classes: dict[tuple[int, ...], list[str]] = {}
    for path, templates in of.items():
        classes.setdefault(tuple(templates), []).append(path)
    found = []
    for key, paths in classes.items():
        load = sum((loads[t] for t in key), start=Counter[tuple[str, int]]())
        blocks = max(1, sum(most_blocks(plan.templates[t]) for t in key))
        most = max(1, min(MAX_BLOCKS // blocks, staging_bytes // max(1, *load.values(), 1)))
        parts = -(-len(paths) // most)
        borders = [len(paths) * i // parts for i in range(parts + 1)]
        found += [tuple(paths[a:b]) for a, b in itertools.pairwise(borders)]
    return found
