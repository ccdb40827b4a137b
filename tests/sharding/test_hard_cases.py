"""The conversions that other weight-transfer systems refuse or get wrong, one named test each."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from jaxrl_sync.sharding import Correspondence, Layout, Plan, plan, reshard, trace
from jaxrl_sync.sharding.paths import leaves_by_path
from jaxrl_sync.sharding.presets import qwen3
from tests.sharding.meshes import P, abstract, bits, mesh, moved_shards, random_bits

Tree = dict[str, Any]
Specs = dict[str, Any]


def moved(
    convert: Callable[[Any], Any],
    shapes: Mapping[str, tuple[int, ...]],
    source: Specs,
    target: Specs,
    on: Mesh,
    to: Mesh,
    dtype: Any = "bfloat16",
) -> tuple[Correspondence, Plan, Tree]:
    """Moves random bits and asserts that every target shard holds what ``convert`` makes of them."""
    rng = np.random.default_rng(0)
    host = {k: random_bits(rng, s, dtype) for k, s in shapes.items()}
    params = {k: jax.device_put(v, NamedSharding(on, P(*source.get(k, ())))) for k, v in host.items()}
    as_bits = {k: jnp.asarray(v.view(f"u{v.dtype.itemsize}")) for k, v in host.items()}
    want = leaves_by_path(convert(as_bits))
    out = leaves_by_path(jax.eval_shape(convert, params))
    target_tree = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, P(*target.get(k, ()))))
        for k, x in out.items()
    }
    corr = trace(convert, params)
    made = plan(corr.export_layout, Layout.of(target_tree), corr)
    arrays = leaves_by_path(reshard(params, made))
    for path, x in want.items():
        for shard in arrays[path].addressable_shards:
            assert np.array_equal(bits(np.asarray(x)[shard.index]), bits(shard.data)), (path, shard.device)
    return corr, made, arrays


def kinds(corr: Correspondence) -> set[str]:
    return {corr.kind_of(p) for p in corr.tensors}


@pytest.mark.parametrize(("kv_heads", "tp"), [(1, 2), (2, 4), (2, 2), (4, 2)])
def test_case_1_gqa_interleaved_qkv_with_tp_larger_than_kv_heads(kv_heads: int, tp: int) -> None:
    cfg = qwen3.DecoderConfig(32, 2, 16, 4, kv_heads, 8, 24)
    convert = functools.partial(qwen3.convert, cfg=cfg, tp=tp)
    to = mesh((tp,), ("tp",), first=4)
    on = mesh((2, 2), ("fsdp", "t"))
    shapes = qwen3.trainer_shapes(cfg)
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda x: jax.device_put(
            rng.standard_normal(x.shape).astype(np.float32),
            NamedSharding(on, P(*(None,) * (len(x.shape) - 1), "fsdp")),
        ),
        shapes,
    )
    target = qwen3.engine_abstract(cfg, to)
    corr = trace(convert, params, target)
    assert kinds(corr) == {"cast"}
    made = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    for want, found in zip(jax.tree.leaves(jax.jit(convert)(params)), jax.tree.leaves(made), strict=True):
        assert np.array_equal(bits(want), bits(found))


def test_case_2_gate_up_interleaved_per_shard() -> None:
    def convert(t: Tree) -> Tree:
        gate, up = t["gate"].reshape(6, 4, 2), t["up"].reshape(6, 4, 2)
        return {"gate_up": jnp.concatenate([gate, up], axis=2).reshape(6, 16)}  # [gate_i; up_i] per shard i

    shapes = {"gate": (6, 8), "up": (6, 8)}
    corr, made, _ = moved(
        convert, shapes, {"gate": ("x",), "up": (None, "x")}, {"gate_up": (None, "tp")}, mesh((2,), ("x",)),
        mesh((4,), ("tp",), first=4),
    )  # fmt: skip
    assert kinds(corr) == {"moved"}
    assert made.for_rank(0).total_bytes == 6 * 16 * 2


@pytest.mark.parametrize("per_expert", [True, False])
def test_case_3_experts_stacked_and_single_permuted_over_ep_and_tp(per_expert: bool) -> None:
    order = [3, 0, 7, 1, 2, 6, 5, 4]

    def split(t: Tree) -> Tree:
        return {f"experts/{e}": t["w"][order[e]] for e in range(8)}

    def merge(t: Tree) -> Tree:
        return {"w": jnp.stack([t[f"e{i}"] for i in order])}

    if per_expert:
        target: Specs = {f"experts/{e}": (None, "tp") for e in range(8)}
        corr, _, _ = moved(split, {"w": (8, 4, 6)}, {"w": (("ep", "x"), None)}, target,
                           mesh((2, 2), ("ep", "x")), mesh((2,), ("tp",), first=4))  # fmt: skip
    else:
        shapes = {f"e{i}": (4, 6) for i in range(8)}
        corr, _, _ = moved(merge, shapes, {f"e{i}": ("x",) for i in range(8)}, {"w": ("ep", None, "tp")},
                           mesh((4,), ("x",)), mesh((2, 2), ("ep", "tp"), first=4))  # fmt: skip
    assert kinds(corr) == {"moved"}


@pytest.mark.parametrize(
    ("before", "after"),
    [((4, 3), (3, 4)), ((3, 8), (4, 6)), ((10, 3), (6, 5)), ((24,), (2, 3, 4)), ((6, 4), (24,))],
)
def test_case_4_reshape_with_factors_that_do_not_nest(
    before: tuple[int, ...], after: tuple[int, ...]
) -> None:
    split = tuple("x" if n % 2 == 0 else None for n in before)
    first = split.index("x") if "x" in split else 0
    spec = tuple("x" if d == first and split[d] else None for d in range(len(before)))
    where = next((d for d, n in enumerate(after) if n % 2 == 0), 0)
    corr, _, _ = moved(
        lambda t: {"w": t["a"].reshape(after)}, {"a": before}, {"a": spec},
        {"w": tuple("y" if d == where else None for d in range(len(after)))},
        mesh((2,), ("x",)), mesh((2,), ("y",), first=4),
    )  # fmt: skip
    assert corr.tensors["w"].fragments[0].num_elements == int(np.prod(after))  # not cut when traced


def test_case_4_one_dimension_cut_by_no_border_stays_one_copy() -> None:
    corr = trace(lambda t: {"w": t["a"].reshape(30)}, {"a": jax.ShapeDtypeStruct((6, 5), "int8")})
    assert len(corr.tensors["w"].fragments) == 1


def test_case_5_scalars_size_one_and_empty_dimensions() -> None:
    def convert(t: Tree) -> Tree:
        return {
            "s": t["s"].reshape(1, 1),
            "o": jnp.squeeze(t["o"], 1),
            "e": jnp.concatenate([t["e"], t["e"]]),
        }

    shapes = {"s": (), "o": (4, 1, 6), "e": (0, 4)}
    corr, made, _ = moved(
        convert, shapes, {"o": ("x",), "e": (None, "x")}, {"o": (None, "y"), "e": (None, "y")},
        mesh((2,), ("x",)), mesh((2,), ("y",), first=4),
    )  # fmt: skip
    assert corr.tensors["e"].fragments == ()
    assert made.for_rank(0).total_bytes == 4 * 6 * 2 + 2 * 2  # the scalar goes to both devices


def test_case_6_transposes_head_permutations_and_strided_maps() -> None:
    heads = np.array([2, 0, 3, 1])

    def convert(t: Tree) -> Tree:
        q = t["q"].reshape(6, 4, 8)[:, heads]
        half = jnp.stack([q[..., :4], q[..., 4:]], axis=-1).reshape(
            6, 4, 8
        )  # RoPE halves to interleaved pairs
        return {"q": half.transpose(1, 2, 0), "every": t["q"][:, ::3], "back": jnp.flip(t["q"], 1).T}

    corr, _, _ = moved(
        convert, {"q": (6, 32)}, {"q": ("x", "y")}, {"q": ("tp",), "every": ("tp",), "back": ("tp",)},
        mesh((2, 2), ("x", "y")), mesh((2,), ("tp",), first=4),
    )  # fmt: skip
    assert kinds(corr) == {"moved"}


def test_case_7_vocabulary_padding_on_both_sides_and_a_short_last_shard() -> None:
    def pad(t: Tree) -> Tree:
        return {"e": jnp.pad(t["e"], ((0, 3), (0, 0)))}

    corr, made, arrays = moved(
        pad, {"e": (5, 4)}, {}, {"e": ("tp",)}, mesh((2,), ("x",)), mesh((4,), ("tp",), first=4)
    )
    assert corr.kind_of("e") == "moved"
    assert made.for_rank(0, "target").constants  # zeros never travel
    assert made.for_rank(0).total_bytes == 5 * 4 * 2
    moved(
        lambda t: {"e": t["e"][:5]},
        {"e": (8, 4)},
        {"e": ("x",)},
        {},
        mesh((4,), ("x",)),
        mesh((2,), ("y",), 4),
    )
    uneven = Layout.of({"e": abstract((5, 4), "bfloat16", mesh((4,), ("x",)), "x")})
    same = trace(lambda t: t, {"e": jax.ShapeDtypeStruct((5, 4), "bfloat16")})
    rank = plan(uneven, uneven, same).for_rank(0)
    assert [c.shape for c in rank.edges[0].copies] == [(2, 4), (2, 4), (4,)]  # 2 + 2 + 1 + 0 rows of 4
    wider = Layout.of({"e": abstract((8, 4), "bfloat16", mesh((3,), ("y",), 4), "y")})  # 3 + 3 + 2 rows
    host = {"e": random_bits(np.random.default_rng(0), (5, 4), "bfloat16")}
    to_padded = trace(pad, {"e": jax.ShapeDtypeStruct((5, 4), "bfloat16")})
    for corr, target in ((same, uneven), (to_padded, wider)):
        found = moved_shards(plan(uneven, target, corr), host)
        want = np.pad(host["e"], ((0, target["e"].shape[0] - 5), (0, 0)))
        for shard in target["e"].shards:
            assert np.array_equal(bits(want[shard.box.slices]), bits(found[shard.device, "e"])), shard


def test_case_8_tied_embeddings_go_to_two_destinations() -> None:
    def convert(t: Tree) -> Tree:
        return {"embed": t["e"], "head": t["e"].T}

    corr, _, _ = moved(convert, {"e": (8, 4)}, {"e": ("x",)}, {"head": (None, "tp")}, mesh((2,), ("x",)),
                       mesh((2,), ("tp",), first=4))  # fmt: skip
    assert len(corr.exported) == 1
    assert corr.report().count("(tied)") == 2


def test_case_9_names_that_one_side_lacks_fail_loudly() -> None:
    from jaxrl_sync.sharding import MappingError

    shapes = {"gate": jax.ShapeDtypeStruct((2,), "int8")}
    target = {"gate_proj": jax.ShapeDtypeStruct((2,), "int8")}
    with pytest.raises(MappingError, match=r"'gate_proj' is not produced \(nearest: 'gate'\)"):
        trace(lambda t: t, shapes, target)


def test_case_11_derived_constants_are_written_by_the_receiver_only() -> None:
    def convert(t: Tree) -> Tree:
        return {"w": t["w"], "table": jnp.cos(jnp.arange(6, dtype=jnp.float32))}

    shapes = {"w": jax.ShapeDtypeStruct((4,), "float32", sharding=NamedSharding(mesh((2,), ("x",)), P("x")))}
    corr = trace(convert, shapes)
    assert corr.kind_of("table") == "constant"
    assert np.allclose(next(iter(corr.constants.values())), np.cos(np.arange(6)), atol=1e-6)
    assert [leaf.name for leaf in corr.exported] == ["w"]


def test_case_12_a_second_transfer_into_the_same_pool_is_right_too() -> None:
    from jaxrl_sync.sharding import make_pool

    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    sharding = NamedSharding(on, P("x"))
    target = {"w": jax.ShapeDtypeStruct((6, 4), "float32", sharding=NamedSharding(to, P("y")))}
    first = {"w": jax.device_put(np.arange(24, dtype=np.float32).reshape(4, 6), sharding)}
    corr = trace(lambda t: {"w": t["w"].T}, first, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    pool = make_pool(made)
    for step in range(3):
        params = {"w": first["w"] + step}
        out = reshard(params, made, out=pool)
        assert np.array_equal(bits(out["w"].addressable_shards[0].data), bits(np.asarray(params["w"]).T[:3]))


@pytest.mark.parametrize("stacked_first", [True, False])
def test_case_15_fp32_masters_are_cast_once_with_jax_rounding(stacked_first: bool) -> None:
    def convert(t: Tree) -> Tree:
        return {"a": t["w"].astype(jnp.bfloat16), "b": t["w"].T.astype(jnp.bfloat16), "c": t["w"]}

    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    host = random_bits(np.random.default_rng(0), (4, 6), "float32")
    params = {"w": jax.device_put(host, NamedSharding(on, P("x") if stacked_first else P()))}
    corr = trace(convert, params)
    assert sorted(leaf.name for leaf in corr.exported) == ["w", "w@bfloat16"]
    target = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, P()))
        for k, x in jax.eval_shape(convert, params).items()
    }
    made = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    for k, want in jax.jit(convert)(params).items():
        assert np.array_equal(bits(want), bits(made[k])), k


def test_case_18_dtypes_of_all_sizes_in_one_stream() -> None:
    shapes = {"a": "int8", "b": "bfloat16", "c": "float32", "d": "float8_e4m3fn"}
    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    rng = np.random.default_rng(0)
    host = {k: random_bits(rng, (6, 3), t) for k, t in shapes.items()}
    params = {k: jax.device_put(v, NamedSharding(on, P("x"))) for k, v in host.items()}
    target = {
        k: jax.ShapeDtypeStruct((3, 6), t, sharding=NamedSharding(to, P(None, "y")))
        for k, t in shapes.items()
    }
    corr = trace(lambda t: jax.tree.map(jnp.transpose, t), params, target)
    out = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    for k, v in host.items():
        assert np.array_equal(bits(v.T), bits(out[k])), k


def test_case_42_replicas_of_the_trainer_do_not_send_twice() -> None:
    on, to = mesh((2, 2), ("dp", "x")), mesh((4,), ("y",), first=4)
    _, made, _ = moved(lambda t: t, {"w": (16, 8)}, {"w": ("x",)}, {"w": ("y",)}, on, to)
    rank = made.for_rank(0)
    assert rank.total_bytes == 16 * 8 * 2
    sent: dict[int, int] = {}
    for c in rank.edges[0].copies:
        sent[c.source_device] = sent.get(c.source_device, 0) + c.total_bytes
    assert set(sent.values()) == {16 * 8 * 2 // 4}  # all four devices send a quarter


def test_scanned_to_unrolled_and_back_is_the_identity() -> None:
    def unroll(t: Tree) -> Tree:
        return {f"layer{i}": t["w"][i] for i in range(5)}

    def scan(t: Tree) -> Tree:
        return {"w": jnp.stack([t[f"layer{i}"] for i in range(5)])}

    there = trace(unroll, {"w": jax.ShapeDtypeStruct((5, 4, 3), "bfloat16")})
    assert all(len(t.fragments) == 1 for t in there.tensors.values())
    both = trace(lambda t: scan(unroll(t)), {"w": jax.ShapeDtypeStruct((5, 4, 3), "bfloat16")})
    identity = trace(lambda t: t, {"w": jax.ShapeDtypeStruct((5, 4, 3), "bfloat16")})
    assert both.digest == identity.digest
    moved(unroll, {"w": (5, 4, 3)}, {"w": (None, "x")}, {}, mesh((2,), ("x",)), mesh((2,), ("y",), first=4))
