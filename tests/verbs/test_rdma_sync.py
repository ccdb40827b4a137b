"""One weight sync between a trainer and an engine process over real verbs (see test_rdma.py)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.server import run_hub
from jaxrl_sync.transfer.verbs.devices import scan

pytestmark = [pytest.mark.rdma, pytest.mark.timeout(1500)]
SLOW_S = 120.0  # in an emulated guest on a busy machine
ROOT = Path(__file__).parents[2]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[str]:
    """The URL of a hub in a thread."""
    if not {"rxe0", "rxe1"} <= {port.device for port in scan()}:
        pytest.skip("needs the RDMA devices rxe0 and rxe1 of tests/vm/run")
    auth.create_token(tmp_path / "token")
    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    thread = threading.Thread(
        target=run_hub,
        args=("127.0.0.1", 0, tmp_path / "token"),
        kwargs={"stop": stop, "announce": announce, "ttl_s": SLOW_S},
    )
    thread.start()
    assert ready.wait(60)
    yield urls[0]
    stop.set()
    thread.join(60)


class Peer:
    """A trainer or engine process of tests/transfer/peer.py."""

    def __init__(self, role: str, devices: int, **options: Any) -> None:
        bindings = options.pop("bindings")
        env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), bindings]),
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.transfer.peer", role, json.dumps(options)],
            cwd=ROOT,
            env=env,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def expect(self, key: str) -> dict[str, Any]:
        """Its next message with this key; the test's own timeout bounds it."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            message: dict[str, Any] = json.loads(line)
            if key in message:
                return message
        raise AssertionError(f"the process ended before it said {key!r}")

    def tell(self, **command: Any) -> None:
        """One command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def close(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.communicate()


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("native", "native"),
        *[
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("native", "pyverbs"), ("pyverbs", "native"), ("pyverbs", "pyverbs")]
        ],
    ],
)
def test_versions_arrive_bit_for_bit_between_processes(
    hub: str, tmp_path: Path, left: str, right: str
) -> None:
    bindings = tmp_path / "bindings"  # nothing else of Debian's Python may come before the environment's own
    bindings.mkdir()
    (bindings / "pyverbs").symlink_to("/usr/lib/python3/dist-packages/pyverbs")
    shared = {"hub": hub, "token": str(tmp_path / "token"), "transport": "verbs", "ttl_s": SLOW_S}
    shared["bindings"] = str(bindings)
    trainer = Peer("trainer", 4, device="rxe0", lineage="a", backend=left, **shared)
    engine = Peer("engine", 2, device="rxe1", engine="e", timeout_s=SLOW_S, backend=right, **shared)
    try:
        trainer.expect("ready")
        engine.expect("ready")
        for number in range(3):
            trainer.tell(publish=number)
            wanted = trainer.expect("published")["expected"]
            found = engine.expect("digest")
            assert (found["transport"], found["digest"]) == ("verbs", wanted), number
    finally:
        engine.close()
        trainer.close()
