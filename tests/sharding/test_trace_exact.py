"""Random programs: the correspondence equals the element-id probe, moved bits equal the conversion."""

from __future__ import annotations

from collections.abc import Callable

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding

from jaxrl_sync.sharding import Layout, plan, reshard, trace
from tests.sharding.meshes import bits, mesh, random_bits, random_spec
from tests.sharding.probe import agreed, ids_of
from tests.sharding.programs import program

QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
SEEDS = st.integers(0, (1 << 32) - 1)


def check_probe(number: int) -> None:
    convert, shapes = program(number)
    ids = ids_of(shapes)
    corr = trace(convert, {k: jax.ShapeDtypeStruct(v.shape, v.dtype) for k, v in ids.items()})
    assert set(agreed(corr, convert, ids)) == {"x", "y"}


def check_moved_bits(number: int) -> None:
    convert, shapes = program(number)
    rng = np.random.default_rng(number)
    grids = [((2, 2), ("x", "y")), ((4,), ("x",)), ((1, 3), ("x", "y")), ((2,), ("x",))]
    on, to = (mesh(*grids[int(rng.integers(0, 4))], first=first) for first in (0, 4))
    dtype = str(rng.choice(["bfloat16", "float32", "int8", "float64"]))
    with jax.enable_x64(dtype == "float64"):
        host = {k: random_bits(rng, s, dtype) for k, s in shapes.items()}
        params = {
            k: jax.device_put(v, NamedSharding(on, random_spec(rng, v.shape, on))) for k, v in host.items()
        }
        out = jax.eval_shape(convert, params)
        target = {
            k: jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=NamedSharding(to, random_spec(rng, x.shape, to))
            )
            for k, x in out.items()
        }
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


@pytest.mark.full
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("block", range(4, 24))
def test_correspondence_and_moved_bits_2000(block: int) -> None:
    in_block(check_probe, block, 100)
    in_block(check_moved_bits, block, 100)
