"""One rank of a world: ``python -m tests.files.rank write|read PATH ADDRESS RANK WORLD``.

Two processes of two devices write as one trainer, or of one device read as one engine. A line on stdin is a
version to write, or asks for the next one to be read; answers are lines on stdout.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main() -> None:
    """Obey until stdin ends."""
    role, path, address, rank, world = sys.argv[1:6]
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={2 if role == 'write' else 1}"
    os.environ["JAX_PLATFORMS"] = "cpu"
    import jax

    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(address, 2, int(rank))
    if role == "write":
        write(Path(path), int(rank), world)
    else:
        read(Path(path), int(rank), world)


def write(path: Path, rank: int, world: str) -> None:
    """A trainer rank."""
    from jaxrl_sync.transfer.errors import TransferError
    from jaxrl_sync.transfer.files import FilePublisher, FileWriterConfig
    from jaxrl_sync.transfer.version import Version
    from tests.files.channels import tree

    config = FileWriterConfig(anchor_every=3, anchor_share=1e9, keep=9, fsync=False, timeout_s=60)
    with FilePublisher(path, tree(0), config=config, world=world) as publisher:
        print("ready", flush=True)
        for line in sys.stdin:
            word, _, number = line.strip().rpartition(" ")
            if word == "lose":  # what this rank would write isn't there when it is asked for
                publisher._part.write = _fails  # type: ignore[method-assign, assignment]
            ticket = publisher.publish(tree(int(number)), Version("run", int(number)))
            try:
                outcome = ticket.wait(120)
                print(outcome.state, outcome.anchor_bytes, outcome.delta_bytes, flush=True)
            except TransferError as error:
                print("failed", type(error).__name__, flush=True)
            if word == "lose":
                del publisher._part.write


def _fails(*_: object) -> None:
    raise OSError(28, "No space left on device")


def read(path: Path, rank: int, world: str) -> None:
    """An engine rank."""
    from jaxrl_sync.transfer.errors import TransferError
    from jaxrl_sync.transfer.files import FileReaderConfig, FileSubscriber
    from tests.files.channels import holds, target

    config = FileReaderConfig(rank=rank, size=2, world=world, poll_s=0.02, timeout_s=60)
    with FileSubscriber(path, target(0), config=config) as subscriber:
        print("ready", flush=True)
        update = None
        for line in sys.stdin:
            word = line.strip()
            if word != "swap":
                update = subscriber.poll(0.5 if word == "look" else 60)
            if update is None:
                print("nothing", flush=True)
                continue
            try:
                update.prepare()
                if word == "prepare":
                    print("prepared", update.version.number, flush=True)
                    continue
                found = holds(update.swap(), update.version.number)
                print("took", update.version.number, found, flush=True)
            except TransferError as error:
                print("failed", type(error).__name__, flush=True)


if __name__ == "__main__":
    main()
