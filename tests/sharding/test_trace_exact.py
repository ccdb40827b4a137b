"""Random programs: the correspondence equals the element-id probe, moved bits equal the conversion."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding

from jaxrl_sync.sharding import Layout, plan, reshard, trace
from tests.sharding.meshes import bits, mesh, moved_shards, random_bits, random_spec
from tests.sharding.probe import agreed, ids_of
from tests.sharding.programs import MIXES, program

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
SEEDS = st.integers(0, (1 << 32) - 1)


def check_probe(number: int) -> None:
    convert, shapes = program(number, "casts")
    ids = ids_of(shapes)
    corr = trace(convert, {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in ids.items()})
    assert set(agreed(corr, convert, ids)) == {"x", "y"}


def _meshes(rng: np.random.Generator) -> tuple[Mesh, Mesh]:
    grids = [((2, 2), ("x", "y")), ((4,), ("x",)), ((1, 3), ("x", "y")), ((2,), ("x",))]
    return mesh(*grids[int(rng.integers(0, 4))]), mesh(*grids[int(rng.integers(0, 4))], first=4)


def _placed(rng: np.random.Generator, out: Any, to: Mesh, uneven: bool = False) -> dict[str, Any]:
    return {
        k: jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(to, random_spec(rng, x.shape, to, uneven))
        )
        for k, x in out.items()
    }


def check_uneven_bits(number: int) -> None:
    """Moved bits where shards are of unequal sizes, some of them empty: shards of numpy arrays."""
    convert, shapes = program(number)
    rng = np.random.default_rng(number)
    on, to = _meshes(rng)
    host = {k: random_bits(rng, s, "int32") for k, s in shapes.items()}
    source = _placed(rng, host, on, uneven=True)
    corr = trace(convert, source)
    ids = ids_of(shapes)
    found = agreed(corr, convert, ids)
    target = Layout.of(_placed(rng, jax.eval_shape(convert, host), to, uneven=True))
    shards = moved_shards(plan(corr.export_layout, target, corr), host)
    flat = np.concatenate([np.zeros(1, np.int32), *(v.ravel() for v in host.values())])
    for path, want in found.items():
        for shard in target[path].shards:
            assert np.array_equal(flat[want[shard.box.slices]], shards[shard.device, path]), (path, shard)


def check_computed(number: int) -> None:
    """Casts and arithmetic anywhere between the moves: what arrives is what the jitted conversion gives."""
    convert, shapes = program(number, "arithmetic")
    rng = np.random.default_rng(number)
    on, to = _meshes(rng)
    dtype = str(rng.choice(["int32", "float32"]))
    params = {
        k: jax.device_put(rng.integers(-99, 99, s).astype(dtype), NamedSharding(on, random_spec(rng, s, on)))
        for k, s in shapes.items()
    }
    want = jax.jit(convert)(params)
    target = _placed(rng, want, to)
    corr = trace(convert, params, target)
    made = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
    for path, x in want.items():
        if not np.array_equal(bits(x), bits(made[path])):  # see `probe.probed`: compilers err, too
            assert np.array_equal(bits(convert(params)[path]), bits(made[path])), path


def check_moved_bits(number: int) -> None:
    convert, shapes = program(number)
    rng = np.random.default_rng(number)
    on, to = _meshes(rng)
    dtype = str(rng.choice(["bfloat16", "float32", "int8", "float64"]))
    with jax.enable_x64(dtype == "float64"):
        host = {k: random_bits(rng, s, dtype) for k, s in shapes.items()}
        params = {
            k: jax.device_put(v, NamedSharding(on, random_spec(rng, v.shape, on))) for k, v in host.items()
        }
        target = _placed(rng, jax.eval_shape(convert, params), to)
        corr = trace(convert, params, target)
        made = reshard(params, plan(corr.export_layout, Layout.of(target), corr))
        # Bits of ids decide which bits must arrive: integers survive any compiler.
        ids = ids_of({k: s for k, s in shapes.items()})
        flat = np.concatenate([np.zeros(1, np.dtype(f"u{host['a'].dtype.itemsize}"))]
                              + [v.view(f"u{v.dtype.itemsize}").ravel() for v in host.values()])  # fmt: skip
        for path, want in agreed(corr, convert, ids).items():
            assert np.array_equal(bits(flat[want]), bits(made[path])), path
            for shard in made[path].addressable_shards:
                box = Layout.of(target)[path].placement.by_device[shard.device.id].box
                assert np.array_equal(bits(flat[want][box.slices]), bits(shard.data)), path


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(SEEDS)
def test_correspondence_equals_the_probe(number: int) -> None:
    check_probe(number)


@settings(max_examples=25, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(SEEDS)
def test_moved_bits_equal_the_conversion(number: int) -> None:
    check_moved_bits(number)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(SEEDS)
def test_moved_bits_equal_the_conversion_where_shards_are_uneven(number: int) -> None:
    check_uneven_bits(number)


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=QUIET)
@given(SEEDS)
def test_computed_leaves_equal_the_jitted_conversion(number: int) -> None:
    check_computed(number)


def test_programs_hold_what_their_mix_says() -> None:
    found: dict[str, set[str]] = {mix: set() for mix in MIXES}
    for mix, number in itertools.product(MIXES, range(30)):
        convert, shapes = program(number, mix)
        corr = trace(convert, {k: jax.ShapeDtypeStruct(s, "int32") for k, s in shapes.items()})
        found[mix] |= {"cast" if leaf.casts else leaf.kind for leaf in corr.leaves}
    assert "cast" not in found["moves"] and "computed" not in found["moves"] | found["casts"]
    assert "cast" in found["casts"] and {"cast", "computed"} <= found["arithmetic"]


@pytest.mark.parametrize("name", ["stop_gradient", "copy", "optimization_barrier"])
def test_identities_are_moves(name: str) -> None:
    same: Any = {"stop_gradient": jax.lax.stop_gradient, "copy": jnp.copy,
                 "optimization_barrier": jax.lax.optimization_barrier}[name]  # fmt: skip
    corr = trace(lambda t: {"w": same(t["w"]).T}, {"w": jax.ShapeDtypeStruct((4, 6), "float32")})
    assert corr.kind_of("w") == "moved"


def in_block(check: Callable[[int], None], block: int, examples: int) -> None:
    """Runs ``check`` on the programs of one block: blocks differ, each is the same on every run."""
    seeded = seed(block)(
        settings(max_examples=examples, deadline=None, database=None, suppress_health_check=QUIET)(
            given(SEEDS)(check)
        )
    )
    seeded()


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("block", range(4))
def test_correspondence_equals_the_probe_400(block: int) -> None:
    in_block(check_probe, block, 100)
    in_block(check_uneven_bits, block, 10)
    in_block(check_computed, block, 10)


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(4, 24))
def test_correspondence_and_moved_bits_2000(block: int) -> None:
    in_block(check_probe, block, 100)
    in_block(check_moved_bits, block, 100)
