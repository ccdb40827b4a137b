"""The compiled Pallas kernels on one GPU: equal to plain XLA bit for bit, and their speed beside a device
copy.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ELEMENTS = 1 << 28


def test_on_the_gpu() -> None:
    """In a process of its own: the tests around this one run on CPU devices."""
    environment = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-m", "tests.delta.test_gpu"],
        env={**environment, "JAX_PLATFORMS": "cuda"}, capture_output=True, text=True, timeout=170,
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr


def main() -> None:
    """Checks equality over dtypes, then a large buffer, then publishing under donation; prints GB/s."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxrl_sync.transfer.delta import pallas_gpu, xla
    from jaxrl_sync.transfer.delta.decode import Applier
    from jaxrl_sync.transfer.delta.encode import Encoder
    from jaxrl_sync.transfer.delta.snapshot import DeviceSnapshot
    from jaxrl_sync.transfer.version import Version
    from tests.delta.bits import DTYPES, PATTERNS, pair, same_bits

    assert jax.devices()[0].platform == "gpu", jax.devices()
    for dtype in DTYPES:
        forms = [jax.jit(lambda a, b, f=f: f(a, b, 70_001, True)) for f in (pallas_gpu.encode, xla.encode)]
        applies = [jax.jit(f) for f in (pallas_gpu.apply, xla.apply)]
        for pattern in PATTERNS:
            old, new = (jnp.asarray(a) for a in pair(dtype, 70_001, pattern))
            first, second = (form(old, new) for form in forms)
            assert all(same_bits(a, b) for a, b in zip(first, second, strict=True)), (dtype, pattern)
            for apply in applies:
                assert same_bits(apply(old, first[1], first[2], first[0]), new), (dtype, pattern)

    bits = jax.random.bits(jax.random.key(0), (ELEMENTS,), jnp.uint16)
    flips = jax.random.uniform(jax.random.key(1), (ELEMENTS,)) < 0.01
    as_bf16 = jax.jit(lambda x: jax.lax.bitcast_convert_type(x, jnp.bfloat16))
    old, new = as_bf16(bits), as_bf16(bits ^ flips.astype(jnp.uint16))
    room = ELEMENTS // 64
    encode = jax.jit(lambda a, b: pallas_gpu.encode(a, b, room, False))
    plain = jax.jit(lambda a, b: xla.encode(a, b, room, False))
    found, expected = encode(old, new), plain(old, new)
    assert all(bool(jnp.array_equal(a, b)) for a, b in zip(found, expected, strict=True))
    apply = jax.jit(lambda s, p, v, c: pallas_gpu.apply(s, p, v, c), donate_argnums=0)
    shadow = apply(jnp.copy(old), found[1], found[2], found[0])
    assert bool(jnp.array_equal(_bits(jax, jnp, shadow), _bits(jax, jnp, new)))
    copy = jax.jit(lambda x: jnp.copy(x))
    size = ELEMENTS * 2 / 1e9
    kept = [shadow]

    def apply_again() -> Any:
        kept[0] = apply(kept[0], found[1], found[2], found[0])
        return kept[0]

    for name, call in (
        ("device copy", lambda: copy(old)),
        ("encode, Pallas", lambda: encode(old, new)),
        ("encode, plain XLA", lambda: plain(old, new)),
        ("apply, Pallas, donated", apply_again),
    ):
        print(f"{name:24s} {size / _median_s(jax, call):8.0f} GB/s of parameters")

    tree = {"w": old}
    snapshot = DeviceSnapshot(Encoder(tree), Applier(tree))
    snapshot.seed(tree, Version("gpu", 0))
    step = jax.jit(lambda x: _flip(jax, jnp, x), donate_argnums=0)
    live = jnp.copy(new)
    for number in range(1, 4):
        before = np.asarray(_bits(jax, jnp, live[:100_000]))
        changes = snapshot.encode({"w": live}, Version("gpu", number))
        live = step(live)
        snapshot.commit(changes)
        assert same_bits(_bits(jax, jnp, snapshot.tree["w"][:100_000]), before)
    print("publishing under donation: exact")
    compared(ELEMENTS)


def compared(elements: int) -> None:
    """Frames of versions that stay on the device equal those of versions that are read from it; prints ms."""
    import jax
    import jax.numpy as jnp

    from jaxrl_sync.sharding import Layout, plan, trace
    from jaxrl_sync.transfer.codec.rules import CodingRules
    from jaxrl_sync.transfer.delta.shards import ShardEncoders
    from jaxrl_sync.transfer.lazy import DeviceShards, Reads
    from jaxrl_sync.transfer.payload.chain import Chain
    from jaxrl_sync.transfer.payload.differences import Differences
    from jaxrl_sync.transfer.payload.settings import PayloadSettings
    from jaxrl_sync.transfer.version import Version

    shapes = {"w": (elements // 2048, 2048), "b": (300,), "s": ()}
    tree = {p: jnp.full(shape, 0.02, jnp.bfloat16) for p, shape in shapes.items()}
    convert = lambda t: {"w": t["w"].T, "b": jnp.flip(t["b"]), "s": t["s"]}  # noqa: E731
    target = jax.jit(convert)(tree)
    correspondence = trace(convert, tree, target)
    made = plan(correspondence.export_layout, Layout.of(target), correspondence)
    (edge,) = made.for_rank(0, side="source").edges
    step = jax.jit(lambda t: {p: _flip(jax, jnp, x.reshape(-1)).reshape(x.shape) for p, x in t.items()})
    settings = PayloadSettings("sparse", CodingRules(zstd="off", whole=False))
    chains = {form: Chain("ab" * 32, edge, settings) for form in ("host", "device")}
    differences, reads = Differences(ShardEncoders(), 8), Reads()
    sources = {"host": None, "device": differences}
    anchor_reads = 0
    for number in range(4):
        version, exported = Version("gpu", number), correspondence.export(tree)
        frames = {}
        for form, chain in chains.items():
            shards = DeviceShards(version, exported, sources[form], reads if form == "device" else None)
            if number == 0:
                chain.anchor(version, shards)
            else:
                frames[form] = chain.frame(Version("gpu", number - 1), version, shards)
        if number == 0:
            anchor_reads = reads.shards
        else:
            one, other = frames["host"], frames["device"]
            assert one is not None and other is not None and one.data == other.data
            assert reads.shards == anchor_reads
            print(
                f"compare of a version: device {other.compare_s * 1e3:.0f}, host {one.compare_s * 1e3:.0f} ms"
            )
        tree = step(tree)


def _bits(jax: Any, jnp: Any, x: Any) -> Any:
    return jax.lax.bitcast_convert_type(x, jnp.uint16)


def _flip(jax: Any, jnp: Any, x: Any) -> Any:
    spread = jnp.arange(x.size, dtype=jnp.uint32) % 101 == 7
    return jax.lax.bitcast_convert_type(_bits(jax, jnp, x) ^ spread.astype(jnp.uint16), jnp.bfloat16)


def _median_s(jax: Any, call: Callable[[], Any]) -> float:
    times = []
    for _ in range(8):
        start = time.perf_counter()
        jax.block_until_ready(call())
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[3]


if __name__ == "__main__":
    main()
