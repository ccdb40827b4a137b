"""A publisher or a subscriber of `sync.py` as a process: ``python sync_child.py ROLE JSON``, JSON lines."""

from __future__ import annotations

import json
import os
import sys
import time
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings

ROWS, COLUMNS = 4096, 1024


def say(**message: Any) -> None:
    """One line to the bench."""
    print(json.dumps(message), flush=True)


def sharding(axis: int) -> NamedSharding:
    """Rows (publisher) or columns (subscriber) over two devices."""
    mesh = Mesh(np.array(jax.devices()), ("x",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*(None,) * axis, "x"))


@jax.jit
def next_weights(masters: jax.Array, number: int, size: float) -> jax.Array:
    """One clipped-normal step of the fp32 masters: what a clipped optimizer update looks like."""
    key = jax.random.fold_in(jax.random.key(1), number)
    return masters + size * jnp.clip(jax.random.normal(key, masters.shape), -1, 1)


def publisher(options: dict[str, Any]) -> None:
    """Answers {"publish": n} with the seconds that the caller was blocked and the changed share."""
    place = sharding(0)
    count = options["tensors"]
    masters = {
        f"layer{i}": jax.device_put(
            0.02 * jax.random.normal(jax.random.key(i), (ROWS, COLUMNS)).astype(jnp.float32), place
        )
        for i in range(count)
    }
    cast = jax.jit(lambda tree: {p: x.astype(jnp.bfloat16) for p, x in tree.items()})
    rules = CodingRules(values=options["values"])
    config = PublisherConfig(
        transport="tcp",
        host=options["host"],
        payload=PayloadSettings(options["payload"], rules),
        timeout_s=120,
    )
    weights = jax.block_until_ready(cast(masters))
    with Publisher(options["hub"], weights, token_file=options["token"], config=config) as out:
        say(ready=True)
        for line in sys.stdin:
            number = json.loads(line)["publish"]
            masters = {p: next_weights(x, number, options["step"]) for p, x in masters.items()}
            before, weights = weights, jax.block_until_ready(cast(masters))
            changed = np.mean([_changed(before[p], weights[p]) for p in weights]) if number else 1.0
            start = time.monotonic()
            ticket = out.publish(weights, Version("bench", number))
            stall_s = time.monotonic() - start
            outcome = ticket.wait(300)
            say(stall_s=stall_s, changed=float(changed), state=outcome.state)


def _changed(a: jax.Array, b: jax.Array) -> float:
    return float(np.mean(np.asarray(a).view(np.uint16) != np.asarray(b).view(np.uint16)))


def subscriber(options: dict[str, Any]) -> None:
    """Takes every version; says what it cost and a checksum of the bits."""
    place = sharding(1)
    target = {
        f"layer{i}": jax.ShapeDtypeStruct((ROWS, COLUMNS), jnp.bfloat16, sharding=place)
        for i in range(options["tensors"])
    }
    config = SubscriberConfig(transport="tcp", timeout_s=120)
    with Subscriber(options["hub"], target, lambda p: p, token_file=options["token"], config=config) as inbox:
        say(ready=True)
        while True:
            update = inbox.poll(timeout_s=600)
            if update is None:
                return
            start = time.monotonic()
            report = update.prepare()
            seconds = time.monotonic() - start
            update.swap()
            say(seconds=seconds, nbytes=report.nbytes, transport=report.transport, wire_s=report.wire_s)


if __name__ == "__main__":
    {"publisher": publisher, "subscriber": subscriber}[sys.argv[1]](json.loads(sys.argv[2]))
