"""Plans in words: the report of a whole plan and the explanation of one tensor."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxrl_sync.sharding.planning import Plan


def _traffic(plan: Plan) -> tuple[Counter[int], Counter[int], Counter[tuple[int, int]], int]:
    """Bytes sent per source device, received per target device, per edge of processes; bytes of constants."""
    counts = Counter(i.template for i in plan.instances)
    sent, received, edges = Counter[int](), Counter[int](), Counter[tuple[int, int]]()
    constant = 0
    of = plan.source.devices, plan.target.devices
    for number, template in enumerate(plan.templates):
        sizes = template.volumes * template.itemsize * counts[number]
        for s, t, size in zip(template.source_device, template.target_device, sizes, strict=True):
            if s < 0:
                constant += int(size)
                continue
            sent[int(s)] += int(size)
            received[int(t)] += int(size)
            edges[of[0][int(s)], of[1][int(t)]] += int(size)
    return sent, received, edges, constant


def report(plan: Plan) -> str:
    """See `Plan.report`."""
    sent, received, edges, constant = _traffic(plan)
    moved = sum(sent.values())
    whole = plan.source.total_bytes
    counts = Counter(i.template for i in plan.instances)
    copies = sum(len(t.source_device) * counts[n] for n, t in enumerate(plan.templates))
    lines = [
        f"plan {plan.digest}",
        f"  {len(plan.source)} source leaves ({whole:,} bytes), {len(plan.target)} target tensors "
        f"({plan.target.total_bytes:,} bytes)",
        f"  {moved:,} bytes over {len(edges)} edges in {copies:,} copies, {len(plan.templates)} templates; "
        f"{constant:,} bytes of constants stay local",
    ]
    for what, load, devices in (
        ("sent", sent, plan.source.devices),
        ("received", received, plan.target.devices),
    ):
        loads = np.array([load.get(d, 0) for d in devices] or [0])
        mean = loads.mean()
        ratio = loads.max() / mean if mean else 1.0
        lines.append(
            f"  {what} per device: {loads.min():,} to {loads.max():,} bytes, largest {ratio:.3f} of mean"
        )
    for (a, b), size in sorted(edges.items())[:32]:
        lines.append(f"  process {a} -> {b}: {size:,} bytes")
    if len(edges) > 32:
        lines.append(f"  ... and {len(edges) - 32} more edges")
    return "\n".join(lines)


def explain(plan: Plan, path: str) -> str:
    """See `Plan.explain`."""
    target = plan.target[path]
    corr = plan.correspondence
    lines = [f"{path}: {target.dtype}{list(target.shape)}, {corr.kind_of(path)}"]
    for instance in plan.instances:
        if instance.target_path != path:
            continue
        template = plan.templates[instance.template]
        axes = ", ".join(
            f"{a.size} x (target dim {a.target_dim} by {a.target_stride}, "
            + (
                f"source dim {a.source_dim} by {a.source_stride})"
                if a.source_dim >= 0
                else "source repeated)"
            )
            for a in template.block.links
        )
        start = tuple(i + k for i, k in zip(template.block.source_start, instance.shift, strict=True))
        lines.append(
            f"  from {instance.leaf} at {start} to {template.block.target_start}: "
            f"{template.block.num_elements} elements, axes [{axes}]"
        )
        for s, t, n in zip(template.source_device, template.target_device, template.volumes, strict=True):
            sender = f"device {s}" if s >= 0 else "a constant"
            lines.append(f"    {sender} -> device {t}: {n * template.itemsize:,} bytes")
    return "\n".join(lines)
