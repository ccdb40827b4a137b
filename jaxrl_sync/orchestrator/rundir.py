"""What the orchestrator leaves in the run directory: metrics.jsonl, progress.json, summary.json.

Rows are written by a thread of its own and synced to disk; a torn last line of a crash is cut off at the
next start. After a resume from step N the file goes on behind step N: later rows of the earlier attempt are
kept beside it as ``metrics.<attempt>.jsonl``, so that steps only grow along ``metrics.jsonl``.
"""

from __future__ import annotations

import json
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxrl_sync.config.process import write_json
from jaxrl_sync.orchestrator.errors import LoopError

Row = Mapping[str, Any]


class MetricsFile:
    """Appends rows to ``metrics.jsonl``; owns the file and the writing thread. ``append`` never blocks."""

    def __init__(self, run_dir: Path, *, resume_step: int) -> None:
        self.path = run_dir / "metrics.jsonl"
        self.earlier = _keep_until(self.path, resume_step)
        self._file = self.path.open("a", encoding="utf8")
        self._rows: queue.Queue[Row | None] = queue.Queue()
        self._error: OSError | None = None
        self._thread = threading.Thread(target=self._write_rows, name="metrics", daemon=True)
        self._thread.start()

    def append(self, row: Row) -> None:
        """Queue one row; raises ``LoopError`` if an earlier one could not be written (disk full)."""
        if self._error is not None:
            raise LoopError(f"can't write {self.path}: {self._error.strerror or self._error}")
        self._rows.put(row)

    def close(self, timeout_s: float = 10.0) -> None:
        """Write what is queued and close the file."""
        self._rows.put(None)
        self._thread.join(timeout_s)
        if not self._thread.is_alive():
            self._file.close()

    def _write_rows(self) -> None:
        while True:
            rows = [self._rows.get()]
            while not self._rows.empty():
                rows.append(self._rows.get_nowait())
            kept = [r for r in rows if r is not None]
            try:
                self._file.write("".join(json.dumps(r) + "\n" for r in kept))
                self._file.flush()
                os.fsync(self._file.fileno())
            except OSError as error:
                self._error = error
            if len(kept) < len(rows):
                return


def read_rows(path: Path) -> list[dict[str, Any]]:
    """All complete rows of a metrics file; a torn line is left out."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf8", errors="replace").splitlines():
        try:
            row = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def write_summary(run_dir: Path, summary: Row) -> None:
    """``summary.json``, atomically."""
    write_json(run_dir / "summary.json", dict(summary))


def write_progress(run_dir: Path, progress: Row) -> None:
    """``progress.json``, atomically; a reader sees the old one or the new one."""
    write_json(run_dir / "progress.json", dict(progress))


def batch_path(run_dir: Path, step: int, rank: int) -> Path:
    """Where the frame of one step and data rank is kept."""
    return run_dir / "batches" / f"step-{step:06d}.rank-{rank}.frame"


def keep_batch(run_dir: Path, step: int, frames: Sequence[bytes]) -> None:
    """Keep the frames of one step, one per data rank, as they are sent; blocks on the disk."""
    for rank, frame in enumerate(frames):
        path = batch_path(run_dir, step, rank)
        path.parent.mkdir(exist_ok=True)
        scratch = path.with_suffix(".tmp")
        scratch.write_bytes(frame)
        scratch.replace(path)


def evals_done(rows: list[dict[str, Any]], lineages: set[str] | None = None) -> set[int]:
    """Triggers of the evaluations among ``rows``."""
    return {
        int(r["trigger"])
        for r in rows
        if r.get("kind") == "eval" and (lineages is None or r.get("lineage") in lineages)
    }


def _keep_until(path: Path, step: int) -> list[dict[str, Any]]:
    """Leave only whole rows up to ``step`` in ``path``; returns them. What was there is kept beside it."""
    if not path.exists():
        return []
    data = path.read_bytes()
    rows = read_rows(path)
    kept = [r for r in rows if int(r.get("step", 0)) <= step]
    if len(kept) == data.count(b"\n") and data.endswith(b"\n"):
        return kept
    attempt = 1
    while path.with_name(f"metrics.{attempt}.jsonl").exists():
        attempt += 1
    path.with_name(f"metrics.{attempt}.jsonl").write_bytes(data)
    scratch = path.with_name(".metrics.jsonl")
    scratch.write_text("".join(json.dumps(r) + "\n" for r in kept), encoding="utf8")
    scratch.replace(path)
    return kept
