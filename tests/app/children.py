"""Small programs that play the roles of a run, for tests of the supervisor with real processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxrl_sync.config.sections import RunSection
from jaxrl_sync.launch.environment import RUN_MARK
from jaxrl_sync.launch.worker import ProcessSpec, WorkerSpec

PRELUDE = """
import json, os, pathlib, signal, sys, threading, time
run = pathlib.Path(os.environ["JAXRL_SYNC_RUN_DIR"])
name = os.environ["CHILD"]
stop = threading.Event()
signal.signal(signal.SIGTERM, lambda *a: stop.set())
def write(path, data):
    path.parent.mkdir(exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(data))
    scratch.replace(path)
def announce(**more):
    write(run / "proc" / f"{name}.json", {"name": name, "pid": os.getpid(), **more})
def progress(step, phase="training"):
    write(run / "progress.json", {"step": step, "steps": 100, "phase": phase, "version": step})
def starts():
    file = run / f"{name}.starts"
    count = int(file.read_text()) + 1 if file.exists() else 1
    file.write_text(str(count))
    return count
"""
WAIT = "announce()\nstop.wait()\n"
STEPS_UNTIL_STOP = """
announce()
step = 0
while not stop.wait(0.1):
    step += 1
    progress(step)
"""


def child(name: str, program: str, run_dir: Path) -> ProcessSpec:
    """A process that runs ``program`` after the prelude."""
    env = {**os.environ, RUN_MARK: str(run_dir), "CHILD": name}
    return ProcessSpec(name, (sys.executable, "-c", PRELUDE + program), env)


def worker(role: str, run_dir: Path, *programs: str, name: str | None = None) -> WorkerSpec:
    """A worker of one process per program."""
    name = name or role
    names = [name if rank == 0 else f"{name}.{rank}" for rank in range(len(programs))]
    ranks = tuple(child(n, p, run_dir) for n, p in zip(names, programs, strict=True))
    return WorkerSpec(name, role, ranks, one_world=len(programs) > 1)


def run_of(
    run_dir: Path,
    hub: str = WAIT,
    trainer: str = WAIT,
    engine: str = WAIT,
    orchestrator: str = STEPS_UNTIL_STOP,
) -> list[WorkerSpec]:
    """A run of four single-process workers."""
    return [
        worker("hub", run_dir, hub),
        worker("trainer", run_dir, trainer, name="trainer-0"),
        worker("engine", run_dir, engine, name="engine-0"),
        worker("orchestrator", run_dir, orchestrator),
    ]


def settings(**changes: Any) -> RunSection:
    """Run settings with short deadlines; who is asked to stop has the time that a slow machine takes."""
    short = {"start_timeout_s": 60.0, "stuck_timeout_s": 60.0, "grace_s": 60.0, "stopped_timeout_s": 1.0}
    return RunSection.model_validate({**short, **changes})


class Notes:
    """A view that remembers."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def update(self, progress: object) -> None:
        """Nothing to remember."""

    def note(self, text: str) -> None:
        """Remember one line."""
        self.lines.append(text)


def alive(pids: Sequence[int]) -> list[int]:
    """Which of the processes still run (zombies count as ended)."""
    found = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found
