"""kill -9 of the supervising process: everything of the run is gone within ten seconds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sync.launch import sweep
from jaxrl_sync.launch.environment import RUN_MARK
from tests.app.children import alive

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys, pathlib
sys.path.insert(0, {root!r})
from tests.app.children import Notes, STEPS_UNTIL_STOP, WAIT, run_of, settings
from jaxrl_sync.launch.supervisor import Supervisor
run_dir = pathlib.Path(sys.argv[1])
engine = "import subprocess\\n"
sleeper = "[sys.executable, '-c', 'import time; time.sleep(600)']"
engine += "subprocess.Popen(" + sleeper + ", start_new_session=True)\\n"
engine += "open('/dev/shm/{prefix}slot', 'wb').write(b'x')\\n"
engine += "import socket\\nsocket.socket(socket.AF_UNIX).bind(str(run / 'x.sock'))\\n" + WAIT
print(Supervisor(settings(), run_dir, run_of(run_dir, engine=engine), Notes(), {prefix!r}).run())
"""


def start(run_dir: Path, prefix: str) -> subprocess.Popen[bytes]:
    """A supervisor in a process of its own, with all its children up."""
    program = RUN.format(root=str(ROOT), prefix=prefix)
    supervisor = subprocess.Popen([sys.executable, "-c", program, str(run_dir)], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not (run_dir / "proc" / "engine-0.json").exists() or not (run_dir / "progress.json").exists():
        assert supervisor.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    return supervisor


def marked(run_dir: Path, count: int) -> list[int]:
    """The processes of a run, once they are so many: who is being started is there twice for a moment."""
    deadline = time.monotonic() + 60
    while len(pids := sweep.marked_pids(RUN_MARK, str(run_dir))) != count:
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    return pids


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_is_left_after_the_supervisor_is_gone(tmp_path: Path, number: signal.Signals) -> None:
    prefix = f"jaxrl_sync-kill{os.getpid()}{int(number)}-"
    supervisor = start(tmp_path, prefix)
    pids = marked(tmp_path, 5)  # four roles and a grandchild in a session of its own
    children = [json.loads(p.read_text())["pid"] for p in (tmp_path / "proc").glob("*.json")]
    assert set(children) < set(pids)
    supervisor.send_signal(number)
    supervisor.wait(timeout=60)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (alive(pids) or left_of(tmp_path, prefix)):
        time.sleep(0.05)
    assert alive(pids) == []
    assert left_of(tmp_path, prefix) == []
    assert guards(tmp_path) == []


def left_of(run_dir: Path, prefix: str) -> list[Path]:
    """Shared memory and sockets of a run."""
    return [*Path("/dev/shm").glob(f"{prefix}*"), *run_dir.glob("*.sock")]


def guards(run_dir: Path) -> list[str]:
    """Command lines of guard processes of the run, once they had a moment to leave."""
    deadline = time.monotonic() + 30
    while True:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
            except OSError:
                continue
            if b"jaxrl_sync.launch.guard" in words and str(run_dir).encode() in words:
                found.append(path.parent.name)
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.05)
