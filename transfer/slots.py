"""Slots of a receiver: each has room for one whole version, and the tree of jax arrays that looks at it.

On CPU the arrays alias the slot's memory, their shards are built once, and a swap is an assignment. Where
jax doesn't alias (an accelerator), the slot is staging memory and ``fill_devices`` puts its content on the
devices (`jaxrl_sync.transfer.filling`): all of it, or what is known to have changed since they held it.
"""

from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
from collections.abc import Collection
from typing import Any

import jax
import numpy as np

from jaxrl_sync.sharding import Layout, SlotLayout
from jaxrl_sync.sharding.paths import leaves_by_path, nested
from jaxrl_sync.transfer import filling
from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.memory import PrivateMemory, SharedMemory
from jaxrl_sync.transfer.transports.pinned import Pinned

Views = Pinned

_generations = itertools.count(1)

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True)
class Target:
    """What a receiver process holds: the whole layout, its own part of it as a slot, and the shardings."""

    layout: Layout
    slot: SlotLayout
    process: int
    shardings: dict[str, jax.sharding.Sharding]

    @classmethod
    def of(cls, tree: Any, process: int) -> Target:
        """From a tree of ``jax.ShapeDtypeStruct`` (or arrays) with shardings. MismatchError without them, or
        where a shape doesn't divide over its devices: jax makes no array of it."""
        shardings = {}
        for path, leaf in leaves_by_path(tree, "target").items():
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, jax.sharding.Sharding):
                raise MismatchError(
                    f"target leaf {path!r} is {type(leaf).__name__} without a sharding, "
                    "expected jax.ShapeDtypeStruct(shape, dtype, sharding=...)"
                )
            try:
                sharding.shard_shape(tuple(leaf.shape))
            except ValueError as error:
                raise MismatchError(f"target leaf {path!r}: {error}") from error
            shardings[path] = sharding
        layout = Layout.of(tree)
        if not layout:
            return cls(layout, SlotLayout((), 4096, {}), process, shardings)
        return cls(layout, SlotLayout.of(layout, process), process, shardings)


class Slot:
    """Memory for one version with the arrays over it. ``close()`` gives both up.

    ``generation`` is another one for every piece of memory: what is made once per slot is kept under it.
    ``layout`` says where each shard lies.
    """

    def __init__(self, target: Target, memory: SharedMemory | PrivateMemory) -> None:
        self.generation = next(_generations)
        self.layout = target.slot
        self.memory = memory
        self.constants_of = ""
        self.closed = False
        self.views: Views = Pinned(target.slot.views(memory.data))
        self._target = target
        self._arrays = _over(self.views)
        self._spread = len(self.views) > len({path for _, path in self.views})
        self.aliased = _aliases(self._arrays, self.views)
        self._tree = _assemble(target, self._arrays) if self.aliased else None
        if not self.aliased:
            self._arrays = {}
        self._settled = False

    def copy_in(self, tree: Any) -> None:
        """Copy in a tree that fits the target in paths, shapes, dtypes and shardings. MismatchError."""
        shards = {
            (shard.device.id, path): np.asarray(shard.data)
            for path, leaf in leaves_by_path(tree).items()
            for shard in getattr(leaf, "addressable_shards", ())
        }
        for key, view in self.views.items():
            found = shards.get(key)
            if found is None or (found.shape, found.dtype) != (view.shape, view.dtype):
                what = "nothing" if found is None else f"{found.dtype}{list(found.shape)}"
                raise MismatchError(f"adopted {key[1]!r}: {what}, expected {view.dtype}{list(view.shape)}")
        for key, view in self.views.items():
            np.copyto(view, shards[key])
        self.fill_devices()

    def unsettle(self) -> bool:
        """The slot is about to be written. Whether the devices hold what lies in it: until now."""
        settled, self._settled = self._settled, False
        return settled

    def fill_devices(self, changed: Collection[str] | None = None) -> int:
        """Where arrays don't alias the slot: put its content on the devices before the swap. Blocks.

        Where they do, arrays of several shards are made anew over the same memory: jax keeps the host copy
        that ``np.asarray`` makes of such an array, and would go on showing what the slot held then.
        ``changed``: the only tensors that were written since the devices held the slot's content, None: any.
        Returns the bytes put there. After an error the next call must be without ``changed``.
        """
        if self.aliased:
            if self._spread:
                self._tree = _assemble(self._target, self._arrays)
            return 0
        self._tree = None
        keys = [
            key
            for key in self.views
            if changed is None
            or key[1] in changed
            or key not in self._arrays
            or self._arrays[key].is_deleted()
        ]
        moved = filling.fill(self.views, keys, self._arrays)
        self._tree = _assemble(self._target, self._arrays)
        self._settled = True
        return moved

    def tree(self) -> Any:
        """The tree of jax arrays with the slot's content."""
        return self._tree

    def close(self) -> None:
        """Drop the arrays and the memory; who still holds the tree keeps its mapping alive."""
        self.closed = True
        self._tree = None
        self._arrays = {}
        self.views = Pinned({})
        gc.collect(0)  # jax gives up what its dropped arrays aliased when the collector runs, not before
        self.memory.close()


def _over(views: Views) -> dict[tuple[int, str], jax.Array]:
    """One array per (device, path) over the slot itself, in one call: many small calls are twice as slow.

    Nothing where a device has memory of its own.
    """
    devices = {d.id: d for d in jax.local_devices()}
    if any(devices[device].platform != "cpu" for device, _ in views):
        return {}
    where = [jax.sharding.SingleDeviceSharding(devices[device]) for device, _ in views]
    return dict(zip(views, jax.device_put(list(views.values()), where, may_alias=True), strict=True))


def _aliases(arrays: dict[tuple[int, str], jax.Array], views: Views) -> bool:
    """Whether every array looks at the slot itself, so that it will see what is written there."""
    devices = {d.id: d for d in jax.local_devices()}
    for key, view in views.items():
        array = arrays.get(key)
        if array is None or (view.nbytes and array.unsafe_buffer_pointer() != view.ctypes.data):
            device = devices[key[0]]
            logger.info("slots are staging memory for %s: %s", device, filling.way_to(device))
            return False
    return True


def _assemble(target: Target, arrays: dict[tuple[int, str], jax.Array]) -> Any:
    """Global arrays from the shards of this process, nested by path."""
    leaves = {}
    for path, tensor in target.layout.items():
        shards = [arrays[s.device, path] for s in tensor.shards if (s.device, path) in arrays]
        leaves[path] = jax.make_array_from_single_device_arrays(tensor.shape, target.shardings[path], shards)
    return nested(leaves) if leaves else {}
