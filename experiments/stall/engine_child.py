"""The engine of `run.py`: it decodes a fixed batch, notes when every decode step ended, and takes weights.

``python engine_child.py JSON``; JSON lines. Steps run in a thread of their own, as in a run.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import statistics
import sys
import threading
import time
from pathlib import Path
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import transfer
from jax.sharding import AxisType, Mesh
from workload import (
    DTYPE,
    LIMIT_S,
    MAX_LEN,
    MODELS,
    PROMPT,
    SLOTS,
    checksum,
    commands,
    conversion,
    engine_config,
    say,
    version,
)

from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.request import Request, Sampling
from jaxrl_sync.inference.updater import Updater
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.subscriber import Subscriber

WAIT_S = 0.001


class BenchEngine:
    """Engine, updater and the peers' receivers of one engine process. Owns threads: ``close()``."""

    def __init__(self, options: dict[str, Any]) -> None:
        self._model = MODELS[options["model"]]
        config = engine_config(options["kv"])
        mesh = Mesh(np.array(jax.devices()[:1]), ("tp",), axis_types=(AxisType.Auto,))
        self._engine = Engine(config, self._model, mesh, dtype=np.dtype(DTYPE), warm_up=True)
        self._subscriber = Subscriber(
            options["hub"],
            self._engine.target,
            conversion(self._model, options["kv"]),
            token_file=options["token"],
            config=SubscriberConfig(),
        )
        self._updater = Updater(self._engine, self._subscriber, "approved", record=_no_record)
        self._stop, self._ended = threading.Event(), list[float]()
        self._thread = threading.Thread(target=self._engine.run, args=(self._stop, self._note))
        self._server: Any = None
        self._link: Any = None
        self._first = self._batches = 0
        self._swapped: int | None = None

    def _note(self, _: float, ended: float) -> None:
        self._ended.append(ended)

    def serve(self) -> None:
        """Take the first version; returns when it serves and every shape is compiled."""
        self._thread.start()
        self._updater.start()
        if not self._updater.ready.wait(LIMIT_S):
            raise SystemExit(f"no first version in {LIMIT_S:g} s: {self._updater.error}")

    def start(self, steps: int) -> dict[str, Any]:
        """A new batch; returns after ``steps`` decode steps of it."""
        self._first, self._swapped = len(self._ended), None
        self._batches += 1
        sampling = Sampling(max_tokens=MAX_LEN - PROMPT, ignore_eos=True)
        prompt = tuple(
            np.random.default_rng(self._batches).integers(0, self._model.vocab_size, PROMPT).tolist()
        )
        self._engine.submit(Request(f"batch-{self._batches}", prompt, SLOTS, sampling))
        self._wait_steps(self._first + steps)
        return {}

    def pause(self, _: Any) -> dict[str, Any]:
        """Stand still between two steps; running samples keep their places."""
        self._engine.pause("keep").result(LIMIT_S)
        return {}

    def resume(self, _: Any) -> dict[str, Any]:
        """Go on."""
        self._engine.resume()
        return {}

    def take(self, number: int) -> dict[str, Any]:
        """Ours: prepare while the batch goes on (unless it was paused), swap between two steps."""
        answer = self._updater.swap(version(number), LIMIT_S).result(LIMIT_S)
        self._swapped = answer["step"]
        keys = ("pause_s", "prepare_s", "verify_s", "transport", "payload", "bytes")
        return {key: answer[key] for key in keys}

    def load(self, order: dict[str, Any]) -> dict[str, Any]:
        """Restore what orbax wrote, straight into the engine's shardings."""
        with ocp.StandardCheckpointer() as loader:
            tree = loader.restore(Path(order["folder"]).absolute(), self._engine.target)
        return self._install(tree, order["number"])

    def pull(self, order: dict[str, Any]) -> dict[str, Any]:
        """Pull what jax.experimental.transfer offers."""
        if self._server is None:
            client = jax.local_devices()[0].client
            self._server = transfer.start_transfer_server(client, "127.0.0.1:0", ["127.0.0.1:0"])
        self._link = self._link or self._server.connect(order["address"])
        leaves, shape = jax.tree.flatten(self._engine.target)
        found = jax.block_until_ready(self._link.pull(order["number"], leaves))
        return self._install(jax.tree.unflatten(shape, found), order["number"])

    def _install(self, tree: Any, number: int) -> dict[str, Any]:
        report = self._engine.install(tree, version(number)).result(LIMIT_S)
        self._swapped = report.step
        return {"pause_s": report.pause_s}

    def finish(self, order: dict[str, Any]) -> dict[str, Any]:
        """After ``after`` more steps end the batch; the times of its steps, and the gap around the swap.

        The first step has the prefill in it and is left out. ``since``: when the new weights were handed out.
        """
        swapped = self._swapped
        if swapped is None:
            raise SystemExit("the batch ends without a swap")
        self._wait_steps(swapped + order["after"])
        self._engine.abort([f"batch-{self._batches}"])
        ended, handed = self._ended[self._first :], order["since"]
        last = swapped - 1 - self._first  # the last step on the old weights
        undisturbed = [b - a for a, b in itertools.pairwise(ended[: last + 1]) if b <= handed]
        median_s = statistics.median(undisturbed)
        gap_s = ended[last + 1] - ended[last]
        while self._engine.stats().running:
            time.sleep(WAIT_S)
        return {
            "steps_s": undisturbed,
            "median_s": median_s,
            "gap_s": gap_s,
            "stall_s": max(0.0, gap_s - median_s),
            "window_s": ended[last + 1] - handed,
            "window_steps": sum(handed < at for at in ended[: last + 2]),
        }

    def _wait_steps(self, count: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while len(self._ended) < count:
            if time.monotonic() > deadline or not self._thread.is_alive():
                raise SystemExit(f"step {count} did not come within {LIMIT_S:g} s, {len(self._ended)} did")
            time.sleep(WAIT_S)

    def checksum(self, _: Any) -> dict[str, Any]:
        """Of the weights that serve, and what is compiled (it must not grow)."""
        return {
            "checksum": checksum(jax.tree.leaves(self._engine._runner._params)),
            "compiled": self._engine.compiled(),
        }

    def close(self) -> None:
        """End threads, leave the hub."""
        self._stop.set()
        self._updater.close(1.0)
        self._subscriber.close()
        if self._thread.is_alive():
            self._thread.join(20.0)
        self._engine.close()


def _no_record(kind: str, t0: float, t1: float, *, version: int | None = None) -> None:
    """The bench keeps its own times."""


def main() -> None:
    """Obey until stdin ends."""
    with contextlib.closing(BenchEngine(json.loads(sys.argv[1]))) as engine:
        engine.serve()
        say(**engine.checksum(0))
        lines = commands()
        while (command := lines.get()) is not None:
            (name, value), *_ = command.items()
            say(**getattr(engine, name)(value))


if __name__ == "__main__":
    main()
