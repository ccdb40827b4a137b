"""The trainer of `run.py`: the product's train step on two devices, and three ways to hand out its weights.

``python trainer_child.py JSON``; JSON lines. Between two commands it trains on if the last one said so.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import transfer
from workload import MODELS, checksum, commands, conversion, say, version

from jaxrl_sync.sharding import Layout
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import make_mesh
from jaxrl_sync.trainer.config import LossConfig, MeshConfig, OptimizerConfig, TrainerConfig
from jaxrl_sync.trainer.step import build_step
from jaxrl_sync.transfer.publisher import Publisher

ROWS, SEQ_LEN = 2, 16


class BenchTrainer:
    """State, compiled step, publisher and the peers' senders of one trainer process."""

    def __init__(self, options: dict[str, Any]) -> None:
        model = MODELS[options["model"]]
        mesh = MeshConfig(fsdp=2)
        config = TrainerConfig(mesh, OptimizerConfig(1e-4), rows=ROWS, seq_len=SEQ_LEN, logprob_chunk=SEQ_LEN)
        where = make_mesh(mesh)
        self._state = train_state.create(model, config, where, seed=0)
        self._step = build_step(model, config, LossConfig(), where)
        self._sums = self._step.zeros()
        self._micro = self._step.put(_batch(model.vocab_size))
        convert = conversion(model, options["kv"])
        self._convert = jax.jit(convert)
        self._publisher = Publisher(
            options["hub"], Layout.of(self._state.params), token_file=options["token"], convert=convert
        )
        self._server: Any = None
        self._offered: Any = None
        self.num_params = model.num_params

    def train(self) -> float:
        """One update; its seconds."""
        start = time.monotonic()
        self._state, self._sums, _ = self._step.update(self._state, self._sums, [self._micro], ROWS * SEQ_LEN)
        return time.monotonic() - start

    def publish(self, number: int) -> dict[str, Any]:
        """Ours: returns when the weights are safe from the next update. How long that took, export in it."""
        before = self._publisher.stats()
        self._publisher.publish(self._state.params, version(number))
        after = self._publisher.stats()
        return {name: after[name] - before[name] for name in ("stall_s", "export_s")}

    def save(self, folder: str) -> dict[str, Any]:
        """Gather the engine's tree to the host and write it with orbax."""
        shutil.rmtree(folder, ignore_errors=True)
        gathered = jax.device_get(self._convert(self._state.params))
        with ocp.StandardCheckpointer() as saver:
            saver.save(Path(folder).absolute(), gathered)
        return {"nbytes": sum(x.nbytes for x in jax.tree.leaves(gathered))}

    def offer(self, uuid: int) -> dict[str, Any]:
        """Gather the engine's tree to one device and offer it through jax.experimental.transfer."""
        device = jax.local_devices()[0]
        if self._server is None:
            self._server = transfer.start_transfer_server(device.client, "127.0.0.1:0", ["127.0.0.1:0"])
        leaves = jax.tree.leaves(self._convert(self._state.params))
        self._offered = jax.block_until_ready(jax.device_put(leaves, device))
        self._server.await_pull(uuid, self._offered)
        return {"address": self._server.address()}

    def checksum(self) -> int:
        """Of the weights as the engine should hold them."""
        return checksum(jax.tree.leaves(jax.device_get(self._convert(self._state.params))))

    def close(self) -> None:
        """End the publisher's threads."""
        self._publisher.close()


def _batch(vocab_size: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    shape = (ROWS, SEQ_LEN)
    return {
        "tokens": rng.integers(0, vocab_size, shape),
        "positions": np.broadcast_to(np.arange(SEQ_LEN), shape),
        "segments": np.ones(shape),
        "loss_mask": np.ones(shape),
        "advantages": rng.standard_normal(shape),
        "rollout_logprobs": np.full(shape, -np.log(vocab_size)),
    }


def main() -> None:
    """Obey until stdin ends."""
    options = json.loads(sys.argv[1])
    trainer = BenchTrainer(options)
    trainer.train()
    lines, running = commands(), False
    trained: list[tuple[float, float]] = []  # since the last answer: when a step began, how long it took
    say(ready=True, params=trainer.num_params)
    ways = {"publish": trainer.publish, "save": trainer.save, "offer": trainer.offer}
    while True:
        while running and lines.empty():
            trained.append((time.time(), trainer.train()))
        command = lines.get()
        if command is None:
            break
        (name, value), *_ = command.items()
        began, answer = time.time(), {}
        if name in ways:
            answer = ways[name](value)
        elif name == "train":
            answer = {"train_s": trainer.train()}
        elif name == "checksum":
            answer = {"checksum": trainer.checksum()}
        running = bool(command.get("running", False))
        say(began=began, ended=time.time(), trained=trained, **answer)
        trained = []
    trainer.close()


if __name__ == "__main__":
    main()
