"""Helpers of the transfer tests: a hub in a thread, a small model on two meshes, and what a process holds."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.sharding.presets import qwen3
from jaxrl_sync.transfer import HubClient, Publisher, PublisherConfig, Subscriber, SubscriberConfig, auth
from jaxrl_sync.transfer.hub.server import run_hub
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.version import Version
from tests.ports import free_port

CONFIG = qwen3.DecoderConfig(
    vocab_size=64, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, head_dim=8, d_ff=64
)
FULL = PayloadSettings()
LEASE_S = 30.0
"""Where no test waits for its end, a lease outlasts whatever a busy machine makes wait."""
AXES = {"embed": "fsdp", "vocab": "tp", "heads": "tp", "kv_heads": "tp", "ff": "tp"}


class Rig:
    """Makes publishers and subscribers of the small model on one hub and closes them in reverse order."""

    def __init__(self, hub: ServerThread, token_file: Path) -> None:
        self._hub = hub
        self._token_file = token_file
        self._open: list[Any] = []

    def publisher(
        self,
        source: Any,
        transport: Any = "auto",
        convert: Any = None,
        payload: PayloadSettings = FULL,
        **options: Any,
    ) -> Publisher:
        options = {"ttl_s": LEASE_S, "chunk_bytes": 4096, **options}
        config = PublisherConfig(transport=transport, payload=payload, **options)
        made = Publisher(self._hub.url, source, token_file=self._token_file, config=config, convert=convert)
        self._open.append(made)
        return made

    def open_subscriber(
        self,
        engine: str = "engine-0",
        transport: Any = "auto",
        target: Any = None,
        convert: Any = None,
        first: int = 4,
        **options: Any,
    ) -> Subscriber:
        options = {"ttl_s": LEASE_S, "chunk_bytes": 4096, **options}
        config = SubscriberConfig(engine=engine, transport=transport, **options)
        return Subscriber(
            self._hub.url,
            engine_target(first) if target is None else target,
            convert or globals()["convert"],
            token_file=self._token_file,
            config=config,
        )

    def subscriber(self, *args: Any, **options: Any) -> Subscriber:
        self._open.append(self.open_subscriber(*args, **options))
        return self._open[-1]  # type: ignore[no-any-return]

    def hub_client(self) -> HubClient:
        self._open.append(HubClient(self._hub.url, self._token_file))
        return self._open[-1]  # type: ignore[no-any-return]

    def close(self) -> None:
        while self._open:
            self._open.pop().close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ServerThread:
    """A hub in a thread of this process. No other program gets its port between its end and a restart."""

    def __init__(self, token_file: Path, port: int = 0, ttl_s: float = LEASE_S) -> None:
        self.stop = threading.Event()
        ready = threading.Event()
        self.url = ""

        def announced(url: str) -> None:
            self.url = url
            ready.set()

        self.thread = threading.Thread(
            target=run_hub,
            args=("127.0.0.1", port or free_port(), token_file),
            kwargs={"stop": self.stop, "announce": announced, "ttl_s": ttl_s},
        )
        self.thread.start()
        assert ready.wait(60)

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


def segments(token_file: Path) -> list[str]:
    """Names of the shared memory of the run that a token belongs to."""
    prefix = f"jaxrl_sync-{auth.run_id_of(auth.load_token(token_file))}-"
    return sorted(n for n in os.listdir("/dev/shm") if n.startswith(prefix))


def open_fds() -> int:
    """File descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))


def mesh(shape: tuple[int, ...], names: tuple[str, ...], first: int = 0) -> Mesh:
    """A mesh with automatic axes over some devices of this process."""
    count = int(np.prod(shape))
    devices = np.array(jax.devices()[first : first + count]).reshape(shape)
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def trainer_params(seed: int = 0, config: qwen3.DecoderConfig = CONFIG) -> Any:
    """Random fp32 parameters sharded over devices 0 to 3, fsdp=2 x tp=2."""
    grid = mesh((2, 2), ("fsdp", "tp"))
    rng = np.random.default_rng(seed)

    def make(path: Any, leaf: Any) -> jax.Array:
        name = "/".join(p.key for p in path)
        spec: list[str | None] = []
        for axis, size in zip(qwen3.TRAINER_AXES[name], leaf.shape, strict=True):
            mapped = AXES.get(axis)
            spec.append(mapped if mapped not in spec and size % 2 == 0 else None)
        value = rng.standard_normal(leaf.shape, dtype=np.float32)
        sharding = NamedSharding(grid, PartitionSpec(*spec))
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: value[index])

    return jax.tree_util.tree_map_with_path(make, qwen3.trainer_shapes(config))


def trained(params: Any, every: int = 1) -> Any:
    """A step of every so many-th weight."""

    def moved(x: jax.Array) -> jax.Array:
        new = x * 1.01 + 0.001
        return new if every == 1 else jnp.where(jnp.arange(x.size).reshape(x.shape) % every == 0, new, x)

    return jax.tree.map(moved, params)


def convert(params: Any) -> Any:
    """The conversion of these tests: the preset's, to bf16, for tp=2."""
    return qwen3.convert(params, CONFIG, 2, jnp.bfloat16)


def engine_target(first: int = 4) -> Any:
    """The engine tree on two devices, tp=2."""
    return qwen3.engine_abstract(CONFIG, mesh((2,), ("tp",), first))


def host(tree: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Path -> the bits of each leaf, read from its shards: np.asarray of an aliasing array may be stale."""
    found = {}
    for path, leaf in leaves_by_path(tree).items():
        value = np.zeros(leaf.shape, leaf.dtype)
        for shard in leaf.addressable_shards:
            value[shard.index] = np.asarray(shard.data)
        found[path] = value.reshape(-1).view(np.uint8)
    return found


def memory_of(tree: Any) -> set[int]:
    """Where the shards of a tree lie."""
    return {
        shard.data.unsafe_buffer_pointer()
        for leaf in jax.tree.leaves(tree)
        for shard in leaf.addressable_shards
    }


def same_bits(a: Any, b: Any) -> bool:
    """Whether two trees have equal paths and bits."""
    x, y = host(a), host(b)
    return x.keys() == y.keys() and all(np.array_equal(x[p], y[p]) for p in x)


def take(subscriber: Subscriber, timeout_s: float = 60) -> tuple[Version, Any]:
    """Poll, prepare and swap in one update."""
    update = subscriber.poll(timeout_s)
    assert update is not None
    report = update.prepare()
    assert report.version == update.version
    return update.version, update.swap()


def until(true: Callable[[], bool], timeout_s: float = 60) -> None:
    """Wait until ``true()``; fails after ``timeout_s``."""
    end = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < end, "not in time"
        time.sleep(0.02)
