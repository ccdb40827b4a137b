"""Draws figure.svg from the newest rows: CPU seconds of a plan against parameters."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent


def main() -> None:
    """One line for jitted layers and one for the plain loop, where there are rows."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    picture = Figure(figsize=(6, 3.5))
    axes = picture.add_subplot()
    for plain, label in ((False, "one jitted layer function"), (True, "plain loop")):
        newest = {row["params"]: row for row in rows if row["plain_loop"] == plain}
        chosen = sorted(newest.items())
        if chosen:
            seconds = [row["trace_cpu_s"] + row["plan_cpu_s"] for _, row in chosen]
            axes.plot([n / 1e9 for n, _ in chosen], seconds, "o-", label=label)
    axes.set_xscale("log")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("parameters, 10^9 (same number of tensors)")
    axes.set_ylabel("CPU seconds: trace, plan, proof")
    axes.legend()
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
