"""One rank of a two-process world: restores a checkpoint and writes the shards it holds, for a test."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.axes import make_mesh
from jaxrl_sync.trainer.checkpoint import Checkpoints
from tests.trainer.batches import MODEL, trainer_config


def main(folder: str, coordinator: str, rank: int, out: str) -> None:
    """Write ``out``: one array per shard, named ``<leaf>|<start>:<stop>,...``, as raw bytes."""
    jax.distributed.initialize(coordinator, 2, rank, initialization_timeout=120)
    jax.devices()
    config = trainer_config(1, 4, 1)
    target = train_state.abstract(MODEL, config, make_mesh(config.mesh))
    with Checkpoints(Path(folder)) as checkpoints:
        state, _, _ = checkpoints.restore(target)
    shards: dict[str, Any] = {}
    for number, leaf in enumerate(jax.tree.leaves(state)):
        for shard in leaf.addressable_shards:
            box = ",".join(
                f"{i.start or 0}:{n if i.stop is None else i.stop}"
                for i, n in zip(shard.index, leaf.shape, strict=True)
            )
            shards[f"{number}|{box}"] = np.frombuffer(np.asarray(shard.data).tobytes(), np.uint8)
    np.savez(out, **shards)
    jax.distributed.shutdown()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
