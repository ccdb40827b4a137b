"""Wrong input: a MappingError that names tensor, operation and reason."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxrl_sync.sharding import Layout, MappingError, Plan, Shard, TensorLayout, plan, purity, reshard, trace
from jaxrl_sync.sharding.box import Box
from jaxrl_sync.sharding.layout import Placement
from jaxrl_sync.sharding.slots import SlotLayout
from tests.sharding.meshes import P, abstract, mesh

Tree = dict[str, Any]
W = {"w": jax.ShapeDtypeStruct((4, 6), "float32"), "i": jax.ShapeDtypeStruct((3,), "int32")}


def test_data_dependent_gather_names_operation_and_tensor() -> None:
    with pytest.raises(MappingError, match=r"gather of 'w' takes its positions from data \(i\)"):
        trace(lambda t: {"w": t["w"][t["i"]]}, W)
    with pytest.raises(MappingError, match=r"dynamic_slice of 'w' takes its positions from data \(i\)"):
        trace(lambda t: {"w": jax.lax.dynamic_slice(t["w"], (t["i"][0], 0), (1, 6))}, W)


def test_impure_and_value_dependent_functions() -> None:
    def prints(t: Tree) -> Tree:
        jax.debug.print("{}", t["w"][0, 0])
        return t

    def looks(t: Tree) -> Tree:
        return t if t["w"][0, 0] > 0 else {"w": t["w"].T}

    with pytest.raises(MappingError, match="impure"):
        trace(prints, W)
    with pytest.raises(MappingError, match=r"looks at the values.*depends on the value.*'w'"):
        trace(looks, W)


LOOKS: dict[str, tuple[str, Any]] = {
    "mask": (r"boolean indices must be concrete; got bool\[4,6\]", lambda t: t["w"][t["w"] > 0]),
    "masked update": ("boolean indices must be concrete", lambda t: t["w"].at[t["w"] > 0].set(0)),
    "list": (r"depends on the value of the argument \S+\['i'\]", lambda t: [t["w"], t["w"]][t["i"][0]]),
    "range": (r"argument \S+\['i'\]", lambda t: t["w"][list(range(t["i"][0]))]),
    "shape": (r"Shapes must be .*argument \S+\['i'\]", lambda t: t["w"].reshape(t["i"][0], -1)),
}


@pytest.mark.parametrize("name", LOOKS)
def test_masks_lengths_and_shapes_of_traced_values_are_looks_at_the_weights(name: str) -> None:
    """They were jax's own errors, and the shape one of a mesh that isn't set, for a folder named sharding."""
    said, make = LOOKS[name]
    with pytest.raises(MappingError, match="convert looks at the values of the weights.*" + said):
        trace(lambda t: {"o": make(t)}, W)


def _with(make: Any, t: Tree) -> Tree:
    return {"a": t["w"], "b": make(t)}


def test_what_python_hides_from_jax_shows_in_a_second_trace() -> None:
    calls = itertools.count(1)
    kept: list[Any] = []

    def leaks(t: Tree) -> Tree:
        kept.append(t["w"])
        return {"a": t["w"], "b": kept[0]}

    a_second = r"convert is impure: traced twice.*differ in "
    wrong: dict[str, tuple[str, Any]] = {
        "counter": (r"the operands of mul .*on which 'b' depends", lambda t: t["w"] * next(calls)),
        "random": (r"a constant .*on which 'b' depends", lambda t: t["w"] + np.random.rand(4, 6)),
        "clock": (
            r"the operands of add .*on which 'b' depends",
            lambda t: t["w"] + time.monotonic_ns() % 2**24,
        ),
        "order": (
            r"a constant .*on which 'b' depends",
            lambda t: t["w"][np.random.permutation(1000)[:, None] % 4],
        ),
        "key": ("random_seed", lambda t: t["w"] + jax.random.normal(jax.random.key(next(calls)), (4, 6))),
        "inside": ("of jit: the operands of mul", lambda t: jax.jit(lambda w: w * next(calls))(t["w"])),
        "length": ("number of operations.*'b'", lambda t: t["w"].T if next(calls) % 2 else t["w"].T.T),
    }
    for said, make in wrong.values():
        with pytest.raises(MappingError, match=a_second + ".*" + said):
            trace(functools.partial(_with, make), W)
    with pytest.raises(MappingError, match=r"the tensors it returns \('w\d+', 'w\d+'\)"):
        trace(lambda t: {f"w{next(calls)}": t["w"]}, W)
    with pytest.raises(MappingError, match="impure"):
        trace(leaks, W)


def test_fixed_random_numbers_and_functions_made_inside_are_pure() -> None:
    def convert(t: Tree) -> Tree:
        rng = np.random.default_rng(0)
        layer = jax.checkpoint(jax.jit(lambda w: jnp.sin(w)[rng.permutation(4)]))
        noise = jax.random.normal(jax.random.key(3), (4, 6))
        return {"a": layer(t["w"]) + noise, "b": t["w"][np.argsort(rng.random(4))], "i": t["i"]}

    assert trace(convert, W).digest == trace(convert, W).digest


def test_rows_of_arrays_of_unequal_length_differ_and_are_not_compared_as_arrays() -> None:
    a, b = np.arange(3), np.arange(3)
    assert purity._equal((a, "x"), (b, "x"))
    assert not purity._equal((a,), (b, b)) and not purity._equal((a,), (b + 1,))


def test_rank_shape_and_dtype_mismatch_name_both_sides() -> None:
    def only(t: Tree) -> Tree:
        return {"w": t["w"]}

    with pytest.raises(MappingError, match=r"'w': convert gives rank 2 \(4, 6\), the target has \(24,\)"):
        trace(only, W, {"w": jax.ShapeDtypeStruct((24,), "float32")})
    with pytest.raises(MappingError, match=r"float32\[4, 6\], the target is bfloat16\[4, 6\]"):
        trace(only, W, {"w": jax.ShapeDtypeStruct((4, 6), "bfloat16")})
    with pytest.raises(MappingError, match="convert produces 'i', which the target lacks"):
        trace(lambda t: t, W, {"w": W["w"]})


def test_missing_and_extra_tensors_come_with_the_nearest_name() -> None:
    target = {"layers/0/up": W["w"]}
    said = (
        r"target tensor 'layers/0/up' is not produced \(nearest: 'layer/0/up'\); convert produces "
        r"'layer/0/up', which the target lacks \(nearest: 'layers/0/up'\)"
    )
    with pytest.raises(MappingError, match=said):
        trace(lambda t: {"layer/0/up": t["w"]}, W, target)
    with pytest.raises(MappingError, match=r"no parameter 'w' \(nearest: 'ww'\)"):
        trace(lambda t: {"w": t["w"] + 1}, {"w": W["w"]}).export({"ww": jnp.ones((4, 6))})


def test_duplicated_target_path() -> None:
    with pytest.raises(MappingError, match="two tensors named 'a/b'"):
        trace(lambda t: {"a/b": t["w"], "a": {"b": t["w"]}}, W)


def test_unknown_axis_is_named() -> None:
    with pytest.raises(ValueError, match="nope"):  # MappingError is a ValueError; jax itself may be first
        Layout.of({"w": abstract((4,), "float32", mesh((2,), ("x",)), "nope")})


def _layout(*shards: Shard, shape: tuple[int, ...] = (4,)) -> Layout:
    return Layout({"w": TensorLayout("float32", Placement(shape, shards))})


def test_a_source_whose_boxes_overlap_partly_or_leave_a_gap_is_refused() -> None:
    corr = trace(lambda t: t, {"w": jax.ShapeDtypeStruct((4,), "float32")})
    whole = _layout(Shard(4, 0, Box((0,), (4,))))
    overlap = _layout(Shard(0, 0, Box((0,), (3,))), Shard(1, 0, Box((2,), (4,))))
    gap = _layout(Shard(0, 0, Box((0,), (2,))), Shard(1, 0, Box((3,), (4,))))
    with pytest.raises(MappingError, match="'w': source boxes overlap partly"):
        plan(overlap, whole, corr)
    with pytest.raises(MappingError, match="'w': source devices hold 3 of 4"):
        plan(gap, whole, corr)
    with pytest.raises(MappingError, match="outside of shape"):
        _layout(Shard(0, 0, Box((0,), (5,))))


def _move(on: Mesh, to: Mesh, path: str | None) -> Any:
    host = np.arange(64, dtype=np.float32).reshape(8, 8)
    params = {"w": jax.device_put(host, NamedSharding(on, P(on.axis_names)))}
    target = {"w": abstract((8, 8), "float32", to, None, to.axis_names)}
    corr = trace(lambda t: t, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    assert np.array_equal(np.asarray(reshard(params, made, path=path)["w"]), host)


@pytest.mark.parametrize("path", ["host", "device"])
def test_meshes_that_overlap_partly_are_named_with_their_devices(path: str) -> None:
    four = mesh((4,), ("x",))
    said = (
        r"source mesh \(x=4; devices \[0, 1, 2, 3\]; tensor 'w'\) and target mesh \(devices \[2, 3, 4, 5\]; "
        r"tensor 'w'\) overlap partly: \[2, 3\] belong to both, \[0, 1\] to the source alone, \[4, 5\]"
    )
    with pytest.raises(MappingError, match=said):
        _move(four, mesh((4,), ("y",), first=2), path)
    for other in (four, mesh((2, 2), ("y", "z"), first=4), mesh((2,), ("y",), first=1), mesh((8,), ("y",))):
        _move(four, other, path)  # the same, disjoint, inside, around


def test_a_corrupted_or_stale_plan_is_refused() -> None:
    on = mesh((2,), ("x",))
    source = Layout.of({"w": abstract((4, 6), "float32", on, "x")})
    corr = trace(lambda t: t, source)
    made = plan(source, source, corr)
    data = made.to_bytes()
    assert Plan.from_bytes(data).digest == made.digest
    for at in range(0, len(data), 7):
        broken = bytearray(data)
        broken[at] ^= 0x10
        with pytest.raises(MappingError):
            Plan.from_bytes(bytes(broken))


@pytest.mark.parametrize("lie", ["moves", "digest", "both"])
def test_a_plan_of_other_moves_is_stale_though_its_checksum_is_right(lie: str) -> None:
    on = mesh((2,), ("x",))
    source, whole = (Layout.of({"w": abstract((4, 6), "float32", on, *spec)}) for spec in (("x",), ()))
    corr = trace(lambda t: t, source)
    made, other = plan(source, source, corr), plan(source, whole, corr)
    old = dataclasses.replace(made)  # what a version that planned otherwise would have written
    if lie != "digest":
        old.__dict__["_moves"] = other._moves
    old.__dict__["_digest"] = made.digest if lie == "moves" else other.digest
    data = old.to_bytes()
    with pytest.raises(
        MappingError, match=f"plan is stale: .* {old.digest}, this version plans {made.digest}"
    ):
        Plan.from_bytes(data)
    assert Plan.from_bytes(dataclasses.replace(made).to_bytes()).digest == made.digest


def test_target_that_differs_from_the_correspondence() -> None:
    on = mesh((2,), ("x",))
    source = Layout.of({"w": abstract((4,), "float32", on)})
    corr = trace(lambda t: t, source)
    with pytest.raises(MappingError, match="target 'w' is bfloat16"):
        plan(source, Layout.of({"w": abstract((4,), "bfloat16", on)}), corr)
    with pytest.raises(MappingError, match=r"target layout lacks 'w', which .* \(nearest: 'ww'\)"):
        plan(source, Layout.of({"ww": abstract((4,), "float32", on)}), corr)
    with pytest.raises(MappingError, match="'v' is not part"):
        plan(
            source, Layout.of({"w": abstract((4,), "float32", on), "v": abstract((4,), "float32", on)}), corr
        )


def test_wrong_process_side_pool_and_arrays() -> None:
    on = mesh((2,), ("x",))
    source = Layout.of({"w": abstract((4,), "float32", on, "x")})
    made = plan(source, source, trace(lambda t: t, source))
    with pytest.raises(MappingError, match=r"has processes \[0\], not 3"):
        made.for_rank(3)
    with pytest.raises(MappingError, match='"source" or "target"'):
        made.for_rank(0, "sauce")
    with pytest.raises(MappingError, match="process 7 holds nothing"):
        SlotLayout.of(source, 7)
    with pytest.raises(MappingError, match="not laid out as the plan says"):
        reshard({"w": jnp.ones(4)}, made)
    with pytest.raises(MappingError, match="traced|plan says float32"):
        reshard({"w": jnp.ones(4, jnp.int32)}, made)
    with pytest.raises(MappingError, match=r"no parameter 'w' \(nearest: 'ww'\)"):
        reshard({"ww": jnp.ones(4)}, made)
    with pytest.raises(MappingError, match="'w' is a ndarray, expected an array of jax"):
        reshard({"w": np.ones(4, np.float32)}, made)
    with pytest.raises(MappingError, match='path must be "host", "device" or None'):
        reshard({"w": jnp.ones(4)}, made, path="gpu")


def test_trees_in_the_place_of_layouts_and_arrays_that_are_gone_or_traced() -> None:
    params = {"w": jnp.ones(4)}
    corr = trace(lambda t: t, params)
    layout = Layout.of(params)
    wrong: Any = params
    with pytest.raises(
        MappingError, match=r"source is a dict, expected a Layout; Layout.of\(tree\) makes one"
    ):
        plan(wrong, layout, corr)
    with pytest.raises(MappingError, match="target is a Correspondence, expected a Layout"):
        plan(layout, wrong and corr, layout)  # type: ignore[arg-type]
    made = plan(layout, layout, corr)
    with pytest.raises(MappingError, match="'w' is traced: call reshard outside of jit"):
        jax.jit(lambda t: reshard(t, made))(params)
    params["w"].delete()
    with pytest.raises(MappingError, match="'w' was deleted or donated"):
        reshard(params, made)


def test_leaves_that_are_no_arrays_of_numbers() -> None:
    with pytest.raises(MappingError, match="source 'w' is a str"):
        trace(lambda t: t, {"w": "x"})
    with pytest.raises(MappingError, match="'k' is of type key<fry>"):
        Layout.of({"k": jax.random.key(0)})
    with pytest.raises(MappingError, match="key<fry>"):
        trace(lambda t: {"k": jax.random.key(0)}, W)
