"""Bytes and seconds of versions in a file channel: anchors and deltas at several densities."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=6")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.transfer.files import FilePublisher, FileSubscriber, FileWriterConfig
from jaxrl_sync.transfer.version import Version

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parent / "sparsity"))

from recorded import commit  # noqa: E402

ROWS = HERE / "rows.jsonl"
DENSITIES = (0.001, 0.01, 0.1)
TENSORS = 8
SHAPE = (4096, 2048)

SHOWN = ("bytes", "write_s", "read_s", "verify_s")

Bits = dict[str, np.ndarray[Any, Any]]


def mesh(shape: tuple[int, ...], names: tuple[str, ...], first: int) -> Mesh:
    """Some of this process's devices."""
    devices = np.array(jax.devices()[first : first + int(np.prod(shape))]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def step(weights: Bits, density: float, rng: np.random.Generator) -> None:
    """Move a share of the weights by one or two units in the last place."""
    for bits in weights.values():
        flat = bits.reshape(-1)
        at = rng.choice(flat.size, int(flat.size * density), replace=False)
        moves = rng.choice(np.array([1, -1, 2, -2]), at.size, p=[0.45, 0.45, 0.05, 0.05])
        flat[at] = (flat[at].astype(np.int32) + moves).astype(np.uint16)


def take(reader: FileSubscriber, weights: Bits) -> tuple[Any, float]:
    """The newest version, compared with what it must be: its report, and seconds of all of it."""
    update = reader.poll(30)
    assert update is not None
    start = time.perf_counter()
    report = update.prepare()
    seconds = time.perf_counter() - start
    for name, leaf in update.swap().items():
        for shard in leaf.addressable_shards:
            found = np.ascontiguousarray(np.asarray(shard.data)).view(np.uint16)
            if not np.array_equal(found, weights[name][shard.index]):
                raise SystemExit(f"{name} of {update.version} arrived with other bits")
    return report, seconds


def pair(
    writer: FilePublisher,
    readers: tuple[FileSubscriber, FileSubscriber],
    weights: Bits,
    tree: Callable[[], Any],
    lineage: str,
    density: float,
    rng: np.random.Generator,
) -> Iterator[dict[str, Any]]:
    """An anchor, then a delta on it; the second reader comes when both are there."""
    for number in range(2):
        outcome = writer.publish(tree(), Version(lineage, number)).wait(300)
        report, _ = take(readers[0], weights)
        yield {
            "kind": "delta" if number else "anchor",
            "density": density if number else 1.0,
            "bytes": outcome.delta_bytes + outcome.anchor_bytes,
            "total_bytes": sum(b.nbytes for b in weights.values()),
            "export_s": outcome.export_s,
            "write_s": outcome.write_s,
            "read_s": report.wire_s,
            "verify_s": report.verify_s,
            "late_s": take(readers[1], weights)[1] if number else None,
            "coding": report.coding,
            "load": os.getloadavg()[0],
            "jax": jax.__version__,
        }
        step(weights, density, rng)


def main() -> None:
    """Print and record every row."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--dry", action="store_true", help="record nothing")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    cut = NamedSharding(mesh((2, 2), ("a", "b"), 0), PartitionSpec("a", "b"))
    other = NamedSharding(mesh((2,), ("x",), 4), PartitionSpec(None, "x"))
    weights: Bits = {
        f"w{i}": rng.normal(0, 2e-3, SHAPE).astype(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        for i in range(TENSORS)
    }

    def tree() -> Any:
        return {n: jax.device_put(b.view(ml_dtypes.bfloat16), cut) for n, b in weights.items()}

    target = {n: jax.ShapeDtypeStruct(SHAPE, np.dtype(ml_dtypes.bfloat16), sharding=other) for n in weights}
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "channel"
        with FilePublisher(path, tree(), config=FileWriterConfig(keep=2, anchor_every=100)) as writer:
            for density in DENSITIES:
                for repeat in range(options.repeats):
                    with FileSubscriber(path, target) as reader, FileSubscriber(path, target) as late:
                        lineage = f"d{density}-{repeat}"  # another one: its first version is an anchor
                        for row in pair(writer, (reader, late), weights, tree, lineage, density, rng):
                            rows.append({"commit": commit(), **row})
                            print(json.dumps(rows[-1]), flush=True)
    for density in (1.0, *DENSITIES):
        found = [r for r in rows if r["density"] == density]
        middle = {k: statistics.median(r[k] for r in found) for k in SHOWN}
        print(f"{100 * density:6.1f} %  1/{found[0]['total_bytes'] / middle['bytes']:.0f}  {middle}")
    if not options.dry:
        ROWS.write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main()
