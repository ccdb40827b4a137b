"""Draws figure.svg from rows.jsonl: seconds per way on a log axis, and the bound of each as a line."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
LABELS = {"naive": "each takes it all", "seed": "one seed, relays", "delta": "one seed, only changes"}


def main() -> None:
    """One bar per way, from its newest row."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    newest = {row["way"]: row for row in rows}
    names = [name for name in LABELS if name in newest]
    picture = Figure(figsize=(6, 2.4), layout="constrained")
    axes = picture.add_subplot()
    axes.barh([LABELS[n] for n in names], [newest[n]["seconds"] for n in names], color="#d9722e")
    for position, name in enumerate(names):
        bound = newest[name]["bound_s"]
        axes.plot([bound, bound], [position - 0.4, position + 0.4], color="black", lw=1.2)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlabel("seconds until the last of four replicas serves (line: bytes / rate + 3 round trips)")
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
