"""The whole application over real processes: the default config learns, and what happens when things die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from jaxrl_sync.launch import sweep
from jaxrl_sync.launch.environment import RUN_MARK
from tests.app.runs import ADDITION, SMALL, Run, check_flow, left_behind

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

LEARN_STEPS = 80
MANY_STEPS = 60
"""Both engines are up before the run is over, also where one takes seconds longer to start than the other."""


@pytest.mark.timeout(240)
def test_the_default_config_learns_asynchronously(tmp_path: Path) -> None:
    """At most three minutes of the default run: exact match above 0.2, flow identities, staleness bound."""
    with Run(tmp_path / "run", f"--run.steps={LEARN_STEPS}") as run:
        code, out, err = run.finish(timeout_s=180)
        assert code == 0, err
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["steps"] == LEARN_STEPS and summary["preflight"] == "fits"
        assert summary["syncs"] >= LEARN_STEPS // 2
        assert summary["eval"]["before"] < 0.1
        assert summary["eval"]["after"] > 0.2
        staleness = {int(k): n for k, n in summary["staleness"].items()}
        assert max(staleness) <= 2
        assert sum(n for k, n in staleness.items() if k >= 1) >= sum(staleness.values()) / 4
        assert [row["step"] for row in run.steps()] == list(range(1, LEARN_STEPS + 1))
        assert "eval exact match: before" in out and "swap pause: median" in out
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []


@pytest.mark.timeout(600)
def test_killed_engine_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SMALL, f"--run.steps={MANY_STEPS}") as run:
        run.wait_up("engine-0", "engine-1")
        run.wait_step(3)
        run.wait_log("orchestrator", "engines fit")  # it compares those that there are when it looks
        os.kill(run.pid("engine-1"), signal.SIGKILL)
        code, _, err = run.finish(timeout_s=400)
        assert code == 0, err
        assert ("restart", "engine-1") in run.events()
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["steps"] == MANY_STEPS and summary["preflight"] == "fits"
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []


def test_killed_hub_is_restarted_and_the_run_goes_on(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SMALL, "--run.steps=30") as run:
        run.wait_step(3)
        url = (run.json("proc/hub.json") or {})["url"]
        os.kill(run.pid("hub"), signal.SIGKILL)
        code, _, err = run.finish(timeout_s=200)
        assert code == 0, err
        assert ("restart", "hub") in run.events()
        check_flow(run.json("summary.json") or {})
        assert (run.json("proc/hub.json") or {})["url"] == url
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []


@pytest.mark.parametrize("process", ["trainer-0", "orchestrator"])
def test_killed_trainer_or_orchestrator_ends_the_run_with_its_name(tmp_path: Path, process: str) -> None:
    with Run(tmp_path / "run", *SMALL, "--run.steps=500") as run:
        run.wait_step(3)
        prefix = run.shm_prefix()
        os.kill(run.pid(process), signal.SIGKILL)
        code, _, err = run.finish(timeout_s=120)
        assert code == 4
        assert err.startswith(f"jaxrl-sync: error: {process} was killed by SIGKILL")
        assert err.count("\n") == 1
        assert left_behind(run, prefix, timeout_s=10) == []


def test_killed_run_leaves_nothing_behind(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SMALL, "--run.steps=500") as run:
        run.wait_step(3)
        prefix = run.shm_prefix()
        assert len(sweep.marked_pids(RUN_MARK, str(run.run_dir))) >= 5
        run.send(signal.SIGKILL)
        assert left_behind(run, prefix, timeout_s=10) == []


def test_interrupt_drains_and_says_so(tmp_path: Path) -> None:
    grace_s = 60  # a slow machine may need it for the update under way and its checkpoint
    with Run(tmp_path / "run", *SMALL, "--run.steps=500", f"--run.grace_s={grace_s}") as run:
        run.wait_step(3)
        prefix = run.shm_prefix()
        begin = time.monotonic()
        run.send(signal.SIGINT)
        code, out, err = run.finish(timeout_s=4 * grace_s)
        assert (code, err) == (130, "jaxrl-sync: error: interrupted\n")
        assert out.endswith(f"jaxrl-sync run {run.run_dir}/config.toml --run-dir {run.run_dir} --resume\n")
        assert time.monotonic() - begin < 3 * grace_s
        assert left_behind(run, prefix, timeout_s=10) == []
        assert list((run.run_dir / "checkpoints").iterdir()), "the drained trainer keeps its last update"


@pytest.mark.timeout(600)
def test_stopped_engine_does_not_hang_the_run(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SMALL, f"--run.steps={MANY_STEPS}", "--run.stopped_timeout_s=3") as run:
        run.wait_up("engine-0", "engine-1")
        run.wait_step(3)
        os.kill(run.pid("engine-0"), signal.SIGSTOP)
        code, _, err = run.finish(timeout_s=400)
        assert code == 0, err
        assert ("stopped", "engine-0") in run.events() and ("restart", "engine-0") in run.events()
        check_flow(run.json("summary.json") or {})


def test_resume_goes_on_in_a_new_lineage_and_repeats_no_prompt(tmp_path: Path) -> None:
    with Run(tmp_path / "run", *SMALL, "--run.steps=8") as run:
        code, _, err = run.finish(timeout_s=150)
        assert code == 0, err
        first = run.steps()
    with Run(tmp_path / "run", *SMALL, "--run.steps=16", "--resume") as run:
        code, _, err = run.finish(timeout_s=150)
        assert code == 0, err
        rows = run.steps()
    assert [row["step"] for row in rows] == list(range(1, 17))
    assert rows[:8] == first
    lineages = [row["lineage"] for row in rows]
    assert len(set(lineages[:8])) == 1 and len(set(lineages[8:])) == 1 and lineages[0] != lineages[8]


def test_workers_of_two_processes_train_and_serve(tmp_path: Path) -> None:
    worlds = ("--trainer.processes=2", "--trainer.devices=1", "--engine.processes=2", "--engine.replicas=1")
    with Run(tmp_path / "run", *SMALL, *worlds, "--run.steps=6") as run:
        code, _, err = run.finish(timeout_s=240)
        assert code == 0, err
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["steps"] == 6
        names = sorted(path.stem for path in (run.run_dir / "proc").glob("*.json"))
        assert names == ["engine-0", "engine-0.1", "hub", "orchestrator", "trainer-0", "trainer-1"]
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []


FAULTS = [
    (("--task.args.size=0",), 1, "the task has 0 training prompts, expected at least 1"),
    (("--task.args.score_raises=*", "--loop.max_consecutive_drops=4"), 1, "injected fault in score()"),
    (("--task.args.prompt_raises=*", "--loop.max_consecutive_drops=4"), 1, "injected fault in prompt()"),
]


@pytest.mark.parametrize(("overrides", "code", "message"), FAULTS, ids=[row[0][0] for row in FAULTS])
def test_a_task_that_fails_is_one_clear_line(
    tmp_path: Path, overrides: tuple[str, ...], code: int, message: str
) -> None:
    with Run(tmp_path / "run", *SMALL, "--task.name=faulty", *overrides) as run:
        found, out, err = run.finish(timeout_s=120)
        assert found == code, err
        assert err.count("\n") == 1 and message in err
        assert "Traceback" not in out + err
        assert left_behind(run, run.shm_prefix(), timeout_s=10) == []


def test_a_prompt_that_always_fails_is_dropped_and_counted(tmp_path: Path) -> None:
    fault = ("--task.name=faulty", '--task.args.score_raises="3"', "--run.steps=5", "--eval.prompts=4")
    with Run(tmp_path / "run", *SMALL, *fault) as run:
        code, _, err = run.finish(timeout_s=150)
        assert code == 0, err
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["flow"]["prompts_given_up"] >= 1
        assert summary["flow"]["train"]["errored"] >= 1


def test_a_rollout_that_never_ends_is_cut_off(tmp_path: Path) -> None:
    fault = (
        "--task.name=faulty",
        '--task.args.never_ends="3"',
        "--loop.group_timeout_s=4",
        "--eval.prompts=2",
    )
    with Run(tmp_path / "run", *SMALL, *fault, "--run.steps=6") as run:
        code, _, err = run.finish(timeout_s=150)
        assert code == 0, err
        summary = run.json("summary.json") or {}
        check_flow(summary)
        assert summary["steps"] == 6


def test_too_little_shared_memory_is_one_clear_line(tmp_path: Path) -> None:
    """A mount namespace with a tiny /dev/shm: exit code 3 and the sizes, not a bus error."""
    tiny = 'mount -t tmpfs -o size=64k tmpfs /dev/shm && exec "$@"'
    prefix = ("unshare", "-m", "sh", "-c", tiny, "sh")
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root and unshare to mount a small /dev/shm")
    probe = subprocess.run([*prefix, "true"], capture_output=True, timeout=20)
    if probe.returncode != 0:
        pytest.skip(f"mount namespaces are not allowed here: {probe.stderr.decode().strip()}")
    with Run(tmp_path / "run", *SMALL, prefix=prefix) as run:
        code, _, err = run.finish(timeout_s=150)
        assert code == 3, err
        assert "/dev/shm" in err and err.count("\n") == 1


def test_the_saved_config_is_the_resolved_one(tmp_path: Path) -> None:
    from jaxrl_sync.config import load

    with Run(tmp_path / "run", *SMALL, "--run.steps=2") as run:
        code, _, err = run.finish(timeout_s=120)
        assert code == 0, err
        saved = load(run.run_dir / "config.toml")
        assert (
            saved.run.steps == 2
            and saved.trainer == load(ADDITION, {"trainer.devices": 2, "trainer.mesh.tp": 1}).trainer
        )
        assert json.loads((run.run_dir / "summary.json").read_text())["steps"] == 2
