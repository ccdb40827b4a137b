"""Reading what a run left behind, finished or not; torn last lines are skipped."""

from __future__ import annotations

import collections
import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxrl_sync.sharding.errors import UserError

Row = dict[str, Any]


class ReportError(UserError):
    """The directory is not one of a run."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class RunData:
    """The rows of one run. ``timelines`` maps a process name to its spans."""

    run_dir: Path
    steps: list[Row]
    evals: list[Row]
    timelines: dict[str, list[Row]]
    density: list[Row]
    events: list[Row]
    summary: Row
    progress: Row
    config_text: str
    rounds: list[Row] = dataclasses.field(default_factory=list)
    edges: list[Row] = dataclasses.field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether the run has come to its end; one that was interrupted or failed has not."""
        return bool(self.summary) and self.summary.get("cause", "done") == "done"

    def staleness(self) -> dict[int, int]:
        """Trained samples by staleness, summed over the steps so far."""
        counts: collections.Counter[int] = collections.Counter()
        for row in self.steps:
            counts.update({int(key): int(n) for key, n in (row.get("staleness") or {}).items()})
        return dict(sorted(counts.items()))

    def syncs(self) -> list[Row]:
        """One row per engine and swap: step, engine, version, bytes, pause_s, transport."""
        found = []
        for row in self.steps:
            for swap in (row.get("sync") or {}).get("engines", []):
                found.append({**swap, "step": row.get("step")})
        return found


def read_run(run_dir: Path) -> RunData:
    """Everything the report needs. Raises ``ReportError`` for a directory that is not a run's."""
    if not (run_dir / "config.toml").exists():
        raise ReportError(f"{run_dir} is not a run directory: it has no config.toml")
    rows = read_rows(run_dir / "metrics.jsonl")
    return RunData(
        run_dir=run_dir,
        steps=[row for row in rows if row.get("kind") == "step"],
        evals=[row for row in rows if row.get("kind") == "eval"],
        timelines={p.stem: read_rows(p) for p in sorted((run_dir / "timeline").glob("*.jsonl"))},
        density=read_rows(run_dir / "density.jsonl"),
        events=read_rows(run_dir / "events.jsonl"),
        summary=_read_object(run_dir / "summary.json"),
        progress=_read_object(run_dir / "progress.json"),
        config_text=(run_dir / "config.toml").read_text(encoding="utf8"),
        rounds=[row for row in rows if row.get("kind") == "round"],
        edges=[row for row in rows if row.get("kind") == "edge"],
    )


def read_rows(path: Path) -> list[Row]:
    """The complete JSON lines of a file; none if it isn't there."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _read_object(path: Path) -> Row:
    rows = read_rows(path)
    return rows[-1] if rows else {}
