"""Plans in words and in a picture: report, explanation of one tensor, who sends what to whom."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxrl_sync.sharding.errors import MappingError, UserError
from jaxrl_sync.sharding.layout import Layout

if TYPE_CHECKING:
    from jaxrl_sync.sharding.planning import Plan
    from jaxrl_sync.sharding.templates import Template


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes of a plan: per node on both sides, per pair of nodes, inside nodes, constant, asked for.

    ``runs``: contiguous bytes -> bytes moved in such runs (one move of each template stands for all).
    """

    sent: Counter[int]
    received: Counter[int]
    edges: Counter[tuple[int, int]]
    fanout_bytes: int
    constant_bytes: int
    asked_bytes: int
    copies: int
    runs: Counter[int]

    @property
    def wire_bytes(self) -> int:
        """Bytes that leave the senders."""
        return sum(self.sent.values())


def traffic(plan: Plan) -> Traffic:
    """Adds up a plan from its templates, without spelling out copies."""
    counts = Counter(i.template for i in plan.instances)
    of = plan.topology.nodes(plan.source, "source"), plan.topology.nodes(plan.target, "target")
    edges, runs = Counter[tuple[int, int]](), Counter[int]()
    constant = fanout = copies = 0
    for number, template in enumerate(plan.templates):
        sizes = template.volumes * template.itemsize * counts[number]
        copies += len(sizes) * counts[number]
        fanout += int(sizes[template.fanout_move].sum())
        if len(sizes) and template.source_device[0] >= 0:
            runs[_run_bytes(template)] += int(sizes.sum())
        devices = template.source_device.tolist(), template.target_device.tolist()
        for s, t, size in zip(*devices, sizes.tolist(), strict=True):
            if s < 0:
                constant += size
            else:
                edges[of[0][s], of[1][t]] += size
    sent, received = Counter[int](), Counter[int]()
    for (a, b), size in edges.items():
        sent[a] += size
        received[b] += size
    asked = _asked_bytes(plan, of[1]) - constant
    return Traffic(sent, received, edges, fanout, constant, asked, copies, runs)


def _asked_bytes(plan: Plan, nodes: Mapping[int, int]) -> int:
    """What the receivers hold, once per device or, by policy, once per node and box."""
    cache: dict[int, int] = {}
    total = 0
    for tensor in plan.target.values():
        place = tensor.placement
        if id(place) not in cache:
            if plan.policy.receivers == "device":
                cache[id(place)] = sum(s.box.volume for s in place.shards)
            else:
                cache[id(place)] = sum(b.volume for _, b in {(nodes[s.device], s.box) for s in place.shards})
        total += cache[id(place)] * tensor.itemsize
    return total


def _run_bytes(template: Template) -> int:
    """Contiguous bytes that the first move reads and writes at once."""
    from jaxrl_sync.sharding.rank_plan import local_strides

    run = 1
    rows_s = local_strides(template.source, False, int(template.source_device[0]))
    rows_t = local_strides(template.target, True, int(template.target_device[0]))
    steps = []
    for a, n in zip(template.block.links, (template.high[0] - template.low[0]).tolist(), strict=True):
        if n > 1:
            source = a.source_stride * rows_s[a.source_dim] if a.source_dim >= 0 else 0
            steps.append((a.target_stride * rows_t[a.target_dim], source, n))
    for target, source, n in sorted(steps):
        if source == target == run:
            run *= n
    return run * template.itemsize


def device_bytes(layout: Layout) -> dict[int, int]:
    """Bytes that each device holds of a layout."""
    held = dict.fromkeys(layout.devices, 0)
    for tensor in layout.values():
        for shard in tensor.shards:
            held[shard.device] += shard.box.volume * tensor.itemsize
    return held


def seconds(plan: Plan, of: Traffic | None = None) -> tuple[float, float]:
    """(predicted, bound): the largest node time of this plan, and the least that any plan could have.

    The bound is the larger of all bytes over all sending rates and the slowest receiving node's own time.
    """
    t = of or traffic(plan)
    rate = plan.topology.rate_of
    sending = max((size / rate(n, "source") for n, size in t.sent.items()), default=0.0)
    receiving = max((size / rate(n, "target") for n, size in t.received.items()), default=0.0)
    senders = sum(rate(n, "source") for n in set(plan.topology.nodes(plan.source, "source").values()))
    return max(sending, receiving), max(t.wire_bytes / senders if senders else 0.0, receiving)


def _spread(load: Mapping[int, int], nodes: set[int]) -> str:
    values = np.array([load.get(n, 0) for n in nodes] or [0])
    ratio = values.max() / values.mean() if values.mean() else 1.0
    return f"{values.min():,} to {values.max():,} bytes, largest {ratio:.3f} of mean"


def report(plan: Plan) -> str:
    """See `Plan.report`."""
    t = traffic(plan)
    predicted, bound = seconds(plan, t)
    sides = ("sent", t.sent, plan.source, "source"), ("received", t.received, plan.target, "target")
    redundancy = t.wire_bytes / t.asked_bytes if t.asked_bytes else 1.0
    lines = [
        f"plan {plan.digest}",
        f"  {len(plan.source)} source leaves ({plan.source.total_bytes:,} bytes), {len(plan.target)} target "
        f"tensors ({plan.target.total_bytes:,} bytes)",
        f"  {t.wire_bytes:,} bytes over {len(t.edges)} edges in {t.copies:,} copies, {len(plan.templates)} "
        f"templates",
        f"  one copy per receiving {plan.policy.receivers} asks for {t.asked_bytes:,} bytes: redundancy "
        f"{redundancy:.3f}; {t.fanout_bytes:,} bytes inside nodes, {t.constant_bytes:,} of constants",
    ]
    for word, load, layout, side in sides:
        lines.append(f"  {word} per node: {_spread(load, set(plan.topology.nodes(layout, side).values()))}")
    lines.append(
        f"  predicted {predicted:.4g} s, {predicted / bound if bound else 1:.3f} of the bound {bound:.4g} s, "
        f"at {plan.topology.rate / 1e9:g} GB/s per node unless the topology says otherwise"
    )
    total = sum(t.runs.values()) or 1
    runs = ", ".join(f"{n:,} B {100 * size / total:.0f} %" for n, size in sorted(t.runs.items())[:8])
    lines.append(f"  contiguous runs: {runs}{' ...' if len(t.runs) > 8 else ''}")
    for word, layout in (("export", plan.source), ("slot", plan.target)):
        held = device_bytes(layout).values()
        lines.append(
            f"  {word} memory per device: {min(held, default=0):,} to {max(held, default=0):,} bytes"
        )
    for (a, b), size in sorted(t.edges.items())[:16]:
        lines.append(f"  node {a} -> {b}: {size:,} bytes")
    if len(t.edges) > 16:
        lines.append(f"  ... and {len(t.edges) - 16} more edges")
    return "\n".join(lines)


def explain(plan: Plan, path: str) -> str:
    """See `Plan.explain`."""
    target = plan.target[path]
    lines = [f"{path}: {target.dtype}{list(target.shape)}, {plan.correspondence.kind_of(path)}"]
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
        lines += _moves(template)
    return "\n".join(lines)


def _moves(template: Template, most: int = 12) -> list[str]:
    """One line per move, senders of equal sizes to one receiver taken together; at most ``most`` lines."""
    groups: dict[tuple[int, int], list[int]] = {}
    sizes = (template.volumes * template.itemsize).tolist()
    for s, t, n in zip(template.source_device.tolist(), template.target_device.tolist(), sizes, strict=True):
        groups.setdefault((t, n), []).append(s)
    lines = []
    for (t, n), senders in sorted(groups.items()):
        many = f"devices {senders[0]}..{senders[-1]} ({len(senders)}), each" if len(senders) > 2 else None
        few = " and ".join(f"device {s}" if s >= 0 else "a constant" for s in senders)
        lines.append(f"    {many or few} -> device {t}: {n:,} bytes")
    for s, t in zip(template.fanout_from.tolist(), template.fanout_to.tolist(), strict=True):
        lines.append(f"    inside the node: device {s} -> device {t}")
    return lines[:most] + ([f"    ... and {len(lines) - most} more"] if len(lines) > most else [])


def figure(plan: Plan) -> Any:
    """See `Plan.figure`."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise UserError("plan.figure() needs matplotlib: pip install matplotlib") from error
    t = traffic(plan)
    sources = sorted(set(plan.topology.nodes(plan.source, "source").values()))
    targets = sorted(set(plan.topology.nodes(plan.target, "target").values()))
    if not sources or not targets:
        raise MappingError("an empty plan has no picture")
    table = np.array([[t.edges.get((a, b), 0) for b in targets] for a in sources]) / 1e6
    picture = Figure(figsize=(2.5 + 0.35 * min(len(targets), 40), 2 + 0.3 * min(len(sources), 40)))
    axes = picture.add_subplot()
    image = axes.imshow(table, aspect="auto", cmap="viridis")
    axes.set_xlabel("target node")
    axes.set_ylabel("source node")
    axes.set_xticks(range(len(targets)), [str(n) for n in targets])
    axes.set_yticks(range(len(sources)), [str(n) for n in sources])
    axes.set_title(f"{t.wire_bytes / 1e9:.3g} GB, plan {plan.digest[:8]}")
    picture.colorbar(image, label="MB")
    return picture
