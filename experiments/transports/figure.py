"""Draws figure.svg from the newest row at full size: GB/s of every way to bring W1 to another process."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
WAYS = {
    "memcpy": "memcpy, 2 threads", "shm": "jaxrl_sync, shm", "ray": "Ray object store",
    "nixl-cma": "NIXL, CMA", "stream": "raw sockets", "tcp": "jaxrl_sync, tcp", "nixl-tcp": "NIXL, tcp",
    "mooncake-tcp": "Mooncake, tcp", "jax-transfer": "jax.experimental.transfer",
}  # fmt: skip


def main() -> None:
    """One bar per way, slowest repetition to fastest as a line."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    row = next(r for r in reversed(rows) if r["scale"] == 1.0)
    names = [name for name in WAYS if name in row["seconds"]]
    rates = [[row["bytes"] / s / 1e9 for s in row["seconds"][name]] for name in names]
    picture = Figure(figsize=(7, 3.5), layout="constrained")
    axes = picture.add_subplot()
    colors = ["#d9722e" if name in ("shm", "tcp") else "#9aa3ab" for name in names]
    medians = [statistics.median(r) for r in rates]
    spread = [[m - min(r) for m, r in zip(medians, rates, strict=True)],
              [max(r) - m for m, r in zip(medians, rates, strict=True)]]  # fmt: skip
    axes.barh([WAYS[n] for n in names], medians, xerr=spread, color=colors)
    axes.invert_yaxis()
    axes.set_xlabel("GB/s")
    axes.set_title(f"{row['bytes'] / 1e9:.2f} GB to another process, 2 CPU cores ({row['commit']})")
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
