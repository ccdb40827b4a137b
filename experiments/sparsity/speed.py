"""Times delta kernels on 64M bfloat16 elements of which 1 % changed, against a one-thread numpy copy of them.

Medians of 7 rounds; in each round every call runs once, in turn, so that a slow spell hits all alike. Prints
a table and appends a row to ``speed.jsonl``. ``copy`` copies between touched buffers, ``fresh copy`` is
``array.copy()``, with its page faults. ``compare of equal buffers`` finds nothing and stores nothing: what
reading both costs on the machine, and so the least that any encoder can take.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxrl_sync.transfer.delta import ffi, sparse
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP
from jaxrl_sync.transfer.delta.decode import apply_local, decode_local, stack_coded
from jaxrl_sync.transfer.delta.encode import encode_local

HERE = Path(__file__).resolve().parent
ROWS = HERE / "speed.jsonl"
REPEATS = 7
LIMITS = {
    "encode, ffi in jit, 2 threads": 0.75,
    "encode, plain XLA": 2.7,
    "decode + apply, ffi in jit, 2 threads": 0.4,
    "decode + apply, aliased, 2 threads": 0.4,
}
FLOOR = "compare of equal buffers, C, 2 threads"
Calls = dict[str, Callable[[], Any]]


def weights(elements: int, changed: float) -> tuple[Any, Any]:
    """(old, new): Gaussian 0.02 in bfloat16; nine of ten changes are one unit in the last place."""
    rng = np.random.default_rng(0)
    block = rng.normal(0, 0.02, min(elements, 1 << 20)).astype(np.float32)
    old = np.resize(block, elements).astype(jnp.bfloat16)
    new = old.copy()
    at = rng.choice(elements, int(elements * changed), replace=False)
    new.view(np.uint16)[at] += rng.choice(np.array([1, 1, 1, 1, 1, 1, 1, 1, 1, 3], np.uint16), at.size)
    return old, new


def encoders(old: Any, new: Any, capacity: int) -> Calls:
    """All ways to encode."""
    a, b = jnp.asarray(old), jnp.asarray(new)
    equal = old.copy()
    calls: Calls = {
        FLOOR: lambda: sparse.compare(old, equal, room=capacity, threads=2),
        "compare, C, 1 thread": lambda: sparse.compare(old, new, room=capacity),
        "compare, C, 2 threads": lambda: sparse.compare(old, new, room=capacity, threads=2),
        "compare + u8 gaps + ulp, C, 1 thread": lambda: sparse.compare_coded(old, new, ULP, room=capacity),
    }
    for name, form, threads in (
        ("encode, ffi in jit, 1 thread", "ffi", 1),
        ("encode, ffi in jit, 2 threads", "ffi", 2),
        ("encode, plain XLA", "xla", 1),
    ):
        if form == "xla" or ffi.available():
            calls[name] = _encode(a, b, capacity, form, threads)
    return calls


def _encode(old: Any, new: Any, capacity: int, form: Any, threads: int) -> Callable[[], Any]:
    run = jax.jit(lambda a, b: encode_local(a, b, capacity, form, threads=threads))
    return lambda: run(old, new)


def appliers(old: Any, new: Any, capacity: int) -> Calls:
    """All ways to apply, each onto a shadow of its own."""
    delta = sparse.compare(old, new)
    coded = sparse.compare_coded(old, new, OVERWRITE)
    streams = stack_coded(coded, (capacity, capacity, 0))
    parts = (*streams[:0], jnp.asarray(delta.positions), jnp.asarray(delta.new), jnp.uint32(delta.count))
    memory = {name: old.copy() for name in ("apply", "aliased")}
    calls: Calls = {
        "apply, aliased, 1 thread": lambda: sparse.apply_into(memory["apply"], delta),
        "apply, aliased, 2 threads": lambda: sparse.apply_into(memory["apply"], delta, threads=2),
        "decode + apply, aliased, 1 thread": lambda: sparse.apply_coded(memory["aliased"], coded),
        "decode + apply, aliased, 2 threads": lambda: sparse.apply_coded(memory["aliased"], coded, threads=2),
    }
    if ffi.available():
        for threads in (1, 2):
            calls[f"decode + apply, ffi in jit, {threads} thread{'s' * (threads - 1)}"] = _shadowed(
                old, lambda s, t=threads: decode_local(s, *streams, "ffi", threads=t)
            )
        calls["apply, ffi in jit"] = _shadowed(old, lambda s: apply_local(s, *parts, "ffi"))
    calls["apply, plain XLA, on uint16"] = _shadowed(
        old.view(np.uint16), lambda s: apply_local(s, *parts, "xla")
    )
    return calls


def _shadowed(old: Any, apply: Callable[[Any], Any]) -> Callable[[], Any]:
    run = jax.jit(apply, donate_argnums=0)
    shadow = [jnp.array(old)]

    def call() -> Any:
        shadow[0] = run(shadow[0])
        return shadow[0]

    return call


def measure(elements: int, changed: float) -> dict[str, Any]:
    """One row: milliseconds of everything and the ratios to the copy."""
    old, new = weights(elements, changed)
    target = old.copy()
    capacity = max(1024, int(elements * changed * 1.5))
    calls: Calls = {
        "copy": lambda: np.copyto(target, old),
        "fresh copy": lambda: old.copy(),
        **encoders(old, new, capacity),
        **appliers(old, new, capacity),
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(REPEATS + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            jax.block_until_ready(call())
            if turn:
                times[name].append((time.perf_counter() - start) * 1e3)
    ms = {name: statistics.median(found) for name, found in times.items()}
    return {
        "elements": elements,
        "changed": changed,
        "jax": jax.__version__,
        "ms": {name: round(t, 2) for name, t in ms.items()},
        "least_ms": {name: round(min(found), 2) for name, found in times.items()},
        "load": os.getloadavg()[0],
    }


def table(row: dict[str, Any]) -> str:
    """The row as text, with what must hold beside what was found."""
    ms = row["ms"]
    lines = [
        f"{row['elements']} bfloat16, {row['changed']:.1%} changed, jax {row['jax']}, load {row['load']:.1f}"
    ]
    for name, t in ms.items():
        limit = f"  (at most {LIMITS[name]})" if name in LIMITS else ""
        lines.append(f"{name:40s} {t:8.1f} ms  {t / ms['copy']:6.2f} x copy{limit}")
    if "compare, C, 1 thread" in ms:
        ratio = ms["compare + u8 gaps + ulp, C, 1 thread"] / ms["compare, C, 1 thread"]
        lines.append(f"fused pass / compare alone: {ratio:.2f}  (at most 2)")
    if FLOOR in ms and "encode, ffi in jit, 2 threads" in ms:
        ratio = ms["encode, ffi in jit, 2 threads"] / ms[FLOOR]
        lines.append(f"encode in jit, 2 threads / reading both buffers: {ratio:.2f}")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--changed", type=float, default=0.01)
    options = parser.parse_args(arguments)
    row = measure(options.elements, options.changed)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=HERE, capture_output=True, text=True)
    with ROWS.open("a") as out:
        out.write(json.dumps({"commit": commit.stdout.strip(), **row}) + "\n")
    print(table(row))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
