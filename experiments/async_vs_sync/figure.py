"""Draws figure.svg from rows.jsonl: exact match of every run, asynchronous beside synchronous."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first

HERE = Path(__file__).resolve().parent


def main() -> None:
    """Read the rows, write the figure."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(figsize=(4, 3))
    for position, mode in enumerate(("async", "sync")):
        values = [row["after"] for row in rows if row["mode"] == mode]
        axes.plot([position] * len(values), values, "o")
        if values:
            axes.plot([position - 0.2, position + 0.2], [sum(values) / len(values)] * 2, "k-")
    axes.set_xticks([0, 1], ["asynchronous", "synchronous"])
    axes.set_xlim(-0.5, 1.5)
    axes.set_ylim(0, 1)
    axes.set_ylabel("exact match after training")
    figure.tight_layout()
    figure.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
