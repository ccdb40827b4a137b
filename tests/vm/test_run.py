"""Where the VM can't be had, its script says so in one line and names the way to do without."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

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


SKIPS = {
    "a test": "def test_it(): pytest.skip('the moon is full')",
    "a mark": "@pytest.mark.skipif(True, reason='the moon is full')\ndef test_it(): pass",
    "a fixture": "@pytest.fixture\ndef it(): pytest.skip('the moon is full')\ndef test_it(it): pass",
    "a module": "pytest.skip('the moon is full', allow_module_level=True)",
    "a package": "pytest.importorskip('no_such_package', reason='the moon is full')",
}


@pytest.mark.parametrize("code", SKIPS.values(), ids=SKIPS)
def test_a_run_in_the_vm_fails_where_a_test_was_left_out_and_nobody_knows_why(
    tmp_path: Path, code: str
) -> None:
    """Skipped tests fail no run by themselves: one without a single write over real verbs was a success."""
    done = in_the_vm(tmp_path, code)
    assert done.returncode not in (0, 5), done.stdout
    assert "in the VM nothing is to be left out" in done.stdout and "the moon is full" in done.stdout


def test_what_another_python_lacks_is_said_aloud_and_fails_no_run(tmp_path: Path) -> None:
    missing = "from tests.verbs.soft import missing"
    fake = "monkeypatch.setattr('sys.version_info', (3, 12, 0))"
    done = in_the_vm(tmp_path, f"{missing}\ndef test_it(monkeypatch): {fake}; missing('a package')")
    assert done.returncode == 0, done.stdout
    assert "##  NOT TESTED: needs a package, found none for Python 3.12" in done.stdout


def in_the_vm(tmp_path: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Tests marked rdma as the VM runs them: one that passes, one of this code, the rules of tests/verbs."""
    begin = "import pytest\npytestmark = pytest.mark.rdma\n"
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    rdma: real verbs\n")
    (tmp_path / "test_passes.py").write_text(begin + "def test_passes(): pass\n")
    (tmp_path / "test_zz.py").write_text(begin + code + "\n")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "tests.verbs.conftest"]
    environment = {**os.environ, "RDMA_VM": "1", "PYTHONPATH": str(RUN.parents[2])}
    return subprocess.run(
        [*command, "--rootdir", str(tmp_path), str(tmp_path)],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
