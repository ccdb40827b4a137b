"""The three implementations inside of jit give equal bits: FFI, Pallas (interpreted here), plain XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxrl_sync.transfer.delta import ffi, sparse, xla
from jaxrl_sync.transfer.delta.bits import NO_POSITION, OVERWRITE, ULP, XOR, DeltaError, host_bits
from jaxrl_sync.transfer.delta.buckets import Ladder
from jaxrl_sync.transfer.delta.decode import Applier, apply_local, decode_local, place, stack_coded
from jaxrl_sync.transfer.delta.encode import Encoder, collect, encode_local
from jaxrl_sync.transfer.delta.masks import cast_with_mask, changed, union
from tests.delta.bits import DTYPES, PATTERNS, SIZES, pair, same_bits

NEEDS_FFI = pytest.mark.skipif(not ffi.available(), reason="no FFI kernels in this build")
FORMS = [pytest.param("ffi", marks=NEEDS_FFI), "pallas", "xla"]


def marks(dtype: str, form: str) -> list[pytest.MarkDecorator]:
    """Of the interpreted kernels and of plain XLA one dtype per width runs in the quick tests."""
    if form == "ffi":
        return [NEEDS_FFI]
    return [] if dtype in ("bfloat16", "float32", "bool") else [pytest.mark.slow]


CASES = [
    pytest.param(dtype, form, marks=marks(dtype, form))
    for form in ("ffi", "pallas", "xla")
    for dtype in DTYPES
]


def compiled_encode(form: Any, capacity: int, keep_old: bool = True) -> Any:
    return jax.jit(
        lambda old, new: encode_local(old, new, capacity, form, keep_old=keep_old, threads=2, interpret=True)
    )


def check_encoded(found: list[jax.Array], expected: sparse.Delta, capacity: int) -> None:
    kept = min(capacity, expected.count)
    assert int(found[0]) == expected.count, "the count is true also on overflow"
    parts = (expected.positions, expected.new, expected.old)
    for array, part, fill in zip(found[1:], parts, (NO_POSITION, 0, 0), strict=True):
        host = np.asarray(array)
        assert part is not None and same_bits(host[:kept], part[:kept])
        assert np.all(host[kept:] == fill)


@pytest.mark.parametrize(("dtype", "form"), CASES)
def test_encode_and_apply_of_all_patterns(dtype: str, form: Any) -> None:
    n, capacity = 5000, 5000
    encode = compiled_encode(form, capacity)
    apply = jax.jit(lambda s, p, v, c: apply_local(s, p, v, c, form, threads=2, interpret=True))
    for pattern in PATTERNS:
        old, new = pair(dtype, n, pattern)
        expected = sparse.compare(old, new, keep_old=True)
        found = encode(jnp.asarray(old), jnp.asarray(new))
        check_encoded(found, expected, capacity)
        shadow = apply(jnp.asarray(old), found[1], found[2], found[0])
        assert same_bits(shadow, new)


@pytest.mark.parametrize("form", FORMS)
def test_sizes_and_overflow(form: Any) -> None:
    for n in (0, 1, 1025, 5000) if form != "ffi" else SIZES:
        old, new = pair("bfloat16", n, "alternating")
        expected = sparse.compare(old, new, keep_old=True)
        capacity = max(1, n // 4)
        found = compiled_encode(form, capacity)(jnp.asarray(old), jnp.asarray(new))
        check_encoded(found, expected, capacity)


@pytest.mark.parametrize("kind", [XOR, ULP])
@pytest.mark.parametrize("form", FORMS)
def test_apply_of_differences(form: Any, kind: int) -> None:
    for dtype in ("bfloat16", "float32", "int8"):
        old, new = pair(dtype, 3000, "one percent")
        delta = sparse.compare(old, new, keep_old=True)
        assert delta.old is not None
        codes = delta.new ^ delta.old if kind == XOR else _zigzag(delta.new, delta.old)
        run = jax.jit(lambda s, p, v, c: apply_local(s, p, v, c, form, kind=kind, interpret=True))
        arguments = (
            jnp.asarray(old),
            jnp.asarray(delta.positions),
            jnp.asarray(codes),
            jnp.uint32(delta.count),
        )
        assert same_bits(run(*arguments), new)


def _zigzag(new: Any, old: Any) -> Any:
    from jaxrl_sync.transfer.codec.bits import zigzag

    return zigzag(new, old)


@pytest.mark.parametrize("kind", [OVERWRITE, XOR, ULP])
@pytest.mark.parametrize("form", ["ffi", "xla"])
def test_jitted_decode_of_the_codecs_streams(form: Any, kind: int) -> None:
    if form == "ffi" and not ffi.available():
        pytest.skip("no FFI kernels in this build")
    for dtype in ("bfloat16", "int8"):
        for pattern in ("one percent", "rows", "none", "ends"):
            old, new = pair(dtype, 9000, pattern)
            coded = sparse.compare_coded(old, new, kind)
            streams = stack_coded(coded, (9100, 9000, 9000 if kind == ULP else 0))
            run = jax.jit(lambda s, g, v, e, n: decode_local(s, g, v, e, n, form, kind=kind))
            assert same_bits(run(jnp.asarray(old), *streams), new)


def sharded_pair(spec: PartitionSpec, pattern: str, shape: tuple[int, ...] = (64, 96)) -> Any:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    sharding = NamedSharding(mesh, spec)
    old, new = (a.reshape(shape) for a in pair("bfloat16", int(np.prod(shape)), pattern))
    return jax.device_put(old, sharding), jax.device_put(new, sharding)


@pytest.mark.parametrize("form", ["ffi", "xla"])
@pytest.mark.parametrize(
    "spec",
    [PartitionSpec("fsdp", "tp"), PartitionSpec("tp"), PartitionSpec(None, ("tp", "fsdp")), PartitionSpec()],
)
def test_sharded_tensors_are_compared_where_they_lie(spec: PartitionSpec, form: Any) -> None:
    if form == "ffi" and not ffi.available():
        pytest.skip("no FFI kernels in this build")
    old, new = sharded_pair(spec, "one percent")
    encoder = Encoder({"w": old}, keep_old=True, implementation=form)
    parts = encoder.encode({"w": old}, {"w": new})["w"]
    assert parts is not None
    assert parts[0].positions.shape[0] == len({str(s.index) for s in old.addressable_shards})
    shards = {s.device.id: (np.asarray(s.data), np.asarray(t.data)) for s, t in zip(
        old.addressable_shards, new.addressable_shards, strict=True)}  # fmt: skip
    found = dict(collect(encoder.sites["w"], parts))
    assert found.keys() == shards.keys()
    for device, (a, b) in shards.items():
        expected = sparse.compare(a, b, keep_old=True)
        assert same_bits(found[device][0].positions, expected.positions)
        assert same_bits(found[device][0].new, expected.new)
        assert same_bits(found[device][0].old, expected.old)
    applier = Applier({"w": old}, implementation=form)
    shadow = applier.apply({"w": jnp.copy(old)}, {"w": parts})["w"]
    assert shadow.sharding == old.sharding and same_bits(shadow, new)
    placed = place(encoder.sites["w"], found, lambda n: n)
    shadow = applier.apply({"w": jnp.copy(old)}, {"w": placed})["w"]
    assert same_bits(shadow, new)


def test_no_collective_touches_the_tensors() -> None:
    old, new = sharded_pair(PartitionSpec("fsdp", "tp"), "one percent")
    encoder = Encoder({"w": old})
    text = jax.jit(lambda a, b: encoder.at_level(0)(a, b)).lower({"w": old}, {"w": new}).compile().as_text()
    assert text is not None
    assert not [word for word in ("all-gather", "collective-permute", "all-to-all") if word in text]


@pytest.mark.parametrize("form", ["ffi", "xla"])
def test_chunks_of_a_long_shard(form: Any) -> None:
    if form == "ffi" and not ffi.available():
        pytest.skip("no FFI kernels in this build")
    old, new = (jax.device_put(a, jax.devices()[0]) for a in pair("bfloat16", 5000, "rows"))
    encoder = Encoder({"w": old}, implementation=form, chunk_elements=2048)
    parts = encoder.encode({"w": old}, {"w": new})["w"]
    assert parts is not None and len(parts) == 3
    ((_, deltas),) = collect(encoder.sites["w"], parts, 2048)
    assert [d.elements for d in deltas] == [2048, 2048, 904]
    applier = Applier({"w": old}, implementation=form, chunk_elements=2048)
    assert same_bits(applier.apply({"w": jnp.copy(old)}, {"w": parts})["w"], new)


def test_levels_climb_on_overflow_and_dense_tensors_are_sent_whole() -> None:
    sparse_pair, dense_pair = pair("bfloat16", 40_000, "one percent"), pair("bfloat16", 40_000, "all")
    rows_pair = pair("bfloat16", 40_000, "rows")
    base = {"a": sparse_pair[0], "b": dense_pair[0], "c": rows_pair[0]}
    new = {"a": sparse_pair[1], "b": dense_pair[1], "c": rows_pair[1]}
    old_tree, new_tree = ({k: jnp.asarray(v) for k, v in tree.items()} for tree in (base, new))
    encoder = Encoder(old_tree)
    found = encoder.encode(old_tree, new_tree)
    assert found["b"] is None
    for path in ("a", "c"):
        parts = found[path]
        assert parts is not None
        ((_, deltas),) = collect(encoder.sites[path], parts)
        assert same_bits(deltas[0].positions, sparse.compare(base[path], new[path]).positions)
    assert encoder.level == 3
    assert encoder.encode(new_tree, new_tree)["b"] is not None
    assert encoder.level == 0, "the level comes down again"


def test_ladder() -> None:
    ladder = Ladder()
    assert [ladder.capacity(1 << 20, level) for level in range(4)] == [4096, 16384, 65536, 262144]
    assert ladder.capacity(100, 0) == 100
    assert ladder.level_for(1 << 20, 4097) == 1
    assert ladder.level_for(1 << 20, 262145) is None
    with pytest.raises(ValueError, match="ascend"):
        Ladder((0.5, 0.1))


def test_mask_of_the_train_step_equals_the_comparison() -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tp"), axis_types=(AxisType.Auto,) * 2)
    shapes = {"w": ((64, 96), PartitionSpec("fsdp", "tp")), "b": ((90,), PartitionSpec())}
    wire = {
        path: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for path, (shape, spec) in shapes.items()
    }
    rng = np.random.default_rng(0)
    masters = {
        path: jax.device_put(rng.normal(0, 0.02, leaf.shape).astype(np.float32), leaf.sharding)
        for path, leaf in wire.items()
    }

    @jax.jit
    def step(params: dict[str, jax.Array], scale: jax.Array) -> Any:
        updated = {path: leaf + scale * jnp.sin(leaf * 1e4) for path, leaf in params.items()}
        return (updated, *cast_with_mask(params, updated, wire))

    first, cast_1, mask_1 = step(masters, jnp.float32(1e-5))
    _, cast_2, mask_2 = step(first, jnp.float32(1e-5))
    start = {path: leaf.astype(jnp.bfloat16) for path, leaf in masters.items()}
    encoder = Encoder(wire)
    fused = encoder.encode_mask(mask_1, cast_1)
    compared = encoder.encode(start, cast_1)
    assert int(changed(mask_1)) > 10
    for path, site in encoder.sites.items():
        a, b = fused[path], compared[path]
        assert a is not None and b is not None
        for (_, x), (_, y) in zip(collect(site, a), collect(site, b), strict=True):
            assert same_bits(x[0].positions, y[0].positions) and same_bits(x[0].new, y[0].new)
    skipped = encoder.encode_mask(union(mask_1, mask_2), cast_2)
    assert all(parts is not None for parts in skipped.values())
    shadow = Applier(wire).apply(start, {path: parts for path, parts in skipped.items() if parts is not None})
    assert all(same_bits(shadow[path], cast_2[path]) for path in wire)


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("at", [[7], [100], [5, 9], [0, 7, 1000, 65535]])
def test_scatter_of_xla_keeps_the_bits_of_nans_it_does_not_touch(at: list[int], constant: bool) -> None:
    bits = np.arange(1 << 16, dtype=np.uint16)
    buffer = jnp.asarray(bits.view(jnp.bfloat16))
    positions, values = jnp.array(at, jnp.uint32), jnp.arange(9, 9 + len(at), dtype=jnp.uint16)
    count = jnp.uint32(len(at))
    expected = bits.copy()
    expected[at] = values
    if constant:
        found = jax.jit(lambda s: xla.apply(s, positions, values, count))(buffer)
    else:
        found = jax.jit(xla.apply)(buffer, positions, values, count)
    assert same_bits(np.asarray(found).view(np.uint16), expected)


def test_a_dtype_without_whole_bytes_is_refused() -> None:
    with pytest.raises(DeltaError, match="int4"):
        Encoder({"w": jnp.zeros(8, jnp.int4)})
    assert host_bits(np.zeros(4, bool)).dtype == np.uint8


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "bool"])
def test_pallas_kernels_lower_to_triton_without_a_gpu(dtype: str) -> None:
    """Compiled runs need a GPU (test_gpu.py); that Triton takes the kernels doesn't."""
    from jaxrl_sync.transfer.delta import pallas_gpu

    buffer = jax.ShapeDtypeStruct((70_000,), dtype)
    room = [
        jax.ShapeDtypeStruct(s, d) for s, d in (((999,), "uint32"), ((999,), f"u{jnp.dtype(dtype).itemsize}"))
    ]
    programs: list[tuple[Any, Any]] = [
        (lambda a, b: pallas_gpu.encode(a, b, 999, True), (buffer, buffer)),
        (
            lambda s, p, v, c: pallas_gpu.apply(s, p, v, c, ULP),
            (buffer, *room, jax.ShapeDtypeStruct((), "uint32")),
        ),
    ]
    for program, arguments in programs:
        traced = jax.jit(program).trace(*arguments)
        try:
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
        except RuntimeError as error:
            if "No supported GPU devices" in str(error):
                pytest.skip("this jax lowers Triton kernels only where it finds a GPU")
            raise
        assert "triton" in text
