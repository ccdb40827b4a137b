"""A trainer or an engine as a process of its own: ``python -m tests.transfer.peer ROLE '{json}'``.

It obeys JSON lines on stdin and answers JSON lines on stdout. Digests are sha256 over the bits of a tree.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
import threading
from collections.abc import Callable
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
    layers = options.get("layers", models.CONFIG.num_layers)
    return dataclasses.replace(models.CONFIG, vocab_size=vocab, num_layers=layers)


def verbs_of(options: dict[str, Any]) -> Any:
    """Verbs settings with the device that the options name, if any."""
    from jaxrl_sync.transfer.verbs.devices import Choice
    from jaxrl_sync.transfer.verbs.settings import VerbsSettings

    device = options.get("device")
    choice = Choice(include=(device,) if device else ())
    return VerbsSettings(choice, chunk_bytes=16384, ring=4, backend=options.get("backend", "native"))


def pieces_of_first_lane(sender: Any) -> int:
    """Calls that the first lane of a tcp edge makes per version."""
    from jaxrl_sync.transfer.transports.tcp import PIECE_BYTES
    from jaxrl_sync.transfer.transports.windows import Direct

    share = sender._lanes.shares[0]
    return sum(-(-s.nbytes // PIECE_BYTES) if isinstance(s, Direct) else 1 for s in share)


class Halt:
    """Makes a send to one engine stop when half (or another share) of it was sent, say so, and wait
    for SIGUSR1."""

    def __init__(self) -> None:
        from jaxrl_sync.transfer.transports.shm import ShmSender
        from jaxrl_sync.transfer.transports.tcp import TcpSender

        self.go_on = threading.Event()
        self._engine = ""
        self._share = 0.5
        self._moved = 0
        self._wrap(ShmSender, "_copy", lambda sender: len(sender._pieces))
        for name in ("_send_piece", "_send_chunk"):
            self._wrap(TcpSender, name, pieces_of_first_lane)

    def _wrap(self, kind: Any, name: str, count: Callable[[Any], int]) -> None:
        """Count the pieces that the link's own thread moves: all of shm, the first lane of tcp."""
        real = getattr(kind, name)

        def piece(sender: Any, *args: Any) -> Any:
            if self._engine and threading.current_thread().name.startswith(f"link-{self._engine}."):
                assert count(sender) > 1, "half of one piece is none"
                if self._moved == int(count(sender) * self._share):
                    self._engine = ""
                    say(halfway=self._moved)
                    self.go_on.wait()
                self._moved += 1
            return real(sender, *args)

        setattr(kind, name, piece)

    def arm(self, engine: str, share: float = 0.5) -> None:
        """The next send to this engine will halt when that share of its pieces, less than 1, was sent."""
        self.go_on.clear()
        self._moved, self._engine, self._share = 0, engine, share


def trainer(options: dict[str, Any]) -> None:
    """Commands: {"publish": number}, {"ticket": number}, {"stats": 1}.

    Trains (and donates) after each publish, with option "every" only each so many-th weight. With
    "halt": ENGINE the next send to it stops halfway, or at "share" of its pieces. Option
    "payload" has fields of PayloadSettings.
    """
    import jax
    import jax.numpy as jnp

    from jaxrl_sync.sharding.presets import qwen3
    from jaxrl_sync.transfer import Publisher, PublisherConfig, Version
    from jaxrl_sync.transfer.payload.settings import PayloadSettings
    from tests.transfer import models

    join_world(options)
    config = big_config(options)
    params = models.trainer_params(options.get("seed", 0), config)
    step = jax.jit(lambda p: models.trained(p, options.get("every", 1)), donate_argnums=0)
    wanted = jax.jit(lambda p: qwen3.convert(p, config, 2, jnp.bfloat16))
    settings = PublisherConfig(
        transport=options.get("transport", "auto"),
        ttl_s=options.get("ttl_s", 2.0),
        verbs=verbs_of(options),
        payload=PayloadSettings(**options.get("payload", {})),
        **options.get("config", {}),
    )
    halt, tickets = Halt(), {}
    signal.signal(signal.SIGUSR1, lambda *_: halt.go_on.set())
    with Publisher(options["hub"], params, token_file=options["token"], config=settings) as publisher:
        say(ready=os.getpid())
        for line in sys.stdin:
            command = json.loads(line)
            if "publish" in command:
                if "halt" in command:
                    halt.arm(command["halt"], command.get("share", 0.5))
                expected = bits(wanted(params)) if options.get("size", 1) == 1 else ""
                ticket = publisher.publish(params, Version(options["lineage"], command["publish"]))
                tickets[command["publish"]] = ticket
                params = step(step(params))
                jax.block_until_ready(params)
                state = ticket.wait(command["wait"]).state if "wait" in command else ""
                say(published=command["publish"], expected=expected, state=state)
            elif "ticket" in command:
                outcome = tickets[command["ticket"]].wait(30)
                details = [r.detail for ranks in outcome.engines.values() for r in ranks.values()]
                say(ticket=command["ticket"], state=outcome.state, details=details)
            else:
                say(**publisher.stats())


def bits(tree: Any) -> str:
    """sha256 over the global bits of a tree of one process, whatever its sharding."""
    from tests.transfer.models import host

    total = hashlib.sha256()
    for path, value in sorted(host(tree).items()):
        total.update(path.encode() + value.tobytes())
    return total.hexdigest()


def obey(subscriber: Any, halt: Halt) -> None:
    """An engine's stdin: {"halt": ENGINE} as a trainer's, {"stats": 1}, {"held": 1}, else slots' sha256."""
    for line in sys.stdin:
        command = json.loads(line)
        if "halt" in command:
            halt.arm(command["halt"])
            say(armed=command["halt"])
        elif "stats" in command:
            say(**subscriber.stats())
        elif "held" in command:
            with open("/proc/self/maps", encoding="utf8") as maps:
                mapped = {line.split(None, 5)[5] for line in maps if "/dev/shm/jaxrl_sync-" in line}
            counts = {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
            say(held={**counts, "segments": len(mapped)})
        else:
            say(slots=[hashlib.sha256(slot.memory.data).hexdigest() for slot in subscriber._slots])


def engine(options: dict[str, Any]) -> None:
    """Takes every version that it is offered and tells the digest; commands: see ``obey``."""
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
        **options.get("config", {}),
    )
    halt = Halt()
    signal.signal(signal.SIGUSR1, lambda *_: halt.go_on.set())
    convert = lambda p: qwen3.convert(p, config, 2, jnp.bfloat16)  # noqa: E731
    target = qwen3.engine_abstract(config, grid)
    with Subscriber(options["hub"], target, convert, token_file=options["token"], config=settings) as sub:
        threading.Thread(target=obey, args=(sub, halt), daemon=True).start()
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
            say(
                installed=str(update.version),
                digest=value,
                transport=report.transport,
                source=report.source,
                nbytes=report.nbytes,
                resumed_bytes=report.resumed_bytes,
            )


if __name__ == "__main__":
    {"trainer": trainer, "engine": engine}[sys.argv[1]](json.loads(sys.argv[2]))
