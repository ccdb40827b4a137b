"""A JAX world's coordinator, which asks for no token, listens where its address says."""

from __future__ import annotations

import subprocess
import sys

from tests.ports import free_port

CHILD = """
import logging, sys
from pathlib import Path
from jaxrl_sync.inference.world import join_world
logging.basicConfig()
port = int(sys.argv[2])
join_world(f"{sys.argv[1]}:{port}", 1, 0, timeout_s=60, shutdown_s=5)
for name in ("tcp", "tcp6"):
    for line in Path(f"/proc/self/net/{name}").read_text().splitlines()[1:]:
        address, state = line.split()[1], line.split()[3]
        if state == "0A" and int(address.rpartition(":")[2], 16) == port:
            print("listens", address.rpartition(":")[0])
"""


def run(host: str) -> tuple[str, str]:
    command = [sys.executable, "-c", CHILD, host, str(free_port())]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout, done.stderr


def test_a_world_on_loopback_is_not_reachable_from_elsewhere() -> None:
    out, err = run("127.0.0.1")
    places = [line.split()[1] for line in out.splitlines()]
    assert places and all(p in ("0100007F", "0000000000000000FFFF00000100007F") for p in places), out
    assert "ASKS FOR NO TOKEN" not in err
