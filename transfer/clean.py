"""Shared memory that a killed process left behind. No jax, no numpy: the launcher's guard uses it."""

from __future__ import annotations

import contextlib
import os

from jaxrl_sync.transfer.memory import PREFIX, SHM_DIR, pid_namespace, shm_prefix


def remove_leftovers(run_id: str) -> list[str]:
    """Remove every segment of a run, whoever made it; returns the names. Call it when the run is over.

    Processes that still map a segment keep their mapping and lose nothing but its name.
    """
    return _remove([n for n in _segments() if n.startswith(shm_prefix(run_id))])


def remove_stale(run_id: str = "") -> list[str]:
    """Remove segments whose maker is dead, of one run or of all; returns the names.

    The maker's process id and its namespace are part of the name; those of other namespaces are kept.
    """
    prefix = shm_prefix(run_id) if run_id else PREFIX
    return _remove([n for n in _segments() if n.startswith(prefix) and not _alive(n)])


def remove_mine() -> list[str]:
    """Remove the segments that this process made: for one that ends without closing what it holds."""
    return _remove([n for n in _segments() if _maker(n) == os.getpid()])


def _segments() -> list[str]:
    try:
        return [n for n in os.listdir(SHM_DIR) if n.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _maker(name: str) -> int | None:
    """Process id of a segment's maker; None for a name of another kind or process namespace."""
    parts = name.rsplit("-", 2)
    namespace, _, pid = parts[1].partition("_") if len(parts) == 3 else ("", "", "")
    return int(pid) if pid.isdecimal() and namespace == str(pid_namespace()) else None


def _alive(name: str) -> bool:
    pid = _maker(name)
    if pid is None:
        return True  # leave it alone
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _remove(names: list[str]) -> list[str]:
    removed = []
    for name in names:
        with contextlib.suppress(FileNotFoundError, PermissionError):
            os.unlink(SHM_DIR / name)
            removed.append(name)
    return removed
