"""Times trace + plan + proof of Kimi-K2's tensors at several widths; prints and records."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax

from jaxrl_sync.sharding import plan, trace
from jaxrl_sync.sharding.cli import paper_source, paper_target
from jaxrl_sync.sharding.describe import seconds
from jaxrl_sync.sharding.paper import PaperMesh
from jaxrl_sync.sharding.presets import family
from jaxrl_sync.sharding.presets.catalog import model

HERE = Path(__file__).resolve().parent
ROWS = HERE / "rows.jsonl"
WIDTHS = (32, 8, 2, 1)


def narrow(divisor: int) -> family.FamilyConfig:
    """Kimi-K2 with every width divided; the number of layers, heads and experts stays."""
    full = model("kimi-k2")
    names = ("vocab_size", "d_model", "head_dim", "d_ff", "d_expert", "q_rank", "kv_rank", "rope_dim")
    return dataclasses.replace(full, **{n: getattr(full, n) // divisor for n in names})


def measure(divisor: int, plain_loop: bool) -> dict[str, Any]:
    """One row."""
    cfg = narrow(divisor)
    wall, cpu = time.perf_counter(), time.process_time()
    source = paper_source(cfg, PaperMesh.parse("fsdp=256"))
    corr = trace(functools.partial(family.convert, cfg=cfg, jit_layers=not plain_loop), source)
    traced = time.process_time()
    target = paper_target(cfg, PaperMesh.parse("tp=8,ep=16"), corr)
    made = plan(corr.export_layout_of(source), target, corr)
    return {
        "width": f"1/{divisor}", "params": cfg.num_params, "tensors": len(target), "plain_loop": plain_loop,
        "trace_cpu_s": traced - cpu, "plan_cpu_s": time.process_time() - traced,
        "wall_s": time.perf_counter() - wall, "templates": len(made.templates),
        "peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "predicted_s": seconds(made)[0], "digest": made.digest, "jax": jax.__version__,
    }  # fmt: skip


def main() -> int:
    """Each width in a process of its own, so that peak memory is its own."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--width", type=int, help="measure one width here and print its row")
    parser.add_argument("--plain-loop", action="store_true")
    parser.add_argument("--whole", action="store_true", help="the full width alone")
    options = parser.parse_args()
    if options.width:
        print(json.dumps(measure(options.width, options.plain_loop)))
        return 0
    git = ["git", "-C", str(HERE), "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git, capture_output=True, text=True, timeout=10).stdout.strip()
    for divisor in WIDTHS[-1:] if options.whole else WIDTHS:
        words = [sys.executable, __file__, "--width", str(divisor)] + ["--plain-loop"] * options.plain_loop
        done = subprocess.run(words, capture_output=True, text=True, timeout=900, check=True)
        row = {"commit": commit, "load": os.getloadavg()[0], **json.loads(done.stdout)}
        total = row["trace_cpu_s"] + row["plan_cpu_s"]
        print(f"{row['params'] / 1e9:8.1f} G parameters  {total:6.2f} CPU s  {row['wall_s']:6.2f} s  "
              f"{row['peak_bytes'] / 1e9:5.2f} GB", flush=True)  # fmt: skip
        with ROWS.open("a", encoding="utf8") as out:
            out.write(json.dumps(row) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
