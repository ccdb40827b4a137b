"""The rounds of a run as a picture: who sent what to whom when, and what the phases of an edge took."""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable, Mapping

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from jaxrl_sync.report.data import Row, RunData

MAX_ROUNDS = 48
"""Rounds that are drawn: the last ones."""

STATES = {
    "committed": "#4c9f70",
    "superseded": "#bbbbbb",
    "aborted": "#e2a33c",
    "partially_committed": "#8e6bbf",
    "failed": "#c0392b",
    "unknown": "#6d6d6d",
}
PUBLISH = "#3b6ea8"
PHASES = ("export", "pack", "encode", "queue", "wire", "verify", "apply", "swap")
"""Phases of an edge; commit is the whole time from the announcement to the swap."""


def rounds(run: RunData) -> Figure | None:
    """A lane per engine and source: rounds from begin to end, arrows from their source, swap pauses."""
    last = sorted(run.rounds, key=lambda row: float(row["ended"]))[-MAX_ROUNDS:]
    drawn = [row for row in last if row.get("begun") is not None]
    if not drawn:
        return None
    lanes = _lanes(drawn)
    figure = Figure(figsize=(11, 1.6 + 0.5 * len(lanes)), layout="constrained")
    axes, phases = figure.subplots(1, 2, width_ratios=(3, 1))
    origin = min(float(row["opened"]) for row in drawn)
    end = max(float(row["ended"]) for row in drawn)
    for row in drawn:
        _draw(axes, row, lanes, origin)
    _spans(axes, run, lanes, origin, end)
    axes.set_yticks(range(len(lanes)), list(lanes))
    axes.set_ylim(len(lanes) - 0.5, -0.5)
    axes.set_xlabel(f"seconds; the last {len(drawn)} rounds")
    seen = [state for state in STATES if any(row["state"] == state for row in drawn)]
    handles = [Patch(color=STATES[state], label=state) for state in seen]
    handles += [Patch(color=PUBLISH, label="publish"), Patch(color="black", label="swap pause")]
    axes.legend(
        handles=handles, ncols=len(handles), loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False
    )
    _phases(phases, run.edges)
    return figure


def _lanes(drawn: Iterable[Row]) -> dict[str, int]:
    """Sources that are no engines come first."""
    engines = sorted({str(row["engine"]) for row in drawn})
    sources = sorted({_source(row) for row in drawn} - set(engines))
    return {name: position for position, name in enumerate([*sources, *engines])}


def _source(row: Row) -> str:
    """``publisher trainer`` and ``relay engine-1`` are the lanes trainer and engine-1."""
    return str(row.get("source", "")).partition(" ")[2]


def _draw(axes: Axes, row: Row, lanes: Mapping[str, int], origin: float) -> None:
    opened, begun, ended = (float(row[key]) - origin for key in ("opened", "begun", "ended"))
    lane, source = lanes[str(row["engine"])], lanes[_source(row)]
    color = STATES.get(str(row["state"]), "#6d6d6d")
    axes.broken_barh([(opened, max(begun - opened, 1e-3))], (lane - 0.08, 0.16), facecolors="#dddddd")
    axes.broken_barh([(begun, max(ended - begun, 1e-3))], (lane - 0.3, 0.6), facecolors=color, alpha=0.8)
    arrow = {"arrowstyle": "->", "color": "#999999", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", xy=(begun, lane), xytext=(begun, source), arrowprops=arrow)
    axes.text(begun, lane - 0.32, str(row.get("version", "")), fontsize=5, va="bottom")


def _spans(axes: Axes, run: RunData, lanes: Mapping[str, int], origin: float, end: float) -> None:
    """Swap pauses on the engines' lanes, publishes on that of the trainer."""
    for process, rows in run.timelines.items():
        for row in rows:
            inside = origin <= float(row["t1"]) and float(row["t0"]) <= end
            if not inside or row["kind"] not in ("swap", "publish"):
                continue
            swap = row["kind"] == "swap"
            lane = lanes.get(process.partition(".")[0] if swap else process.rpartition("-")[0])
            if lane is not None:
                start, width = float(row["t0"]) - origin, max(float(row["t1"]) - float(row["t0"]), 2e-3)
                color = "black" if swap else PUBLISH
                axes.broken_barh([(start, width)], (lane - 0.4, 0.8), facecolors=color)


def _phases(axes: Axes, edges: Iterable[Row]) -> None:
    """Median seconds of each phase, by transport and payload; a phase that takes none is left out."""
    groups: dict[str, list[Row]] = collections.defaultdict(list)
    for row in edges:
        groups[f"{row.get('transport')}, {row.get('payload')}"].append(row)
    for name in sorted(groups):
        medians = [statistics.median(_seconds(row, phase) for row in groups[name]) for phase in PHASES]
        points = [(seconds, n) for n, seconds in enumerate(medians) if seconds > 0]
        axes.plot([x for x, _ in points], [y for _, y in points], "o", label=name, alpha=0.8)
    axes.set_xscale("log")
    axes.set_yticks(range(len(PHASES)), PHASES)
    axes.set_ylim(len(PHASES) - 0.5, -0.5)
    axes.set_xlabel("seconds per edge, medians")
    axes.grid(axis="x", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    if groups:
        axes.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1))


def _seconds(row: Row, phase: str) -> float:
    return float(row.get(f"seconds_{phase}", 0.0))
