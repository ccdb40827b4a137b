"""A slot's content put on devices that don't alias it, in groups, with two groups on their way at a time.

Each group goes from the slot into page-locked memory (``pinned_host``, where the platform has it) and from
there by the device's own copy engine, while the next group is put into page-locked memory. Beside the slot
that takes no more than two groups of host memory, and on the devices nothing but the arrays themselves: those
of the slot's earlier version are given up group by group as theirs are made anew.
"""

from __future__ import annotations

import collections
import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

Key = tuple[int, str]
Views = Mapping[Key, npt.NDArray[Any]]

GROUP_BYTES = 64 << 20
"""A group is whole shards of about so many bytes, or a single larger one."""

UNDER_WAY = 2
PINNED = "pinned_host"

logger = logging.getLogger("jaxrl_sync.transfer")


def groups_of(views: Views, keys: Iterable[Key], group_bytes: int = GROUP_BYTES) -> list[list[Key]]:
    """The shards in their order, as groups of at most ``group_bytes`` (one larger shard: a group alone)."""
    groups: list[list[Key]] = []
    filled = 0
    for key in keys:
        nbytes = views[key].nbytes
        if not groups or filled + nbytes > group_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += nbytes
    return groups


def fill(
    views: Views, keys: Iterable[Key], arrays: dict[Key, jax.Array], group_bytes: int = GROUP_BYTES
) -> int:
    """New arrays of these shards in ``arrays``, each on its device; the bytes put there.

    ``arrays`` gives up the old one of a shard before its new one is made; after an error some are missing.
    Blocks until all are there: the views may be written again. jax's errors where a device has no room.
    """
    devices = {d.id: d for d in jax.local_devices()}
    under_way: collections.deque[list[jax.Array]] = collections.deque()
    moved = 0
    for group in groups_of(views, keys, group_bytes):
        if len(under_way) == UNDER_WAY:
            jax.block_until_ready(under_way.popleft())
        for key in group:
            arrays.pop(key, None)
        values = [views[key] for key in group]
        made = _put(values, [devices[device] for device, _ in group])
        arrays.update(zip(group, made, strict=True))
        under_way.append(made)
        moved += sum(value.nbytes for value in values)
    jax.block_until_ready(list(under_way))
    return moved


def way_to(device: Any) -> str:
    """In words, how a slot's content gets to a device."""
    how = f"through {PINNED}" if _has_pinned(device) else f"without {PINNED}, which {device.platform} lacks"
    return f"groups of {GROUP_BYTES >> 20} MiB {how}, {UNDER_WAY} on their way at a time"


def _put(values: Sequence[npt.NDArray[Any]], devices: Sequence[Any]) -> list[jax.Array]:
    """Arrays of their own memory on these devices, perhaps still on their way there."""
    where = [jax.sharding.SingleDeviceSharding(device) for device in devices]
    found: list[jax.Array] = jax.device_put(_staged(values, devices), where)
    if devices[0].platform != "cpu":
        return found
    # A CPU device aliases aligned host memory, whatever it is told.
    return [
        jax.device_put(np.array(value), at) if _is_over(array, value) else array
        for array, value, at in zip(found, values, where, strict=True)
    ]


def _staged(values: Sequence[npt.NDArray[Any]], devices: Sequence[Any]) -> Sequence[Any]:
    """The values in page-locked memory, or as they are where there is none."""
    if not all(_has_pinned(device) for device in devices):
        return values
    where = [jax.sharding.SingleDeviceSharding(device, memory_kind=PINNED) for device in devices]
    try:
        staged: list[jax.Array] = jax.device_put(list(values), where)
    except jax.errors.JaxRuntimeError as error:
        logger.warning("no %s memory for a group, so it goes as it lies: %s", PINNED, error)
        return values
    return staged


def _has_pinned(device: Any) -> bool:
    return any(memory.kind == PINNED for memory in device.addressable_memories())


def _is_over(array: jax.Array, value: npt.NDArray[Any]) -> bool:
    return bool(value.nbytes) and array.unsafe_buffer_pointer() == value.ctypes.data
