"""An axis that a mesh lacks: a MappingError with tensor, operation and axes, by whatever door it comes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxrl_sync.sharding import Layout, MappingError, placed, trace
from jaxrl_sync.sharding.cli import main
from jaxrl_sync.sharding.paper import PaperMesh
from jaxrl_sync.sharding.presets import qwen3
from tests.sharding.meshes import P, mesh

Tree = dict[str, Any]
ON = mesh((2,), ("x",))
W = {"v": jax.ShapeDtypeStruct((4,), "float32"), "w": jax.ShapeDtypeStruct((4, 6), "float32")}


X = P("x")


def _over_shards(body: Callable[[Any], Any], spec: P = X, out: P = X) -> Callable[[Tree], Tree]:
    return lambda t: {"w": jax.shard_map(body, mesh=ON, in_specs=spec, out_specs=out)(t["w"])}


INSIDE: dict[str, tuple[Callable[[Tree], Tree], str]] = {
    "constraint": (
        lambda t: {"w": jax.lax.with_sharding_constraint(t["w"], P("nope"))},
        r'`jax.lax.with_sharding_constraint\(t\["w"\], P\("nope"\)\)` \(test_axes.py:\d+\) of \'w\': .*nope.*'
        r"not found in mesh.*the mesh has the axes 'x'",
    ),
    "sharding": (
        lambda t: {"w": jax.device_put(t["w"] * 2, NamedSharding(ON, P("nope")))},
        r'`NamedSharding\(ON, P\("nope"\)\)` .*nope.*axes \'x\'',
    ),
    "twice": (
        lambda t: {"w": jax.lax.with_sharding_constraint(t["w"], NamedSharding(ON, P("x", "x")))},
        r"duplicate entries for `x`",
    ),
    "inside jit": (
        lambda t: {"w": jax.jit(lambda a: jax.lax.with_sharding_constraint(a * 2, P("nope")))(t["w"])},
        r"of float32\[4, 6\], made from 'w': .*nope.*axes 'x'",
    ),
    "jit": (
        lambda t: {"w": jax.jit(lambda a: a, in_shardings=P("nope"))(t["w"])},
        r"jit.*of 'w': .*nope.*axes 'x'",
    ),
    "shard_map in": (_over_shards(lambda a: a, P("nope")), r"of 'w': .*in_specs refers to 'nope'.*axes 'x'"),
    "shard_map out": (
        _over_shards(lambda a: a, out=P("nope")), r"of 'w': .*out_specs refers to 'nope'.*axes 'x'"
    ),
    "collective": (
        _over_shards(lambda a: jax.lax.psum(a, "nope")),
        r"psum.*of float32\[2, 6\], made from 'w': unknown axis 'nope'; the mesh has the axes 'x'",
    ),
    "gather": (
        _over_shards(lambda a: jax.lax.all_gather(a, "nope")),
        r"all_gather.*of float32\[2, 6\], made from 'w': .*nope.*axes 'x'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", INSIDE)
def test_an_unknown_axis_inside_a_conversion_names_operation_tensor_and_axes(name: str) -> None:
    convert, said = INSIDE[name]
    with jax.set_mesh(ON), pytest.raises(MappingError, match=said) as caught:
        trace(convert, W)
    assert caught.value.__cause__ is not None and caught.value.exit_code == 2


def test_a_shard_map_over_explicit_axes_whose_inputs_lie_otherwise_is_named() -> None:
    on = Mesh(np.array(jax.devices()[:2]), ("x",), axis_types=(AxisType.Explicit,))

    def convert(t: Tree) -> Tree:
        return {"w": jax.shard_map(lambda a: a * 2, mesh=on, in_specs=X, out_specs=X)(t["w"])}

    params = {"w": jax.device_put(jnp.ones((4, 6)), NamedSharding(on, X))}
    said = r"convert: `jax.shard_map\(.* of 'w': in_specs passed to shard_map: .* does not match .*axes 'x'"
    with pytest.raises(MappingError, match=said):
        trace(convert, params)

    def places(t: Tree) -> Tree:
        placed = jax.sharding.reshard(t["w"], NamedSharding(on, X))
        return {"w": jax.shard_map(lambda a: a * 2, mesh=on, in_specs=X, out_specs=X)(placed)}

    assert [float(x.sum()) for x in trace(places, params).export(params).values()] == [48.0]


def test_a_spec_or_a_collective_where_no_mesh_is_set() -> None:
    with pytest.raises(MappingError, match=r"of 'w': .*requires a non-empty mesh.*no mesh is set"):
        trace(INSIDE["constraint"][0], W)
    with pytest.raises(MappingError, match=r"axis_index\(\"nope\"\).*nope; no mesh is set"):
        trace(lambda t: {"w": t["w"] + jax.lax.axis_index("nope")}, W)


def test_many_inputs_are_counted_and_not_listed() -> None:
    tree = {f"w{i}": W["w"] for i in range(9)}
    with pytest.raises(MappingError, match=r"of 'w0', 'w1', 'w2' and 6 more: "):
        trace(lambda t: jax.device_put(t, NamedSharding(ON, P("nope"))), tree)
    with pytest.raises(MappingError, match=r"of 'w5': "):
        trace(_with_odd_locals, tree)


def _with_odd_locals(tree: Tree) -> Tree:
    def one(w: Any) -> Any:
        odd: Any = {1: [iter((w,)), "axis"], "a": object()}  # nothing of this is a tree of jax
        odd["itself"] = [odd, odd]
        return jax.device_put(w, NamedSharding(ON, P("nope")))

    return {"w": one(tree["w5"])}


def test_other_errors_of_a_conversion_stay_what_they_are() -> None:
    with pytest.raises(KeyError, match="nope"):
        trace(lambda t: {"w": t["nope"]}, W)
    with pytest.raises(TypeError, match="cannot reshape"):
        trace(lambda t: {"w": jnp.reshape(t["w"], (5,))}, W)

    def checks(t: Tree) -> Tree:
        assert t["w"].shape == (1,)
        return t

    with pytest.raises(AssertionError):
        trace(checks, W)


def test_placed_names_the_tensor_whose_spec_does_not_fit_the_mesh() -> None:
    shapes = {"a": {"w": W["w"]}, "v": W["v"]}
    made = placed(shapes, ON, {"a": {"w": P(None, "x")}, "v": P()})
    assert made["a"]["w"].sharding == NamedSharding(ON, P(None, "x"))
    assert Layout.of(made)["a/w"].shards[1].box.start == (0, 3)
    assert placed(shapes, ON, P("x"))["v"].sharding.spec == P("x")
    wrong: list[tuple[Any, str]] = [
        ({"a": {"w": P(("x", "nope"))}, "v": P()}, r"'a/w' \(4, 6\): .*names axis 'nope'; the mesh has 'x'"),
        ({"a": {"w": P("x", "x")}, "v": P()}, r"'a/w' \(4, 6\): .*names axis 'x' twice"),
        (P(None, "x"), r"'v' \(4,\): .*has 2 entries, the tensor rank 1"),
        ({"a": {"w": P()}}, r"specs lack 'v'"),
        ({"a": {"w": P(), "u": P()}, "v": P()}, r"shapes lack 'a/u' \(nearest: 'a/w'\)"),
    ]
    for specs, said in wrong:
        with pytest.raises(MappingError, match="placed: " + said):
            placed(shapes, ON, specs)


class _Leaf:
    """An array-like of another project with something else for a sharding."""

    def __init__(self, sharding: Any) -> None:
        self.shape, self.dtype, self.sharding = (4, 6), np.dtype("float32"), sharding


def test_layouts_want_a_mesh_and_a_spec_of_the_tensors_rank() -> None:
    with pytest.raises(MappingError, match=r"leaf 'w' is a _Leaf without a mesh \(its sharding is .*nope"):
        Layout.of({"w": _Leaf(P("nope"))})
    with pytest.raises(MappingError, match=r"leaf 'w': .*has 3 entries, the tensor rank 2"):
        Layout.of({"w": _Leaf(NamedSharding(ON, P(None, None, "x")))})
    with pytest.raises(ValueError, match="nope"):  # raised by jax before there is anything to say it of
        NamedSharding(ON, P("nope"))


def test_presets_and_meshes_on_paper_name_axis_and_tensor() -> None:
    cfg = qwen3.DecoderConfig(
        vocab_size=32, num_layers=1, d_model=8, num_heads=2, num_kv_heads=1, head_dim=4, d_ff=16
    )
    with pytest.raises(MappingError, match=r"placed: '.+' \(.*names axis 'tp'; the mesh has 'x'"):
        qwen3.engine_abstract(cfg, ON)
    with pytest.raises(
        MappingError, match=r"'a/w' \(4, 6\): spec .* names axis 'nope'; the mesh has 'x', 'y'"
    ):
        PaperMesh.parse("x=2,y=2").placement((4, 6), ("nope",), path="a/w")
    with pytest.raises(MappingError, match=r"names axis 'z'"):
        PaperMesh.parse("x=2").placement((4, 6), (), {"z": 0})


@pytest.mark.parametrize(
    ("axes", "said"),
    [
        (
            "--source foo=3 --target tp=2",
            "--source: unknown axis 'foo', for 'embed' first; trainers have dp, ",
        ),
        ("--source fdsp=4 --target tp=2", "--source: unknown axis 'fdsp' (nearest: 'fsdp')"),
        (
            "--source fsdp=4 --target pp=2",
            "--target: unknown axis 'pp' (nearest: 'tp'), for 'embed' first; eng",
        ),
    ],
)
def test_plans_on_paper_know_the_axes_of_trainers_and_engines(
    axes: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--model", "qwen3-0.6b", *axes.split()]) == 2
    assert capsys.readouterr().err.startswith(f"jaxrl-sync: error: {said}")
