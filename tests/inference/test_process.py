"""Engine processes with a real hub and publisher: first version, swaps, drain, death as one unit."""

from __future__ import annotations

import contextlib
import dataclasses
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_sync.inference import probe
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.launch.worker import error_line
from jaxrl_sync.transfer import Publisher, PublisherConfig, auth, clean
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import TINY, ask, generate, tp_mesh, trainer_weights
from tests.ports import free_port
from tests.transfer.models import ServerThread, segments

CONFIG = EngineConfig(
    slots=8,
    max_len=512,
    prefill_lengths=(8,),
    prefill_rows=4,
    decode_steps_per_dispatch=2,
    version_probe=True,
)
TTL_S = 9.0
"""Of leases: longer than a slow machine stands still."""


@dataclasses.dataclass
class Child:
    """One engine rank: its process, and the files that it writes."""

    process: subprocess.Popen[str]
    announce: Path
    rows: Path

    def url(self, timeout_s: float = 240.0) -> str:
        """The announced URL; fails with the child's output when it ends instead."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if self.announce.exists() and (text := self.announce.read_text()):
                return str(json.loads(text)["url"])
            assert self.process.poll() is None, self.process.communicate()[1]
            time.sleep(0.05)
        raise AssertionError(f"not announced within {timeout_s} s")

    def end(self, timeout_s: float) -> tuple[int, str]:
        """Exit code and the child's last error line; libraries may write after it."""
        _, stderr = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, error_line(stderr)


class World:
    """A hub, a publisher over a 4x2 mesh, and engine processes; everything is closed at the end."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.token_file = folder, folder / "token"
        self.token = auth.create_token(self.token_file)
        self.hub = ServerThread(self.token_file)
        self.mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
        self.convert = engine_convert(TINY, CONFIG, 2, "float32")
        self.children: list[Child] = []
        self.publisher = Publisher(
            self.hub.url,
            self.trainer_tree(0, 0),
            token_file=self.token_file,
            config=PublisherConfig(ttl_s=TTL_S),
            convert=self.convert,
        )

    def trainer_tree(self, seed: int, number: int) -> Any:
        """A stamped trainer tree on the publisher's mesh, its first divisible dimension split over fsdp."""
        tree = probe.add_source_stamp(trainer_weights(seed), TINY, number)

        def place(x: Any) -> jax.Array:
            spec = [None if n % 4 or i == 0 else "fsdp" for i, n in enumerate(x.shape)]
            first = spec.index("fsdp") if "fsdp" in spec else -1
            parts = [s if i == first else None for i, s in enumerate(spec)]
            placed: jax.Array = jax.device_put(x, NamedSharding(self.mesh, PartitionSpec(*parts)))
            return placed

        return jax.tree.map(place, tree)

    def publish(self, number: int, lineage: str = "life") -> Version:
        version = Version(lineage, number)
        self.publisher.publish(self.trainer_tree(number, number), version)
        return version

    def start(self, size: int = 1, swap_policy: str = "approved", port: int = 0) -> list[Child]:
        """Start an engine of ``size`` processes, tp=2 over all of them."""
        coordinator = f"127.0.0.1:{free_port()}"
        started = [self._start_rank(r, size, coordinator, swap_policy, port) for r in range(size)]
        self.children += started
        return started

    def _start_rank(self, rank: int, size: int, coordinator: str, swap_policy: str, port: int) -> Child:
        name = f"{len(self.children)}-{rank}"
        announce, rows = self.folder / f"announce-{name}", self.folder / f"rows-{name}"
        spec = {
            "engine": dataclasses.asdict(CONFIG),
            "model": dataclasses.asdict(TINY),
            "subscriber": {"rank": rank, "size": size, "ttl_s": TTL_S, "timeout_s": 30.0},
            "swap_policy": swap_policy,
            "hub": self.hub.url,
            "token_file": str(self.token_file),
            "coordinator": coordinator if size > 1 else None,
            "port": port,
            "announce": str(announce),
            "rows": str(rows),
        }
        flags = f"--xla_force_host_platform_device_count={2 // size}"
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.inference.engine_child", json.dumps(spec)],
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            cwd=Path(__file__).parents[2],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        return Child(process, announce, rows)

    def client(self, url: str) -> httpx.Client:
        return httpx.Client(
            base_url=url, headers=auth.bearer_headers(self.token), timeout=60, trust_env=False
        )

    def expected(self, seed: int, *prompts: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Greedy tokens of a fresh engine in this process, loaded with the same weights."""
        mesh = tp_mesh(2)
        target = target_tree(TINY, CONFIG, mesh, jnp.float32)
        tree = self.convert(probe.add_source_stamp(trainer_weights(seed), TINY, seed))
        placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)
        with Engine(CONFIG, TINY, mesh, placed) as engine:
            requests = [ask(str(i), p, temperature=0.0, max_tokens=12) for i, p in enumerate(prompts)]
            return [r.samples[0].tokens for r in generate(engine, *requests)]

    def close(self) -> None:
        for child in self.children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.communicate()
        self.publisher.close()
        self.hub.close()
        clean.remove_leftovers(auth.run_id_of(self.token))  # of those that were killed


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.close()


def greedy(client: httpx.Client, prompt: tuple[int, ...]) -> dict[str, Any]:
    body = ask(f"g-{time.monotonic_ns()}", prompt, temperature=0.0, max_tokens=12).to_json()
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    sample: dict[str, Any] = answer.json()["samples"][0]
    return sample


@contextlib.contextmanager
def long_rollouts(client: httpx.Client) -> Iterator[list[dict[str, Any]]]:
    """A group that outlasts in the background whatever is done meanwhile, and is cut off then; its answer is
    in the list at the end."""
    answers: list[dict[str, Any]] = []
    name = f"long-{time.monotonic_ns()}"
    body = ask(name, (1, 2), 512, max_tokens=500).to_json()
    thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json=body).json()))
    thread.start()
    while not client.get("/stats").json()["running"] and thread.is_alive():
        time.sleep(0.01)
    yield answers
    assert client.post("/abort", json={"request_ids": [name]}).json() == {"aborted": 1}
    thread.join(60)


@pytest.mark.slow
@pytest.mark.invariant(60)
@pytest.mark.invariant(65)
@pytest.mark.parametrize("size", [1, 2])
def test_an_engine_takes_versions_and_swaps_in_mid_generation(world: World, size: int) -> None:
    children = world.start(size)
    time.sleep(1.0)
    assert not children[0].announce.exists()
    world.publish(0)
    prompts = [(1, 2, 3), (7,), (4, 4, 9, 2)]
    with world.client(children[0].url()) as client, HubClient(world.hub.url, world.token_file) as hub:
        assert client.get("/health").json() == {"state": "ready", "version": {"lineage": "life", "number": 0}}
        (member,) = hub.wait_members("engine", 1, 60)
        assert member.info["url"] == str(client.base_url).rstrip("/") and member.info["slots"] == 8
        assert [tuple(greedy(client, p)["tokens"]) for p in prompts] == world.expected(0, *prompts)
        mixed, received = 0, 12 * len(prompts)
        for number in (1, 2, 3):
            world.publish(number)
            with long_rollouts(client) as answers:
                asked = time.monotonic()
                swapped = client.post("/swap", json={"lineage": "life", "number": number, "timeout_s": 30})
                took_s = time.monotonic() - asked
            assert swapped.status_code == 200, swapped.text
            answer = swapped.json()
            assert answer["number"] == number and answer["bytes"] > 0 and answer["pause_s"] < took_s
            for sample in answers[0]["samples"]:
                assert sorted(sample["versions"]) == sample["versions"]
                assert len(sample["versions"]) == 500 or sample["finish_reason"] == "abort"
                mixed += len(set(sample["versions"])) == 2
                received += len(sample["tokens"])
            assert [tuple(greedy(client, p)["tokens"]) for p in prompts] == world.expected(number, *prompts)
            received += 12 * len(prompts)
        assert mixed > 0
        again = client.post("/swap", json={"lineage": "life", "number": 2}).json()
        assert (again["number"], again["pause_s"]) == (3, 0.0)
        stats = client.get("/stats").json()
        assert stats["mixed_version_steps"] == 0 and stats["swaps"] == 4
        assert stats["tokens_generated"] == received
        late = client.post("/swap", json={"lineage": "life", "number": 9, "timeout_s": 0.5})
        assert late.status_code == 504 and client.get("/health").json()["version"]["number"] == 3
    kinds = [json.loads(row)["kind"] for row in children[0].rows.read_text().splitlines()]
    assert kinds.count("swap") == 4 and kinds.count("prepare") == 4 and "generate" in kinds
    for child in children:
        child.process.send_signal(signal.SIGTERM)
    assert [child.end(120)[0] for child in children] == [0] * size


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "how"), [(0, signal.SIGKILL), (1, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_an_engine_of_two_ranks_dies_as_one(world: World, victim: int, how: signal.Signals) -> None:
    children = world.start(2)
    world.publish(0)
    with world.client(children[0].url()) as client:
        greedy(client, (1, 2))
    survivor = children[1 - victim]
    body = ask("long", (1, 2), 8, max_tokens=500).to_json()
    with world.client(children[0].url()) as client:
        with contextlib.suppress(httpx.TransportError):
            threading.Timer(0.1, children[victim].process.send_signal, (how,)).start()
            client.post("/generate", json=body, timeout=0.3)
    code, line = survivor.end(240)
    assert code == 4 and line.startswith("jaxrl-sync: error: engine-0 rank") and "died" in line
    assert not [n for n in segments(world.token_file) if f"_{survivor.process.pid}-" in n]


@pytest.mark.slow
def test_the_other_ranks_end_with_the_error_of_rank_0_and_its_exit_code(world: World) -> None:
    """They were told to stop, and ended as if all were well: code 0."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        children = world.start(2, port=taken.getsockname()[1])
        ends = [child.end(240) for child in children]
    assert [code for code, _ in ends] == [3, 3], ends
    assert ends[0][1].startswith("jaxrl-sync: error: can't listen on 127.0.0.1:")
    assert ends[1][1].startswith("jaxrl-sync: error: engine-0 rank 0 failed: can't listen on 127.0.0.1:")


@pytest.mark.slow
def test_policy_auto_takes_versions_by_itself(world: World) -> None:
    world.publish(0)
    (child,) = world.start(1, swap_policy="auto")
    with world.client(child.url()) as client:
        world.publish(1)
        world.publish(2)
        deadline = time.monotonic() + 120
        while client.get("/health").json()["version"]["number"] != 2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert tuple(greedy(client, (5, 6))["tokens"]) == world.expected(2, (5, 6))[0]


@pytest.mark.slow
def test_a_pinned_request_holds_a_swap_and_a_drain_ends_it(world: World) -> None:
    version = world.publish(0)
    (child,) = world.start()
    with world.client(child.url()) as client:
        client.post("/pause", json={"mode": "keep"})
        body = ask("pinned", (3,), 4, max_tokens=100, version=version).to_json()
        answers: list[httpx.Response] = []
        thread = threading.Thread(target=lambda: answers.append(client.post("/generate", json=body)))
        thread.start()
        world.publish(1)
        while client.get("/stats").json()["running"] + client.get("/stats").json()["waiting"] < 4:
            time.sleep(0.02)
        swap, deadline = {"lineage": "life", "number": 1, "timeout_s": 2.0}, time.monotonic() + 120
        while "pinned" not in (held := client.post("/swap", json=swap)).text:  # not even prepared in time
            assert held.status_code == 504 and time.monotonic() < deadline, held.text
        assert held.status_code == 504
        assert client.get("/stats").json()["prepared"] == {"lineage": "life", "number": 1}
        client.post("/resume")
        thread.join(60)
        assert {v for s in answers[0].json()["samples"] for v in s["versions"]} == {0}
        swapped = client.post("/swap", json={"lineage": "life", "number": 1, "timeout_s": 30}).json()
        assert swapped["number"] == 1 and swapped["bytes"] > 0
        wrong = client.post("/generate", json=body)
        assert wrong.status_code == 409 and "pins version life:0" in wrong.text
    child.process.send_signal(signal.SIGTERM)
    assert child.end(120)[0] == 0


@pytest.mark.slow
@pytest.mark.invariant(28)
def test_an_engine_without_hub_and_in_the_middle_of_a_swap_drains_within_the_grace_time(world: World) -> None:
    world.publish(0)
    (child,) = world.start()
    place = urllib.parse.urlsplit(child.url())
    assert place.hostname is not None
    with contextlib.closing(http.client.HTTPConnection(place.hostname, place.port, timeout=60)) as swap:
        swap.request("GET", "/health")
        swap.getresponse().read()
        body = json.dumps({"lineage": "life", "number": 9, "timeout_s": 60})
        swap.request("POST", "/swap", body, auth.bearer_headers(world.token))
        with world.client(child.url()) as client:
            for _ in range(10):  # the server has one loop, and has taken what came to it before these
                assert client.get("/stats").status_code == 200
        world.publisher.close()
        world.hub.close()
        time.sleep(TTL_S / 2)  # more than one heartbeat: the leases are in their retries
        child.process.send_signal(signal.SIGTERM)
        assert child.end(20)[0] == 0, "it waits neither for the hub (30 s) nor for the swap (60 s)"
        answer = swap.getresponse()
        assert answer.status == 503 and b"closing" in answer.read()
