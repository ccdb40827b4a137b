"""Roles started one by one with ``--hub`` and ``--token-file``, as a cluster does: who dies is named by all
that depend on it, without a supervisor, within the bounds of the config."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from jaxrl_sync.config import load, parse_overrides, save
from jaxrl_sync.launch.worker import error_line
from jaxrl_sync.transfer import clean
from jaxrl_sync.transfer.auth import create_token, load_token, run_id_of
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub.client import HubClient
from tests.app.runs import ADDITION, CACHE, SMALL
from tests.ports import free_port

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(600), pytest.mark.invariant(19)]

BOUNDS = ("--hub.ttl_s=6", "--loop.trainer_wait_s=4")
"""A slow machine may stand still for a few seconds, and the orchestrator may look at the directory that late.
Together less than the 20 s for which the data connection looks for its trainer: its error has no name."""
ENGINE_BOUNDS = ("--run.start_timeout_s=60",)
"""The engine's own patience with a hub that is gone. For the others it is also the time to start, which is
more than that where the machine is slow."""


class ByHand:
    """One run without a supervisor; leaving kills what is left of it."""

    def __init__(self, run_dir: Path, *overrides: str) -> None:
        self.run_dir = run_dir
        run_dir.mkdir()
        words = [*SMALL, "--engine.replicas=1", "--run.steps=100000", *BOUNDS, *overrides]
        save(load(ADDITION, parse_overrides(words)), run_dir / "config.toml")
        self.token_file = Path(f"{run_dir}.token")
        create_token(self.token_file)
        self.port = free_port()
        self.hub_url = f"http://127.0.0.1:{self.port}"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.start("hub", "--port", str(self.port))
        for role, bounds in (("orchestrator", ()), ("trainer", ()), ("engine", ENGINE_BOUNDS)):
            self.start(role, "--hub", self.hub_url, *bounds)

    def start(self, role: str, *options: str) -> None:
        env = {**os.environ, "JAX_COMPILATION_CACHE_DIR": str(CACHE)}
        env.pop("XLA_FLAGS", None)
        given = ("--run-dir", str(self.run_dir), "--token-file", str(self.token_file), *options)
        with (self.run_dir / f"{role}.log").open("wb") as log:
            command = [sys.executable, "-m", "jaxrl_sync.cli", role, *given]
            self.processes[role] = subprocess.Popen(command, env=env, stdout=log, stderr=log)

    def __enter__(self) -> ByHand:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait()
        clean.remove_leftovers(run_id_of(load_token(self.token_file)))  # of those that were killed

    def log(self, role: str) -> str:
        return (self.run_dir / f"{role}.log").read_text()

    def wait(self, there: Callable[[], object], timeout_s: float = 240.0) -> None:
        """Until ``there()`` is true; fails with the log of a role that ended meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not there():
            for role, process in self.processes.items():
                assert process.poll() is None, f"{role}: {self.log(role)}"
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def registered(self, role: str) -> bool:
        """Whether the hub's directory lists ``role``."""
        try:
            with HubClient(self.hub_url, self.token_file, timeout_s=2.0) as hub:
                return bool(hub.members(role))
        except TransferError:
            return False  # the hub itself is not up yet

    def trained(self, steps: int) -> bool:
        rows = self.run_dir / "metrics.jsonl"
        return rows.exists() and rows.read_text().count('"kind": "step"') >= steps

    def ends(self, role: str, timeout_s: float = 180.0) -> tuple[int, str]:
        """Exit code and error line of a role that ends by itself."""
        return self.processes[role].wait(timeout_s), error_line(self.log(role))


@pytest.mark.parametrize("when", ["it starts", "it trains"])
def test_a_trainer_that_dies_is_named_by_the_orchestrator(tmp_path: Path, when: str) -> None:
    with ByHand(tmp_path / "run") as run:
        roles = ("orchestrator", "trainer")  # who never saw the trainer can't miss it
        run.wait(lambda: run.trained(2) if when == "it trains" else all(map(run.registered, roles)))
        run.processes["trainer"].kill()
        code, line = run.ends("orchestrator")
        assert code == 4 and line.startswith("jaxrl-sync: error: ") and "trainer process trainer-0" in line
        for role in ("engine", "hub"):  # they serve until they are told to stop
            assert run.processes[role].poll() is None
            run.processes[role].send_signal(signal.SIGTERM)
            assert run.processes[role].wait(60) == 0, run.log(role)
        prefix = f"jaxrl_sync-{run_id_of(load_token(run.token_file))}-"
        kept = [p.name for p in Path("/dev/shm").glob(f"{prefix}*")]
        assert not [name for name in kept if f"_{run.processes['engine'].pid}-" in name]


def test_a_hub_that_dies_ends_all_others_by_name(tmp_path: Path) -> None:
    with ByHand(tmp_path / "run") as run:
        run.wait(lambda: run.trained(2))
        run.processes["hub"].kill()
        code, line = run.ends("orchestrator")
        assert code == 4 and "the hub is gone" in line
        code, line = run.ends("trainer")
        assert code == 4 and ("orchestrator closed" in line or "lease of trainer" in line)
        code, line = run.ends("engine")
        assert code == 4 and "lease of engine" in line and "didn't answer for 60 s" in line
