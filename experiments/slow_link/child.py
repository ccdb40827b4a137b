"""The trainer or a replica of `run.py` as a process: ``python child.py ROLE JSON``, lines of JSON."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.faults.peer import say, use_door

SHAPE = (1024, 1024)


def trainer(options: dict[str, Any]) -> None:
    """Answers {"publish": n} with the time at which publish was called, and {"sent": 1} with its counters."""
    grid = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    rows = NamedSharding(grid, PartitionSpec("x"))
    rng = np.random.default_rng(0)
    masters = {
        f"layer{i}": jax.device_put(rng.standard_normal(SHAPE, dtype=np.float32), rows)
        for i in range(options["tensors"])
    }

    @jax.jit
    def step(tree: Any, number: int) -> Any:
        """Changes the share of the elements that the bench asks for, each by more than a bf16 can miss."""

        def one(x: jax.Array, i: int) -> jax.Array:
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(2), number), i)
            return jnp.where(jax.random.uniform(key, x.shape) < options["changed"], x * 1.02, x)

        return {p: one(x, i) for i, (p, x) in enumerate(tree.items())}

    cast = jax.jit(lambda tree: {p: x.astype(jnp.bfloat16) for p, x in tree.items()})
    weights = jax.block_until_ready(cast(masters))
    config = PublisherConfig(
        transport="tcp",
        host=options["host"],
        threads=2,
        timeout_s=300,
        payload=PayloadSettings(options["payload"]),
    )
    with Publisher(options["hub"], weights, token_file=options["token"], config=config) as out:
        say(ready=True)
        for line in sys.stdin:
            number = json.loads(line)["publish"]
            masters = step(masters, number)
            weights = jax.block_until_ready(cast(masters))
            start = time.time()
            out.publish(weights, Version("bench", number))
            say(published=number, t=start)


def replica(options: dict[str, Any]) -> None:
    """Takes every version and says when it served it."""
    use_door(options["door"], options["name"], options["direct"])
    place = SingleDeviceSharding(jax.devices()[0])
    target = {
        f"layer{i}": jax.ShapeDtypeStruct(SHAPE, jnp.bfloat16, sharding=place)
        for i in range(options["tensors"])
    }
    config = SubscriberConfig(
        engine=options["name"],
        transport="tcp",
        timeout_s=300,
        site=options["site"],
        relay=options["relay"],
        eager=True,
        host=options["host"],
        payload=PayloadSettings(options["payload"]),
    )
    with Subscriber(options["hub"], target, lambda p: p, token_file=options["token"], config=config) as inbox:
        say(ready=True)
        while True:
            update = inbox.poll(timeout_s=600)
            if update is None:
                return
            seen = time.time()
            report = update.prepare()
            update.swap()
            say(
                installed=report.version.number,
                seen=seen,
                t=time.time(),
                payload=report.payload,
                source=report.source,
                seconds=dict(report.seconds),
            )


if __name__ == "__main__":
    {"trainer": trainer, "replica": replica}[sys.argv[1]](json.loads(sys.argv[2]))
