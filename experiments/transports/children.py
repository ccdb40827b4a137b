"""Child processes that speak JSON lines, and the virtual environments of the peers."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import venv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STEP_LIMIT_S = 300.0
INSTALL_LIMIT_S = 900.0


class ChildError(Exception):
    """A process ended or fell silent."""


class Child:
    """A process; ``ask`` sends it a line and waits for its answer. ``close()`` ends it."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        self.name = Path(command[1]).stem
        self._log = log.open("ab")
        env = {**os.environ, "PYTHONUNBUFFERED": "1"}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=env
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("{"):
                self._lines.put(line)
        self._lines.put("")

    def tell(self, **command: Any) -> None:
        """One line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()

    def answer(self, timeout_s: float = STEP_LIMIT_S) -> dict[str, Any]:
        """Its next line; ChildError when it ended or is too slow."""
        try:
            line = self._lines.get(timeout=timeout_s)
        except queue.Empty:
            raise ChildError(f"{self.name} said nothing for {timeout_s:g} s") from None
        if not line:
            raise ChildError(f"{self.name} ended with {self._process.wait(10)}: {self._last_words()}")
        found: dict[str, Any] = json.loads(line)
        return found

    def _last_words(self) -> str:
        lines = Path(self._log.name).read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "no word of it"

    def ask(self, **command: Any) -> dict[str, Any]:
        """`tell`, then `answer`."""
        self.tell(**command)
        return self.answer()

    def close(self) -> None:
        """Close its stdin; kill it if that isn't enough."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        self._log.close()

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment(folder: Path, name: str, requirements: Sequence[Sequence[str]]) -> Path:
    """The interpreter of a virtual environment with these pip arguments installed. OSError if that fails."""
    place = folder / name
    python, stamp = place / "bin" / "python", place / ".stamp"
    wanted = json.dumps([sys.version_info[:2], requirements])
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    print(f"installing {name} into {place}", file=sys.stderr, flush=True)
    venv.create(place, with_pip=True)
    for arguments in requirements:
        command = [str(python), "-m", "pip", "install", "-q", *arguments]
        done = subprocess.run(command, capture_output=True, text=True, timeout=INSTALL_LIMIT_S)
        if done.returncode:
            lines = done.stderr.strip().splitlines() or ["no word from pip"]
            raise OSError(f"pip install {' '.join(arguments)}: {lines[-1]}")
    stamp.write_text(wanted)
    return python
