"""reshard in one process: memory, donation, pools, and the traps of aliased arrays."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

import jaxrl_sync.sharding
from jaxrl_sync.sharding import Layout, MappingError, Plan, Policy, kernels, make_pool, plan, reshard, trace
from tests.sharding.meshes import P, abstract, bits, mesh, random_bits

Tree = dict[str, Any]


def setting(dtype: str = "bfloat16", policy: Policy | None = None) -> tuple[Tree, Plan]:
    """A matrix and a replicated vector from fsdp=4 to tp=2 with two replicas."""
    on, to = mesh((4,), ("fsdp",)), mesh((2, 2), ("dp", "tp"), first=4)
    rng = np.random.default_rng(0)
    params = {
        "w": jax.device_put(random_bits(rng, (16, 48), dtype), NamedSharding(on, P("fsdp"))),
        "n": jax.device_put(random_bits(rng, (48,), dtype), NamedSharding(on, P())),
    }
    target = {"w": abstract((48, 16), dtype, to, "tp"), "n": abstract((48,), dtype, to)}
    corr = trace(lambda t: {"w": t["w"].T, "n": t["n"]}, params, target)
    return params, plan(corr.export_layout, Layout.of(target), corr, policy=policy)


def test_results_alias_the_pool_and_compile_nothing_anew() -> None:
    params, made = setting()
    pool = make_pool(made, path="host")
    low = min(v.__array_interface__["data"][0] for v in pool.views.values())
    high = max(v.__array_interface__["data"][0] + v.nbytes for v in pool.views.values())
    step: Any = jax.jit(lambda t: jax.tree.map(lambda x: x.sum(), t))
    for _ in range(3):
        out = reshard(params, made, out=pool)
        jax.block_until_ready(step(out))
        for x in jax.tree.leaves(out):
            for s in x.addressable_shards:
                assert low <= s.data.unsafe_buffer_pointer() < high
                assert s.data.unsafe_buffer_pointer() % 64 == 0
    assert step._cache_size() == 1


def test_a_later_result_shows_new_values_although_numpy_looked_at_the_earlier_one() -> None:
    params, made = setting("float32")
    pool = make_pool(made)
    first = reshard(params, made, out=pool)
    kept = np.array(np.asarray(first["n"]))
    doubled = jax.tree.map(lambda x: x * 2, params)
    second = reshard(doubled, made, out=pool)
    assert np.array_equal(bits(np.asarray(second["n"])), bits(np.asarray(doubled["n"])))
    assert not np.array_equal(bits(kept), bits(np.asarray(second["n"])))


def test_donation_deletes_the_source_and_keeps_every_bit() -> None:
    params, made = setting()
    want = np.array(np.asarray(params["w"]).T)
    out = reshard(params, made, donate=True)
    assert params["w"].is_deleted() and params["n"].is_deleted()
    assert np.array_equal(bits(want), bits(out["w"]))


def test_nothing_here_donates_through_device_put_or_scatters_floats() -> None:
    # device_put(donate=True) crashes the process between disjoint CPU devices; bf16 scatters change NaN bits.
    for file in Path(jaxrl_sync.sharding.__file__).parent.rglob("*.py"):
        text = file.read_text()
        assert not re.search(
            r"device_put\([^)]*donate\s*=", text.replace("``jax.device_put(donate=True)``", "")
        ), file
        assert ".at[" not in text or file.name in ("values.py", "device_words.py"), (
            file
        )  # the latter: integers


@pytest.mark.parametrize("native", [True, False])
def test_policy_node_fills_replicas_inside_the_node(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(kernels, "kernels", lambda: None)
    params, made = setting(policy=Policy("node"))
    assert made.for_rank(0).total_bytes == (16 * 48 + 48) * 2  # one process: every element once
    out = reshard(params, made)
    for path, want in (("w", np.asarray(params["w"]).T), ("n", np.asarray(params["n"]))):
        for s in out[path].addressable_shards:
            assert np.array_equal(bits(want[s.index]), bits(s.data)), (path, s.device)


def test_a_pool_of_another_plan_is_refused() -> None:
    params, made = setting()
    _, other = setting("float32")
    with pytest.raises(MappingError, match="pool was made for plan"):
        reshard(params, made, out=make_pool(other))


def test_the_exported_leaves_can_be_given_instead_of_the_parameters() -> None:
    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    params = {"w": jax.device_put(jnp.arange(24.0).reshape(4, 6), NamedSharding(on, P("x")))}
    target = {"w": abstract((6, 4), "bfloat16", to, "y")}
    corr = trace(lambda t: {"w": t["w"].T.astype(jnp.bfloat16)}, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    assert np.array_equal(bits(reshard(corr.export(params), made)["w"]), bits(reshard(params, made)["w"]))


def test_one_device_to_eight_and_back() -> None:
    one, all_of_them = mesh((1,), ("x",)), mesh((8,), ("y",))
    host = random_bits(np.random.default_rng(0), (8, 40), "bfloat16")
    tree = {"w": jax.device_put(host, NamedSharding(one, P()))}
    for to, spec in ((all_of_them, (None, "y")), (one, ())):
        target = {"w": abstract((8, 40), "bfloat16", to, *spec)}
        corr = trace(lambda t: t, tree, target)
        tree = reshard(tree, plan(corr.export_layout, Layout.of(target), corr))
        assert np.array_equal(bits(tree["w"]), bits(host))


def test_results_have_the_very_shardings_of_a_given_target_tree() -> None:
    params, _ = setting()
    on = jax.sharding.Mesh(np.array(jax.devices())[[7, 6, 5, 4]].reshape(2, 2), ("a", "b"))
    target = {"w": abstract((16, 48), "bfloat16", on, "b", "a")}
    corr = trace(lambda t: {"w": t["w"]}, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    with pytest.raises(MappingError, match="give make_pool the target tree"):
        make_pool(made)
    out = reshard(params, made, out=make_pool(made, target))
    assert out["w"].sharding == target["w"].sharding
    assert np.array_equal(bits(out["w"]), bits(params["w"]))
    with pytest.raises(MappingError, match="not laid out"):
        make_pool(made, {"w": abstract((16, 48), "bfloat16", on, "a", "b")})


@pytest.mark.parametrize("grid", [(2, 3), (3, 2), (6, 1), (1, 6)])
def test_arrays_on_meshes_of_any_factor_order_work_in_one_jit(grid: tuple[int, int]) -> None:
    to = mesh(grid, ("x", "y"))
    params = {k: jnp.arange(36.0).reshape(6, 6) + i for i, k in enumerate("abc")}
    specs = {"a": ("x", "y"), "b": ("y", "x"), "c": (("x", "y"),)}
    target = {k: abstract((6, 6), "float32", to, *s) for k, s in specs.items()}
    corr = trace(lambda t: t, params, target)
    out = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    # Adding them would reshard (x, y) to (y, x), which aborts XLA's partitioner on jaxlib 0.12.0.1 for 2 x 3.
    totals = jax.jit(lambda t: jax.tree.map(jnp.sum, t))(out)
    assert {k: float(x) for k, x in totals.items()} == {k: float(x.sum()) for k, x in params.items()}


def _square() -> tuple[Tree, Plan, Tree]:
    """A matrix turned over on one device: an earlier result is laid out as the source is."""
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh((1,), ("x",)), P()))}
    target = {"w": jax.ShapeDtypeStruct((8, 8), "float32", sharding=params["w"].sharding)}
    corr = trace(lambda t: {"w": t["w"].T}, params, target)
    return params, plan(corr.export_layout, Layout.of(target), corr), target


@pytest.mark.parametrize("native", [True, False])
def test_a_result_is_no_source_for_its_own_pool(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not native:
        monkeypatch.setattr(kernels, "kernels", lambda: None)
    params, made, target = _square()
    pool = make_pool(made, target)
    out = reshard(params, made, out=pool)
    kept = np.array(out["w"])
    with pytest.raises(MappingError, match="'w' lies in the memory of the pool that it would be written to"):
        reshard(out, made, out=pool)
    assert np.array_equal(kept, np.asarray(out["w"]))
    back = reshard(out, made, out=make_pool(made, target))
    assert np.array_equal(bits(back["w"]), bits(params["w"]))


@pytest.mark.parametrize("how", ["deleted", "donated", "a shard"])
@pytest.mark.parametrize("path", ["host", "device"])
def test_a_pool_goes_on_after_its_result_was_deleted_or_donated(path: Any, how: str) -> None:
    params, made = setting("float32")
    pool = make_pool(made, path=path)
    step: Any = jax.jit(lambda t: jax.tree.map(lambda x: x + 1, t), donate_argnums=0)
    kept = []
    for i in range(3):
        given = jax.tree.map(lambda x, i=i: jnp.nan_to_num(x) * 0 + i, params)
        out = reshard(given, made, out=pool)
        assert {float(x.min()) for x in out.values()} == {float(x.max()) for x in out.values()} == {i}
        if how == "donated":
            kept.append(step(out))
        elif how == "deleted":
            out["w"].delete()
        else:
            out["w"].addressable_shards[0].data.delete()
    for i, tree in enumerate(kept):  # what was made of a donated result stays
        assert {float(x.max()) for x in tree.values()} == {float(x.min()) for x in tree.values()} == {i + 1}


@pytest.mark.parametrize("path", ["host", "device"])
def test_equal_boxes_over_several_meshes_keep_the_mesh_of_each_leaf(path: Any) -> None:
    params, _ = setting()
    to = mesh((2, 2), ("a", "b"), first=4)
    other = jax.sharding.Mesh(np.array(jax.devices()[4:]), ("c",))
    target = {
        "x": abstract((16, 48), "bfloat16", to, ("a", "b")),
        "y": abstract((16, 48), "bfloat16", other, "c"),
    }
    corr = trace(lambda t: {"x": t["w"], "y": t["w"]}, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    out = reshard(params, made, out=make_pool(made, target, path=path))
    assert {k: x.sharding for k, x in out.items()} == {k: x.sharding for k, x in target.items()}


def test_types_of_64_bits_need_them_switched_on() -> None:
    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    with jax.enable_x64(True):
        params = {"w": jax.device_put(np.arange(8.0) / 3, NamedSharding(on, P("x")))}
        target = {"w": abstract((8,), "float64", to)}
        corr = trace(lambda t: t, params, target)
        made = plan(corr.export_layout, Layout.of(target), corr)
    with pytest.raises(
        MappingError, match=r"'w' is float64, but jax has no 64-bit types here: set jax_enable_x64"
    ):
        reshard(params, made)
    with jax.enable_x64(True):
        assert np.array_equal(bits(reshard(params, made)["w"]), bits(params["w"]))
