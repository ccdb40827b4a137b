"""Times reshard against jax.device_put and memcpy on workload W1, cases A, B and C; prints and records."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
)
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import ml_dtypes
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import Layout, copies_digest, make_pool, plan, reshard, trace
from jaxrl_sync.sharding import kernels as kernels_module
from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.sharding.resharding import Pool, source_views

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.jsonl"
CASES = {"A": ((4, 1), (1, 4)), "B": ((2, 2), (2, 2)), "C": ((1, 4), (2, 2))}
REPEATS = 7
V, D, HEADS, KV, K, F = 151_936, 1024, 16, 8, 128, 3072

Tree = dict[str, Any]


def shapes(layers: int) -> dict[str, tuple[tuple[int, ...], PartitionSpec]]:
    """Path -> (shape, spec) of W1."""
    column, row, none = PartitionSpec("fsdp", "tp"), PartitionSpec("tp", "fsdp"), PartitionSpec()
    found = {"embed": ((V, D), row), "lm_head": ((D, V), column), "final_norm": ((D,), none)}
    for i in range(layers):
        layer = {
            "q": ((D, HEADS * K), column), "k": ((D, KV * K), column), "v": ((D, KV * K), column),
            "o": ((HEADS * K, D), row), "gate": ((D, F), column), "up": ((D, F), column),
            "down": ((F, D), row),
            "norm1": ((D,), none), "norm2": ((D,), none), "q_norm": ((K,), none), "k_norm": ((K,), none),
        }  # fmt: skip
        found |= {f"{i}/{name}": value for name, value in layer.items()}
    return found


def mesh(shape: tuple[int, int], first: int) -> Mesh:
    """fsdp x tp over four devices."""
    devices = np.array(jax.devices()[first : first + 4]).reshape(shape)
    return Mesh(devices, ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)


def timed(call: Callable[[], Any]) -> float:
    """Seconds of one call, results ready."""
    start = time.perf_counter()
    jax.block_until_ready(call())
    return time.perf_counter() - start


def medians(calls: dict[str, Callable[[], Any]]) -> dict[str, float]:
    """Median of REPEATS calls of each, taken in turns, after one round that is not counted."""
    rounds = [{name: timed(call) for name, call in calls.items()} for _ in range(REPEATS + 1)]
    return {name: statistics.median(r[name] for r in rounds[1:]) for name in calls}


def memcpy(size: int, threads: int) -> Callable[[], None]:
    """Copies ``size`` bytes with numpy on threads, between buffers touched before."""
    source, target = np.ones(size, np.uint8), np.ones(size, np.uint8)
    cuts = [size * i // threads for i in range(threads + 1)]

    def run() -> None:
        work = [
            threading.Thread(target=np.copyto, args=(target[a:b], source[a:b]))
            for a, b in zip(cuts, cuts[1:], strict=False)
        ]
        for t in work:
            t.start()
        for t in work:
            t.join()

    return run


def case(name: str, layers: int, threads: int) -> dict[str, Any]:
    """One row."""
    rng = np.random.default_rng(0)
    on, to = mesh(CASES[name][0], 0), mesh(CASES[name][1], 4)
    model = shapes(layers)
    params: Tree = {}
    for path, (shape, spec) in model.items():
        host = rng.integers(0, 1 << 16, shape, dtype=np.uint16).view(ml_dtypes.bfloat16)
        params[path] = jax.device_put(host, NamedSharding(on, spec))
    target = {
        p: jax.ShapeDtypeStruct(s, "bfloat16", sharding=NamedSharding(to, c)) for p, (s, c) in model.items()
    }
    layout = Layout.of(target)
    size = layout.total_bytes
    pool_s = timed(lambda: make_pool(_plan(params, target)).plan_digest)
    pool = make_pool(_plan(params, target))
    assert isinstance(pool, Pool)
    first_s = timed(lambda: reshard(params, _plan(params, target), out=pool, threads=threads))
    made = _plan(params, target)
    row: dict[str, Any] = {"case": name, "bytes": size, "tensors": len(model), "threads": threads}
    row["load"] = os.getloadavg()[0]  # above 1 only the ratios within a row mean something
    row |= {"jax": jax.__version__, "python": sys.version.split()[0], "kernels": kernels() is not None}
    row |= {"pool_s": pool_s, "first_s": first_s}
    _check(params, reshard(params, made, out=pool, threads=threads))
    for view in pool.views.values():
        view[...] = 0
    with _without_kernels():
        _check(params, reshard(params, made, out=pool, threads=threads))
    shardings = {p: x.sharding for p, x in target.items()}
    views, table = source_views(params, made), pool.table(made)
    copies = tuple(c for e in made.for_rank(0, "target").edges for c in e.copies)

    def without_kernels() -> Any:
        with _without_kernels():
            return reshard(params, made, out=pool, threads=threads)

    calls = {
        "reshard_s": lambda: reshard(params, made, out=pool, threads=threads),
        "device_put_s": lambda: jax.device_put(params, shardings),
        "memcpy_s": memcpy(size, threads),
        "reshard_numpy_s": without_kernels,
        "copy_s": lambda: table.execute(views, pool.views, threads),
        "copy_and_sum_s": lambda: table.execute(views, pool.views, threads, sums={}),
        "sum_s": lambda: copies_digest(copies, views, "source", threads),
    }
    return row | medians(calls)


@contextlib.contextmanager
def _without_kernels() -> Iterator[None]:
    """As if the C kernels were not built."""
    native, kernels_module.kernels = kernels_module.kernels, lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        kernels_module.kernels = native


def _plan(params: Tree, target: Tree) -> Any:
    """Everything that a first call has to do: trace, plan, prove."""
    corr = trace(lambda t: t, params, target)
    return plan(corr.export_layout, Layout.of(target), corr)


def _check(params: Tree, made: Tree) -> None:
    for path, x in params.items():
        parts = path.split("/")
        y = made
        for part in parts:
            y = y[part]
        same = np.array_equal(np.asarray(x).view(np.uint16), np.asarray(y).view(np.uint16))
        if not same:
            raise SystemExit(f"{path} arrived with other bits")


def main() -> int:
    """Runs the cases and appends their rows."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--cases", default="ABC")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=Path, default=ROWS, help="file that the rows are appended to")
    options = parser.parse_args()
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    print("case     pool    first  reshard    numpy  device_put  memcpy     copy  + sums  | "
          "device_put/reshard  /numpy  reshard/memcpy")  # fmt: skip
    for name in options.cases:
        row = {"commit": commit, **case(name, options.layers, options.threads)}
        columns = [row[k] * 1e3 for k in ("pool_s", "first_s", "reshard_s", "reshard_numpy_s", "device_put_s",
                                          "memcpy_s", "copy_s", "copy_and_sum_s")]  # fmt: skip
        slow = row["device_put_s"]
        print(name, " ".join(f"{c:8.1f}" for c in columns), f"ms | {slow / row['reshard_s']:15.2f} "
              f"{slow / row['reshard_numpy_s']:7.2f} {row['reshard_s'] / row['memcpy_s']:15.2f}",
              flush=True)  # fmt: skip
        with options.rows.open("a", encoding="utf8") as out:
            out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
