"""Leaving nothing behind: killing what still carries a run's mark, removing its shared memory and sockets.

Standard library only, and quick to import: the guard process uses it.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

SHM_DIR = Path("/dev/shm")


def marked_pids(variable: str, value: str) -> list[int]:
    """Live processes but this one that were started with ``variable=value`` in their environment.

    The mark, not a remembered number, says that a process belongs to the run: a recycled pid never matches.
    """
    mark = f"{variable}={value}".encode()
    return [pid for pid in _all_pids() if pid != os.getpid() and mark in _environment(pid)]


def kill_marked(variable: str, value: str, deadline_s: float) -> list[int]:
    """SIGKILL every marked process until none is left or ``deadline_s`` passed; the pids that were killed."""
    killed: set[int] = set()
    deadline = time.monotonic() + deadline_s
    while True:
        pids = marked_pids(variable, value)
        if not pids or time.monotonic() >= deadline:
            return sorted(killed)
        killed.update(pid for pid in pids if _kill(pid, f"{variable}={value}".encode()))
        time.sleep(0.05)


def _kill(pid: int, mark: bytes) -> bool:
    """Kill ``pid`` through a pidfd, after looking once more that it is still the marked process."""
    try:
        fd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if mark not in _environment(pid):
            return False
        signal.pidfd_send_signal(fd, signal.SIGKILL)
        return True
    except OSError:
        return False
    finally:
        os.close(fd)


def _all_pids() -> Iterable[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def _environment(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []


def is_stopped(pid: int) -> bool:
    """Whether the process is stopped (SIGSTOP, a debugger): state T or t in ``/proc/<pid>/stat``."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in ("T", "t")


def remove_shm(prefix: str, folder: Path = SHM_DIR) -> list[str]:
    """Remove the shared-memory segments whose names start with ``prefix``; the names that were removed."""
    removed = []
    for path in sorted(folder.glob(f"{prefix}*")):
        path.unlink(missing_ok=True)
        removed.append(path.name)
    return removed


def remove_sockets(folder: Path) -> list[str]:
    """Remove the socket files below ``folder``; their paths."""
    removed = []
    for path in sorted(folder.rglob("*")):
        if path.is_socket():
            path.unlink(missing_ok=True)
            removed.append(str(path))
    return removed
