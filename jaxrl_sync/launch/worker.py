"""A worker: one or more processes that play one role, start together and die as one unit."""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)
ERROR_PREFIX = "jaxrl-sync: error: "
ECHO_S = 0.5
"""Schedulers and timeout(1) signal a process and its group, so that one wish arrives twice: for so long a
second signal is taken for the first."""


@dataclasses.dataclass(frozen=True)
class ProcessSpec:
    """How to start one process: its name, its command line, its whole environment."""

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class WorkerSpec:
    """The processes of one worker. ``one_world``: they are handed a common ``--coordinator`` address."""

    name: str
    role: str
    processes: tuple[ProcessSpec, ...]
    one_world: bool = False


@dataclasses.dataclass(frozen=True)
class Exit:
    """How a process ended: ``code`` is its exit status, negative for a signal; ``line`` its own last word."""

    process: str
    code: int
    line: str
    log: Path

    @property
    def cause(self) -> str:
        """One line that names the process and why it ended, as far as that is known."""
        if self.line.startswith(ERROR_PREFIX):
            return f"{self.process}: {self.line.removeprefix(ERROR_PREFIX)}"
        how = (
            f"was killed by {_signal_name(-self.code)}" if self.code < 0 else f"exited with code {self.code}"
        )
        return f"{self.process} {how}; its log is {self.log}"


class Worker:
    """Owns the processes of one worker and their logs. Not thread-safe; one supervisor loop drives it."""

    def __init__(self, spec: WorkerSpec, run_dir: Path) -> None:
        self.spec = spec
        self.starts = 0
        self.started_at = 0.0
        self._run_dir = run_dir
        self._children: dict[str, subprocess.Popen[bytes]] = {}
        self._port: socket.socket | None = None
        """The coordinator's, kept for it while its world is up."""

    @property
    def name(self) -> str:
        """The worker's name."""
        return self.spec.name

    @property
    def pids(self) -> dict[str, int]:
        """Process id by process name, of those that were started last."""
        return {name: child.pid for name, child in self._children.items()}

    def log_path(self, process: str) -> Path:
        """Where the process's output goes; restarts append."""
        return self._run_dir / "logs" / f"{process}.log"

    def start(self, *extra: str) -> None:
        """Start every process with ``extra`` arguments; one world gets a fresh coordinator port each time."""
        self._release_port()
        if self.spec.one_world:
            self._port = reserved_port()
            extra = (*extra, "--coordinator", f"127.0.0.1:{self._port.getsockname()[1]}")
        for spec in self.spec.processes:
            self._proc_file(spec.name).unlink(missing_ok=True)
        for spec in self.spec.processes:
            self._children[spec.name] = self._spawn(spec, extra)
        self.starts += 1
        self.started_at = time.monotonic()

    def _spawn(self, spec: ProcessSpec, extra: tuple[str, ...]) -> subprocess.Popen[bytes]:
        path = self.log_path(spec.name)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab") as log:
            return subprocess.Popen(
                [*spec.argv, *extra],
                env=dict(spec.env),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_die_with_parent(os.getpid()),
            )

    def _proc_file(self, process: str) -> Path:
        return self._run_dir / "proc" / f"{process}.json"

    def silent(self) -> list[str]:
        """Processes that have not written their ``proc/<name>.json`` yet."""
        return [name for name in self._children if not self._proc_file(name).exists()]

    def first_exit(self) -> Exit | None:
        """How the worker's first ended process ended; a failed one goes before one that ended well."""
        ended = [self._exit(n, c.returncode) for n, c in self._children.items() if c.poll() is not None]
        return min(ended, key=_blame, default=None)

    def done(self) -> bool:
        """Whether all its processes have ended."""
        return all(child.poll() is not None for child in self._children.values())

    def _exit(self, process: str, code: int) -> Exit:
        return Exit(process, code, last_line(self.log_path(process)), self.log_path(process))

    def terminate(self) -> None:
        """Ask every process to stop (SIGTERM); returns at once."""
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL every process and its session, and reap them."""
        self._signal(signal.SIGKILL)
        for child in self._children.values():
            child.wait()
        self._release_port()

    def _release_port(self) -> None:
        if self._port is not None:
            self._port.close()
            self._port = None

    def _signal(self, number: signal.Signals) -> None:
        for child in self._children.values():
            try:
                if child.poll() is None:
                    os.killpg(child.pid, number)
            except ProcessLookupError:
                continue


def _die_with_parent(parent: int) -> Callable[[], None]:
    """What a child does before it becomes its program: ask to die when its parent does, of whatever."""

    def arm() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return arm


def _blame(end: Exit) -> tuple[bool, bool, bool]:
    """Sort key: failures first, those with a named cause before others, signals of our own making last."""
    return (end.code == 0, not end.line.startswith(ERROR_PREFIX), end.code == -signal.SIGABRT)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def last_line(path: Path, tail_bytes: int = 65536) -> str:
    """The last error line of a log (``jaxrl-sync: error: ...``), else its last line that isn't empty."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - tail_bytes))
            return error_line(log.read().decode("utf8", "replace"))
    except FileNotFoundError:
        return ""


def error_line(text: str) -> str:
    """The last line of a process's output that names its error, else its last line that isn't empty.

    Libraries may still write when the process has said why it ends.
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith(ERROR_PREFIX)]
    return (errors or lines or [""])[-1]


def missing_resource(error: OSError) -> str | None:
    """One line about the user's disk, where that is at fault: a path that can't be used as asked, or no room
    left; None for any other error."""
    if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EROFS):
        return None
    return f"{error.filename}: {error.strerror}" if error.filename is not None else str(error.strerror)


def reserved_port() -> socket.socket:
    """A socket that keeps a port of loopback for a gRPC server that will listen there. The caller closes it.

    It doesn't listen. Servers of gRPC share ports with sockets of their user that share them too
    (SO_REUSEPORT); nobody else gets this one meanwhile, and the kernel hands it out to nobody.
    """
    held = socket.socket()
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    held.bind(("127.0.0.1", 0))
    return held
