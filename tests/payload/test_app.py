"""A whole run over tcp by frames: it learns as ever, and its metrics say what travelled."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.app.runs import SMALL, Run, check_flow

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.timeout(600)
def test_a_run_over_tcp_by_frames(tmp_path: Path) -> None:
    """With an engine that dies: it comes back by an anchor while the others go on by frames."""
    sparse = ("--sync.transport=tcp", "--sync.payload=sparse", "--sync.sparse.values=auto")
    with Run(tmp_path / "run", *SMALL, *sparse, "--run.steps=40") as run:
        run.wait_up("engine-0", "engine-1")  # a run goes on with one alone
        run.wait_step(4)
        os.kill(run.pid("engine-1"), signal.SIGKILL)
        code, _, err = run.finish(timeout_s=500)
        assert code == 0, err
        check_flow(run.json("summary.json") or {})
        rows = [engine for step in run.steps() for engine in step["sync"]["engines"] if engine["bytes"]]
    frames = [row for row in rows if row["payload"] == "frame"]
    full = [row for row in rows if row["payload"] == "full"]
    assert len(frames) >= 10  # the staleness that the loop allows asks for more versions in 40 steps
    assert all(0 < row["density"] <= 1 and row["coding"] for row in frames)
    assert all(row["density"] == 1 for row in full)
