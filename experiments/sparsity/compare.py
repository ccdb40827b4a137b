"""Times how a publisher finds out what changed: on the host, or by jitted encoders on its devices (CPUs).

A chain each for three ways from a trainer's layout to an engine's, 64M bfloat16 elements of which 1 %
changed. Medians of 7 versions; frames of both are compared. Prints a table and appends rows to
``compare.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=6".strip()
)

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from recorded import circumstances
from speed import weights

from jaxrl_sync.sharding import Edge, Layout, plan, trace
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.delta.shards import ShardEncoders
from jaxrl_sync.transfer.exports import shards_of
from jaxrl_sync.transfer.lazy import DeviceShards
from jaxrl_sync.transfer.payload.chain import Chain
from jaxrl_sync.transfer.payload.differences import Differences
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.version import Version

ROWS = Path(__file__).resolve().parent / "compare.jsonl"
VERSIONS, WARM = 9, 2
SETTINGS = PayloadSettings("sparse", CodingRules(zstd="off", whole=False))
Tree = dict[str, Any]
Case = tuple[int, P, Callable[[Tree], Tree], int, P]
CASES: dict[str, Case] = {
    "one device to one": (1, P(), lambda t: t, 1, P()),
    "rows of 4 to columns of 2": (4, P("x"), lambda t: t, 2, P(None, "z")),
    "rows of 4, transposed, to rows of 2": (4, P("x"), lambda t: {"w": t["w"].T}, 2, P("z")),
}


def mesh(count: int, name: str, first: int) -> Mesh:
    """One axis over some of the virtual devices."""
    return Mesh(np.array(jax.devices()[first : first + count]), (name,), axis_types=(AxisType.Auto,))


def edge_of(case: Case, tree: Tree) -> tuple[Any, Edge]:
    """The correspondence and the only edge of its plan."""
    _, _, convert, count, spec = case
    sharding = NamedSharding(mesh(count, "z", 4), spec)
    target = {
        path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
        for path, x in jax.eval_shape(convert, tree).items()
    }
    correspondence = trace(convert, tree, target)
    made = plan(correspondence.export_layout, Layout.of(target), correspondence)
    (edge,) = made.for_rank(0, side="source").edges
    return correspondence, edge


def measure(name: str, side: int, changed: float, threads: int) -> dict[str, Any]:
    """One row: milliseconds to compare a version."""
    case = CASES[name]
    sharding = NamedSharding(mesh(case[0], "x", 0), case[1])
    value, rng = weights(side * side, 0.0)[0].reshape(side, side), np.random.default_rng(1)
    correspondence, edge = edge_of(case, {"w": jax.device_put(value, sharding)})
    host, device = (Chain("ab" * 32, edge, SETTINGS, threads) for _ in range(2))
    differences = Differences(ShardEncoders(threads), SETTINGS.history, threads)
    times: dict[str, list[float]] = {"host": [], "device": [], "encoders": []}
    for number in range(VERSIONS + 1):
        version, exported = (
            Version("bench", number),
            correspondence.export({"w": jax.device_put(value, sharding)}),
        )
        jax.block_until_ready(exported)
        shards = shards_of(exported), DeviceShards(version, exported, differences)
        if number == 0:
            host.anchor(version, shards[0])
            device.anchor(version, shards[1])
        else:
            base, before = Version("bench", number - 1), differences.compare_s
            one, other = host.frame(base, version, shards[0]), device.frame(base, version, shards[1])
            assert one is not None and other is not None and one.data == other.data
            found = one.compare_s, other.compare_s, differences.compare_s - before
            for chain in (host, device):
                chain.confirm("engine", version)
            if number > WARM:
                for kind, seconds in zip(times, found, strict=True):
                    times[kind].append(seconds * 1e3)
        value = value.copy()
        value.reshape(-1).view(np.uint16)[rng.integers(0, value.size, int(value.size * changed))] += 1
    ms = {kind: round(statistics.median(found), 1) for kind, found in times.items()}
    return {
        **circumstances(),
        "case": name,
        "elements": side * side,
        "changed": changed,
        "threads": threads,
        **ms,
    }


def main(arguments: list[str]) -> int:
    """Every case with one thread and with two."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", type=int, default=8192, help="rows and columns of the tensor")
    parser.add_argument("--changed", type=float, default=0.01)
    parser.add_argument("--no-rows", action="store_true", help="print only")
    given = parser.parse_args(arguments)
    for threads in (1, 2):
        for name in CASES:
            row = measure(name, given.side, given.changed, threads)
            print(
                f"{name:36s} {threads} threads: host {row['host']:6.1f} ms, device {row['device']:6.1f} ms "
                f"({row['encoders']:.1f} in the encoders)",
                flush=True,
            )
            if not given.no_rows:
                with ROWS.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    return 0
