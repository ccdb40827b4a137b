"""Draws every round of the newest row: our rate and perftest's, beside each other."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).resolve().parent
plt.rcParams["svg.hashsalt"] = "jaxrl-sync"


def main() -> None:
    """Write figure.svg."""
    row = json.loads((HERE / "rows.jsonl").read_text().splitlines()[-1])
    figure, axes = plt.subplots(1, len(row["mb_per_s"]), figsize=(7, 2.8), constrained_layout=True)
    for axis, (name, rates) in zip(axes, row["mb_per_s"].items(), strict=True):
        for who, seen in rates.items():
            if seen:
                axis.plot(range(1, len(seen) + 1), seen, marker="o", label=who)
        axis.set_title(f"{name}: {row['ratio'][name]:.2f} of perftest's median", fontsize=9)
        axis.set_xlabel("round")
        axis.set_ylabel("MB/s in the VM")
        axis.set_ylim(bottom=0)
    axes[0].legend(fontsize=8)
    figure.savefig(HERE / "figure.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
