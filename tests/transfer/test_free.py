"""How much memory a process could still take, of a control group that a limit and files fill."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxrl_sync.transfer import free

GIB = 1 << 30


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A control group with 8 GiB, of which 7.9 are in use: 6 by files that were read, 1 by shared memory."""
    monkeypatch.setattr(free, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(free, "CGROUP", tmp_path)
    (tmp_path / "meminfo").write_text("MemTotal: 67108864 kB\nMemAvailable: 33554432 kB\n")
    (tmp_path / "memory.max").write_text(f"{8 * GIB}\n")
    (tmp_path / "memory.current").write_text(f"{8 * GIB - GIB // 10}\n")
    rows = {"anon": GIB, "file": 7 * GIB, "shmem": GIB, "inactive_file": 5 * GIB, "active_file": GIB}
    (tmp_path / "memory.stat").write_text("".join(f"{name} {n}\n" for name, n in rows.items()))
    return tmp_path


def test_files_in_memory_take_no_room_of_a_control_group(group: Path) -> None:
    assert free.free_bytes() == 6 * GIB + GIB // 10


def test_the_least_of_machine_and_group_counts(group: Path) -> None:
    (group / "meminfo").write_text("MemAvailable: 1024 kB\n")
    assert free.free_bytes() == 1 << 20
    (group / "meminfo").unlink()
    (group / "memory.max").write_text("max\n")
    assert free.free_bytes() is None
