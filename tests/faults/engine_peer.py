"""One rank of an engine replica: takes every version it is offered and generates all the while.

Generation is a loop that reads the serving weights, tensor by tensor, and swaps between two steps. It notes
its longest pause, and ``torn`` counts reads that differ from what was there right after the swap.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import Any

import numpy as np

from jaxrl_sync.sharding import UserError
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import Subscriber, SubscriberConfig
from jaxrl_sync.transfer.subscriber import Update
from tests.faults import model
from tests.faults.peer import Holds, Pauses, held, join_world, listen, say
from tests.transfer.models import mesh

STEP_S = 0.02


def sum_of(values: model.Array) -> int:
    """A cheap sum over the bits of one shard: another one after any single change."""
    return int(np.bitwise_xor.reduce(values.reshape(-1).view(np.uint16), initial=0))


class Generation:
    """The engine's own thread. ``swap`` has it take an update between two steps and waits for that."""

    def __init__(self, holds: Holds) -> None:
        self.pauses = Pauses()
        self.torn = 0
        self.tree: Any = None
        self._holds = holds
        self._parts: list[tuple[model.Array, int]] = []
        self._todo: queue.SimpleQueue[Update | None] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def stop_reading(self) -> None:
        """Called by another thread: read nothing until the next swap; returns when no read is under way."""
        self._todo.put(None)
        self._done.get()

    def swap(self, update: Update) -> Any:
        """Called by another thread: the new tree, once generation uses it. Errors of ``update.swap``."""
        self._todo.put(update)
        result = self._done.get()
        if isinstance(result, BaseException):
            raise result
        return result

    def run(self) -> None:
        """Generate for ever."""
        position = 0
        while True:
            if not self._todo.empty():
                self._swap(self._todo.get())
            if self._parts:
                values, expected = self._parts[position % len(self._parts)]
                self.torn += sum_of(values) != expected
                position += 1
            self.pauses.step()
            time.sleep(STEP_S)

    def _swap(self, update: Update | None) -> None:
        if update is None:
            self._parts = []
            self._done.put(None)
            return
        try:
            self.tree = update.swap()
        except UserError as error:
            self._done.put(error)
            return
        self._holds.reach("swap")
        self._parts = [(values, sum_of(values)) for _, _, values in model.shards(self.tree)]
        self._done.put(self.tree)


def take_all(subscriber: Subscriber, generation: Generation, holds: Holds) -> None:
    """Take every version, and say what came of it."""
    while True:
        try:
            update = subscriber.poll(timeout_s=1.0)
            if update is None:
                continue
            say(preparing=str(update.version), round=update._offer.round)
            if update.in_place:  # its memory is what serves
                generation.stop_reading()
            report = update.prepare()
            holds.reach("prepared")
            tree = generation.swap(update)
        except UserError as error:
            say(error=type(error).__name__, message=str(error), installed=str(subscriber.installed))
            time.sleep(0.1)
            continue
        say(
            installed=str(report.version),
            digest=model.digest(model.shards(tree)),
            transport=report.transport,
            nbytes=report.nbytes,
            source=report.source,
            resumed_bytes=report.resumed_bytes,
            payload=report.payload,
            prepare_s=report.prepare_s,
            t=time.time(),
        )


def run(options: dict[str, Any]) -> None:
    """Commands: pauses, held, digest, hold, go."""
    join_world(options)
    target = qwen3.engine_abstract(model.CONFIG, mesh((options["tp"],), ("tp",)))
    config = SubscriberConfig(
        engine=options["engine"],
        rank=options.get("rank", 0),
        size=options.get("size", 1),
        transport=options["transport"],
        timeout_s=options["timeout_s"],
        ttl_s=options["ttl_s"],
        **options.get("subscriber", {}),
    )
    holds = Holds()
    generation = Generation(holds)
    convert = model.convert_for(options["tp"])
    with Subscriber(options["hub"], target, convert, token_file=options["token"], config=config) as inbox:

        def handle(command: dict[str, Any]) -> None:
            if holds.obey(command):
                return
            if "pauses" in command:
                look, steps = generation.pauses.look(), generation.pauses.steps
                say(pauses=look, steps=steps, torn=generation.torn)
            elif "held" in command:
                say(held=held(), stats=inbox.stats())
            elif "digest" in command:
                tree = generation.tree
                found = model.digest(model.shards(tree)) if tree is not None else ""
                say(now=str(inbox.installed), digest=found)

        listen(handle)
        say(ready=os.getpid(), boxes=model.boxes_of(target))
        taking = threading.Thread(target=take_all, args=(inbox, generation, holds), daemon=True)
        taking.start()
        generation.run()
