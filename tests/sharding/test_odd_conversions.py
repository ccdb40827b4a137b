"""Conversions that few write: what they mean must arrive all the same, or be a named error."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding

from jaxrl_sync.sharding import Correspondence, Layout, MappingError, plan, reshard, trace
from jaxrl_sync.sharding.paths import leaves_by_path
from tests.sharding.meshes import P, abstract, bits, mesh

Tree = dict[str, Any]
HOST = np.random.default_rng(0).standard_normal((8, 6)).astype(np.float32)
ROWS = np.array([3, 1, 7])


def moved(convert: Callable[[Any], Any], params: Any, to: Mesh, path: str | None = None) -> Any:
    """(correspondence, result) of a transfer to ``to``, everything replicated there."""
    shapes = jax.eval_shape(convert, params)
    target = jax.tree.map(lambda x: abstract(x.shape, x.dtype, to), shapes)
    corr = trace(convert, params, target)
    return corr, reshard(params, plan(corr.export_layout, Layout.of(target), corr), path=path)


def of_w(convert: Callable[[Any], Any], path: str | None = None) -> tuple[Correspondence, Any]:
    """What becomes of the matrix ``HOST``, on four devices, on two others."""
    params = {"w": jax.device_put(HOST, NamedSharding(mesh((2, 2), ("x", "y")), P("x", "y")))}
    corr, out = moved(lambda t: {"o": convert(t["w"])}, params, mesh((2,), ("tp",), first=4), path)
    return corr, out["o"]


def test_a_function_applied_at_some_rows_is_computed_and_no_overwriting() -> None:
    corr, found = of_w(lambda w: w.at[ROWS].apply(lambda x: x * 2))
    want = HOST.copy()
    want[ROWS] *= 2
    assert corr.kind_of("o") == "computed" and np.array_equal(bits(want), bits(found))


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "int8", "uint16", "bool", "bfloat16"])
@pytest.mark.parametrize("how", ["beyond the end", "rolled rows"])
def test_gathers_of_any_type_have_what_jax_puts_where_nothing_is(how: str, dtype: str) -> None:
    """Of types of less than a byte there was a ValueError of a NaN that is no integer."""

    def convert(w: Any) -> Any:
        if how == "rolled rows":
            return jax.vmap(jnp.roll)(w, jnp.arange(8))
        return w.at[np.array([0, 9, -1, -9])].get(mode="fill")

    host = np.arange(48).reshape(8, 6) % 2
    params = {"w": jnp.asarray(host).astype(dtype)}
    corr, out = moved(lambda t: {"o": convert(t["w"])}, params, mesh((2,), ("tp",), first=4))
    assert corr.kind_of("o") == "moved"
    assert np.array_equal(bits(out["o"]), bits(jax.jit(convert)(params["w"])))


def _pads() -> list[tuple[int, int, int, int]]:
    """(rows, before, after, between) that leave a size of at least 0."""
    cuts = [(-3, 4), (4, -3), (-9, 9), (9, -9), (-1, -1), (2, 1)]
    every = [(rows, a, b, k) for rows in (1, 2, 5) for a, b in cuts for k in (0, 2)]
    return [(n, a, b, k) for n, a, b, k in every if n + (n - 1) * k + a + b >= 0]


@pytest.mark.parametrize(("rows", "before", "after", "between"), _pads())
def test_padding_that_cuts_more_than_there_is(rows: int, before: int, after: int, between: int) -> None:
    long = rows + (rows - 1) * between
    size = long + before + after
    spread = np.full((long, 6), 7, np.float32)
    spread[:: between + 1] = HOST[:rows]
    want = np.full((size, 6), 7, np.float32)
    for i in range(size):
        if 0 <= i - before < long:
            want[i] = spread[i - before]
    corr, found = of_w(lambda w: lax.pad(w[:rows], jnp.float32(7), ((before, after, between), (0, 0, 0))))
    assert corr.kind_of("o") in ("moved", "constant") and np.array_equal(bits(want), bits(found))


def test_random_keys_may_be_scanned_and_mapped_over() -> None:
    keys = jax.random.split(jax.random.key(0), 8)

    def noisy(row: Any, key: Any) -> Any:
        return row + jax.random.normal(key, (6,))

    def convert(w: Any) -> Any:
        return lax.scan(lambda c, xs: (c, noisy(*xs)), 0, (w, keys))[1]

    corr, found = of_w(convert)
    assert corr.kind_of("o") == "computed"
    assert np.array_equal(bits(jax.jit(convert)(HOST)), bits(found))


def noise() -> Any:
    return jax.random.normal(jax.random.key(0), (2048, 2304))  # too large to be written out while tracing


@pytest.mark.parametrize("path", ["host", "device"])
def test_what_is_computed_from_no_parameter_lies_where_its_layout_says(path: str) -> None:
    a, b = mesh((2,), ("x",)), mesh((2,), ("x",), first=2)
    params = {
        "a": jax.device_put(HOST[:4], NamedSharding(a, P("x"))),
        "b": jax.device_put(HOST, NamedSharding(b, P("x"))),
    }

    def convert(t: Tree) -> Tree:
        return {"a": t["a"] * 2, "n": noise()}

    corr, found = moved(convert, params, mesh((2,), ("tp",), first=4), path)
    assert corr.kind_of("n") == "computed" and corr.unused == ("b",)
    assert np.array_equal(bits(found["n"]), bits(jax.jit(noise)()))
    _, alone = moved(lambda t: {"n": noise()}, params, mesh((2,), ("tp",), first=4), path)
    assert np.array_equal(bits(alone["n"]), bits(found["n"]))


def test_noise_without_any_parameter_has_no_place() -> None:
    corr = trace(lambda t: {"n": noise()}, {})
    with pytest.raises(MappingError, match=r"computed leaf 'n#.*no parameter whose devices"):
        corr.export({})


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Scaled:
    """As quantised weights of other projects: a field is called as the inside of an NNX Variable."""

    value: Any
    scale: Any


def test_a_dataclass_with_a_value_beside_other_fields_keeps_all_names() -> None:
    on = mesh((2,), ("x",))
    params = {
        "w": Scaled(*(jax.device_put(x, NamedSharding(on, P("x"))) for x in (HOST, HOST[:, 0]))),
        "z": Scaled(jax.device_put(HOST, NamedSharding(on, P())), {}),
    }
    assert list(Layout.of(params)) == ["w/scale", "w/value", "z"]
    corr, out = moved(
        lambda t: {"w": Scaled(t["w"].value.T, t["w"].scale)}, params, mesh((2,), ("tp",), first=4)
    )
    assert set(corr.tensors) == set(leaves_by_path(out)) == {"w/value", "w/scale"}
    assert np.array_equal(bits(out["w"]["value"]), bits(HOST.T))


def test_random_keys_among_the_parameters_are_named() -> None:
    tree = {"w": HOST, "rngs": {"key": jax.random.key(0)}}
    for side, source, target in (("source", tree, None), ("target", {"w": HOST}, tree)):
        with pytest.raises(MappingError, match=rf"{side} 'rngs/key' is of type key<fry>.*leave it out"):
            trace(lambda t: {"w": t["w"]}, source, target)


def test_a_conversion_that_wants_other_devices_is_an_error_that_names_the_leaf() -> None:
    there = NamedSharding(mesh((2,), ("tp",), first=4), P("tp"))
    with pytest.raises(
        MappingError, match=r"computing 'o#computed0' on the source's devices: .*incompatible"
    ):
        of_w(lambda w: lax.with_sharding_constraint(w * 2, there) + 1)
