"""The source's side: computed leaves, casts, and buffers that no later step can touch."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl_sync.sharding import Correspondence, Layout, MappingError, plan, reshard, trace
from tests.sharding.meshes import P, bits, mesh, random_bits

Tree = dict[str, Any]


def lora(t: Tree) -> Tree:
    merged = t["w"] + (t["a"] @ t["b"]) * 0.5
    return {
        "w": merged.astype(jnp.bfloat16).T,
        "norm": jax.jit(lambda x: 1 + x)(t["n"]),
        "plain": t["n"],
        "scaled": jax.lax.scan(lambda c, x: (c, x * 2), 0, t["s"])[1],
        "gated": jax.nn.silu(t["n"]),
    }


def params_on(on: jax.sharding.Mesh) -> Tree:
    rng = np.random.default_rng(0)
    shapes = {"w": (8, 6), "a": (8, 2), "b": (2, 6), "n": (6,), "s": (3, 4)}
    specs = {"w": P("x", "y"), "a": P("x"), "b": P(None, "y"), "n": P(), "s": P(None, "x")}
    return {
        k: jax.device_put(rng.standard_normal(s).astype(np.float32), NamedSharding(on, specs[k]))
        for k, s in shapes.items()
    }


def test_computed_leaves_equal_the_jitted_conversion_bit_for_bit() -> None:
    on, to = mesh((2, 2), ("x", "y")), mesh((2,), ("tp",), first=4)
    params = params_on(on)
    corr = trace(lora, params)
    assert {p: corr.kind_of(p) for p in corr.tensors} == {
        "w": "computed", "norm": "computed", "plain": "moved", "scaled": "computed", "gated": "computed",
    }  # fmt: skip
    want = jax.jit(lora)(params)
    target = {
        k: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(to, P("tp" if x.shape[0] % 2 == 0 else None))
        )
        for k, x in want.items()
    }
    made = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    for k, x in want.items():
        assert np.array_equal(bits(x), bits(made[k])), k


def test_only_the_smallest_computed_frontier_is_computed() -> None:
    def convert(t: Tree) -> Tree:
        return {"qk": jnp.concatenate([t["q"], t["k"] * 2.0], axis=0)}

    on = mesh((2,), ("x",))
    params = {k: jax.device_put(jnp.ones((4, 2)), NamedSharding(on, P("x"))) for k in "qk"}
    corr = trace(convert, params)
    assert [(leaf.kind, leaf.params) for leaf in corr.exported] == [("param", ("q",)), ("computed", ("k",))]
    assert corr.kind_of("qk") == "mixed"
    assert "mul of k" in corr.report()


def test_export_is_laid_out_as_export_layout_says() -> None:
    params = params_on(mesh((2, 2), ("x", "y")))
    corr = trace(lora, params)
    assert Layout.of(corr.export(params)) == corr.export_layout
    with pytest.raises(MappingError, match="no parameter 'w'"):
        corr.export({k: v for k, v in params.items() if k != "w"})
    with pytest.raises(MappingError, match=r"'n' is float32\[5\], traced float32\[6\]"):
        corr.export({**params, "n": jnp.ones(5)})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_exported_buffers_survive_donation_of_the_parameters(dtype: str) -> None:
    on = mesh((2,), ("x",))
    host = random_bits(np.random.default_rng(0), (64, 64), dtype)
    params = {"w": jax.device_put(host, NamedSharding(on, P("x")))}
    corr = trace(lambda t: {"w": t["w"].T}, params)
    out = jax.block_until_ready(corr.export(params))
    pointers = {s.data.unsafe_buffer_pointer() for s in params["w"].addressable_shards}
    assert not pointers & {s.data.unsafe_buffer_pointer() for s in out["w"].addressable_shards}
    step = jax.jit(lambda p: {"w": p["w"] * 0}, donate_argnums=0)
    for _ in range(3):
        params = jax.block_until_ready(step(params))
    assert np.array_equal(bits(out["w"]), bits(host))


def test_a_correspondence_that_came_as_bytes_needs_its_function_for_computed_leaves() -> None:
    params = params_on(mesh((2, 2), ("x", "y")))
    corr = trace(lora, params)
    arrived = Correspondence.from_bytes(corr.to_bytes())
    assert arrived == corr and arrived.digest == corr.digest
    assert arrived.export_layout == corr.export_layout
    with pytest.raises(MappingError, match="bind"):
        arrived.export(params)
    bound = arrived.bind(lora, params, None)
    for k, x in corr.export(params).items():
        assert np.array_equal(bits(x), bits(bound.export(params)[k]))
    with pytest.raises(MappingError, match="'plain' differs first"):
        arrived.bind(lambda t: {**lora(t), "plain": jnp.flip(t["n"])}, params, None)


def test_export_compiles_once_for_one_layout() -> None:
    params = params_on(mesh((2, 2), ("x", "y")))
    corr = trace(lora, params)
    corr.export(params)
    count = len(corr._export_cache)
    corr.export(jax.tree.map(lambda x: x + 1, params))
    assert len(corr._export_cache) == count == 1
