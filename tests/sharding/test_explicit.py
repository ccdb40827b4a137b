"""Sources and targets on meshes of Explicit axes, what `jax.make_mesh` makes unless told otherwise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxrl_sync.sharding import Layout, MappingError, plan, reshard, trace
from tests.sharding.meshes import P, bits, mesh

Tree = dict[str, Any]

SHAPES = {"w": (8, 6), "a": (8, 2), "b": (2, 6), "n": (6,), "s": (4, 3)}
SPECS = {"w": P("x", "y"), "a": P("x", "y"), "b": P("y", None), "n": P("y"), "s": P("x")}


def explicit(shape: tuple[int, ...], names: tuple[str, ...], first: int = 0) -> Mesh:
    devices = jax.devices()[first : first + int(np.prod(shape))]
    return jax.make_mesh(shape, names, axis_types=(AxisType.Explicit,) * len(names), devices=devices)


def params_on(on: Mesh) -> Tree:
    rng = np.random.default_rng(0)
    host = {k: rng.standard_normal(s).astype(np.float32) for k, s in SHAPES.items()}
    return {k: jax.device_put(v, NamedSharding(on, SPECS[k])) for k, v in host.items()}


def merged(t: Tree) -> Tree:
    return {"w": t["w"] + t["a"] @ t["b"]}


def several(t: Tree) -> Tree:
    return {
        "w": (t["w"] + (t["a"] @ t["b"]) * 0.5).astype(jnp.bfloat16).T,
        "norm": jax.jit(lambda x: 1 + x)(t["n"]),
        "flat": (t["w"] * 2).reshape(16, 3),
        "rows": jax.lax.scan(lambda c, x: (c, x * 2), 0, t["s"])[1],
        "plain": t["w"].reshape(3, 16).T,
    }


CONVERSIONS = {"merged": merged, "several": several}


def target_of(convert: Callable[[Tree], Tree], params: Tree, to: Mesh) -> Tree:
    shapes = {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in params.items()}
    out = jax.eval_shape(convert, shapes)
    return {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, P("tp"))) for k, x in out.items()
    }


@pytest.mark.parametrize("path", ["host", "device"])
@pytest.mark.parametrize("set_too", [False, True])
@pytest.mark.parametrize("name", CONVERSIONS)
def test_computed_leaves_of_explicit_axes_equal_those_of_auto_axes(
    name: str, set_too: bool, path: Any
) -> None:
    convert = CONVERSIONS[name]
    want = jax.jit(convert)(params_on(mesh((2, 2), ("x", "y"))))
    on, to = explicit((2, 2), ("x", "y")), explicit((2,), ("tp",), first=4)
    params = params_on(on)
    target = target_of(convert, params, to)
    corr = trace(convert, params, target)
    assert corr.kind_of("w") == "computed"

    def move() -> Tree:
        made: Tree = reshard(params, plan(corr.export_layout, Layout.of(target), corr), path=path)
        return made

    if set_too:
        with jax.set_mesh(on):
            made = move()
    else:
        made = move()
    for k, x in want.items():
        assert np.array_equal(bits(x), bits(made[k])), k


def test_exports_keep_their_sharding_and_their_memory() -> None:
    params = params_on(explicit((2, 2), ("x", "y")))
    corr = trace(several, params)
    old = jax.block_until_ready(corr.export(params))
    assert old["w"].sharding == params["w"].sharding  # the parameter itself, moved to "plain"
    assert Layout.of(old) == corr.export_layout
    places = {k: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for k, x in old.items()}
    new = jax.block_until_ready(corr.export(jax.tree.map(lambda x: x + 1, params), old))
    assert all(x.is_deleted() for x in old.values()) and not any(x.is_deleted() for x in params.values())
    for k, x in new.items():
        assert [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] == places[k], k


_auto: Any = jax.sharding.auto_axes  # its annotations know only functions of one argument
WRITTEN: dict[str, Callable[[Tree], Any]] = {
    "out_sharding": lambda t: jnp.einsum("ij,jk->ik", t["a"], t["b"], out_sharding=P("x", "y")) + t["w"],
    "reshard": lambda t: jax.sharding.reshard(t["w"] * 2, P("x")) @ jax.sharding.reshard(t["b"], P()).T,
    "ones": lambda t: jnp.ones((8, 6), out_sharding=P("x", "y")) + t["w"],
    "auto_axes": lambda t: _auto(lambda a, b: a @ b, out_sharding=P("x"))(t["a"], t["b"]),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_conversion_that_says_its_shardings_is_computed_with_them(name: str) -> None:
    def convert(t: Tree) -> Tree:
        return {"w": WRITTEN[name](t)}

    on = explicit((2, 2), ("x", "y"))
    params = params_on(on)
    with jax.set_mesh(on):
        want = jax.jit(convert)(params)
        corr = trace(convert, params)
    found = corr.export(params)  # also where the mesh is no longer set
    assert [np.array_equal(bits(want["w"]), bits(x)) for x in found.values()] == [True]


def test_what_jax_refuses_of_such_a_conversion_is_an_error_that_names_the_leaves() -> None:
    def convert(t: Tree) -> Tree:
        return {"a": jax.sharding.reshard(t["w"] * 2, P("x")), "m": t["a"] @ t["b"]}

    on = explicit((2, 2), ("x", "y"))
    params = params_on(on)
    with jax.set_mesh(on):
        corr = trace(convert, params)
        with pytest.raises(
            MappingError, match=r"computing 'a#.*', 'm#.*' over .* axes: dot_general: Contracting"
        ):
            corr.export(params)
