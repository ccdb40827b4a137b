"""Runs the default config asynchronously and synchronously, seeds 0, 1, 2; prints and records both."""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
CONFIG = HERE.parent / "addition" / "run.toml"
ROWS = HERE / "rows.jsonl"
MODES = {"async": 2, "sync": 0}
SEEDS = (0, 1, 2)
RUN_LIMIT_S = 900


def main() -> int:
    """Run what has no row yet for this commit, then print the comparison; 1 if it does not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, help="updates per run (default: the config's)")
    options = parser.parse_args()
    commit = _commit()
    rows = [r for r in _read() if r["commit"] == commit and r["steps_asked"] == options.steps]
    for seed in SEEDS:
        for mode, bound in MODES.items():
            if not any(r["seed"] == seed and r["mode"] == mode for r in rows):
                rows.append(_run(mode, bound, seed, options.steps, commit))
    return _compare(rows)


def _run(mode: str, bound: int, seed: int, steps: int | None, commit: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-") as folder:
        run_dir = Path(folder) / "run"
        command = [sys.executable, "-m", "jaxrl_sync.cli", "run", str(CONFIG), "--run-dir", str(run_dir)]
        command += ["--run.seed", str(seed), "--loop.staleness_bound", str(bound)]
        command += ["--run.steps", str(steps)] if steps else []
        begin = time.monotonic()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=RUN_LIMIT_S)
        wall_s = time.monotonic() - begin
        summary = json.loads((run_dir / "summary.json").read_text())
    row = {
        "mode": mode,
        "seed": seed,
        "steps_asked": steps,
        "steps": summary["steps"],
        "before": summary["eval"]["before"],
        "after": summary["eval"]["after"],
        "wall_s": round(wall_s, 1),
        "tokens_per_s": summary["tokens_per_s"],
        "staleness": summary["staleness"],
        "commit": commit,
    }
    with ROWS.open("a", encoding="utf8") as file:
        file.write(json.dumps(row) + "\n")
    print(
        f"{mode:5} seed {seed}: exact match {row['after']:.3f} after {row['steps']} updates, {wall_s:.0f} s"
    )
    return row


def _compare(rows: list[dict[str, Any]]) -> int:
    after = {m: [r["after"] for r in rows if r["mode"] == m] for m in MODES}
    wall = {m: [r["wall_s"] for r in rows if r["mode"] == m] for m in MODES}
    for mode in MODES:
        values = "  ".join(f"{v:.3f}" for v in after[mode])
        mean_s = statistics.mean(wall[mode])
        print(f"{mode:5}  {values}  mean {statistics.mean(after[mode]):.3f}  wall time {mean_s:.0f} s")
    difference = abs(statistics.mean(after["async"]) - statistics.mean(after["sync"]))
    good = min(after["async"]) >= 0.5 and difference <= 0.1
    print(
        f"difference of the means {difference:.3f} (at most 0.1), least async {min(after['async']):.3f} (0.5)"
    )
    return 0 if good else 1


def _read() -> list[dict[str, Any]]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def _commit() -> str:
    command = ["git", "-C", str(HERE), "rev-parse", "--short=12", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, timeout=30).stdout.strip() or "none"


if __name__ == "__main__":
    raise SystemExit(main())
