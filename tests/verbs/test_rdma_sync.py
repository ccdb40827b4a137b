"""Weight syncs between trainer and engine processes over real verbs (see test_rdma.py)."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.server import run_hub
from tests.transfer.models import trainer_params
from tests.verbs.soft import DEBIAN, LONG_S, pyverbs_here, soft_devices

pytestmark = [pytest.mark.rdma, pytest.mark.slow, pytest.mark.timeout(1500)]
ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[dict[str, str]]:
    """A hub in a thread, a token, and saved parameters."""
    soft_devices()
    auth.create_token(tmp_path / "token")
    saved = {path.replace("/", "|"): np.asarray(x) for path, x in leaves_by_path(trainer_params(7)).items()}
    np.savez(tmp_path / "params.npz", allow_pickle=False, **saved)
    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(
        target=run_hub,
        args=("127.0.0.1", 0, tmp_path / "token"),
        kwargs={"stop": stop, "announce": announce, "ttl_s": LONG_S},
    )
    thread.start()
    assert ready.wait(60)
    (tmp_path / "bindings").mkdir()  # nothing else of Debian's Python may come before the environment's own
    (tmp_path / "bindings" / "pyverbs").symlink_to(f"{DEBIAN}/pyverbs")
    yield {"hub": urls[0], "token": str(tmp_path / "token"), "params": str(tmp_path / "params.npz")}
    stop.set()
    thread.join(60)


class Peer:
    """A process of sync_peer.py."""

    def __init__(self, role: str, devices: int, run: dict[str, str]) -> None:
        bindings = str(Path(run["token"]).parent / "bindings")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), bindings]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        command = [sys.executable, "-m", "tests.verbs.sync_peer", role, json.dumps(run)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def expect(self, key: str) -> dict[str, Any]:
        """Its next message with this key; the test's own timeout bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if key in message:
                return message
            assert "error" not in message, message
        raise AssertionError(f"the process ended before it said {key!r}")

    def tell(self, key: str, **command: Any) -> dict[str, Any]:
        """One command, and the answer that has this key."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()
        return self.expect(key)

    def close(self) -> None:
        """Kill it, stopped or not."""
        self.process.kill()
        self.process.communicate()


@pytest.fixture
def peers(run: dict[str, str]) -> Iterator[Any]:
    """Starts processes; all are gone afterwards."""
    started: list[Peer] = []

    def start(role: str) -> Peer:
        started.append(Peer(role, {"trainer": 4, "engine": 2}[role], run))
        return started[-1]

    yield start
    for peer in started:
        peer.close()


def test_all_pairings_of_backends_placed_and_staged_over_one_and_two_rails(peers: Any) -> None:
    """A version of saved parameters each, bit for bit, through Publisher and Subscriber of two processes."""
    pyverbs_here()
    trainer, engine = peers("trainer"), peers("engine")
    trainer.expect("ready")
    engine.expect("ready")
    cases = [
        (left, right, placement, ["rxe0"], ["rxe1"])
        for left, right in itertools.product(["native", "pyverbs"], repeat=2)
        for placement in ("placed", "staged")
    ]
    cases += [("native", "native", p, ["rxe0", "rxe1"], ["rxe1", "rxe0"]) for p in ("placed", "staged")]
    for number, (left, right, placement, ours, theirs) in enumerate(cases):
        trainer.tell("opened", open=1, verbs={"backend": left, "devices": ours})
        verbs = {"backend": right, "devices": theirs, "placement": placement}
        engine.tell("opened", open=f"engine-{number}", verbs=verbs)
        wanted = trainer.tell("expected", publish=number, lineage=f"l{number}")["expected"]
        found = engine.tell("digest", take=1)
        assert (found["transport"], found["digest"]) == ("verbs", wanted), (left, right, placement)
        engine.tell("closed", close=1)
        trainer.tell("closed", close=1)


def test_a_trainer_stopped_in_mid_write_can_never_change_a_slot_again(peers: Any) -> None:
    """Its round expires, another trainer's version is installed, it wakes up: no bit of any slot changes."""
    first, engine = peers("trainer"), peers("engine")
    first.expect("ready")
    engine.expect("ready")
    first.tell("opened", open=1, verbs={"devices": ["rxe0"]})
    verbs = {"devices": ["rxe1"], "placement": "placed", "chunk_bytes": 4096}
    engine.tell("opened", open="engine", verbs=verbs)
    wanted = first.tell("expected", publish=0, lineage="a")["expected"]
    assert engine.tell("digest", take=1)["digest"] == wanted
    first.tell("expected", publish=1, lineage="a", stop_at=5, wait=1)
    failed = engine.tell("error", take=1, timeout_s=20.0)
    assert failed["error"] == "DeadlineError" and "trainer.0" in failed["message"], failed
    second = peers("trainer")
    second.expect("ready")
    second.tell("opened", open=1, verbs={"devices": ["rxe0"]})
    wanted = second.tell("expected", publish=0, lineage="b")["expected"]
    assert engine.tell("digest", take=1)["digest"] == wanted
    slots = engine.tell("slots", slots=1)["slots"]
    os.kill(first.process.pid, signal.SIGCONT)
    outcome = first.expect("state")
    assert outcome["state"] == "failed", outcome
    assert any(word in outcome["detail"] for word in ("queue pair", "closed", "gone")), outcome
    assert engine.tell("slots", slots=1)["slots"] == slots
