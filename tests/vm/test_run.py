"""Where the VM can't be had, its script says so in one line and names the way to do without."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

RUN = Path(__file__).parent / "run"
TOOLS = ("bash", "env", "dirname", "uname", "id", "mkdir", "cat", "sed", "awk", "mktemp", "rm", "touch")


def run(tmp_path: Path, *words: str, **fakes: str) -> subprocess.CompletedProcess[str]:
    """The script with nothing in PATH but TOOLS and scripts of our own."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in TOOLS:
        found = shutil.which(name)
        assert found is not None
        if name not in fakes:
            (tools / name).symlink_to(found)
    for name, text in fakes.items():
        (tools / name).write_text(f"#!/bin/sh\n{text}\n")
        (tools / name).chmod(0o755)
    environment = {"PATH": str(tools), "HOME": str(tmp_path)}
    return subprocess.run([str(RUN), *words], env=environment, capture_output=True, text=True, timeout=60)


def refused(done: subprocess.CompletedProcess[str], words: str) -> None:
    assert done.returncode == 125, done
    assert words in done.stderr
    assert "JAXRL_SYNC_NO_VM=1 makes ./dev test leave out the tests on real RDMA verbs" in done.stderr


def test_no_apt(tmp_path: Path) -> None:
    refused(run(tmp_path, "true", id="echo 0", uname="echo x86_64"), "needs Debian or Ubuntu (apt-get)")


def test_another_kind_of_machine(tmp_path: Path) -> None:
    refused(run(tmp_path, "true", uname="echo riscv64"), "needs an x86-64 machine, this is riscv64")


def test_not_root(tmp_path: Path) -> None:
    refused(run(tmp_path, "true", id="echo 1000", uname="echo x86_64"), "needs root")


def test_no_network(tmp_path: Path) -> None:
    """apt fails three times, then the last words say what failed and where to look."""
    fakes = {
        "id": "echo 0",
        "uname": "echo x86_64",
        "apt-get": "echo tried; exit 100",
        "dpkg-query": "exit 1",
        "sleep": "exit 0",
        "flock": "exit 0",
        "tail": "cat /dev/null",
    }
    done = run(tmp_path, "true", **fakes)
    refused(done, "apt-get update failed (is there a network?)")
    log = tmp_path / ".cache" / "jaxrl-sync-vm" / "apt.log"
    assert log.read_text().count("tried") == 3


def test_help_and_no_command(tmp_path: Path) -> None:
    done = run(tmp_path, "--help")
    assert done.returncode == 0 and "tests/vm/run --prepare" in done.stdout
    (tmp_path / "again").mkdir()
    refused(run(tmp_path / "again", "-t", "5"), "no command given")


def test_ends_with_a_banner_without_the_vm() -> None:
    """`./dev test` says loudly, at its end, what it left out."""
    text = (RUN.parents[2] / "dev").read_text()
    start = text.index("without_vm() {")
    function = text[start : text.index("\n}\n", start) + 3]
    done = subprocess.run(
        ["bash", "-c", function + "\nwithout_vm"],
        env={**os.environ, "JAXRL_SYNC_NO_VM": "1"},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (
        "NOT TESTED: real RDMA verbs. JAXRL_SYNC_NO_VM=1: the VM with soft-RoCE did not run." in done.stderr
    )
