"""A plain synchronous loop beside a finished run of bound 0: ``python -m tests.app.plain_loop RUN_DIR``.

It calls the same jitted functions as the application (the trainer's update, the engine's prefill and decode)
on meshes of the same shape, and moves weights by ``jit(convert)`` and ``jax.device_put``: no mapper, no hub,
no transport, no orchestrator. It needs a process of its own with as many virtual devices as the trainer has:
XLA's thread pool, and with it the order of sums inside a matmul, depends on their number.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_sync.batch.frame import BatchFrame, BatchHeader, decode_batch, encode_batch
from jaxrl_sync.batch.pack import PackConfig, pack
from jaxrl_sync.batch.rollout import Episode, Group, Sample, Turn
from jaxrl_sync.config import RunConfig
from jaxrl_sync.config.convert import to_decoder, to_engine
from jaxrl_sync.config.load import load
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.request import GroupResult, Request, Sampling
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.orchestrator.advantages import group_advantages
from jaxrl_sync.orchestrator.rundir import batch_path
from jaxrl_sync.orchestrator.source import DataSource, Draw
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.tasks.protocol import Task
from jaxrl_sync.tasks.registry import make_task
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import make_mesh
from jaxrl_sync.trainer.checkpoint import Checkpoints
from jaxrl_sync.trainer.settings import loss_config, trainer_config
from jaxrl_sync.trainer.trainer import Trainer
from jaxrl_sync.transfer.version import Version
from tests.inference.engine_helpers import run_until, tp_mesh


class PlainLoop:
    """Draw, generate, score, pack, train, convert; one step after the other."""

    def __init__(self, config: RunConfig) -> None:
        self.config, self.model = config, to_decoder(config)
        settings = trainer_config(config)
        mesh = make_mesh(settings.mesh, jax.devices()[: settings.mesh.num_devices])
        state = train_state.create(self.model, settings, mesh, config.run.seed)
        self.trainer = Trainer(self.model, settings, loss_config(config), mesh, state)
        self.task: Task = make_task(config.task.name, config.task.args)
        self.data = self.task.dataset("train", config.task.seed)
        self.source = DataSource(self.data.size, config.run.seed)
        self.engine_config: EngineConfig = to_engine(config)
        colocated = config.engine.placement == "colocated"
        self.tp = config.trainer.devices if colocated else config.engine.devices
        self.engine_mesh = tp_mesh(self.tp)
        dtype = np.dtype(config.engine.dtype)
        self.engine = Engine(self.engine_config, self.model, self.engine_mesh, dtype=dtype)

    def weights(self, model: DecoderConfig) -> Any:
        """The engine tree of the trainer's weights of this moment."""
        dtype = self.config.engine.dtype
        tree = jax.jit(engine_convert(model, self.engine_config, self.tp, dtype))(self.trainer.params)
        target = target_tree(model, self.engine_config, self.engine_mesh, np.dtype(dtype))
        return jax.tree.map(lambda x, t: jax.device_put(x, t.sharding), tree, target)

    def steps(self) -> Iterator[tuple[BatchFrame, dict[str, float]]]:
        """Batch and metrics of every step."""
        for step in range(1, self.config.run.steps + 1):
            installed = self.engine.install(self.weights(self.model), Version("plain", step - 1))
            while not installed.done():
                self.engine.step()
            installed.result(0)
            draws = [self.source.draw() for _ in range(self.config.loop.prompts_per_step)]
            frame = self.batch([d for d in draws if d is not None], step)
            yield frame, self.trainer.train(frame)

    def batch(self, draws: list[Draw], step: int) -> BatchFrame:
        """Samples of one step as the frame of the only data rank."""
        requests = [self.request(d, step - 1) for d in draws]
        results = run_until(self.engine, [self.engine.submit(r) for r in requests], max_steps=4000)
        samples = [s for d, r, x in zip(draws, requests, results, strict=True) for s in self.group(d, r, x)]
        t = self.config.trainer
        packed = pack(samples, PackConfig(1, t.rows, t.seq_len, overlong="truncate"))
        header = BatchHeader(
            step, 0, packed.micro_batches, t.rows, t.seq_len, packed.num_valid_tokens, False, False, {}
        )
        return decode_batch(encode_batch(header, packed.for_rank(0)))

    def request(self, draw: Draw, version: int) -> Request:
        """The engine request of one group."""
        s = self.config.loop.sampling
        sampling = Sampling(s.temperature, s.top_k, s.top_p, s.max_tokens, tuple(self.task.stop_token_ids))
        prompt = tuple(int(t) for t in self.task.prompt(self.data[draw.item]))
        return Request(f"train-{draw.position}-v{version}", prompt, self.config.loop.group_size, sampling)

    def group(self, draw: Draw, request: Request, result: GroupResult) -> list[Sample]:
        """Scored samples of one group."""
        uid, version = self.data[draw.item], self.engine.version
        assert version is not None
        episodes = []
        for index, s in enumerate(result.samples):
            turn = Turn(
                prompt=np.asarray(request.prompt, np.int32),
                tokens=np.asarray(s.tokens, np.int32),
                logprobs=np.asarray(s.logprobs, np.float32),
                versions=np.asarray(s.versions, np.int32),
                finish_reason=s.finish_reason,
            )
            plain = Episode(uid, request.request_id, index, version.lineage, version.number, (turn,))
            reward = self.task.score(plain)
            episodes.append(
                Episode(uid, request.request_id, index, version.lineage, version.number, (turn,), reward)
            )
        whole = Group(request.request_id, uid, len(episodes), version.number, tuple(episodes))
        rewards = [float(r) for r in whole.rewards]
        return list(whole.samples(group_advantages(rewards, normalize_std=self.config.loss.normalize_std)))


def compare(run_dir: Path) -> None:
    """Every batch and every update of a finished run against the plain loop, and the state it saved."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["kind"] == "step"]
    config = load(run_dir / "config.toml")
    plain = PlainLoop(config)
    for row, (frame, metrics) in zip(rows, plain.steps(), strict=True):
        kept = decode_batch(batch_path(run_dir, row["step"], 0).read_bytes())
        assert kept.header.num_valid_tokens == frame.header.num_valid_tokens
        for name, array in frame.fields.items():
            same = kept.fields[name].tobytes() == array.tobytes()
            assert same, f"step {row['step']}: field {name} differs from the plain loop's"
        for name in ("grad_norm", "loss", "mismatch_k1"):
            assert row["trainer"][name] == metrics[name], (row["step"], name)
    target = train_state.abstract(plain.model, plain.trainer.config, plain.trainer.step.mesh)
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        saved, meta, _ = checkpoints.restore(target)
    assert meta.version.number == config.run.steps == len(rows)
    pairs = zip(jax.tree.leaves(saved), jax.tree.leaves(plain.trainer.state), strict=True)
    assert all(np.asarray(a).tobytes() == np.asarray(b).tobytes() for a, b in pairs)
    staleness = [s for row in rows for s in row["staleness"]]
    assert set(map(int, staleness)) == {0}
    print(f"{len(rows)} steps equal")


if __name__ == "__main__":
    compare(Path(sys.argv[1]))
