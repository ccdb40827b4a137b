"""reshard by path "device" on virtual CPU devices: bit for bit what the host path and the conversion give."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from jaxrl_sync.sharding import Layout, MappingError, Plan, Policy, make_pool, plan, reshard, trace
from jaxrl_sync.sharding import device_path as device_path_module
from jaxrl_sync.sharding.device_path import DevicePath, batches
from jaxrl_sync.sharding.device_pool import device_pool
from jaxrl_sync.sharding.device_words import INDEX_LIMIT, read, views, write
from jaxrl_sync.sharding.errors import DeviceCopyError
from jaxrl_sync.sharding.rounds import device_loads
from tests.sharding.meshes import P, abstract, bits, mesh, random_bits, random_spec
from tests.sharding.programs import program

Tree = dict[str, Any]

WIDE = ["float64", "int64", "uint64", "complex128"]
NARROW = ["int4", "float4_e2m1fn", "uint4", "int2", "uint2"]
OTHERS = ["uint16", "int32", "float16", "float8_e4m3fn", "float8_e5m2"]
DTYPES = [
    *("bool", "int8", "bfloat16", "float32", "complex64", "float64"),
    *(pytest.param(d, marks=pytest.mark.slow) for d in (*OTHERS, *WIDE[1:])),
]


def host_bits(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> Any:
    """Any bit pattern that the type has."""
    if dtype == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in NARROW:
        width = 2 if dtype.endswith("int2") else 4
        values = rng.integers(0, 1 << width, shape, dtype=np.uint8)
        if dtype.startswith("float"):
            return values.view(jnp.dtype(dtype))
        return (values.astype(np.int8) - ((1 << width - 1) if dtype[0] == "i" else 0)).astype(
            jnp.dtype(dtype)
        )
    return random_bits(rng, shape, jnp.dtype(dtype))


def convert(t: Tree) -> Tree:
    """Boxes, strides that nest and that do not, repeats, reversals, a scalar, nothing, constants."""
    w = t["w"]
    return {
        "turned": w.T, "vector": t["n"], "scalar": w[3, 5], "flat": jnp.flip(w, 0).reshape(-1),
        "third": w[1:, 1::5], "twice": jnp.repeat(w, 2, 1), "none": w[:0],
        "more": jnp.concatenate([w, jnp.zeros_like(w[:4])]),
    }  # fmt: skip


SPECS = {"turned": ("tp",), "flat": ("dp",), "twice": (("dp", "tp"),), "more": ("dp", "tp")}


def setting(dtype: str, policy: Policy | None = None, convert: Any = convert) -> tuple[Tree, Plan]:
    """fsdp=4 to dp=2 x tp=2 on four other devices."""
    on, to = mesh((4,), ("fsdp",)), mesh((2, 2), ("dp", "tp"), first=4)
    host = host_bits(np.random.default_rng(1), (16, 48), dtype)
    params = {
        "w": jax.device_put(host, NamedSharding(on, P("fsdp"))),
        "n": jax.device_put(host[0], NamedSharding(on, P())),
    }
    shapes = jax.eval_shape(convert, params)
    target = {k: abstract(x.shape, x.dtype, to, *SPECS.get(k, ())) for k, x in shapes.items()}
    corr = trace(convert, params, target)
    return params, plan(corr.export_layout, Layout.of(target), corr, policy=policy)


def assert_equal_shards(found: Tree, want: Tree) -> None:
    assert found.keys() == want.keys()
    for path, x in want.items():
        assert (found[path].dtype, found[path].shape) == (x.dtype, x.shape)
        assert found[path].sharding == x.sharding
        for a, b in zip(found[path].addressable_shards, x.addressable_shards, strict=True):
            assert a.device == b.device and np.array_equal(bits(a.data), bits(b.data)), (path, a.device)


def simple(t: Tree) -> Tree:
    """One box with its axes turned, one of strides that do not nest, one that is sent to all."""
    return {"turned": t["w"].T, "third": t["w"][1:, 1::5], "vector": t["n"]}


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_arrives_bit_for_bit_as_by_the_host_path(dtype: str) -> None:
    with jax.enable_x64(dtype in WIDE):
        params, made = setting(dtype, convert=simple)
        assert_equal_shards(reshard(params, made, path="device"), reshard(params, made, path="host"))


@pytest.mark.parametrize("policy", ["device", "node"])
def test_blocks_of_every_kind_constants_and_copies_inside_nodes(policy: str) -> None:
    params, made = setting("bfloat16", Policy(policy))
    assert_equal_shards(reshard(params, made, path="device"), reshard(params, made, path="host"))


@pytest.mark.parametrize(
    "dtype", [*NARROW[:2], *(pytest.param(d, marks=pytest.mark.slow) for d in NARROW[2:])]
)
def test_types_of_less_than_a_byte_take_the_device_path(dtype: str) -> None:
    params, made = setting(dtype, convert=simple)
    found = reshard(params, made)
    for path, x in simple({k: np.asarray(v) for k, v in params.items()}).items():
        assert np.array_equal(bits(found[path]), bits(x)), path
    with pytest.raises(MappingError, match="less than a byte"):
        reshard(params, made, path="host")


@pytest.mark.parametrize("number", [0, 3, 6])
def test_random_programs_and_meshes(number: int) -> None:
    made_of, shapes = program(number)
    rng = np.random.default_rng(number)
    grids = [((2, 2), ("x", "y")), ((4,), ("x",)), ((1, 3), ("x", "y")), ((1,), ("x",))]
    on, to = (mesh(*grids[int(rng.integers(0, 4))], first=first) for first in (0, 4))
    params = {
        k: jax.device_put(random_bits(rng, s, "bfloat16"), NamedSharding(on, random_spec(rng, s, on)))
        for k, s in shapes.items()
    }
    target = {
        k: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(to, random_spec(rng, x.shape, to)))
        for k, x in jax.eval_shape(made_of, params).items()
    }
    corr = trace(made_of, params, target)
    planned = plan(corr.export_layout, Layout.of(target), corr)
    assert_equal_shards(reshard(params, planned, path="device"), reshard(params, planned, path="host"))


def test_casts_and_computed_leaves_are_evaluated_on_the_source_and_moved() -> None:
    on, to = mesh((4,), ("x",)), mesh((2,), ("y",), first=4)
    params = {"w": jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(on, P("x")))}

    def scaled(t: Tree) -> Tree:
        return {"a": t["w"].T.astype(jnp.bfloat16), "b": (1 + t["w"])[:, 2:6]}

    target = {"a": abstract((8, 8), "bfloat16", to, "y"), "b": abstract((8, 4), "float32", to)}
    corr = trace(scaled, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    out = reshard(params, made, path="device")
    for path, x in jax.jit(scaled)(params).items():
        assert np.array_equal(bits(out[path]), bits(x))


def layers(count: int, policy: Policy | None = None) -> tuple[Tree, Plan]:
    """One stacked parameter and ``count`` of its own each, both to one tensor per layer."""
    on, to = mesh((4,), ("x",)), mesh((2,), ("y",), first=4)
    rng = np.random.default_rng(0)
    params = {"s": random_bits(rng, (count, 8, 12), "bfloat16")}
    params |= {f"p{i}": random_bits(rng, (8, 12), "bfloat16") for i in range(count)}
    placed = {
        k: jax.device_put(v, NamedSharding(on, P(None, "x") if k == "s" else P("x")))
        for k, v in params.items()
    }

    def unstack(t: Tree) -> Tree:
        return {f"{k}{i}": x for i in range(count) for k, x in (("s", t["s"][i].T), ("p", t[f"p{i}"]))}

    shapes = jax.eval_shape(unstack, placed)
    target = {k: abstract(x.shape, x.dtype, to, "y") for k, x in shapes.items()}
    corr = trace(unstack, placed, target)
    return placed, plan(corr.export_layout, Layout.of(target), corr, policy=policy)


def test_programs_do_not_grow_with_layers_nor_with_devices() -> None:
    # Two classes (stacked, one by one), a gather and a scatter for each; all devices of a side share them.
    assert [len(DevicePath(layers(n)[1]).programs) for n in (16, 48)] == [4, 4]


def test_a_second_call_compiles_nothing() -> None:
    params, made = layers(4)
    reshard(params, made, path="device")
    seen: list[str] = []

    def listen(event: str, duration_secs: float, **_: str | int) -> None:
        seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    jax.block_until_ready(reshard(params, made, path="device"))
    assert not [event for event in seen if "compile" in event or "trace" in event]


def test_batches_bound_what_a_device_stages() -> None:
    params, made = layers(12)
    loads = device_loads(made)
    limit = 2 * max(max(load.values()) for load in loads)
    groups = batches(made, limit)
    assert sorted(p for g in groups for p in g) == sorted(made.target)
    for group in groups:
        total = sum(
            (loads[i.template] for i in made.instances if i.target_path in group), start=type(loads[0])()
        )
        assert max(total.values()) <= limit
    assert_equal_shards(_by_path(DevicePath(made, limit), params, made), reshard(params, made, path="host"))
    assert [len(g) for g in batches(made, 1)] == [1] * 24  # a tensor that alone needs more: on its own


def _by_path(path: DevicePath, params: Tree, made: Plan) -> Tree:
    shards = path.execute(params, None)
    want = reshard(params, made, path="host")
    return {
        k: jax.make_array_from_single_device_arrays(
            x.shape, x.sharding, [shards[s.device.id, k] for s in x.addressable_shards]
        )
        for k, x in want.items()
    }


def test_a_pool_donates_the_earlier_result_and_takes_its_memory() -> None:
    params, made = setting("bfloat16")
    pool = make_pool(made, path="device")
    first = reshard(params, made, out=pool)
    want = reshard(params, made, path="host")
    assert_equal_shards(first, want)
    where = {
        (s.device, k): s.data.unsafe_buffer_pointer() for k, x in first.items() for s in x.addressable_shards
    }
    second = reshard(params, made, out=pool)
    assert_equal_shards(second, want)
    with pytest.raises((RuntimeError, ValueError), match="deleted|donated"):
        np.asarray(first["turned"])
    same = [
        s.data.unsafe_buffer_pointer() == where[s.device, k]
        for k in ("turned", "third") for s in second[k].addressable_shards
    ]  # fmt: skip
    assert all(same)
    with pytest.raises(MappingError, match='path "device"'):
        reshard(params, made, out=pool, path="host")


def _pointers(tree: Tree) -> dict[str, list[int]]:
    return {k: [s.data.unsafe_buffer_pointer() for s in x.addressable_shards] for k, x in tree.items()}


def test_donated_sources_are_deleted_as_soon_as_their_batch_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_path_module, "MAX_BLOCKS", 8)
    params, made = layers(6)
    want = reshard(params, made, path="host")
    live: list[int] = []
    real = DevicePath._wave

    def watched(self: DevicePath, *args: Any) -> Any:
        live.append(sum(not x.is_deleted() for x in params.values()))
        return real(self, *args)

    monkeypatch.setattr(DevicePath, "_wave", watched)
    out = reshard(params, made, path="device", donate=True)
    assert_equal_shards(out, want)
    assert live[0] == 7 and live[-1] < 5 and live == sorted(live, reverse=True)
    assert all(x.is_deleted() for x in params.values())


@pytest.mark.parametrize("path", ["host", "device"])
def test_tied_leaves_are_donated_once_the_last_of_them_is_read(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One array under two names was deleted with the first, and the second ended in jax's error."""
    monkeypatch.setattr(device_path_module, "MAX_BLOCKS", 1)
    on, to = mesh((4,), ("x",)), mesh((2,), ("y",), first=4)
    host = random_bits(np.random.default_rng(0), (8, 12), "float32")
    tied = jax.device_put(host, NamedSharding(on, P("x")))
    params = {"embed": tied, "head": tied}

    def untie(t: Tree) -> Tree:
        return {"a": t["embed"].T, "b": t["head"]}

    target = {"a": abstract((12, 8), "float32", to, "y"), "b": abstract((8, 12), "float32", to, "y")}
    corr = trace(untie, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    assert len(batches(made, 1)) == 2
    out = reshard(params, made, path=path, donate=True)
    assert np.array_equal(bits(out["a"]), bits(host.T)) and np.array_equal(bits(out["b"]), bits(host))
    assert tied.is_deleted()


def test_memory_of_another_kind_is_named() -> None:
    on, to = mesh((2,), ("x",)), mesh((2,), ("y",), first=4)
    kinds = {m.kind for m in jax.devices()[0].addressable_memories()}
    own = jax.devices()[0].default_memory().kind
    other = min(kinds - {own})
    offloaded = NamedSharding(on, P("x"), memory_kind=other)
    params = {"w": jax.device_put(np.arange(64, dtype=np.float32).reshape(8, 8), offloaded)}
    target = {"w": abstract((8, 8), "float32", to, "y")}
    corr = trace(lambda t: {"w": t["w"].T}, params, target)
    made = plan(corr.export_layout, Layout.of(target), corr)
    with pytest.raises(MappingError, match=rf"'w' lies in memory '{other}', path \"device\" reads '{own}'"):
        reshard(params, made, path="device")
    want = np.asarray(params["w"]).T
    assert np.array_equal(np.asarray(reshard(params, made, path="host")["w"]), want)
    there = jax.device_put(params, NamedSharding(on, P("x")))
    assert np.array_equal(np.asarray(reshard(there, made, path="device")["w"]), want)
    asked = NamedSharding(to, P("y"), memory_kind=other)
    wish = {"w": jax.ShapeDtypeStruct((8, 8), np.float32, sharding=asked)}
    for path in ("host", "device"):
        with pytest.raises(MappingError, match=rf"target 'w' asks for memory '{other}', .* made in '{own}'"):
            make_pool(made, wish, path=path)


def test_results_without_a_pool_stay_as_they_are() -> None:
    params, made = layers(2)
    first = reshard(params, made, path="device")
    kept = np.array(first["s0"])
    reshard(jax.tree.map(lambda x: x + 1, params), made, path="device")
    assert np.array_equal(bits(first["s0"]), bits(kept))
    gc.collect()
    assert device_pool(made)._shards is None  # nothing is held for the next call


@pytest.mark.parametrize(
    ("size", "offset", "shape", "strides", "width", "boxed"),
    [
        (24, 5, (3,), (6,), 1, True),
        (24, 0, (4, 6), (6, 1), 1, True),
        (24, 23, (4, 6), (-6, -1), 1, True),
        (24, 3, (2, 3, 2), (1, 0, 12), 1, True),
        (24, 1, (5,), (4,), 1, True),
        (25, 1, (5,), (4,), 1, False),
        (24, 0, (7, 3), (3, 2), 1, False),
        (24, 2, (3, 2), (4, 1), 2, True),
        (1, 0, (), (), 1, True),
        (1, 0, (), (), 4, True),
    ],
)
def test_blocks_of_any_strides_are_read_and_written(
    size: int, offset: int, shape: tuple[int, ...], strides: tuple[int, ...], width: int, boxed: bool
) -> None:
    flat = np.arange(size * width, dtype=np.uint32)
    where = np.full(shape, offset)
    for d, s in enumerate(strides):
        where = where + np.arange(shape[d]).reshape(-1, *(1,) * (len(shape) - d - 1)) * s
    words = (where[..., None] * width + np.arange(width)).reshape(-1)
    ((view, start),) = views(size * width, offset, shape, strides, width)
    assert (view.digits is not None) == boxed
    at = jnp.asarray(start, jnp.int32)
    starts = [at[i] for i in range(view.num_starts)]
    assert np.array_equal(jax.jit(read, static_argnums=1)(flat, view, starts), flat[words])
    if 0 not in strides and len(np.unique(words)) == len(words):
        want = flat.copy()
        want[words] = np.arange(len(words)) + 1000
        block = jnp.arange(len(words), dtype=jnp.uint32) + 1000
        assert np.array_equal(jax.jit(write, static_argnums=1)(jnp.asarray(flat), view, starts, block), want)


def test_shards_beyond_32_bit_indices_get_programs_without_64_bit_types() -> None:
    size = 3 * (INDEX_LIMIT + 8)
    boxed = views(size, size - 5, (3,), (1,), 1)
    assert len(boxed) == 1 and boxed[0][0].digits is None and boxed[0][0].base == size - 5
    nested = views(3 << 31, 5, (3, 4), (1 << 31, 8), 1)
    assert nested[0][0].digits == (3, 1 << 28, 8)
    cut = views(size, 1, (3, 5), (INDEX_LIMIT + 1, 7), 1)
    assert len(cut) == 3 and [v.base for v, _ in cut] == [1 + i * (INDEX_LIMIT + 1) for i in range(3)]
    for view, start in (*boxed, *nested, *cut):
        starts = [jax.ShapeDtypeStruct((), np.int32)] * len(start)
        flat, block = (jax.ShapeDtypeStruct((n,), np.uint16) for n in (view.size, view.num_words))
        assert jax.eval_shape(lambda f, s, v=view: read(f, v, s), flat, starts).shape == (view.num_words,)
        out = jax.eval_shape(lambda f, s, b, v=view: write(f, v, s, b), flat, starts, block)
        assert out.shape == flat.shape


def test_a_program_that_reads_wrong_elements_is_found_at_its_first_use(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, made = layers(2)
    path = DevicePath(made)
    real = DevicePath._wave

    def wrong(self: DevicePath, *args: Any) -> Any:
        shards = real(self, *args)
        key = next(iter(shards))
        return shards | {key: jnp.roll(shards[key], 1)}

    monkeypatch.setattr(DevicePath, "_wave", wrong)
    with pytest.raises(DeviceCopyError, match=r"gather and scatter of '[sp]0' gave other bytes on device 4"):
        path.execute(params, None)


ON_GPU = """
import jax, jax.numpy as jnp, numpy as np
from jaxrl_sync.sharding import Layout, make_pool, plan, reshard, trace
from jaxrl_sync.sharding.device_pool import DevicePool
assert jax.devices()[0].platform == "gpu", jax.devices()
raw = np.random.default_rng(0).integers(0, 1 << 16, (1024, 768), dtype=np.uint16)
params = {"w": jax.device_put(raw.view(jnp.bfloat16))}
def convert(t):
    w = t["w"]
    return {"a": w.T, "b": w[1:, 1::5], "c": jnp.flip(w, 0).reshape(-1), "d": jnp.repeat(w, 2, 1)}
here = params["w"].sharding
shapes = jax.eval_shape(convert, params)
target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
corr = trace(convert, params, target)
made = plan(corr.export_layout, Layout.of(target), corr)
pool = make_pool(made, target)
assert isinstance(pool, DevicePool)
for _ in range(2):
    out = reshard(params, made, out=pool)
    for name, want in convert({"w": raw}).items():
        assert np.array_equal(np.asarray(out[name]).view(np.uint16), np.asarray(want)), name
"""


@pytest.mark.gpu
def test_on_one_gpu_by_default_and_bit_for_bit() -> None:
    # In a process of its own: this one was told to use the CPU before jax was imported.
    env = {k: v for k, v in os.environ.items() if k not in ("JAX_PLATFORMS", "XLA_FLAGS")}
    words = [sys.executable, "-c", ON_GPU]
    done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
