"""One process of the trainer's world: publishes what it is told to, and trains on at once (and donates)."""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import jax
import numpy as np

from jaxrl_sync.sharding import Correspondence, Layout
from jaxrl_sync.transfer import Publisher, PublisherConfig, Version
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.outcome import Ticket
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.faults import model
from tests.faults.peer import Holds, held, join_world, listen, say


def hold_export(holds: Holds) -> None:
    """The place ``export`` is in the middle of publish: when the version's buffers are to be made."""
    real = Correspondence.export

    def export(self: Correspondence, *args: Any, **kwargs: Any) -> Any:
        holds.reach("export")
        return real(self, *args, **kwargs)

    Correspondence.export = export  # type: ignore[method-assign]


class Tickets:
    """What was published, and threads that wait for what became of it."""

    def __init__(self) -> None:
        self._tickets: dict[int, Ticket] = {}

    def add(self, number: int, ticket: Ticket) -> None:
        """Remember the ticket of a version."""
        self._tickets[number] = ticket

    def ask(self, number: int, timeout_s: float) -> None:
        """Say what became of a version, once that is known."""
        threading.Thread(target=self._wait, args=(number, timeout_s), daemon=True).start()

    def _wait(self, number: int, timeout_s: float) -> None:
        try:
            outcome = self._tickets[number].wait(timeout_s)
        except (TransferError, KeyError) as error:
            say(outcome=number, state=type(error).__name__, detail=str(error), engines={})
            return
        engines = {
            f"{engine}.{rank}": {"state": r.state, "detail": r.detail, "transport": r.transport}
            for engine, ranks in outcome.engines.items()
            for rank, r in ranks.items()
        }
        say(outcome=number, state=outcome.state, detail="", engines=engines)


def run(options: dict[str, Any]) -> None:
    """Commands: publish, outcome, held, stats, hold, go."""
    join_world(options)
    lineage, holds, tickets = options["lineage"], Holds(), Tickets()
    hold_export(holds)
    params, now = model.trainer_params(), np.uint32(0)
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    config = PublisherConfig(
        transport=options["transport"],
        host=options["host"],
        chunk_bytes=64 << 10,
        ttl_s=options["ttl_s"],
        timeout_s=options["timeout_s"],
        payload=PayloadSettings(options.get("payload", "full"), CodingRules(whole=False)),
        **options.get("publisher", {}),
    )
    with Publisher(options["hub"], Layout.of(params), token_file=options["token"], config=config) as out:

        def handle(command: dict[str, Any]) -> None:
            if holds.obey(command):
                return
            if "publish" in command:
                todo.put(command["publish"])
            elif "outcome" in command:
                tickets.ask(command["outcome"], command["timeout_s"])
            elif "held" in command:
                say(held=held(), stats=out.stats())

        listen(handle)
        say(ready=os.getpid())
        while True:
            number = todo.get()
            wanted = model.mask(lineage, number)
            params, now = model.flip(params, now ^ wanted, options.get("every", 1)), wanted
            jax.block_until_ready(params)
            start = time.monotonic()
            try:
                tickets.add(number, out.publish(params, Version(lineage, number)))
            except TransferError as error:
                say(published=number, error=type(error).__name__, message=str(error))
                continue
            say(published=number, error="", stall_s=time.monotonic() - start)
