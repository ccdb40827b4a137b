"""Versions from device arrays to device arrays through Publisher and Subscriber, while training donates.

On one GPU (marked ``gpu``), and the same program on CPU devices that stand in for accelerators: exports are
compared where they lie, and a slot is staging memory whose content is put on the devices in groups.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl_sync.transfer import (
    Publisher,
    PublisherConfig,
    Subscriber,
    SubscriberConfig,
    Version,
    auth,
    filling,
    slots,
)
from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from tests.sharding.meshes import P, mesh
from tests.transfer.models import LEASE_S, ServerThread, host

TRANSPORTS: tuple[Literal["shm", "tcp"], ...] = ("shm", "tcp")
PAYLOADS: tuple[Literal["full", "sparse"], ...] = ("full", "sparse")
VERSIONS = 6
Tree = dict[str, Any]


def convert(tree: Tree) -> Tree:
    """Casts, a transpose, a flip, a split; ``still`` never changes."""
    w = tree["w"].astype(jnp.bfloat16)
    return {
        "turned": w.T,
        "top": w[: w.shape[0] // 2],
        "flipped": tree["layers"][:, ::-1].astype(jnp.bfloat16),
        "still": tree["still"],
        "count": tree["count"],
    }


def params(rows: int) -> Tree:
    """``rows`` x 1024 elements and three times as many, on the first device, or sharded over two of four."""
    on = mesh((2,), ("x",)) if len(jax.devices()) >= 4 else mesh((1,), ("x",))
    spec = {"w": P("x"), "layers": P(None, "x"), "still": P(), "count": P()}
    keys = jax.random.split(jax.random.key(0), 3)
    made = {
        "w": jax.random.normal(keys[0], (rows, 1024), jnp.float32),
        "layers": jax.random.normal(keys[1], (3, rows, 1024), jnp.float32),
        "still": jax.random.normal(keys[2], (rows, 64), jnp.float32),
        "count": jnp.zeros((), jnp.int32),
    }
    return {name: jax.device_put(x, NamedSharding(on, spec[name])) for name, x in made.items()}


def target(source: Tree) -> Tree:
    """The engine's tree: on the same device, or on two others."""
    many = len(jax.devices()) >= 4
    on = mesh((2,), ("z",), 2) if many else mesh((1,), ("z",))
    spec = {"turned": P("z"), "top": P(None, "z"), "flipped": P(None, None, "z"), "still": P(), "count": P()}
    return {
        name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(on, spec[name]))
        for name, x in jax.eval_shape(convert, source).items()
    }


@functools.partial(jax.jit, donate_argnums=0)
def train_step(tree: Tree) -> Tree:
    """Other values for about one element in a hundred; its argument's buffers are reused."""

    def moved(x: Any) -> Any:
        at = jnp.arange(x.size, dtype=jnp.int32).reshape(x.shape)
        return jnp.where(at % 97 == tree["count"] % 97, x * 1.5 + 0.25, x)

    trained = {name: moved(x) for name, x in tree.items() if name in ("w", "layers")}
    return {**tree, **trained, "count": tree["count"] + 1}


def expected(tree: Tree) -> dict[str, Any]:
    """The bits that an engine must get, in host memory."""
    return {name: np.asarray(x).copy() for name, x in jax.jit(convert)(tree).items()}


def play(url: str, token_file: Path, transport: Any, payload: Any, rows: int, platform: str) -> list[Any]:
    """Publish every version, train on at once, take it in, compare; the reports."""
    tree = params(rows)
    made = (
        PayloadSettings(payload, CodingRules(whole=False), compare="device")
        if payload == "sparse"
        else PayloadSettings()
    )
    reports = []
    ours = PublisherConfig(transport=transport, payload=made, ttl_s=LEASE_S)
    theirs = SubscriberConfig(transport=transport, ttl_s=LEASE_S, timeout_s=60)
    with (
        Publisher(url, tree, token_file=token_file, config=ours) as publisher,
        Subscriber(url, target(tree), convert, token_file=token_file, config=theirs) as subscriber,
    ):
        for number in range(VERSIONS):
            wanted, before = expected(tree), tree
            publisher.publish(tree, Version("a", number))
            for _ in range(1 + number % 2):
                tree = train_step(tree)  # overwrites what was just published
            update = subscriber.poll(60)
            assert update is not None and before["w"].is_deleted()
            reports.append(update.prepare())
            got = update.swap()
            assert all(
                np.array_equal(bits, wanted[name].reshape(-1).view(np.uint8))
                for name, bits in host(got).items()
            ), (transport, payload, number)
            for leaf in jax.tree.leaves(got):
                assert {d.platform for d in leaf.devices()} == {platform}, leaf.sharding
                assert leaf.sharding.memory_kind == "device"
    return reports


def check(platform: str, rows: int, say: Callable[[str], None]) -> None:
    """All transports and payloads."""
    with tempfile.TemporaryDirectory() as folder:
        token_file = Path(folder) / "token"
        auth.create_token(token_file)
        for transport in TRANSPORTS:
            for payload in PAYLOADS:
                hub = ServerThread(token_file)
                start = time.monotonic()
                try:
                    reports = play(hub.url, token_file, transport, payload, rows, platform)
                finally:
                    hub.close()
                later = reports[2:]  # each slot's first one is whole
                assert {r.transport for r in reports} == {transport}
                assert {r.payload for r in later} == {"frame" if payload == "sparse" else "full"}
                whole, moved = reports[0].moved["devices"], {r.moved["devices"] for r in later}
                if payload == "sparse":  # `still` stays where it is
                    assert max(moved) < whole
                else:
                    assert moved == {whole}
                say(
                    f"{transport}, {payload}: {whole / 1e6:.1f} MB; by version, received "
                    f"{[round(r.nbytes / 1e6, 2) for r in reports]} MB, put on the device "
                    f"{[round(r.moved['devices'] / 1e6, 1) for r in reports]} MB in "
                    f"{[round(r.seconds['fill'] * 1e3, 1) for r in reports]} ms; "
                    f"{time.monotonic() - start:.1f} s in all"
                )


def test_on_cpu_devices_that_stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    real = filling.groups_of
    monkeypatch.setattr(slots, "_aliases", lambda arrays, views: False)
    monkeypatch.setattr(filling, "groups_of", lambda views, keys, _: real(views, keys, 1 << 16))
    check("cpu", 64, print)


@pytest.mark.gpu
def test_on_the_gpu() -> None:
    """In a process of its own: the tests around this one run on CPU devices."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.transfer.test_device_sync"],
        env={**environment, "JAX_PLATFORMS": "cuda"}, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """On whatever devices there are, with versions of several groups."""
    device = jax.devices()[0]
    if device.platform == "cpu":
        sys.exit("no accelerator here: JAX_PLATFORMS says cpu, or no GPU was found")
    check(device.platform, 16384, print)


if __name__ == "__main__":
    main()
