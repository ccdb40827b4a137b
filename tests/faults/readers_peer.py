"""Simulated readers: many engines in one process, each a subscriber of its own that may serve others."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from jaxrl_sync.sharding import UserError
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import Subscriber, SubscriberConfig
from tests.faults import model
from tests.faults.peer import held, listen, say
from tests.transfer.models import mesh


def take_all(name: str, subscriber: Subscriber) -> None:
    """Take every version, say when it served and what its bits are."""
    while True:
        try:
            update = subscriber.poll(timeout_s=1.0)
            if update is None:
                continue
            report = update.prepare()
            tree = update.swap()
        except UserError as error:
            say(error=type(error).__name__, message=str(error), reader=name)
            time.sleep(0.1)
            continue
        now = time.time()
        digest = model.digest(model.shards(tree))
        say(installed=str(report.version), reader=name, t=now, digest=digest, nbytes=report.nbytes)


def run(options: dict[str, Any]) -> None:
    """One thread per reader; commands: held."""
    target = qwen3.engine_abstract(model.CONFIG, mesh((1,), ("tp",)))
    convert = model.convert_for(1)

    def open_one(name: str) -> Subscriber:
        config = SubscriberConfig(
            engine=name,
            transport="tcp",
            timeout_s=options["timeout_s"],
            ttl_s=options["ttl_s"],
            host=options["host"],
            chunk_bytes=64 << 10,  # a small model in parts that relays can hand on
            **options["subscriber"],
        )
        return Subscriber(options["hub"], target, convert, token_file=options["token"], config=config)

    readers = {name: open_one(name) for name in options["readers"]}
    listen(lambda command: say(held=held()) if "held" in command else None)
    for name, subscriber in readers.items():
        threading.Thread(target=take_all, args=(name, subscriber), daemon=True).start()
    say(ready=os.getpid(), boxes=model.boxes_of(target))
    threading.Event().wait()
