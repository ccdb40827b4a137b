"""An engine in the trainer's processes: one and two ranks, in turns with training, served like any other."""

from __future__ import annotations

import concurrent.futures
import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.config.load import validate
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.trainer import axes
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.checkpoint import Checkpoints
from jaxrl_sync.trainer.config import MeshConfig
from jaxrl_sync.trainer.offload import Offloaded, host_kind
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.hub.client import HubClient
from tests.inference.engine_helpers import ask, generate, tp_mesh
from tests.trainer.batches import MODEL, SEQ_LEN, build, host, same_bits, trainer_config
from tests.trainer.worlds import DEADLINE_S, TrainerWorld, hub, settings, train

pytestmark = pytest.mark.timeout(600)

STEPS = (1, 2, 3)
PROMPTS = [(1, 2, 3), (7,), (4, 4, 9, 2)]


def _settings(processes: int, placement: str = "colocated", **engine: Any) -> dict[str, Any]:
    trainer = {"offload": "optimizer"} if placement == "colocated" else {}
    shape = {"placement": placement, "dtype": "float32", "devices": 4, "max_len": SEQ_LEN, "slots": 8}
    return settings(processes, {"fsdp": 2, "tp": 2}, trainer=trainer, engine={**shape, **engine})


@contextlib.contextmanager
def _client(world: TrainerWorld) -> Iterator[httpx.Client]:
    """A client of the colocated engine, found in the hub's directory as the orchestrator finds it."""
    with HubClient(world.hub_url, world.token_file) as directory:
        (member,) = directory.wait_members("engine", 1, DEADLINE_S)
    assert member.name == "engine-0" and member.info["colocated"] and member.info["moves_itself"]
    headers = auth.bearer_headers(auth.load_token(world.token_file))
    with httpx.Client(base_url=member.info["url"], headers=headers, timeout=60, trust_env=False) as client:
        yield client


def _greedy(client: httpx.Client, prompt: tuple[int, ...]) -> tuple[int, ...]:
    body = ask(f"g-{time.monotonic_ns()}", prompt, temperature=0.0, max_tokens=12).to_json()
    answer = client.post("/generate", json=body)
    assert answer.status_code == 200, answer.text
    return tuple(answer.json()["samples"][0]["tokens"])


class Rollouts:
    """Generates without a pause until it is closed; ``samples`` are all that came."""

    def __init__(self, client: httpx.Client) -> None:
        self.samples: list[dict[str, Any]] = []
        self.statuses: set[int] = set()
        self._client, self._stop = client, threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        n = 0
        while not self._stop.is_set():
            body = ask(f"r-{n}", (1, 2), 8, max_tokens=28, ignore_eos=True).to_json()
            answer = self._client.post("/generate", json=body)
            self.statuses.add(answer.status_code)
            self.samples += answer.json().get("samples", [])
            n += 1

    def freeze(self) -> None:
        """Pause the engine while some of them are under way; the trainer's turn ends it."""
        while True:
            assert self._client.post("/pause", json={"mode": "keep"}).json() == {"state": "paused"}
            if self._client.get("/stats").json()["running"]:
                return
            assert self._thread.is_alive() and self._client.post("/resume").status_code == 200

    def close(self) -> None:
        self._stop.set()
        self._thread.join(240)


def _expected(run_dir: Path, data: dict[str, Any]) -> list[tuple[int, ...]]:
    """Greedy tokens of an engine of its own, loaded with the weights that the trainer saved."""
    config = validate(data)
    mesh = MeshConfig(fsdp=2, tp=2)
    target = train_state.abstract(
        MODEL, trainer_config(1, 2, 2), axes.make_mesh(mesh, jax.devices()[: mesh.num_devices])
    )
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        state, meta, _ = checkpoints.restore(target)
    assert meta.version.number == STEPS[-1]
    engine, model = to_engine(config), to_decoder(config)
    tree = jax.jit(engine_convert(model, engine, 4, "float32"))(host(state.params))
    place = target_tree(model, engine, tp_mesh(4), np.dtype("float32"))
    placed = jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, place)
    with Engine(engine, model, tp_mesh(4), placed) as alone:
        requests = [ask(str(i), p, temperature=0.0, max_tokens=12) for i, p in enumerate(PROMPTS)]
        return [r.samples[0].tokens for r in generate(alone, *requests)]


@pytest.mark.slow
@pytest.mark.invariant(30)
@pytest.mark.invariant(36)
@pytest.mark.parametrize(("processes", "sleep"), [(1, "release"), (1, "keep"), (2, "release")])
def test_generation_and_training_take_turns_and_the_engine_serves_what_was_trained(
    tmp_path: Path, processes: int, sleep: str
) -> None:
    run_dir, data = tmp_path / "run", _settings(processes, sleep=sleep)
    with hub(run_dir) as url, TrainerWorld(run_dir, data, url) as world:
        with world.senders() as senders, _client(world) as client:
            first = [_greedy(client, p) for p in PROMPTS]
            rollouts = Rollouts(client)
            try:
                rollouts.freeze()
                acks = train(senders, STEPS)
            finally:
                rollouts.close()
            assert rollouts.statuses == {200}
            for sample in rollouts.samples:
                assert len(sample["versions"]) == 28 and sorted(sample["versions"]) == sample["versions"]
            assert any(len(set(s["versions"])) > 1 for s in rollouts.samples), "none went on after a turn"
            body = {"lineage": acks[-1].lineage, "number": 3, "timeout_s": 30}
            swapped = client.post("/swap", json=body).json()
            assert swapped["number"] == 3 and swapped["transport"] == "inprocess"
            assert swapped["moved"]["shared"] > 0 and swapped["bytes"] == swapped["moved"]["copied"] > 0
            last = [_greedy(client, p) for p in PROMPTS]
            stats = client.get("/stats").json()
            assert stats["state"] == "ready" and stats["sleep"]["sleeps"] == 3
            assert (stats["sleep"]["freed_bytes"] > 0) == (sleep == "release")
            late = client.post("/swap", json={**body, "number": 9, "timeout_s": 0.5})
            assert late.status_code == 504
        assert world.stop() == [0] * processes, world.log()
    assert all(a.metrics["wake_s"] > 0 for a in acks)
    assert last == _expected(run_dir, data) and last != first


@pytest.mark.slow
@pytest.mark.invariant(56)
def test_a_held_version_is_served_before_the_trainer_gets_its_turn(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, _settings(1), url) as world:
        with world.senders() as senders, _client(world) as client:
            version = client.get("/health").json()["version"]
            assert client.post("/hold", json={**version, "timeout_s": 60}).status_code == 200
            training = threading.Thread(target=train, args=(senders, [1]))
            training.start()
            body = ask("pinned", (3,), 4, max_tokens=20).to_json()
            for n in range(4):
                pinned = {**body, "request_id": f"p{n}", "version": version}
                answer = client.post("/generate", json=pinned)
                assert answer.status_code == 200, answer.text
                assert {v for s in answer.json()["samples"] for v in s["versions"]} == {0}
            assert training.is_alive(), "the step waits for the hold"
            client.post("/release")
            training.join(240)
            assert client.get("/health").json()["version"]["number"] == 1
            assert client.post("/generate", json={**body, "version": version}).status_code == 409
            assert client.post("/pause", json={"mode": "keep"}).json() == {"state": "paused"}
            with concurrent.futures.ThreadPoolExecutor() as pool:
                waiting = pool.submit(client.post, "/generate", json={**body, "request_id": "waits"})
                while not client.get("/stats").json()["waiting"]:
                    assert not waiting.done()
                assert world.stop() == [0], world.log()
                assert waiting.result(60).status_code == 503, "it is refused, not left to break"


@pytest.mark.slow
@pytest.mark.invariant(19)
def test_the_death_of_a_rank_ends_the_other_while_they_generate(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, _settings(2), url) as world, _client(world) as client:
        _greedy(client, PROMPTS[0])
        world.processes[1].kill()
        assert world.processes[0].wait(240) == 4
        assert "engine-0 rank 1 of this engine died" in world.log()


@pytest.mark.slow
def test_training_beside_an_engine_is_training(tmp_path: Path) -> None:
    """The same losses, bit for bit, as without an engine and with the optimizer always on the devices."""
    curves = []
    for placement in ("colocated", "disaggregated"):
        run_dir = tmp_path / placement / "run"
        with (
            hub(run_dir) as url,
            TrainerWorld(run_dir, _settings(1, placement), url) as world,
            world.senders() as senders,
        ):
            curves.append([(a.metrics["loss"], a.metrics["grad_norm"]) for a in train(senders, STEPS)])
    assert curves[0] == curves[1]


def test_offloaded_state_comes_back_bit_for_bit_in_its_own_shardings() -> None:
    _, state = build(trainer_config(1, 2, 2))
    before, shardings = host(state.opt_state), jax.tree.map(lambda x: x.sharding, state.opt_state)
    away = Offloaded(state.opt_state)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(state.opt_state))
    kind = host_kind(jax.devices()[0])
    assert {leaf.sharding.memory_kind for leaf in jax.tree.leaves(away.tree)} == {kind}
    assert away.nbytes > 0 and kind != jax.devices()[0].default_memory().kind
    back = away.restore()
    assert same_bits(before, host(back))
    assert jax.tree.map(lambda x: x.sharding, back) == shardings
