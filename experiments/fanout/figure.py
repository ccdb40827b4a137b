"""Draws figure.svg from rows.jsonl: seconds to the last reader against readers, per kind of fan-out."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
COLORS = {"star": "#9aa3ab", "chain": "#4c78a8", "tree": "#d9722e"}


def main() -> None:
    """One line per kind, from the newest row per number of readers."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    newest = {(row["kind"], row["readers"]): row for row in rows}
    picture = Figure(figsize=(5, 3.2), layout="constrained")
    axes = picture.add_subplot()
    for kind, color in COLORS.items():
        points = sorted((n, row["seconds"]) for (k, n), row in newest.items() if k == kind)
        axes.plot([n for n, _ in points], [s for _, s in points], "o-", color=color, label=kind)
    row = rows[-1]
    axes.axhline(
        row["nbytes"] / row["rate"], color="black", lw=0.8, ls=":", label="one copy at a source's rate"
    )
    axes.set_xlabel("readers")
    axes.set_ylabel("seconds to the last that serves")
    axes.legend(frameon=False)
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
