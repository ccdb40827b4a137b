"""Whole runs in processes of their own, for tests: start, wait for progress, look for what is left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from jaxrl_sync.launch import sweep
from jaxrl_sync.launch.environment import RUN_MARK

ROOT = Path(__file__).resolve().parents[2]
ADDITION = ROOT / "experiments" / "addition" / "run.toml"
CACHE = ROOT / ".cache" / "xla"

SMALL = (
    "--run.steps=12",
    "--trainer.devices=2",
    "--trainer.mesh.tp=1",
    "--engine.devices=1",
    "--engine.slots=32",
    "--loop.prompts_per_step=8",
    "--loop.group_size=4",
    "--eval.prompts=16",
)
"""The default config at a size that starts fast; compilation is cached between tests."""


class Run:
    """One ``jaxrl-sync run``, a context manager: leaving kills it and everything that carries its mark."""

    def __init__(
        self, run_dir: Path, *overrides: str, config: Path = ADDITION, prefix: tuple[str, ...] = ()
    ) -> None:
        self.run_dir = run_dir
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
        env.pop("XLA_FLAGS", None)
        command = [*prefix, sys.executable, "-m", "jaxrl_sync.cli", "run", str(config)]
        self._process = subprocess.Popen(
            [*command, "--run-dir", str(run_dir), *overrides],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Run:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            self._process.kill()
        sweep.kill_marked(RUN_MARK, str(self.run_dir), deadline_s=10.0)
        self._process.communicate(timeout=30)

    def send(self, number: signal.Signals) -> None:
        """A signal to the supervisor."""
        self._process.send_signal(number)

    def finish(self, timeout_s: float) -> tuple[int, str, str]:
        """Wait for the end: exit code, stdout, stderr."""
        out, err = self._process.communicate(timeout=timeout_s)
        return self._process.returncode, out, err

    def wait_step(self, step: int, timeout_s: float = 240.0) -> None:
        """Until ``progress.json`` says that ``step`` updates are committed."""
        deadline = time.monotonic() + timeout_s
        while (self.json("progress.json") or {}).get("step", -1) < step:
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"step {step} not reached within {timeout_s:g} s"
            time.sleep(0.05)

    def wait_up(self, *processes: str, timeout_s: float = 240.0) -> None:
        """Until these processes have said that they are up: a run goes on with the engines that there are."""
        deadline = time.monotonic() + timeout_s
        while missing := [name for name in processes if self.json(f"proc/{name}.json") is None]:
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"{missing} not up within {timeout_s:g} s"
            time.sleep(0.05)

    def wait_log(self, process: str, words: str, timeout_s: float = 240.0) -> None:
        """Until a process has logged ``words``."""
        deadline, log = time.monotonic() + timeout_s, self.run_dir / "logs" / f"{process}.log"
        while words not in (log.read_text() if log.exists() else ""):
            assert self._process.poll() is None, self._process.communicate()
            assert time.monotonic() < deadline, f"{process} did not log {words!r} within {timeout_s:g} s"
            time.sleep(0.05)

    def json(self, name: str) -> dict[str, Any] | None:
        """A JSON file of the run directory, None while it isn't there."""
        try:
            data: dict[str, Any] = json.loads((self.run_dir / name).read_text())
        except FileNotFoundError:
            return None
        return data

    def pid(self, process: str) -> int:
        """Process id of one process of the run."""
        return int((self.json(f"proc/{process}.json") or {})["pid"])

    def events(self) -> list[tuple[str, str]]:
        """Kind and process of what the supervisor noted."""
        lines = (self.run_dir / "events.jsonl").read_text().splitlines()
        return [(row["event"], row["process"]) for row in map(json.loads, lines)]

    def steps(self) -> list[dict[str, Any]]:
        """The metrics rows of the steps."""
        text = (self.run_dir / "metrics.jsonl").read_text()
        rows = [
            json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()
        ]  # one may be half there
        return [row for row in rows if row["kind"] == "step"]

    def shm_prefix(self) -> str:
        """How the run's shared-memory segments are called."""
        from jaxrl_sync.transfer.auth import load_token, run_id_of

        return f"jaxrl_sync-{run_id_of(load_token(self.run_dir / 'token'))}-"


def left_behind(run: Run, prefix: str, timeout_s: float) -> list[str]:
    """What of the run is still there after at most ``timeout_s``: processes, segments, sockets."""
    deadline = time.monotonic() + timeout_s
    while True:
        found = [f"process {pid}" for pid in sweep.marked_pids(RUN_MARK, str(run.run_dir))]
        found += [f"segment {path.name}" for path in Path("/dev/shm").glob(f"{prefix}*")]
        found += [f"socket {path}" for path in run.run_dir.rglob("*") if path.is_socket()]
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def check_flow(summary: dict[str, Any]) -> None:
    """The flow identities of the loop, from the counters of a finished run."""
    assert summary["identities_ok"] is True
    for kind in ("train", "eval"):
        flow = summary["flow"][kind]
        ended = sum(flow[k] for k in ("accepted", "filtered", "dropped", "cancelled", "errored"))
        assert flow["submitted"] == ended + flow["running"], (kind, flow)
        assert flow["running"] == 0, (kind, flow)
