"""Draws figure.svg from the newest rows: milliseconds per case and jax version of each way to move W1."""

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
    """A panel per jax version, in it one group of bars per case."""
    rows = [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]
    newest = {(row["jax"], row["case"]): row for row in rows}
    versions = sorted({version for version, _ in newest})
    picture = Figure(figsize=(5 * len(versions), 3.5), layout="constrained")
    panels = picture.subplots(1, len(versions), sharey=True, squeeze=False)[0]
    for axes, version in zip(panels, versions, strict=True):
        cases = [row for (v, _), row in sorted(newest.items()) if v == version]
        for k, (key, label) in enumerate(WAYS.items()):
            at = [i + (k - 1.5) * 0.2 for i in range(len(cases))]
            axes.bar(at, [row[key] * 1e3 for row in cases], width=0.2, label=label)
        axes.set_xticks(range(len(cases)), [f"case {row['case']}" for row in cases])
        axes.set_title(f"{cases[0]['bytes'] / 1e9:.2f} GB, jax {version}")
    panels[0].set_ylabel("ms")
    panels[0].legend()
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
