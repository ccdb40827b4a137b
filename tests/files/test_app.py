"""The whole application with a folder between trainer and engines, and with one beside another transport."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sync.transfer.auth import load_token
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.replay import verify
from tests.app.runs import CACHE, SMALL, Run, check_flow, left_behind

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(800)]

STEPS = 8


def finished(run: Run) -> set[str]:
    """Wait for the end of a run that must be sound; the transports of its swaps."""
    code, _, err = run.finish(timeout_s=240)
    assert code == 0, err
    check_flow(run.json("summary.json") or {})
    moved = [e for row in run.steps() for e in row["sync"]["engines"] if e["bytes"]]
    assert left_behind(run, run.shm_prefix(), timeout_s=60) == []
    return {e["transport"] for e in moved}


def check_channel(run_dir: Path) -> None:
    """The last version is there, and all of it is sound."""
    with Channel.open(run_dir / "weights", Trust(), load_token(run_dir / "token")) as channel:
        found = list(verify(channel))
        assert [v.wrong for v in found] == [None] * len(found)
        assert found[-1].version.number == STEPS


@pytest.mark.parametrize("size", [1, 2], ids=["one-process", "two-processes-a-side"])
def test_a_run_over_a_folder(tmp_path: Path, size: int) -> None:
    options = ["--sync.transport=file", "--sync.file.path=weights", "--sync.file.anchor_every=4"]
    if size == 2:
        options += ["--trainer.processes=2", "--trainer.devices=1"]
        options += ["--engine.processes=2", "--engine.replicas=1"]
    with Run(tmp_path / "run", *SMALL, f"--run.steps={STEPS}", *options) as run:
        assert finished(run) == {"file"}
        check_channel(tmp_path / "run")


def test_a_folder_beside_another_transport(tmp_path: Path) -> None:
    options = ("--sync.transport=tcp", "--sync.file.path=weights")
    with Run(tmp_path / "run", *SMALL, f"--run.steps={STEPS}", *options) as run:
        assert finished(run) == {"tcp"}
        check_channel(tmp_path / "run")


def test_an_engine_that_comes_late_takes_its_weights_from_the_folder_of_a_run_over_tcp(
    tmp_path: Path,
) -> None:
    run_dir = tmp_path / "run"
    options = ("--sync.transport=tcp", "--sync.file.path=weights", "--run.steps=5000")
    with Run(run_dir, *SMALL, *options) as run:
        run.wait_step(3)
        command = [sys.executable, "-m", "jaxrl_sync.cli", "engine", "--run-dir", str(run_dir), "--replica=2"]
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
        env.pop("XLA_FLAGS", None)
        more = ["--engine.replicas=3", "--sync.transport=file"]
        late = subprocess.Popen([*command, *more], env=env, stderr=subprocess.PIPE, text=True)
        try:
            deadline = time.monotonic() + 200
            while not any(e["transport"] == "file" for row in run.steps() for e in row["sync"]["engines"]):
                assert late.poll() is None, late.communicate()
                assert time.monotonic() < deadline, "the late engine took no version"
                time.sleep(0.1)
            late.send_signal(signal.SIGTERM)
            assert late.wait(120) == 0
        finally:
            late.kill()
            late.communicate(timeout=20)
        rows = [e for row in run.steps() for e in row["sync"]["engines"] if e["bytes"]]
        assert {(e["engine"] == "engine-2", e["transport"]) for e in rows} == {(True, "file"), (False, "tcp")}
        run.send(signal.SIGINT)
        assert run.finish(timeout_s=150)[0] == 130


def test_a_resumed_run_goes_on_with_its_sealed_channel(tmp_path: Path) -> None:
    options = (*SMALL, "--sync.transport=file", "--sync.file.path=weights")
    with Run(tmp_path / "run", *options, "--run.steps=4") as run:
        assert finished(run) == {"file"}
    with Run(tmp_path / "run", *options, f"--run.steps={STEPS}", "--resume") as run:
        assert finished(run) == {"file"}
        check_channel(tmp_path / "run")
