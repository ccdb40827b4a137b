"""``jaxrl-sync plan``: what a weight update of a published model would cost, on paper, allocating nothing.

jaxrl-sync plan --model kimi-k2 --source "fsdp=256" --target "tp=8,ep=16" [--replicas N]
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence

import jax

from jaxrl_sync.sharding.command_line import Parser
from jaxrl_sync.sharding.correspondence import Correspondence
from jaxrl_sync.sharding.describe import seconds, traffic
from jaxrl_sync.sharding.errors import MappingError, UserError
from jaxrl_sync.sharding.layout import Layout, Placement, TensorLayout, dtype_of
from jaxrl_sync.sharding.paper import PaperMesh, layout, split_first
from jaxrl_sync.sharding.paths import nearest
from jaxrl_sync.sharding.planning import Plan, plan
from jaxrl_sync.sharding.presets import family
from jaxrl_sync.sharding.presets.catalog import MODELS, model
from jaxrl_sync.sharding.relays import relay
from jaxrl_sync.sharding.topology import GIGABIT, Policy, Topology
from jaxrl_sync.sharding.tracing import trace

TRAINER_AXES = ("dp", "fsdp", "tp", "ep", "pp")
ENGINE_AXES = ("tp", "ep", "dp")


def parser() -> argparse.ArgumentParser:
    """The command line of ``jaxrl-sync plan``."""
    p = Parser("jaxrl-sync plan", description=__doc__.splitlines()[0] if __doc__ else None)
    p.add_argument("--model", required=True, help=", ".join(MODELS))
    p.add_argument("--source", required=True, metavar="AXES", help='trainer mesh, as "fsdp=256"')
    p.add_argument("--target", required=True, metavar="AXES", help='mesh of one engine, as "tp=8,ep=16"')
    p.add_argument(
        "--replicas", type=_positive, default=1, metavar="N", help="engines of that mesh (default 1)"
    )
    p.add_argument("--receivers", choices=("device", "node"), default="device", help="who gets a copy")
    p.add_argument("--devices-per-node", type=_positive, default=8)
    p.add_argument("--nics-per-node", type=_positive, default=8)
    p.add_argument("--gbit", type=_positive, default=400, help="rate of one NIC in Gb/s")
    p.add_argument("--dtype", default="bfloat16", help="what travels (default bfloat16)")
    p.add_argument(
        "--stacked-experts", action="store_true", help="engine keeps experts in one tensor per layer"
    )
    p.add_argument("--explain", metavar="PATH", help="also explain one engine tensor")
    p.add_argument("--figure", metavar="FILE", help="also draw who sends what to whom")
    return p


def _positive(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on, found {text!r}")
    return int(text)


def paper_source(cfg: family.FamilyConfig, mesh: PaperMesh) -> Layout:
    """The trainer's fp32 tree: layers and experts unsplit, all axes on the first dimension that divides."""
    shapes = family.trainer_shapes(cfg)
    _check_axes("--source", "trainers", mesh, TRAINER_AXES, next(iter(shapes)))
    placed = {}
    for path, shape in shapes.items():
        skip = 2 if "/experts/" in path else 1 if "/" in path else 0
        placed[path] = mesh.placement(shape, split_first(mesh, shape, skip), path=path)
    return layout(placed, "float32")


def _check_axes(option: str, who: str, mesh: PaperMesh, known: tuple[str, ...], path: str) -> None:
    for name in mesh.sizes:
        if name not in known:
            raise MappingError(
                f"{option}: unknown axis {name!r}{nearest(name, known)}, for {path!r} first; "
                f"{who} have {', '.join(known[:-1])} and {known[-1]}"
            )


def paper_target(cfg: family.FamilyConfig, mesh: PaperMesh, corr: Correspondence) -> Layout:
    """The engine's tree: ``tp`` on heads and hidden units, ``ep`` on experts, all else replicated."""
    sizes = mesh.sizes
    _check_axes("--target", "engines", mesh, ENGINE_AXES, next(iter(corr.tensors)))
    tp, ep = sizes.get("tp", 1), sizes.get("ep", 1)

    def place(path: str, shape: tuple[int, ...]) -> Placement:
        dim, expert = family.engine_split(path, cfg), family.expert_of(path)
        spec: list[str | None] = [None] * len(shape)
        if dim is not None and "tp" in sizes and shape[dim] % tp == 0:
            spec[dim] = "tp"
        if path.endswith(("experts_gate_up", "experts_down")) and "ep" in sizes:
            spec[0] = "ep"
        only = {"ep": expert * ep // cfg.num_experts} if expert is not None and "ep" in sizes else None
        return mesh.placement(shape, tuple(spec), only, path)

    return Layout({p: TensorLayout(t.dtype, place(p, t.shape)) for p, t in corr.tensors.items()})


def paper_plan(args: argparse.Namespace) -> Plan:
    """The plan that the arguments describe."""
    cfg, dtype = model(args.model), dtype_of(args.dtype)
    if jax.dtypes.canonicalize_dtype(dtype) != dtype:
        raise MappingError(f"--dtype: jax has no {dtype} unless jax_enable_x64 is set")
    source_mesh = PaperMesh.parse(args.source, args.devices_per_node)
    source = paper_source(cfg, source_mesh)
    convert = functools.partial(family.convert, cfg=cfg, dtype=dtype, per_expert=not args.stacked_experts)
    corr = trace(convert, source)
    target = paper_target(cfg, PaperMesh.parse(args.target, args.devices_per_node), corr)
    topology = Topology(rate=args.nics_per_node * args.gbit * GIGABIT)
    return plan(corr.export_layout_of(source), target, corr, topology, Policy(args.receivers))


PUBLISHED_S = 1.3
"""Kimi-K2, bf16 on 256 trainer GPUs to FP8 on 128 inference GPUs, a 400 Gb/s NIC each (arXiv 2510.27656)."""

PUBLISHED_OF_BOUND = (1.18, 2.12)
"""End-to-end seconds over the bound of the wire, WeightBridge, models from 16 B to 1 T parameters."""


def beside_published(made: Plan, itemsize: int) -> str:
    """The prediction beside what others measured: theirs end to end, this one the wire alone."""
    predicted, bound = seconds(made)
    low, high = (factor * bound for factor in PUBLISHED_OF_BOUND)
    senders, receivers = len(made.source.devices), len(made.target.devices)
    fp8 = f", {predicted / itemsize:.4g} s if it travelled in FP8" if itemsize > 1 else ""
    return (
        "  published beside it (end to end; the prediction is the wire alone):\n"
        f"    Kimi-K2 from 256 to 128 GPUs in FP8: {PUBLISHED_S} s; this plan from {senders} to {receivers}: "
        f"{predicted:.4g} s{fp8}\n"
        "    WeightBridge {} to {} times the bound: ".format(*PUBLISHED_OF_BOUND)
        + f"that would be {low:.4g} to {high:.4g} s here"
    )


def _replicas(made: Plan, count: int) -> str:
    senders = len(set(made.source.devices.values()))
    receivers = len(set(made.target.devices.values()))
    rate = made.topology.rate
    wire = traffic(made).wire_bytes
    lines = [f"  {count} engines of {receivers} nodes from {senders} trainer nodes:"]
    for shape in ("direct", "chain", "tree"):
        r = relay(count, wire, senders * rate, receivers * rate, shape)
        lines.append(f"    {shape}: {r.seconds:.3f} s, depth {r.depth}, {r.num_chunks} chunks")
    return "\n".join(lines)


def _draw(made: Plan, file: str) -> None:
    picture = made.figure()
    try:
        picture.savefig(file)
    except (OSError, ValueError) as error:  # no such folder; no such format
        raise UserError(f"--figure {file}: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the report of a plan on paper; returns the exit code (2: bad command line or mapping)."""
    args = parser().parse_args(argv)
    try:
        started = time.perf_counter()
        made = paper_plan(args)
        took = time.perf_counter() - started
        print(f"{args.model}: {model(args.model).num_params / 1e9:.1f} G parameters, planned in {took:.1f} s")
        print(made.report())
        print(beside_published(made, dtype_of(args.dtype).itemsize))
        if args.replicas > 1:
            print(_replicas(made, args.replicas))
        if args.explain:
            print(made.explain(args.explain))
        if args.figure:
            _draw(made, args.figure)
    except UserError as error:
        print(f"jaxrl-sync: error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
