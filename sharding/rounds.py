"""Memory-bounded rounds: a plan in groups of tensors, none of which any process needs much memory for."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from jaxrl_sync.sharding.errors import MappingError

if TYPE_CHECKING:
    from jaxrl_sync.sharding.planning import Plan

Load = Counter[tuple[str, int]]


def device_loads(plan: Plan) -> list[Load]:
    """Per template, bytes that each ("source" | "target", device) sends or gets of one instance."""
    found = []
    for template in plan.templates:
        load: Load = Counter()
        sizes = (template.volumes * template.itemsize).tolist()
        devices = template.source_device.tolist(), template.target_device.tolist()
        for s, t, size in zip(*devices, sizes, strict=True):
            if s >= 0:
                load["source", s] += size
                load["target", t] += size
        found.append(load)
    return found


def _process_loads(plan: Plan) -> list[Load]:
    """The same per process."""
    of = {"source": plan.source.devices, "target": plan.target.devices}
    found = []
    for load in device_loads(plan):
        summed: Load = Counter()
        for (side, device), size in load.items():
            summed[side, of[side][device]] += size
        found.append(summed)
    return found


def rounds(plan: Plan, limit_bytes: int) -> list[tuple[str, ...]]:
    """See `Plan.rounds`."""
    loads = _process_loads(plan)
    per_path: dict[str, Load] = {path: Counter() for path in plan.target}
    for instance in plan.instances:
        per_path[instance.target_path].update(loads[instance.template])
    groups: list[tuple[str, ...]] = []
    group: list[str] = []
    held: Load = Counter()
    for path, load in per_path.items():
        largest = max(load.values(), default=0)
        if largest > limit_bytes:
            raise MappingError(
                f"tensor {path!r} alone needs {largest} bytes on one process, limit {limit_bytes}"
            )
        if group and any(held[k] + v > limit_bytes for k, v in load.items()):
            groups.append(tuple(group))
            group, held = [], Counter()
        group.append(path)
        held.update(load)
    return [*groups, tuple(group)] if group else groups
