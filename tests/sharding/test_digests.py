from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sync.sharding import Layout, MappingError, state_digest
from jaxrl_sync.sharding.digests import add_digests
from tests.sharding.meshes import abstract, mesh, random_bits

Shards = dict[tuple[int, str], Any]


def shards_of(layout: Layout, arrays: dict[str, Any]) -> Shards:
    return {
        (s.device, path): np.ascontiguousarray(arrays[path][s.box.slices])
        for path, t in layout.items()
        for s in t.shards
    }


ARRAYS = {
    "m": random_bits(np.random.default_rng(0), (8, 4, 6), "bfloat16"),
    "v": random_bits(np.random.default_rng(1), (16,), "float32"),
    "s": random_bits(np.random.default_rng(2), (), "float64"),
    "b": random_bits(np.random.default_rng(3), (4, 4), "int8"),
    "e": np.zeros((0, 4), np.float32),
}


def _layout(on: jax.sharding.Mesh, **specs: Any) -> Layout:
    return Layout.of({k: abstract(a.shape, a.dtype, on, *specs.get(k, ())) for k, a in ARRAYS.items()})


def test_equal_over_layouts_and_additive_over_parts() -> None:
    rows = _layout(mesh((4,), ("x",)), m=("x",), v=("x",), b=("x",))
    columns = _layout(mesh((2, 2), ("x", "y")), m=(None, "x", "y"), v=("y",), b=(None, ("x", "y")))
    shards = shards_of(rows, ARRAYS)
    whole = state_digest(shards, rows)
    assert whole == state_digest(shards_of(columns, ARRAYS), columns, threads=2)
    halves = [{k: a for k, a in shards.items() if k[1] != "s" and (k[0] < 2) == low} for low in (True, False)]
    parts = add_digests(*(state_digest(h, rows) for h in halves))
    assert {k: v for k, v in whole.items() if k != "s"} == parts


def test_every_single_bit_and_every_swap_changes_both_sums() -> None:
    on = mesh((1,), ("x",))
    layout = Layout.of({"w": abstract((6, 5), "uint16", on)})
    array = np.arange(30, dtype=np.uint16).reshape(6, 5)
    base = state_digest({(0, "w"): array}, layout)["w"]
    for bit in range(16):
        changed = array.copy()
        changed[3, 2] ^= 1 << bit
        found = state_digest({(0, "w"): changed}, layout)["w"]
        assert found[0] != base[0] and found[1] != base[1]
    for swapped in (array[::-1], array[:, ::-1], np.roll(array, 1, 0), np.roll(array, 1, 1)):
        found = state_digest({(0, "w"): np.ascontiguousarray(swapped)}, layout)["w"]
        assert found[0] != base[0] and found[1] != base[1]


def test_golden_sums() -> None:
    # The same on every machine: the sums travel between processes of different versions.
    layout = Layout.of({"w": abstract((3, 4), "float32", mesh((1,), ("x",)))})
    assert state_digest({(0, "w"): np.arange(12, dtype=np.float32).reshape(3, 4)}, layout) == {
        "w": (2302672896, 2092957696)
    }


def test_wrong_shards_are_refused() -> None:
    layout = Layout.of({"w": abstract((4,), "float32", mesh((2,), ("x",)), "x")})
    with pytest.raises(MappingError, match="has 16 bytes, expected 8"):
        state_digest({(0, "w"): np.zeros(4, np.float32)}, layout)
    with pytest.raises(MappingError, match="device 5 holds nothing"):
        state_digest({(5, "w"): np.zeros(2, np.float32)}, layout)
