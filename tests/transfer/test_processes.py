"""Trainer and engines as processes: bit-equality, kills, stops, restarts, worlds of two processes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.clean import remove_leftovers
from jaxrl_sync.transfer.hub.client import HubClient
from tests.ports import free_port
from tests.transfer import models
from tests.transfer.models import ServerThread, segments, until
from tests.transfer.peer import bits, shard_bits

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]


class Peer:
    """A peer process; ``expect`` reads its next line that has a key."""

    def __init__(self, role: str, devices: int, **options: Any) -> None:
        env = {
            **os.environ,
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}",
        }
        command = [sys.executable, "-m", "tests.transfer.peer", role, json.dumps(options)]
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with contextlib.suppress(ValueError):
            for line in self.process.stdout:
                self.lines.put(json.loads(line))

    def expect(self, key: str, timeout_s: float = 120) -> dict[str, Any]:
        deadline = time.monotonic() + timeout_s
        while True:
            message = self.lines.get(timeout=max(0.01, deadline - time.monotonic()))
            if key in message:
                return message

    def tell(self, **command: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def publish(self, number: int) -> str:
        """Publish a version; returns the digest that engines must find."""
        self.tell(publish=number)
        answer = self.expect("published")
        assert answer["published"] == number
        return str(answer["expected"])

    def slots(self) -> list[str]:
        """What lies in every slot of an engine now."""
        self.tell(slots=1)
        found: list[str] = self.expect("slots")["slots"]
        return found

    def kill(self, how: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(how)
        if how == signal.SIGKILL:
            self.process.wait(60)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(60)
        self._reader.join(60)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                with contextlib.suppress(OSError):
                    stream.close()


class Cast:
    """The processes of one test on one hub."""

    def __init__(self, hub_url: str, token_file: Path) -> None:
        self.common = {"hub": hub_url, "token": str(token_file)}
        self.peers: list[Peer] = []

    def trainer(self, lineage: str, devices: int = 4, **options: Any) -> Peer:
        return self._start("trainer", devices, lineage=lineage, **options)

    def engine(self, name: str, devices: int = 2, **options: Any) -> Peer:
        return self._start("engine", devices, engine=name, **options)

    def _start(self, role: str, devices: int, **options: Any) -> Peer:
        # a lease that outlasts what a busy machine makes wait, where no test waits for its end
        self.peers.append(Peer(role, devices, **{"ttl_s": models.LEASE_S, **self.common, **options}))
        return self.peers[-1]


@pytest.fixture
def cast(hub: ServerThread, token_file: Path) -> Iterator[Cast]:
    made = Cast(hub.url, token_file)
    yield made
    for peer in made.peers:
        peer.close()
    remove_leftovers(auth.run_id_of(auth.load_token(token_file)))


def reach(engine: Peer, version: str, timeout_s: float = 120) -> dict[str, Any]:
    """The engine's report of a version; it may pass others on the way."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = engine.expect("digest", deadline - time.monotonic())
        if seen["installed"] == version:
            return seen


@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.invariant(29)
def test_two_engines_hold_every_version_bit_for_bit(cast: Cast, token_file: Path, transport: str) -> None:
    trainer = cast.trainer("a", transport=transport)
    engines = [cast.engine(f"engine-{i}", transport=transport) for i in range(2)]
    for peer in (trainer, *engines):
        peer.expect("ready")
    for number in range(12):
        expected = trainer.publish(number)
        for engine in engines:
            seen = reach(engine, f"a:{number}")
            assert seen["digest"] == expected
            assert seen["transport"] == ("shm" if transport == "auto" else "tcp")
    assert len(segments(token_file)) == (4 if transport == "auto" else 0)


@pytest.mark.invariant(65)
def test_killed_engine_restarts_with_the_current_weights_and_cleans_up_after_the_dead(
    cast: Cast, token_file: Path
) -> None:
    trainer, first, other = cast.trainer("a"), cast.engine("x"), cast.engine("y")
    for peer in (trainer, first, other):
        peer.expect("ready")
    expected = trainer.publish(0)
    assert reach(first, "a:0")["digest"] == reach(other, "a:0")["digest"] == expected
    first.kill()
    expected = trainer.publish(1)  # the other goes on
    assert reach(other, "a:1")["digest"] == expected
    assert len(segments(token_file)) == 4
    again = cast.engine("x")
    again.expect("ready")
    assert len(segments(token_file)) == 4  # it removed what its predecessor left
    assert reach(again, "a:1")["digest"] == expected  # before anything newer is published
    expected = trainer.publish(2)
    assert reach(again, "a:2")["digest"] == reach(other, "a:2")["digest"] == expected


@pytest.mark.invariant(32)
def test_killed_trainer_leaves_engines_serving_and_a_new_lineage_takes_over(cast: Cast) -> None:
    trainer, engine = cast.trainer("a"), cast.engine("x")
    for peer in (trainer, engine):
        peer.expect("ready")
    trainer.publish(5)
    reach(engine, "a:5")
    trainer.kill()
    resumed = cast.trainer("b", seed=4)
    resumed.expect("ready")
    expected = resumed.publish(3)  # a lower number: another lineage
    assert reach(engine, "b:3")["digest"] == expected


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(32)
def test_kill_and_stop_of_the_sender_in_mid_transfer(cast: Cast, token_file: Path, transport: str) -> None:
    # a round lasts long enough for half of it, and for the test to stop or kill who sends then
    big: dict[str, Any] = {"transport": transport, "vocab": 1 << 18, "timeout_s": 10.0}
    trainer, engine = cast.trainer("a", **big), cast.engine("x", **big)
    for peer in (trainer, engine):
        peer.expect("ready")
    expected = trainer.publish(0)
    assert reach(engine, "a:0", 120)["digest"] == expected
    trainer.tell(publish=1, halt="x")
    trainer.expect("halfway")
    trainer.kill(signal.SIGSTOP)
    failed = engine.expect("error", 60)
    assert failed["installed"] == "a:0" and failed["error"] == "DeadlineError"
    resumed = cast.trainer("b", seed=9, **big)
    resumed.expect("ready")
    expected = resumed.publish(0)
    assert reach(engine, "b:0", 120)["digest"] == expected
    before = engine.slots()
    trainer.kill(signal.SIGCONT)  # wakes up with a round that is long over, replaced by another process
    trainer.kill(signal.SIGUSR1)
    trainer.tell(ticket=1)
    ended = trainer.expect("ticket")
    # the engine may have waited for it with a new link, over which it says what it serves now
    assert ended["state"] in ("failed", "superseded"), ended
    assert re.search("x.0|round|by b:0", ended["details"][0]), ended
    assert engine.slots() == before
    resumed.tell(publish=1, halt="x")
    resumed.expect("halfway")
    resumed.kill()
    failed = engine.expect("message", 60)
    assert failed["installed"] == "b:0" and failed["error"] == "PeerLost"
    last = cast.trainer("c", seed=2, **big)
    last.expect("ready")
    expected = last.publish(1)
    assert reach(engine, "c:1", 120)["digest"] == expected


@pytest.mark.parametrize("transport", ["shm", "tcp"])
@pytest.mark.invariant(32)
def test_killed_receiver_in_mid_transfer_disturbs_nobody(cast: Cast, transport: str) -> None:
    big: dict[str, Any] = {"transport": transport, "vocab": 1 << 17}
    trainer, victim, other = cast.trainer("a", **big), cast.engine("x", **big), cast.engine("y", **big)
    for peer in (trainer, victim, other):
        peer.expect("ready")
    expected = trainer.publish(0)
    assert reach(victim, "a:0", 120)["digest"] == reach(other, "a:0", 120)["digest"] == expected
    trainer.tell(publish=1, wait=60, halt="x")
    trainer.expect("halfway")
    victim.kill()
    trainer.kill(signal.SIGUSR1)
    answer = trainer.expect("published")
    assert answer["state"] == "partially_committed"
    assert reach(other, "a:1", 120)["digest"] == answer["expected"]
    again = cast.engine("x", **big)
    again.expect("ready")
    assert reach(again, "a:1", 120)["digest"] == answer["expected"]


@pytest.mark.invariant(33)
def test_an_engine_that_stood_still_longer_than_its_lease_catches_up(cast: Cast) -> None:
    trainer, frozen, other = cast.trainer("a"), cast.engine("x", ttl_s=2.0), cast.engine("y")
    for peer in (trainer, frozen, other):
        peer.expect("ready")
    trainer.publish(0)
    for peer in (frozen, other):
        reach(peer, "a:0")
    frozen.kill(signal.SIGSTOP)
    for number in (1, 2):
        expected = trainer.publish(number)
        assert reach(other, f"a:{number}")["digest"] == expected
    time.sleep(3.0)  # the lease is 2 s
    frozen.kill(signal.SIGCONT)
    assert reach(frozen, "a:2")["digest"] == expected
    expected = trainer.publish(3)
    assert reach(frozen, "a:3")["digest"] == reach(other, "a:3")["digest"] == expected


@pytest.mark.invariant(19)
def test_killed_hub_comes_back_and_syncs_go_on(tmp_path: Path, token_file: Path) -> None:
    code = (
        "import sys; from jaxrl_sync.transfer.hub.server import run_hub;"
        "run_hub('127.0.0.1', int(sys.argv[1]), sys.argv[2], announce=lambda url: print(url, flush=True))"
    )

    def start(port: int) -> tuple[subprocess.Popen[str], str]:
        command = [sys.executable, "-c", code, str(port), str(token_file)]
        hub = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert hub.stdout is not None
        return hub, hub.stdout.readline().strip()

    hub, url = start(free_port())  # nobody gets it by chance while no hub is there
    peers = Cast(url, token_file)
    try:
        trainer, engine = peers.trainer("a"), peers.engine("x")
        for peer in (trainer, engine):
            peer.expect("ready")
        expected = trainer.publish(0)
        assert reach(engine, "a:0")["digest"] == expected
        hub.kill()
        hub.wait(60)
        expected = trainer.publish(1)  # training goes on without a hub
        if hub.stdout is not None:
            hub.stdout.close()
        hub, again = start(int(url.rsplit(":", 1)[1]))
        assert again == url
        assert reach(engine, "a:1")["digest"] == expected
    finally:
        for peer in peers.peers:
            peer.close()
        hub.kill()
        hub.wait(60)
        if hub.stdout is not None:
            hub.stdout.close()
        remove_leftovers(auth.run_id_of(auth.load_token(token_file)))


def expected_trees(count: int, every: int = 1) -> list[Any]:
    """What the peers' training makes of seed 0: the converted parameters of each version."""
    params = models.trainer_params()
    step = jax.jit(lambda p: models.trained(p, every))
    trees = []
    for _ in range(count):
        trees.append(jax.jit(models.convert)(params))
        params = step(step(params))
    return trees


# not "sparse": what measured speeds say is cheaper, a section as a whole too, would be read
@pytest.mark.parametrize("payload", [{}, {"kind": "bitmap", "compare": "device"}], ids=["full", "on devices"])
def test_a_trainer_world_of_two_processes_feeds_an_engine_of_two_processes(
    cast: Cast, payload: dict[str, Any]
) -> None:
    every = 50 if payload else 1
    worlds: dict[str, dict[str, Any]] = {
        w: {"coordinator": f"127.0.0.1:{free_port()}", "size": 2} for w in ("trainer", "engine")
    }
    options = {"ttl_s": models.LEASE_S, "payload": payload, "every": every, **worlds["trainer"]}
    trainers = [cast.trainer("a", 2, rank=r, **options) for r in range(2)]
    engines = [cast.engine("x", 1, rank=r, ttl_s=models.LEASE_S, **worlds["engine"]) for r in range(2)]
    single = cast.engine("y", ttl_s=models.LEASE_S)
    for peer in (*trainers, *engines, single):
        peer.expect("ready")
    until(lambda: all(trainer_stats(peer)["links"] == 3 for peer in trainers))  # tickets ask all of them
    read: list[float] = []
    for number, expected in enumerate(expected_trees(4, every)):
        for peer in trainers:
            peer.tell(publish=number)
        for peer in trainers:
            peer.expect("published")
        put = jax.tree.map(lambda t, x: jax.device_put(x, t.sharding), models.engine_target(), expected)
        for rank, peer in enumerate(engines):
            assert reach(peer, f"a:{number}")["digest"] == shard_bits(put, rank)
        assert reach(single, f"a:{number}")["digest"] == bits(expected)
        for peer in trainers:  # once they are through, what was sent is counted and known
            peer.tell(ticket=number)
        assert all(peer.expect("ticket")["state"] == "committed" for peer in trainers)
        stats = [trainer_stats(peer) for peer in trainers]
        if number == 0:
            read = [s["shards_read"] for s in stats]
        elif payload:  # each process compares its own shards, and reads none of them
            assert [s["shards_read"] for s in stats] == read
            assert all(s["frames"] > 0 and s["device_compares"] == number for s in stats)


def trainer_stats(peer: Peer) -> dict[str, float]:
    """The publisher's counters."""
    peer.tell(stats=1)
    return peer.expect("shards_read")


def settled(cast: Cast, engine: str, size: int) -> None:
    """Wait until the hub knows that all ranks of an engine have installed what was offered."""
    with HubClient(cast.common["hub"], cast.common["token"]) as hub:
        deadline = time.monotonic() + 60
        while True:
            status = hub.status()
            ranks = status["engines"][engine]["ranks"]
            if len(ranks) == size and all(ranks.values()) and not status["rounds"]:
                return
            assert time.monotonic() < deadline, status
            time.sleep(0.02)


def test_one_dead_rank_ends_the_round_of_its_whole_engine(cast: Cast) -> None:
    trainer = cast.trainer("a")
    world: dict[str, Any] = {"coordinator": f"127.0.0.1:{free_port()}", "size": 2, "timeout_s": 4.0}
    # a lease longer than a publish on a busy machine takes: without the stopped rank nothing would be offered
    engines = [cast.engine("x", 1, rank=r, ttl_s=30.0, **world) for r in range(2)]
    for peer in (trainer, *engines):
        peer.expect("ready")
    trainer.publish(0)
    for peer in engines:
        reach(peer, "a:0")
    settled(cast, "x", 2)  # a rank that stops before it has told the hub would hold up every later offer
    engines[1].kill(signal.SIGSTOP)
    trainer.publish(1)
    failed = engines[0].expect("error", 30)
    assert failed["installed"] == "a:0"  # it had the bytes, but not the whole engine did
    engines[1].kill(signal.SIGKILL)
