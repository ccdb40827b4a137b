"""A child process that speaks JSON lines, as the test sees it: everything it ever said stays readable."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.faults.network import Host

ROOT = Path(__file__).parents[2]
Message = dict[str, Any]


class ChildLost(Exception):
    """A child ended, or did not say in time what it was to say."""


class Child:
    """Owns a process of ``tests.faults.peer``. Its words are a list; waits look from a place in it."""

    def __init__(
        self, name: str, role: str, place: Host, log: Path, devices: int = 1, /, **options: Any
    ) -> None:
        self.name, self.place = name, place
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
            "OMP_NUM_THREADS": "1",
        }
        command = place.wrap([sys.executable, "-m", "tests.faults.peer", role, json.dumps(options)])
        self._log = log
        with log.open("ab") as errors:
            self.process = subprocess.Popen(
                command,
                cwd=ROOT,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        self.said: list[Message] = []
        self._changed = threading.Condition()
        self._over = False
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                with self._changed:
                    self.said.append(json.loads(line))
                    self._changed.notify_all()
        with self._changed:
            self._over = True
            self._changed.notify_all()

    @property
    def alive(self) -> bool:
        """Whether the process runs (or is stopped)."""
        return self.process.poll() is None

    def tell(self, **command: Any) -> int:
        """Send a command; the place in its words from which the answer comes."""
        place = len(self.said)
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(json.dumps(command) + "\n")
            self.process.stdin.flush()
        return place

    def wait(
        self,
        key: str,
        timeout_s: float,
        since: int = 0,
        where: Callable[[Message], bool] = lambda _: True,
    ) -> Message:
        """The first message from ``since`` on that has ``key`` and is as ``where`` says. ChildLost."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                for message in self.said[since:]:
                    if key in message and where(message):
                        return message
                left = deadline - time.monotonic()
                if self._over or left <= 0:
                    break
                self._changed.wait(left)
            end = f"it ended with {self.process.poll()}" if self._over else f"after {timeout_s:g} s"
            last = self.said[-3:]
        tail = self._log.read_text(errors="replace")[-2000:]
        raise ChildLost(
            f"{self.name} didn't say {key!r}: {end}; last words {last}; its log ends with\n{tail}"
        )

    def ask(self, timeout_s: float = 30.0, **command: Any) -> Message:
        """Send a command and return the answer that has the command's first key."""
        since = self.tell(**command)
        return self.wait(next(iter(command)), timeout_s, since)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; after a SIGKILL the process is gone, after a SIGSTOP it stands."""
        self.process.send_signal(number)
        if number == signal.SIGKILL:
            self.process.wait(20)
        elif number == signal.SIGSTOP:
            end = time.monotonic() + 10
            while _state(self.process.pid) not in "Tt" and time.monotonic() < end:
                time.sleep(0.005)

    def close(self) -> None:
        """Kill it if need be, and let go of its pipes. Idempotent."""
        if self.alive:
            self.process.kill()
        self.process.wait(20)
        self._reader.join(5)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


def _state(pid: int) -> str:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return "T"
    return text.rpartition(")")[2].split()[0]
