"""What each device gathers and scatters for some tensors of a plan, and which devices do the same.

A *member* is one device's part of a wave of copies: a program shape and what differs between devices of that
shape (where blocks start, which tensors, which peers). Members of one shape form a *group* that runs one
program.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt
from jax.sharding import SingleDeviceSharding

from jaxrl_sync.sharding.device_programs import (
    Devices,
    PackShape,
    ScatterShape,
    Write,
    pack,
    scatter,
    together,
)
from jaxrl_sync.sharding.device_words import View, views, words_per_element
from jaxrl_sync.sharding.layout import Layout, dtype_of
from jaxrl_sync.sharding.planning import CONSTANT_DEVICE
from jaxrl_sync.sharding.rank_plan import Copy

Constants = Mapping[str, npt.NDArray[Any]]


@dataclasses.dataclass(frozen=True)
class Member:
    """One device's gathers or scatters. ``peers``: per buffer the device at its other end."""

    device: int
    shape: PackShape | ScatterShape
    starts: tuple[int, ...]
    names: tuple[str, ...]
    peers: tuple[int, ...]
    constants: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Group:
    """Devices that run one program: per device its tensors and peers; starts and constants lie on them."""

    shape: PackShape | ScatterShape
    devices: Devices
    starts: Any
    names: tuple[tuple[str, ...], ...]
    peers: tuple[tuple[int, ...], ...]
    constants: tuple[Any, ...]

    @functools.cached_property
    def program(self) -> Callable[..., Any]:
        """The compiled gather, or the scatter that makes new shards."""
        if isinstance(self.shape, PackShape):
            return pack(self.shape, self.devices)
        return scatter(self.shape, self.devices)

    @functools.cached_property
    def program_over_old(self) -> Callable[..., Any]:
        """The compiled scatter that writes over given shards."""
        assert isinstance(self.shape, ScatterShape)
        return scatter(dataclasses.replace(self.shape, donated=True), self.devices)


def sender(device: int, source: Layout, copies: Sequence[Copy]) -> Member:
    """What ``device`` gathers from its shards of ``source``."""
    names: dict[str, int] = {}
    edges: dict[int, list[tuple[int, View]]] = {}
    starts: dict[int, list[int]] = {}
    for c in copies:
        if c.source_device != device:
            continue
        leaf = source[c.source_path]
        number = names.setdefault(c.source_path, len(names))
        size, width = leaf.placement.by_device[device].box.volume, words_per_element(dtype_of(leaf.dtype))
        for view, start in views(size * width, c.source_offset, c.shape, c.source_strides, width):
            edges.setdefault(c.target_device, []).append((number, view))
            starts.setdefault(c.target_device, []).extend(start)
    to = tuple(sorted(edges))
    avals = tuple((source[n].placement.by_device[device].box.shape, source[n].dtype) for n in names)
    shape = PackShape(avals, tuple(tuple(edges[t]) for t in to))
    return Member(device, shape, tuple(i for t in to for i in starts[t]), tuple(names), to)


def taker(
    device: int, target: Layout, copies: Sequence[Copy], names: Sequence[str], constants: Constants
) -> Member:
    """What ``device`` scatters into its shards of these tensors of ``target``."""
    mine = [c for c in copies if c.target_device == device]
    senders = tuple(sorted({c.source_device for c in mine} - {CONSTANT_DEVICE}))
    used = tuple(sorted({c.source_path for c in mine if c.source_device == CONSTANT_DEVICE}))
    lengths = dict.fromkeys(senders, 0)
    writes: list[tuple[Write, list[int]]] = []
    for c in mine:
        tensor, number = target[c.target_path], names.index(c.target_path)
        size, width = tensor.placement.by_device[device].box.volume, words_per_element(dtype_of(tensor.dtype))
        spots = views(size * width, c.target_offset, c.shape, c.target_strides, width)
        if c.source_device == CONSTANT_DEVICE:
            writes += _from_constant(c, number, spots, used.index(c.source_path), constants, width)
            continue
        for to, start in spots:
            offset = lengths[c.source_device]
            writes.append((Write(number, to, senders.index(c.source_device), offset), list(start)))
            lengths[c.source_device] = offset + to.num_words
    writes.sort(key=lambda w: w[0].array)  # the program goes through one shard after the other
    avals = tuple((target[n].placement.by_device[device].box.shape, target[n].dtype) for n in names)
    fixed = tuple(((constants[n].size,), str(constants[n].dtype)) for n in used)
    shape = ScatterShape(
        avals, tuple(lengths[s] for s in senders), fixed, tuple(w for w, _ in writes), donated=False
    )
    return Member(device, shape, tuple(i for _, at in writes for i in at), tuple(names), senders, used)


def _from_constant(
    c: Copy, number: int, spots: Sequence[tuple[View, tuple[int, ...]]], constant: int, values: Constants,
    width: int,
) -> list[tuple[Write, list[int]]]:  # fmt: skip
    size = values[c.source_path].size
    whence = views(size * width, c.source_offset, c.shape, c.source_strides, width)
    if len(whence) != len(spots):  # one is cut for its size: cut the other at the same places
        whence = [(dataclasses.replace(whence[0][0], shape=to.shape), whence[0][1]) for to, _ in spots]
    pairs = zip(spots, whence, strict=True)
    return [(Write(number, to, -1, 0, constant, of), [*start, *at]) for (to, at), (of, start) in pairs]


def groups(members: Sequence[Member], devices: Mapping[int, Any], constants: Constants) -> tuple[Group, ...]:
    """Members of one shape, on one platform and with equal constants, taken together."""
    found: dict[Any, list[Member]] = {}
    for m in members:
        given = tuple(constants[n].tobytes() for n in m.constants)
        found.setdefault((m.shape, devices[m.device].platform, given), []).append(m)
    made = []
    for group in found.values():
        where = tuple(devices[m.device] for m in group)
        starts = _on(where, [np.array(m.starts or (0,), np.int32) for m in group])
        fixed = tuple(_on(where, [constants[n]] * len(where)) for n in group[0].constants)
        made.append(
            Group(
                group[0].shape, where, starts, tuple(m.names for m in group), tuple(m.peers for m in group),
                fixed,
            )
        )  # fmt: skip
    return tuple(made)


def _on(devices: Devices, rows: Sequence[npt.NDArray[Any]]) -> Any:
    """One row on each device, as an array over the group."""
    placed = jax.device_put(list(rows), [SingleDeviceSharding(d) for d in devices])
    return together(devices, rows[0].shape, placed)


def shards_of(target: Layout, paths: Collection[str]) -> dict[int, list[str]]:
    """Device -> those of the tensors of which it holds any element, in order."""
    held: dict[int, list[str]] = {}
    for path in paths:
        for shard in target[path].shards:
            if shard.box.volume:
                held.setdefault(shard.device, []).append(path)
    return held
