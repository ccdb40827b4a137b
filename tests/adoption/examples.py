"""Programs of docs/examples/ that adopt jaxrl_sync: their marked lines, the programs without them, runs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "examples"
BEGIN, END = "# >>> jaxrl_sync", "# <<< jaxrl_sync"
LIMIT_S = 540.0


def split(name: str) -> tuple[list[str], str]:
    """The marked lines of a program that aren't empty, and the program without them."""
    marked, plain, inside = list[str](), list[str](), False
    for line in (FOLDER / f"{name}.py").read_text(encoding="utf8").splitlines():
        if line.strip() in (BEGIN, END):
            assert inside == (line.strip() == END), f"{name}: markers that aren't pairs"
            inside = not inside
        elif not inside:
            plain.append(line)
        elif line.strip():
            marked.append(line)
    assert not inside, f"{name}: a region without its end"
    return marked, "\n".join(plain) + "\n"


def module(name: str) -> Any:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def environment() -> dict[str, str]:
    """Programs choose their own number of devices."""
    return {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}


class Program:
    """A running example with its lines; ends with ``with``."""

    def __init__(self, file: Path, folder: Path, python: str = sys.executable) -> None:
        self._errors = (folder / f"{file.stem}.log").open("w+", encoding="utf8")
        self._process = subprocess.Popen(
            [python, str(file), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env=environment(),
        )
        self._timer = threading.Timer(LIMIT_S, self._process.kill)
        self._timer.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def tell(self, word: Any) -> None:
        """One JSON line to it."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(word) + "\n")
        self._process.stdin.flush()

    def ask(self, question: Any) -> Any:
        """One JSON line to it, one from it."""
        assert self._process.stdout is not None
        self.tell(question)
        line = self._process.stdout.readline()
        assert line, self.errors()
        return json.loads(line)

    def end(self) -> list[Any]:
        """Close its stdin and wait: its remaining lines. Asserts that it ended well."""
        out, _ = self._process.communicate(timeout=LIMIT_S)
        assert self._process.returncode == 0, self.errors()
        return [json.loads(line) for line in out.splitlines() if line.startswith("{")]

    def errors(self) -> str:
        """What it wrote to stderr."""
        self._errors.seek(0)
        return f"exit code {self._process.poll()}: {self._errors.read()[-3000:]}"

    def close(self) -> None:
        """Kill it if it still runs."""
        self._timer.cancel()
        if self.running:
            self._process.kill()
        self._process.wait(20)
        for stream in (self._process.stdin, self._process.stdout, self._errors):
            if stream is not None:
                stream.close()


@contextmanager
def started(files: Sequence[Path], folder: Path, python: str = sys.executable) -> Iterator[list[Program]]:
    """Programs that share a folder; all are gone afterwards."""
    programs = list[Program]()
    try:
        for file in files:
            programs.append(Program(file, folder, python))
        yield programs
    finally:
        for program in programs:
            program.close()
