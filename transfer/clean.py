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


def _segments() -> list[str]:
    try:
        return [n for n in os.listdir(SHM_DIR) if n.startswith(PREFIX)]
    except FileNotFoundError:
        return []


def _alive(name: str) -> bool:
    parts = name.rsplit("-", 2)
    namespace, _, pid = parts[1].partition("_") if len(parts) == 3 else ("", "", "")
    if not pid.isdigit() or namespace != str(pid_namespace()):
        return True  # of another kind or place: leave it alone
    try:
        os.kill(int(pid), 0)
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
