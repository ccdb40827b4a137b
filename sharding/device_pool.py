"""Destination buffers of the device path: a result whose shards the next one is scattered into."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_sync.sharding.device_path import STAGING_BYTES, DevicePath
from jaxrl_sync.sharding.planning import Plan
from jaxrl_sync.sharding.pool import global_arrays, target_shardings


class DevicePool:
    """Room for one copy of a plan's target on its devices, allocated by the first result.

    A later result is scattered into the shards of the one before it, which are donated: the arrays of the
    earlier result are deleted, and whoever still uses them gets jax's error, never other values.
    """

    def __init__(self, plan: Plan, target: Any = None, staging_bytes: int = STAGING_BYTES) -> None:
        self.plan_digest = plan.digest
        self.path = DevicePath(plan, staging_bytes)
        self.shardings = target_shardings(plan, target)
        self._target = plan.target
        self._shards: dict[tuple[int, str], Any] | None = None

    def fill(self, arrays: Mapping[str, Any], done: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Path -> target array, over the shards of the last result."""
        old, self._shards = self._shards, None
        if old is not None and any(x.is_deleted() for x in old.values()):
            old = None  # its arrays were deleted or donated, and their memory with them
        self._shards = self.path.execute(arrays, old, done)
        return global_arrays(self._target, self._shards, self.shardings)

    def fresh(self, arrays: Mapping[str, Any], done: Callable[[str], None] | None = None) -> dict[str, Any]:
        """Path -> target array in memory of its own, which the device's allocator takes back."""
        return global_arrays(self._target, self.path.execute(arrays, None, done), self.shardings)


def device_pool(plan: Plan) -> DevicePool:
    """The plan's own, for results without a pool of the caller's."""
    made = plan.kept.get("device")
    if made is None:
        made = plan.kept["device"] = DevicePool(plan)
    return made
