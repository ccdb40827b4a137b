"""Draws density.svg from density.jsonl: changed share by step, learning rate and dtype, and gaps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt  # noqa: E402  the backend must be chosen first

HERE = Path(__file__).resolve().parent
COLORS = {"bf16": "tab:blue", "fp16": "tab:orange", "fp8": "tab:green"}
MODELS = {"scratch": "addition model from scratch", "smollm2-135m": "SmolLM2-135M, pretrained"}


def main() -> None:
    """Read the rows, write the figure."""
    rows = [json.loads(line) for line in (HERE / "density.jsonl").read_text().splitlines()]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6))
    for plot, (model, title) in zip(axes, MODELS.items(), strict=False):
        _shares(plot, [r for r in rows if r["model"] == model], title)
    _gaps(axes[2], [r for r in rows if r["model"] == "smollm2-135m" and r["dtype"] == "bf16"])
    figure.tight_layout()
    figure.savefig(HERE / "density.svg")


def _shares(plot: Any, rows: list[dict[str, Any]], title: str) -> None:
    rates = sorted({r["learning_rate"] for r in rows})
    for dtype, color in COLORS.items():
        for rate, style in zip(rates, ("-", "--", ":", "-."), strict=False):
            chosen = [r for r in rows if r["dtype"] == dtype and r["learning_rate"] == rate]
            steps, shares = [r["step"] for r in chosen], [r["fraction"] for r in chosen]
            plot.plot(steps, shares, style, color=color, label=f"{dtype}, lr {rate:g}")
        published = [r["published"] for r in rows if r["dtype"] == dtype][:1]
        for share in published:
            plot.axhline(share, color=color, alpha=0.3, linewidth=4)
    plot.set_yscale("log")
    plot.set_xlabel("update (bands: published, Qwen3-30B-A3B)")
    plot.set_ylabel("changed elements")
    plot.set_title(title)
    plot.legend(fontsize=6)


def _gaps(plot: Any, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        total = sum(row["gaps"].values())
        sizes = sorted(int(bits) for bits in row["gaps"])
        shares = [row["gaps"][str(bits)] / total for bits in sizes]
        plot.plot(
            [2**bits for bits in sizes], shares, label=f"lr {row['learning_rate']:g} step {row['step']}"
        )
    plot.set_xscale("log", base=2)
    plot.axvline(256, color="gray", linewidth=0.5)
    plot.set_xlabel("gap to the next changed element, up to (bf16)")
    plot.set_ylabel("share")
    plot.set_title("gaps of the pretrained model")
    plot.legend(fontsize=6)


if __name__ == "__main__":
    main()
