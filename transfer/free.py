"""How much memory this process could still take."""

from __future__ import annotations

import contextlib
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def free_bytes() -> int | None:
    """Available host memory in bytes, within the limit of its control group; None where nobody tells."""
    found = [n for n in (_available(), _below_limit()) if n is not None]
    return min(found, default=None)


def _available() -> int | None:
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in MEMINFO.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) << 10
    return None


def _below_limit() -> int | None:
    with contextlib.suppress(OSError, ValueError):  # "max": no limit
        limit = int((CGROUP / "memory.max").read_text())
        used = int((CGROUP / "memory.current").read_text()) - _cached()
        return max(0, limit - max(0, used))
    return None


def _cached() -> int:
    """Bytes of files that the group has in memory and gives up when asked: reading fills it to its limit."""
    rows = [line.split() for line in (CGROUP / "memory.stat").read_text().splitlines()]
    return sum(int(n) for name, n in rows if name in ("active_file", "inactive_file"))
