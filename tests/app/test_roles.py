"""A role's own process: what signals do to it, and that it leaves no shared memory behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sync.config import load
from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.launch import roles
from jaxrl_sync.launch.commands import workers
from jaxrl_sync.launch.environment import HUGE_PAGES, huge_pages
from jaxrl_sync.launch.worker import ECHO_S, error_line
from jaxrl_sync.transfer.auth import create_token
from tests.app.runs import ADDITION

THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")

PROGRAM = """
import os, pathlib, sys, time
from types import SimpleNamespace
import threading
from jaxrl_sync.launch import roles
from jaxrl_sync.transfer.memory import pid_namespace

segment = pathlib.Path(f"/dev/shm/jaxrl_sync-feed-{pid_namespace()}_{os.getpid()}-0")
context = SimpleNamespace(stop=threading.Event())
roles.ECHO_S = float(sys.argv[2])
roles._stop_on_signals(context)
segment.write_bytes(b"weights")
print(segment, flush=True)
context.stop.wait()
print("draining", flush=True)
time.sleep(float(sys.argv[1]))
segment.unlink()
"""


def start(drain_s: float, echo_s: float) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, str(drain_s), str(echo_s)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_one_wish_that_arrives_twice_drains() -> None:
    process, segment = start(drain_s=0.5, echo_s=600.0)
    os.kill(process.pid, signal.SIGSTOP)  # so that both are there when it looks
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCONT):  # two of one kind could arrive as one
        os.kill(process.pid, number)
    assert process.wait(120) == 0
    assert not segment.exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_a_role_and_its_shared_memory(number: signal.Signals) -> None:
    process, segment = start(drain_s=600, echo_s=ECHO_S)
    os.kill(process.pid, number)
    assert process.stdout is not None and process.stdout.readline() == "draining\n"
    assert segment.exists()
    time.sleep(0.7)
    os.kill(process.pid, number)
    assert process.wait(120) == 130
    assert not segment.exists()


@pytest.mark.parametrize(
    ("placement", "replicas", "expected"),
    [
        ("disaggregated", 2, ["hub", "trainer", "engine-0", "engine-1", "orchestrator"]),
        ("colocated", 1, ["hub", "trainer", "orchestrator"]),
        ("mixed", 3, ["hub", "trainer", "engine-1", "engine-2", "orchestrator"]),
    ],
)
def test_a_colocated_replica_has_no_process_of_its_own(
    tmp_path: Path, placement: str, replicas: int, expected: list[str]
) -> None:
    config = load(ADDITION, {"engine.placement": placement, "engine.replicas": replicas})
    assert [w.name for w in workers(config, tmp_path, {})] == expected


def test_arrays_of_roles_lie_in_huge_pages_unless_somebody_says_otherwise(tmp_path: Path) -> None:
    config = load(
        ADDITION, {"engine.placement": "disaggregated", "trainer.platform": "cuda", "engine.replicas": 1}
    )
    theirs = {"GLIBC_TUNABLES": "glibc.malloc.check=0"}
    found = {w.name: w.processes[0].env.get("GLIBC_TUNABLES") for w in workers(config, tmp_path, theirs)}
    plain = theirs["GLIBC_TUNABLES"]
    assert found == {
        "hub": plain, "trainer": plain, "engine-0": f"{plain}:{HUGE_PAGES}", "orchestrator": plain
    }  # fmt: skip
    kept = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=0"}
    assert huge_pages(kept) == kept and huge_pages({}) == {"GLIBC_TUNABLES": HUGE_PAGES}


@pytest.mark.skipif(
    "[madvise]" not in (THP.read_text() if THP.exists() else ""), reason="no huge pages for who asks"
)
def test_huge_pages_are_asked_for_where_a_large_array_lies() -> None:
    """Whether the kernel has some to give just now is another question."""
    program = """
import jax.numpy as jnp
x = jnp.ones(1 << 24, jnp.float32).block_until_ready()
kib = size = 0
for words in map(str.split, open("/proc/self/smaps")):
    size = int(words[1]) if words[0] == "Size:" else size
    kib += size if words[0] == "VmFlags:" and "hg" in words else 0
print(kib)
"""
    env = {k: v for k, v in os.environ.items() if k != "GLIBC_TUNABLES"} | {"JAX_PLATFORMS": "cpu"}
    kib = [
        int(subprocess.run([sys.executable, "-c", program], env=e, capture_output=True, timeout=120).stdout)
        for e in (env, huge_pages(env))
    ]
    assert kib[1] >= kib[0] + (64 << 10), f"{kib} KiB asked for without and with the tunable, of 64 MiB"


def test_a_disk_that_can_not_be_written_is_one_line_and_the_code_of_a_missing_resource(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was a traceback, and code 1."""
    monkeypatch.setattr(roles, "_stop_on_signals", lambda context: None)
    create_token(tmp_path / "token")
    (tmp_path / "run").write_text("no folder")
    context = ProcessContext("hub", "hub", load(ADDITION), tmp_path / "run", tmp_path / "token")
    assert roles.run_role(context) == 3
    said = capsys.readouterr().err
    assert "Traceback" not in said and error_line(said).startswith(f"jaxrl-sync: error: {tmp_path}/run")


def test_the_command_of_a_colocated_replica_says_that_it_has_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roles, "_stop_on_signals", lambda context: None)
    config = load(ADDITION, {"engine.placement": "mixed", "engine.replicas": 3})
    context = ProcessContext("engine", "engine-0", config, tmp_path, tmp_path / "token")
    assert roles.run_role(context) == 2
    assert "engine --replica 0: expected 1 or 2 (engine.placement='mixed'" in capsys.readouterr().err
