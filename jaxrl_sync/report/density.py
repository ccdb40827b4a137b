"""The density figure of a report: what share of the weights updates change, and what that costs to send."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from jaxrl_sync.report.data import Row, RunData

MAX_CLASSES = 8
"""Classes of tensors that are drawn: those with the most elements."""


def density(run: RunData) -> Figure | None:
    """Share by class, overlap and entropies over versions; bytes by coding and gaps of the last update."""
    rows = run.density
    if not rows:
        return None
    figure = Figure(figsize=(11, 6.8), layout="constrained")
    (shares, overlaps, entropies), (sizes, gaps, rest) = figure.subplots(2, 3)
    rest.set_axis_off()
    _shares(shares, rows)
    _overlaps(overlaps, rows)
    _entropies(entropies, rows)
    _sizes(sizes, rows[-1])
    _gaps(gaps, rows[-1])
    return figure


def _shares(axes: Axes, rows: list[Row]) -> None:
    versions = [row["version"] for row in rows]
    axes.plot(versions, [row["fraction"] for row in rows], "k-", linewidth=2, label="all")
    last = rows[-1]["classes"]
    for name in sorted(last, key=lambda n: -last[n]["elements"])[:MAX_CLASSES]:
        axes.plot(versions, [row["classes"][name]["fraction"] for row in rows], label=name, linewidth=1)
    axes.set_xlabel("version")
    axes.set_ylabel("changed elements")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6, frameon=False)


def _overlaps(axes: Axes, rows: list[Row]) -> None:
    """Of the elements that an update changes, the share that the update measured before had changed too."""
    known = [row for row in rows if row["overlap"] is not None]
    axes.plot([row["version"] for row in known], [row["overlap"] for row in known], "k.-", label="measured")
    by_chance = [row["fraction"] for row in known]  # of changes that fall independently of those before
    axes.plot(
        [row["version"] for row in known], by_chance, "--", color="gray", linewidth=1, label="by chance"
    )
    axes.set_xlabel("version")
    axes.set_ylabel("changed by the update before, too")
    axes.set_ylim(-0.02, 1.02)
    axes.legend(fontsize=6, frameon=False)


def _entropies(axes: Axes, rows: list[Row]) -> None:
    versions = [row["version"] for row in rows]
    labels = {"new": "new bits", "xor": "XOR with the old", "ulp": "step in units of the last place"}
    for name, label in labels.items():
        axes.plot(versions, [row["entropy_bits"][name] for row in rows], ".-", linewidth=1, label=label)
    positions = [row["position_bound_bits"] for row in rows]
    axes.plot(versions, positions, "--", color="gray", linewidth=1, label="positions, H(p)/p")
    axes.set_xlabel("version")
    axes.set_ylabel("entropy per changed element, bits")
    axes.set_ylim(bottom=0)
    axes.legend(fontsize=6, frameon=False)


def _sizes(axes: Axes, row: Row) -> None:
    sizes = {f"positions {n}": size for n, size in row["position_bytes"].items()}
    sizes |= {f"values {n}": size for n, size in row["value_bytes"].items()}
    names = list(sizes)
    axes.barh(names, [sizes[n] / max(1, row["full_bytes"]) for n in names])
    axes.axvline(1.0, color="gray", linewidth=0.5)
    axes.tick_params(axis="y", labelsize=6)
    axes.set_xlabel(f"bytes / full, version {row['version']}")


def _gaps(axes: Axes, row: Row) -> None:
    bits = sorted(int(b) for b in row["gaps"])
    axes.bar(bits, [row["gaps"][str(b)] for b in bits])
    axes.set_xlabel("gap to the next changed element, bits")
    axes.set_ylabel("entries")
