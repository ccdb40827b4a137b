"""Whole versions from a Publisher to a Subscriber: the very calls of a run, over any transport.

The server is the engine's side and holds the hub; the client trains nothing, publishes, and times.
"""

from __future__ import annotations

import contextlib
import dataclasses
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxrl_sync.transfer.bench.queue_pairs import expect
from jaxrl_sync.transfer.bench.shape import BenchError, Result, Shape, percentiles
from jaxrl_sync.transfer.verbs.devices import Choice
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from jaxrl_sync.transfer.wire import Connection

if TYPE_CHECKING:
    import jax

LEAVES = 4
POLL_S = 0.5
TTL_S = 30.0
_LINEAGE = "bench"


def leaves(shape: Shape, seed: int) -> dict[str, jax.Array]:
    """A tree of ``size_bytes`` in a few tensors of bytes, whose values follow from the seed."""
    import jax
    import numpy as np

    count = min(LEAVES, shape.size_bytes)
    sizes = [shape.size_bytes // count + (i < shape.size_bytes % count) for i in range(count)]
    rng = np.random.default_rng(shape.seed)
    base = {f"tensor_{i}": rng.integers(0, 256, n, dtype=np.uint8) for i, n in enumerate(sizes)}
    return {path: jax.device_put(value + np.uint8(seed)) for path, value in base.items()}


def digest(tree: Any) -> str:
    """Over the bits of a tree of bytes."""
    import numpy as np
    import xxhash

    total = xxhash.xxh3_128()
    for path in sorted(tree):
        total.update(np.ascontiguousarray(np.asarray(tree[path])).data)
    return total.hexdigest()


def same(tree: Any) -> Any:
    """The conversion between two sides that hold the same."""
    return tree


@contextlib.contextmanager
def _hub(token: str, timeout_s: float) -> Iterator[tuple[str, Path]]:
    """The URL of a hub in a thread, and the file with its token."""
    from jaxrl_sync.transfer.hub.server import run_hub

    stop, ready, urls = threading.Event(), threading.Event(), list[str]()

    def announce(url: str) -> None:
        urls.append(url)
        ready.set()

    with _token_file(token) as file:
        options = {"stop": stop, "announce": announce, "ttl_s": TTL_S}
        thread = threading.Thread(target=run_hub, args=("127.0.0.1", 0, file), kwargs=options)
        thread.start()
        try:
            if not ready.wait(timeout_s):
                raise BenchError("the hub did not come up")
            yield urls[0], file
        finally:
            stop.set()
            thread.join(timeout_s)


@contextlib.contextmanager
def _token_file(token: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="jaxrl-sync-bench-") as folder:
        file = Path(folder) / "token"
        file.touch(mode=0o600)
        file.write_text(token + "\n")
        yield file


def _verbs(shape: Shape, choice: Choice) -> VerbsSettings:
    return VerbsSettings(choice=choice, queue_pairs=shape.qps)


def serve(connection: Connection, shape: Shape, choice: Choice, token: str) -> None:
    """The engine: install every version, and tell the digest of those that are compared."""
    from jaxrl_sync.transfer import Subscriber, SubscriberConfig

    config = SubscriberConfig(
        transport=shape.transport, threads=2, timeout_s=shape.timeout_s, verbs=_verbs(shape, choice)
    )
    with _hub(token, shape.timeout_s) as (url, file):
        with Subscriber(url, _target(shape), same, token_file=file, config=config) as subscriber:
            connection.send({"kind": "opened", "hub": url}, timeout_s=shape.timeout_s)
            last = -1
            while last < shape.iters - 1:
                update = subscriber.poll(POLL_S)
                if update is None:
                    _check_alive(connection)
                    continue
                prepared = update.prepare(shape.timeout_s)
                tree, last = update.swap(), update.version.number
                seen = digest(tree) if is_compared(shape, last) else ""
                message = {"kind": "installed", "number": last, "digest": seen}
                connection.send({**message, **_times(prepared)}, timeout_s=shape.timeout_s)
            expect(connection, "end", shape.timeout_s)


def _times(prepared: Any) -> dict[str, Any]:
    return {name: getattr(prepared, name) for name in ("transport", "wire_s", "verify_s", "prepare_s")}


def _check_alive(connection: Connection) -> None:
    if connection.wait_readable(0.0):
        expect(connection, "end", 1.0)
        raise BenchError(f"{connection.peer} ended early")


def _target(shape: Shape) -> Any:
    import jax

    tree = leaves(dataclasses.replace(shape, seed=0), 0)
    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for path, x in tree.items()}


def is_compared(shape: Shape, number: int) -> bool:
    """The first ones, the last, and what is left of ``checked`` spread between."""
    every = max(1, shape.iters // max(1, shape.checked))
    return shape.checked > 0 and (number % every == 0 or number == shape.iters - 1)


def measure(connection: Connection, shape: Shape, choice: Choice, token: str) -> Result:
    """The trainer: publish ``iters`` versions one after the other, each with other values."""
    from jaxrl_sync.transfer import Publisher, PublisherConfig, Version

    connection.send({"kind": "open", "shape": shape.to_json()}, timeout_s=shape.timeout_s)
    opened = expect(connection, "opened", shape.timeout_s)
    config = PublisherConfig(
        transport=shape.transport, threads=2, timeout_s=shape.timeout_s, verbs=_verbs(shape, choice)
    )
    wire, rounds, verify, commits, compared, transport = [], [], [], [], 0, ""
    first = leaves(shape, 0)
    with (
        _token_file(token) as file,
        Publisher(str(opened.get("hub")), first, token_file=file, config=config) as publisher,
    ):
        for number in range(shape.iters):
            tree = leaves(shape, number % 256)
            started = time.perf_counter()
            ticket = publisher.publish(tree, Version(_LINEAGE, number))
            installed = expect(connection, "installed", shape.timeout_s)
            rounds.append(time.perf_counter() - started)
            outcome = ticket.wait(shape.timeout_s)
            if installed.get("number") != number or outcome.state != "committed":
                raise BenchError(f"version {number} is {outcome.state}, {installed.get('number')} installed")
            if installed["digest"]:
                if installed["digest"] != digest(tree):
                    raise BenchError(f"version {number} arrived with other bits than it was sent with")
                compared += 1
            wire.append(float(installed["wire_s"]))
            verify.append(float(installed["verify_s"]))
            commits.append(float(outcome.seconds.get("commit", 0.0)))
            transport = str(installed["transport"])
        connection.send({"kind": "end"}, timeout_s=shape.timeout_s)
    if transport != shape.transport:
        raise BenchError(f"versions went over {transport}, expected {shape.transport}")
    warm = slice(1, None) if shape.iters > 1 else slice(None)  # the first one finds slots and links cold
    details = {
        "wire_s": statistics.median(wire[warm]),
        "verify_s": statistics.median(verify[warm]),
        "commit_s": statistics.median(commits[warm]),
        "round_s": statistics.median(rounds[warm]),
    }
    counts = {"versions": compared, "bytes": compared * shape.size_bytes}
    latency = percentiles([s * 1e6 for s in rounds[warm]])
    return Result(shape, len(wire[warm]), sum(wire[warm]), latency, counts, details)
