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
        return max(0, limit - int((CGROUP / "memory.current").read_text()))
    return None
