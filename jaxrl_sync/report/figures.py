"""The figures of a report: each takes the run's data and gives one picture as SVG or PNG bytes."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("agg")

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxrl_sync.report.data import Row, RunData

KINDS = {
    "generate": "#4c9f70",
    "train": "#3b6ea8",
    "stage": "#7aa6d8",
    "publish": "#e2a33c",
    "sync": "#d9722e",
    "prepare": "#e8c07d",
    "swap": "#c0392b",
    "eval": "#8e6bbf",
    "checkpoint": "#6d6d6d",
    "wait": "#dddddd",
}
"""Colour of each kind of span in the timeline."""

MAX_SPANS = 4000
"""Spans per process that are drawn; of more, the longest."""


def learning(run: RunData) -> Figure | None:
    """Mean reward per step, and the accuracy of every evaluation at the version it was pinned to."""
    if not run.steps and not run.evals:
        return None
    figure, axes = _axes("update", "reward, accuracy")
    _plot(
        axes, run.steps, "step", lambda row: row.get("reward"), label="reward of trained samples", alpha=0.6
    )
    _plot(axes, run.evals, "version", lambda row: row.get("accuracy"), label="eval accuracy", marker="o")
    labels = list(dict.fromkeys(label for row in run.evals for label in row.get("tasks", {})))
    for label in labels if len(labels) > 1 else ():
        _plot(axes, run.evals, "version", _accuracy_of(label), label=f"eval accuracy of {label}", marker=".")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(loc="lower right", frameon=False)
    return figure


def _accuracy_of(label: str) -> Callable[[Row], Any]:
    return lambda row: row.get("tasks", {}).get(label, {}).get("accuracy")


def staleness(run: RunData) -> Figure | None:
    """How many trained samples were how many updates old."""
    counts = run.staleness()
    if not counts:
        return None
    figure, axes = _axes("staleness at ship time, in updates", "share of trained samples")
    total = sum(counts.values())
    axes.bar(list(counts), [n / total for n in counts.values()], color="#3b6ea8", width=0.7)
    axes.set_xticks(list(counts))
    return figure


def mismatch(run: RunData) -> Figure | None:
    """KL between engine and trainer log-probs of the trained tokens, per step (estimators k1 and k3)."""
    keys = sorted({key for row in run.steps for key in row.get("trainer", {}) if "mismatch" in key})
    if not keys:
        return None
    figure, axes = _axes("update", "nats per token")
    for key in keys:
        _plot(axes, run.steps, "step", _of_trainer(key), label=key)
    axes.set_yscale("symlog", linthresh=1e-5)
    axes.legend(frameon=False)
    return figure


def sync_cost(run: RunData) -> Figure | None:
    """Bytes of every sync, and how long each stopped decoding."""
    syncs = run.syncs()
    if not syncs:
        return None
    figure = Figure(figsize=(7, 3.6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    for engine in sorted({str(row["engine"]) for row in syncs}):
        rows = [row for row in syncs if row["engine"] == engine]
        versions = [row["version"] for row in rows]
        above.plot(versions, [row["bytes"] / 1e6 for row in rows], ".", label=engine)
        below.plot(versions, [1e3 * row["pause_s"] for row in rows], ".", label=engine)
    above.set_ylabel("MB per sync")
    above.set_ylim(bottom=0)
    above.legend(frameon=False, ncols=4)
    below.set_ylabel("swap pause, ms")
    below.set_xlabel("version")
    below.set_ylim(bottom=0)
    return figure


def timeline(run: RunData) -> Figure | None:
    """What each process was doing when: one bar per process, one colour per kind of work."""
    spans = {name: rows for name, rows in run.timelines.items() if rows}
    if not spans:
        return None
    origin = min(row["t0"] for rows in spans.values() for row in rows)
    figure = Figure(figsize=(11, 0.9 + 0.55 * len(spans)), layout="constrained")
    axes = figure.subplots()
    seen: set[str] = set()
    for position, (_, rows) in enumerate(sorted(spans.items())):
        for kind, color in KINDS.items():
            bars = _bars([row for row in rows if row["kind"] == kind], origin)
            if bars:
                seen.add(kind)
                height = 0.8 if kind in ("wait", "generate", "eval") else 0.6
                axes.broken_barh(bars, (position - height / 2, height), facecolors=color)
    axes.set_yticks(range(len(spans)), sorted(spans))
    axes.invert_yaxis()
    axes.set_xlabel("seconds since the first span")
    handles = [Patch(color=KINDS[kind], label=kind) for kind in KINDS if kind in seen]
    axes.legend(
        handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False
    )
    return figure


def _of_trainer(key: str) -> Callable[[Row], Any]:
    return lambda row: row.get("trainer", {}).get(key)


def _bars(rows: Sequence[Row], origin: float) -> list[tuple[float, float]]:
    longest = sorted(rows, key=lambda row: row["t0"] - row["t1"])[:MAX_SPANS]
    return [(row["t0"] - origin, max(row["t1"] - row["t0"], 1e-3)) for row in longest]


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(7, 2.9), layout="constrained")
    axes = figure.subplots()
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _plot(axes: Axes, rows: Sequence[Row], x: str, y: Callable[[Row], Any], **style: Any) -> None:
    points = [(row[x], y(row)) for row in rows if row.get(x) is not None and y(row) is not None]
    if points:
        axes.plot(*zip(*points, strict=True), **style)


def to_image(figure: Figure, form: str) -> bytes:
    """The picture as ``svg`` or ``png``."""
    out = io.BytesIO()
    figure.savefig(out, format=form, dpi=130)
    return out.getvalue()
