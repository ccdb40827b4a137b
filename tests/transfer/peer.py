"""A trainer or an engine as a process of its own: ``python -m tests.transfer.peer ROLE '{json}'``.

It obeys JSON lines on stdin and answers JSON lines on stdout. Digests are sha256 over the bits of a tree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
from typing import Any


def shard_bits(tree: Any, position: int) -> str:
    """sha256 over the bits of the shards on one device (by its position among the devices of each leaf)."""
    import numpy as np

    from jaxrl_sync.sharding.paths import leaves_by_path

    total = hashlib.sha256()
    for path, leaf in sorted(leaves_by_path(tree).items()):
        device = sorted(leaf.sharding.device_set, key=lambda d: d.id)[position]
        (shard,) = [s for s in leaf.addressable_shards if s.device == device]
        total.update(path.encode() + np.ascontiguousarray(np.asarray(shard.data)).tobytes())
    return total.hexdigest()


def say(**message: Any) -> None:
    """One line to the test."""
    print(json.dumps(message), flush=True)


def join_world(options: dict[str, Any]) -> None:
    """Become one process of a JAX world, if the options name one."""
    if "coordinator" in options:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options["coordinator"], options["size"], options["rank"])


def big_config(options: dict[str, Any]) -> Any:
    """The model of the tests, or one whose embedding makes a transfer take a while."""
    from tests.transfer import models

    vocab = options.get("vocab", models.CONFIG.vocab_size)
    return dataclasses.replace(models.CONFIG, vocab_size=vocab)


def verbs_of(options: dict[str, Any]) -> Any:
    """Verbs settings with the device that the options name, if any."""
    from jaxrl_sync.transfer.verbs.devices import Choice
    from jaxrl_sync.transfer.verbs.settings import VerbsSettings

    device = options.get("device")
    choice = Choice(include=(device,) if device else ())
    return VerbsSettings(choice, chunk_bytes=16384, ring=4, backend=options.get("backend", "native"))


def trainer(options: dict[str, Any]) -> None:
    """Commands: {"publish": number} and {"stats": 1}; trains (and donates) after each publish."""
    import jax
    import jax.numpy as jnp

    from jaxrl_sync.sharding.presets import qwen3
    from jaxrl_sync.transfer import Publisher, PublisherConfig, Version
    from tests.transfer import models

    join_world(options)
    config = big_config(options)
    params = models.trainer_params(options.get("seed", 0), config)
    step = jax.jit(lambda p: jax.tree.map(lambda x: x * 1.01 + 0.001, p), donate_argnums=0)
    wanted = jax.jit(lambda p: qwen3.convert(p, config, 2, jnp.bfloat16))
    settings = PublisherConfig(
        transport=options.get("transport", "auto"), ttl_s=options.get("ttl_s", 2.0), verbs=verbs_of(options)
    )
    with Publisher(options["hub"], params, token_file=options["token"], config=settings) as publisher:
        say(ready=os.getpid())
        for line in sys.stdin:
            command = json.loads(line)
            if "publish" in command:
                expected = bits(wanted(params)) if options.get("size", 1) == 1 else ""
                ticket = publisher.publish(params, Version(options["lineage"], command["publish"]))
                params = step(step(params))
                jax.block_until_ready(params)
                state = ticket.wait(command["wait"]).state if "wait" in command else ""
                say(published=command["publish"], expected=expected, state=state)
            else:
                say(**publisher.stats())


def bits(tree: Any) -> str:
    """sha256 over the global bits of a tree of one process, whatever its sharding."""
    from tests.transfer.models import host

    total = hashlib.sha256()
    for path, value in sorted(host(tree).items()):
        total.update(path.encode() + value.tobytes())
    return total.hexdigest()


def engine(options: dict[str, Any]) -> None:
    """Takes every version that it is offered and tells the digest; {"hold": seconds} sleeps before a swap."""
    import jax.numpy as jnp

    from jaxrl_sync.sharding.presets import qwen3
    from jaxrl_sync.transfer import Subscriber, SubscriberConfig
    from jaxrl_sync.transfer.errors import TransferError
    from tests.transfer import models

    join_world(options)
    config = big_config(options)
    grid = models.mesh((2,), ("tp",))
    settings = SubscriberConfig(
        engine=options["engine"],
        rank=options.get("rank", 0),
        size=options.get("size", 1),
        transport=options.get("transport", "auto"),
        timeout_s=options.get("timeout_s", 10.0),
        ttl_s=options.get("ttl_s", 2.0),
        verbs=verbs_of(options),
    )
    convert = lambda p: qwen3.convert(p, config, 2, jnp.bfloat16)  # noqa: E731
    target = qwen3.engine_abstract(config, grid)
    with Subscriber(options["hub"], target, convert, token_file=options["token"], config=settings) as sub:
        say(ready=os.getpid())
        while True:
            update = sub.poll(timeout_s=60)
            if update is None:
                continue
            try:
                say(preparing=update.version.number)
                report = update.prepare()
            except TransferError as error:
                say(error=type(error).__name__, message=str(error), installed=str(sub.installed))
                continue
            tree = update.swap()
            value = bits(tree) if options.get("size", 1) == 1 else shard_bits(tree, options["rank"])
            say(installed=str(update.version), digest=value, transport=report.transport)


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](json.loads(sys.argv[2]))
