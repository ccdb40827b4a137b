"""A trainer or an engine for syncs over real verbs: ``python -m tests.verbs.sync_peer ROLE '{json}'``.

Obeys JSON lines on stdin, answers JSON lines on stdout. One process opens one publisher or subscriber after
the other, so that what is slow in an emulated guest (importing, compiling) is done once.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from typing import Any

from tests.transfer.peer import bits, say
from tests.verbs.soft import LONG_S, settings_for


def settings(command: dict[str, Any]) -> Any:
    """Verbs settings of an ``open`` command."""
    options = {"chunk_bytes": 16384, "ring": 4, **command["verbs"]}
    return settings_for(*options.pop("devices"), **options)


def load(path: str) -> Any:
    """Saved parameters, on the trainer's mesh."""
    import jax
    import numpy as np

    from jaxrl_sync.sharding.paths import leaves_by_path, nested
    from tests.transfer import models

    like = leaves_by_path(models.trainer_params())
    with np.load(path) as saved:
        return nested(
            {p: jax.device_put(saved[p.replace("/", "|")], leaf.sharding) for p, leaf in like.items()}
        )


def trainer(options: dict[str, Any]) -> None:
    """Commands: open, publish (number of the version, lineage, stop_at), close."""
    import jax

    from jaxrl_sync.transfer import Publisher, PublisherConfig, Version
    from tests.transfer import models
    from tests.verbs.zygote import posts_counted, strike_here

    params = load(options["params"])
    scaled = jax.jit(lambda p, by: jax.tree.map(lambda x: x * by, p))
    wanted = jax.jit(models.convert)
    publisher: Any = None
    say(ready=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            config = PublisherConfig(
                transport="verbs", ttl_s=LONG_S, timeout_s=LONG_S, verbs=settings(command)
            )
            publisher = Publisher(options["hub"], params, token_file=options["token"], config=config)
            say(opened=1)
        elif "publish" in command:
            tree = scaled(params, 1.0 + command["publish"] / 16)
            expected = bits(wanted(tree))
            stop = (lambda: strike_here(signal.SIGSTOP)) if "stop_at" in command else None
            with posts_counted(command.get("stop_at", 0), stop):
                ticket = publisher.publish(tree, Version(command["lineage"], command["publish"]))
                say(published=command["publish"], expected=expected)
                if "wait" in command:
                    outcome = ticket.wait(LONG_S)
                    say(state=outcome.state, detail=str(outcome))
        elif "close" in command:
            publisher.close()
            say(closed=1)


def engine(options: dict[str, Any]) -> None:
    """Commands: open, take (within timeout_s), slots (digests of their memory), close."""
    from jaxrl_sync.transfer import Subscriber, SubscriberConfig
    from jaxrl_sync.transfer.errors import TransferError
    from tests.transfer import models

    subscriber: Any = None
    say(ready=os.getpid())
    for line in sys.stdin:
        command = json.loads(line)
        if "open" in command:
            config = SubscriberConfig(
                engine=command["open"],
                transport="verbs",
                ttl_s=LONG_S,
                timeout_s=LONG_S,
                verbs=settings(command),
            )
            target = models.engine_target(0)
            subscriber = Subscriber(
                options["hub"], target, models.convert, token_file=options["token"], config=config
            )
            say(opened=1)
        elif "take" in command:
            update = subscriber.poll(timeout_s=LONG_S)
            started = time.monotonic()
            try:
                report = update.prepare(command.get("timeout_s"))
            except TransferError as error:
                say(error=type(error).__name__, message=str(error), seconds=time.monotonic() - started)
                continue
            tree = update.swap()
            say(installed=str(update.version), digest=bits(tree), transport=report.transport)
        elif "slots" in command:
            say(slots=[hashlib.sha256(slot.memory.data).hexdigest() for slot in subscriber._slots])
        elif "close" in command:
            subscriber.close()
            say(closed=1)


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](json.loads(sys.argv[2]))
