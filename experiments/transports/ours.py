"""A trainer or an engine of the bench as a process: ``python ours.py ROLE '{json}'``, JSON lines in and out.

They hold W1, case A, and call only what a run calls: Publisher.publish, Subscriber.poll, prepare, swap.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
os.environ["JAX_PLATFORMS"] = "cpu"
sys.path.insert(0, str(Path(__file__).resolve().parent))

import jax
import jax.numpy as jnp
import w1
from jax import lax

from jaxrl_sync.transfer import Publisher, PublisherConfig, Subscriber, SubscriberConfig, Version


def say(**message: Any) -> None:
    """One line to the bench."""
    print(json.dumps(message), flush=True)


def other_bits(tree: w1.Tree) -> w1.Tree:
    """The same tree with the low bit of every element turned: each version is another one."""
    turned = {p: lax.bitcast_convert_type(x, jnp.uint16) ^ jnp.uint16(1) for p, x in tree.items()}
    return {p: lax.bitcast_convert_type(x, jnp.bfloat16) for p, x in turned.items()}


def trainer(options: dict[str, Any]) -> None:
    """Answers {"publish": n} with the time at which the export was ready, {"checksum"}, {"stats"}."""
    params = w1.params(options["scale"])
    step = jax.jit(other_bits, donate_argnums=0)
    config = PublisherConfig(transport=options["transport"], threads=options["threads"])
    with Publisher(options["hub"], params, token_file=options["token"], config=config) as publisher:
        say(ready=True)
        for line in sys.stdin:
            command = json.loads(line)
            if "publish" in command:
                start = time.monotonic()
                ticket = publisher.publish(params, Version("bench", command["publish"]))
                # the transfer may begin before publish returns: the clock starts when the export is done
                say(ready_at=start + ticket.export_s, stall_s=time.monotonic() - start)
            elif "step" in command:
                params = jax.block_until_ready(step(params))
                say(stepped=True)
            elif "checksum" in command:
                say(checksum=w1.checksum(params))
            else:
                say(**publisher.stats())


def engine(options: dict[str, Any]) -> None:
    """Answers {"take": 1} with what the next version cost, {"checksum"}, {"stats"}."""
    config = SubscriberConfig(
        transport=options["transport"],
        threads=options["threads"],
        connections=options["connections"],
        eager=True,  # as the engines of a run that pull
    )
    decode = jax.jit(lambda tree: sum(jnp.sum(x[..., 0].astype(jnp.float32)) for x in tree.values()))
    target = w1.target(options["scale"])
    token = options["token"]
    with Subscriber(options["hub"], target, lambda p: p, token_file=token, config=config) as subscriber:
        say(ready=True)
        tree: w1.Tree = {}
        for line in sys.stdin:
            command = json.loads(line)
            if "take" in command:
                update = subscriber.poll(timeout_s=120)
                if update is None:
                    raise SystemExit("no version in 120 s")
                start = time.monotonic()
                report = update.prepare()
                complete_at = start + report.wire_s  # then it is verified, and arrays are made
                start = time.monotonic()
                tree = update.swap()
                swap_s = time.monotonic() - start
                jax.block_until_ready(decode(tree))
                say(
                    complete_at=complete_at, wire_s=report.wire_s, verify_s=report.verify_s, swap_s=swap_s,
                    transport=report.transport, compiled=decode._cache_size(), moved=dict(report.moved),
                )  # fmt: skip
            elif "checksum" in command:
                say(checksum=w1.checksum(tree))
            else:
                say(**subscriber.stats())


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](json.loads(sys.argv[2]))
