"""Draws figure.svg from the newest rows: seconds per case of each way to move W1."""

from __future__ import annotations

import json
from pathlib import Path

from matplotlib.figure import Figure

HERE = Path(__file__).resolve().parent
WAYS = {
    "memcpy_s": "memcpy",
    "reshard_s": "reshard",
    "reshard_numpy_s": "reshard, numpy",
    "device_put_s": "device_put",
}


def main() -> None:
    """One group of bars per case."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    rows = list({row["case"]: row for row in rows}.values())
    picture = Figure(figsize=(7, 3.5))
    axes = picture.add_subplot()
    for k, (key, label) in enumerate(WAYS.items()):
        at = [i + (k - 1.5) * 0.2 for i in range(len(rows))]
        axes.bar(at, [row[key] * 1e3 for row in rows], width=0.2, label=label)
    axes.set_xticks(range(len(rows)), [f"case {row['case']}" for row in rows])
    axes.set_ylabel("ms")
    axes.set_title(f"{rows[0]['bytes'] / 1e9:.2f} GB between two meshes, jax {rows[0]['jax']}")
    axes.legend()
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
