"""What the rows of one session say: medians per mode, the claims, the table."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]
LABELS = {
    "stop": "stop, gather, save and load with orbax",
    "jax": "stop, `jax.experimental.transfer`",
    "sync": "jaxrl_sync, synchronous",
    "async": "jaxrl_sync, asynchronous",
}
CLAIMS = {"stop": 42.0, "jax": 10.0}
PAUSE_STEPS = 2.0
PUBLISH_SHARE = 0.05
"""Of a train step: so long may publish block the training thread beside the export."""


@dataclasses.dataclass(frozen=True)
class Mode:
    """One mode under one condition. ``lost_s`` is decode time lost per sync, slower steps included."""

    syncs: int
    stall_s: float
    p99_s: float
    window_s: float
    lost_s: float
    loss: float


@dataclasses.dataclass(frozen=True)
class Training:
    """What syncs of ours cost the trainer: medians in seconds.

    ``alone_s``: a step with nothing beside it; ``beside_s`` with an engine that decodes; ``overlapped_s``
    with a transfer, too (0 without such steps). ``blocked_s``: publish, of which the export ``export_s``.
    """

    alone_s: float
    beside_s: float
    overlapped_s: float
    blocked_s: float
    export_s: float

    @property
    def share(self) -> float:
        """Of a step alone: what publish blocks the training thread for beside the export."""
        return max(0.0, self.blocked_s - self.export_s) / self.alone_s

    def line(self) -> str:
        """As text."""
        blocked, alone = self.blocked_s, self.alone_s
        text = (
            f"  train step alone {alone * 1e3:.0f} ms; publish blocks it for {blocked * 1e3:.1f} ms "
            f"({blocked / alone:.1%}), of which the export takes {self.export_s * 1e3:.1f}; the rest "
            f"is {self.share:.2%} of a step"
        )
        if self.overlapped_s and self.beside_s:
            slower = self.overlapped_s / self.beside_s - 1
            text += (
                f"; beside decoding {self.beside_s * 1e3:.0f} ms, with a transfer too "
                f"{self.overlapped_s * 1e3:.0f} ms ({slower:+.1%})"
            )
        return text


@dataclasses.dataclass(frozen=True)
class Condition:
    """All modes while the trainer is paused or runs; ``step_s`` and ``spread_s``: median and IQR of steps."""

    step_s: float
    spread_s: float
    modes: dict[str, Mode]
    training: Training | None = None

    def stall_s(self, mode: str) -> float:
        """The median stall, or the spread of the decode steps where that is more."""
        return max(self.modes[mode].stall_s, self.spread_s)


@dataclasses.dataclass(frozen=True)
class Summary:
    """A session: ``conditions`` by "paused" and "running", as far as there are rows."""

    session: str
    params: int
    conditions: dict[str, Condition]

    def lines(self) -> list[str]:
        """The table as text."""
        lines = [f"session {self.session}, {self.params:,} parameters"]
        for name, c in self.conditions.items():
            lines.append(
                f"trainer {name}: decode step {c.step_s * 1e3:.1f} ms, spread (IQR) {c.spread_s * 1e3:.1f} ms"
            )
            for mode, m in c.modes.items():
                lines.append(
                    f"  {LABELS[mode]:40} {m.syncs:3} syncs, stall {m.stall_s * 1e3:8.1f} ms (p99 "
                    f"{m.p99_s * 1e3:8.1f}), serves after {m.window_s * 1e3:7.0f} ms, decode time lost "
                    f"{m.lost_s * 1e3:7.0f} ms, {m.loss:4.0%} of the tokens/s until then"
                )
            if c.training is not None:
                lines.append(c.training.line())
        return lines


def markdown(rows: Sequence[Row]) -> str:
    """The README's table of the newest session; nothing without rows."""
    chosen = [r for r in rows if r["session"] == rows[-1]["session"]]
    if not chosen:
        return ""
    summary = summarize(chosen)
    params = f"{summary.params / 1e6:.0f}M parameters"
    lines = [
        "",
        f"| new weights for {params} | trainer | syncs | generation stops, ms | p99 | tokens lost, ms |",
    ]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for name, c in summary.conditions.items():
        for mode, m in c.modes.items():
            label = f"**{LABELS[mode]}**" if mode in ("sync", "async") else LABELS[mode]
            figures = f"{m.stall_s * 1e3:.1f} | {m.p99_s * 1e3:.1f} | {m.lost_s * 1e3:.0f}"
            lines.append(f"| {label} | {name} | {m.syncs} | {figures} |")
    steps = ", ".join(
        f"{name} {c.step_s * 1e3:.1f} ms (IQR {c.spread_s * 1e3:.1f} ms)"
        for name, c in summary.conditions.items()
    )
    lines += ["", f"Commit {summary.session.partition('-')[0]}; one decode step, trainer {steps}."]
    return "\n".join(lines) + "\n"


def summarize(rows: Sequence[Row]) -> Summary:
    """The summary of one session's rows."""
    conditions = {}
    for name, running in (("paused", False), ("running", True)):
        chosen = [r for r in rows if r["running"] == running]
        if chosen:
            conditions[name] = _condition(chosen)
    return Summary(rows[-1]["session"], rows[-1]["params"], conditions)


def _condition(rows: Sequence[Row]) -> Condition:
    steps = [s for r in rows for s in r["steps_s"]]
    low, middle, high = statistics.quantiles(steps, n=4)
    modes = {
        m: _mode([r for r in rows if r["mode"] == m]) for m in LABELS if any(r["mode"] == m for r in rows)
    }
    return Condition(middle, high - low, modes, _training(rows))


def _training(rows: Sequence[Row]) -> Training | None:
    """Of asynchronous syncs; None of rows from before trainers told it."""
    ours = [r for r in rows if r["mode"] == "async" and "export_s" in r["report"]]
    if not ours:
        return None
    steps = [r["train_steps"] for r in ours]
    beside, overlapped = ([t for s in steps for t in s[name]] for name in ("beside_s", "overlapped_s"))
    return Training(
        statistics.median(s["alone_s"] for s in steps),
        statistics.median(beside) if beside else 0.0,
        statistics.median(overlapped) if overlapped else 0.0,
        statistics.median(r["report"]["stall_s"] for r in ours),
        statistics.median(r["report"]["export_s"] for r in ours),
    )


def _mode(rows: Sequence[Row]) -> Mode:
    stalls = sorted(r["stall_s"] for r in rows)
    lost = [max(0.0, r["window_s"] - r["window_steps"] * r["median_s"]) for r in rows]
    return Mode(
        len(rows),
        statistics.median(stalls),
        stalls[min(len(stalls) - 1, int(0.99 * len(stalls)))],
        statistics.median(r["window_s"] for r in rows),
        statistics.median(lost),
        statistics.median(x / r["window_s"] for x, r in zip(lost, rows, strict=True)),
    )


def verdict(summary: Summary) -> int:
    """Print the claims with their figures; 1 if one that can be checked does not hold."""
    paused = summary.conditions.get("paused")
    if paused is None or "async" not in paused.modes:
        return 0
    claims = [
        (f"{LABELS[mode]} over ours", paused.modes[mode].stall_s / paused.stall_s("async"), limit, True)
        for mode, limit in CLAIMS.items()
        if mode in paused.modes
    ]
    steps = paused.modes["async"].p99_s / paused.step_s
    claims.append(("p99 swap pause, decode steps", steps, PAUSE_STEPS, False))
    if paused.training is not None:
        claims.append(("publish without its export, of a step", paused.training.share, PUBLISH_SHARE, False))
    failed = 0
    for text, value, limit, at_least in claims:
        good = value >= limit if at_least else value <= limit
        failed += not good
        print(
            f"  {text}: {value:.2f} (at {'least' if at_least else 'most'} {limit:g}){'' if good else ' NO'}"
        )
    return 1 if failed else 0
