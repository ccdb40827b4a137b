"""Many connections one after the other, and senders that die at any point: nothing grows, the next works.

Over shared memory and tcp; over verbs see tests/verbs (test_leaks, test_rdma_bulk, test_rdma_faults).
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import share_seed
from tests.transfer.models import LEASE_S
from tests.transfer.test_processes import Cast, cast, reach  # noqa: F401

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BOUND_S = 20.0
POINTS = 10
WARM, COUNTED = 50, 100
"""Cycles before the first look: caches of jax and the hub's lists of past rounds fill meanwhile."""

ROOM_BYTES = 8 << 20
"""What so many cycles may add to a process that is trainer, engine and hub (which lists past rounds)."""

CYCLES = """
import contextlib, ctypes, gc, json, os, sys, threading
from pathlib import Path
from jaxrl_sync.transfer import Version, auth
from tests.transfer.models import *
token, transport = Path(sys.argv[1]) / "token", sys.argv[2]
auth.create_token(token)
server = ServerThread(token)
with Rig(server, token) as rig:
    params = trainer_params()
    publisher = rig.publisher(params, transport)
    publisher.publish(params, Version("a", 0))
    wanted = convert(params)
    def cycles(count):
        for number in range(count):
            with rig.open_subscriber("guest", transport=transport) as guest:
                _, tree = take(guest, 60)
                assert same_bits(tree, wanted), number
                del tree
    def state():
        until(lambda: publisher.stats()["links"] == 0, 60)
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)
        pages = int(open("/proc/self/statm").read().split()[1])
        found = {"fds": open_fds(), "threads": threading.active_count(), "segments": len(segments(token))}
        return {**found, "rss": pages * os.sysconf("SC_PAGE_SIZE")}
    cycles(int(sys.argv[3]))
    before = state()
    cycles(int(sys.argv[4]))
    few = lambda: open_fds() <= before["fds"] + 12 and threading.active_count() <= before["threads"] + 8
    with contextlib.suppress(AssertionError):  # those of the last cycle end a moment after it
        until(few, 60)
    after = state()
server.close()
print(json.dumps([before, after]))
"""


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_connect_transfer_close_leaves_nothing(tmp_path: Path, transport: str) -> None:
    """A subscriber that connects, takes the version and closes: descriptors, threads, segments, memory."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(ROOT)])}
    command = [sys.executable, "-c", CYCLES, str(tmp_path), transport, str(WARM), str(COUNTED)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=800)
    assert done.returncode == 0, done.stderr[-3000:]
    before, after = json.loads(done.stdout)
    print(f"\n{COUNTED} cycles over {transport}: {before} -> {after}")
    assert after["segments"] == before["segments"] == 0
    # pools of connections to the hub and their threads vary, but not with the number of cycles
    assert after["fds"] <= before["fds"] + 12 and after["threads"] <= before["threads"] + 8
    assert after["rss"] - before["rss"] < ROOM_BYTES, f"{after['rss'] - before['rss']} bytes more"


@pytest.mark.full
@pytest.mark.timeout(900)
@pytest.mark.invariant(32)
@pytest.mark.parametrize("transport", ["shm", "tcp"])
def test_a_sender_killed_at_any_point_is_named_in_time_and_replaced(
    cast: Cast,  # noqa: F811
    transport: str,
) -> None:
    """At ten seeded points of a transfer: one error that names the sender, within the round's bound."""
    seed = f"{share_seed()}/{transport}"
    rng = random.Random(seed)
    points = sorted(rng.uniform(0.0, 0.99) for _ in range(POINTS))
    print(f"\nseed {seed}: {[round(p, 3) for p in points]}")
    # a lease that ran out beside a living process would end a round, with an error of its own
    common: dict[str, Any] = {"transport": transport, "layers": 12, "timeout_s": BOUND_S, "ttl_s": LEASE_S}
    one_lane = {"chunk_bytes": 4096, "connections": 1}  # of several, one may have sent nothing yet
    engine = cast.engine("x", config=one_lane, **common)
    engine.expect("ready")
    base: dict[str, int] = {}
    for number, point in enumerate([*points, None]):
        trainer = cast.trainer(f"t{number}", seed=number, config={"chunk_bytes": 4096}, **common)
        trainer.expect("ready")
        expected = trainer.publish(0)
        assert reach(engine, f"t{number}:0", 120)["digest"] == expected
        engine.tell(held=1)
        now = engine.expect("held")["held"]
        base = base or now
        assert now["segments"] == base["segments"], (number, now, base)
        assert now["fds"] <= base["fds"] + 6 and now["threads"] <= base["threads"] + 4, (number, now, base)
        if point is None:
            break
        trainer.tell(publish=1, halt="x", share=point)
        trainer.expect("halfway")
        killed = time.monotonic()
        trainer.kill()
        failed = engine.expect("error", 3 * BOUND_S)
        assert time.monotonic() - killed < BOUND_S, point
        assert failed["error"] == "PeerLost" and failed["installed"] == f"t{number}:0", failed
        assert "publisher trainer.0" in failed["message"] or "trainer.0" in failed["message"], failed
