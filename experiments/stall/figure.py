"""Draws figure.svg from the newest session: the stalls of every way, with the trainer paused and running."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure
from run import read
from summary import LABELS

HERE = Path(__file__).resolve().parent


def main() -> None:
    """One dot per sync on a logarithmic axis, the median as a bar, one median decode step as a line."""
    rows = read(HERE / "rows.jsonl")
    rows = [r for r in rows if r["session"] == rows[-1]["session"]]
    picture = Figure(figsize=(7.5, 3.6), layout="constrained")
    panels = picture.subplots(1, 2, sharey=True)
    for axes, running in zip(panels, (False, True), strict=True):
        chosen = [r for r in rows if r["running"] == running]
        for place, mode in enumerate(LABELS):
            stalls = sorted(max(1e-4, r["stall_s"]) * 1e3 for r in chosen if r["mode"] == mode)
            if stalls:
                spread = [place + 0.4 * (i / max(1, len(stalls) - 1) - 0.5) for i in range(len(stalls))]
                color = "#d9722e" if mode in ("sync", "async") else "#9aa3ab"
                axes.plot(spread, stalls, ".", color=color, markersize=4)
                axes.hlines(stalls[len(stalls) // 2], place - 0.3, place + 0.3, color="black", lw=1.2)
        if chosen:
            steps = sorted(s for r in chosen for s in r["steps_s"])
            axes.axhline(steps[len(steps) // 2] * 1e3, ls=":", color="gray", lw=1)
        axes.set_xticks(
            range(len(LABELS)), ["orbax", "jax transfer", "ours, sync", "ours, async"], fontsize=8
        )
        axes.set_title(f"trainer {'running' if running else 'paused after publishing'}", fontsize=9)
        axes.set_yscale("log")
    panels[0].set_ylabel("generation stands still, ms (dotted: one decode step)", fontsize=8)
    picture.savefig(HERE / "figure.svg")


if __name__ == "__main__":
    main()
