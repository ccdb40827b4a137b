"""Whole runs in every synchronisation mode and placement; docs/modes.md says what each promises."""

from __future__ import annotations

import time
from pathlib import Path

import httpx
import pytest

from jaxrl_sync.transfer import auth
from tests.app.runs import SMALL, Run, check_flow, left_behind

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

STEPS = 6
LONG = (
    "--loop.sampling.max_tokens=40",
    "--engine.max_len=64",
    "--engine.decode_steps_per_dispatch=1",
    "--engine.slots=8",
    "--engine.version_probe=true",
)
"""Long samples and few slots: generation takes longest, and samples are in flight when a version comes."""

MODES = {
    "one-step-off": ("--sync.mode=one_step_off", "--loop.staleness_bound=1"),
    "async-keep": ("--sync.mode=async", *LONG),
    "async-recompute": ("--sync.kv_policy=recompute", *LONG),
    "async-wait": ("--sync.pause_mode=wait", *LONG),
    "async-abort": ("--sync.pause_mode=abort", *LONG),
    "async-pull": ("--sync.initiator=pull", "--eval.every_steps=2", *LONG),
    "colocated-abort": (
        "--engine.placement=colocated",
        "--engine.replicas=1",
        "--sync.pause_mode=abort",
        *LONG,
    ),
    "mixed": ("--engine.placement=mixed", "--engine.replicas=2", *LONG),
    "colocated-world": (
        "--engine.placement=colocated",
        "--engine.replicas=1",
        "--trainer.processes=2",
        "--trainer.devices=1",
        "--trainer.offload=optimizer",
        *LONG,
    ),
}
SPANNING = {"async-keep", "async-recompute", "mixed", "colocated-world"}
"""Where running samples go on under the new version, so that some have tokens of two."""


def _let_the_other_join(run: Run, timeout_s: float = 150.0) -> None:
    """Keep the colocated engine paused (a turn of the trainer ends a pause) until engine-1 serves too."""
    deadline = time.monotonic() + timeout_s
    while "engine-1 serving" not in str((run.json("progress.json") or {}).get("engines")):
        assert time.monotonic() < deadline, run.json("progress.json")
        _ask_colocated(run, "/pause", {"mode": "keep"})
        time.sleep(0.05)
    _ask_colocated(run, "/resume", {})


def _ask_colocated(run: Run, call: str, body: dict[str, str]) -> None:
    place = run.json("proc/engine-0.json")
    if place is not None:
        headers = auth.bearer_headers(auth.load_token(run.run_dir / "token"))
        answer = httpx.post(place["url"] + call, json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text


@pytest.mark.invariant(11)
@pytest.mark.parametrize("mode", MODES)
def test_a_run_keeps_what_its_mode_promises(tmp_path: Path, mode: str) -> None:
    steps = STEPS if mode not in SPANNING or "colocated" in mode else 4 * STEPS  # enough for it to happen
    with Run(tmp_path / "run", *SMALL, *MODES[mode], f"--run.steps={steps}") as run:
        if mode == "mixed":
            _let_the_other_join(run)
        code, _, err = run.finish(timeout_s=240)
        assert code == 0, err
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["steps"] == steps
        staleness = {int(k): n for k, n in summary["staleness"].items() if n}
        if mode == "one-step-off":
            by_step = [{int(k) for k, n in row["staleness"].items() if n} for row in run.steps()]
            assert by_step == [{0}] + [{1}] * (STEPS - 1)
        else:
            assert max(staleness) <= 2
        if mode in SPANNING:
            assert summary["multi_version_fraction"] > 0, "no rollout went on under a new version"
        if mode == "async-wait":
            assert summary["multi_version_fraction"] == 0
        if "colocated" in mode:
            names = sorted(path.stem for path in (run.run_dir / "proc").glob("*.json"))
            assert "engine-0" in names and run.pid("engine-0") == run.pid("trainer-0")
            rows = [row for s in run.steps() for row in s["sync"]["engines"]]
            assert rows and all(row["transport"] == "inprocess" for row in rows)
        if mode == "mixed":
            found = {row["transport"] for s in run.steps() for row in s["sync"]["engines"]}
            assert "inprocess" in found and len(found) >= 2, found
            assert run.pid("engine-0") == run.pid("trainer-0") != run.pid("engine-1")
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []
