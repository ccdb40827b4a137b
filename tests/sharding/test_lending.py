"""Results without a pool: memory is used again when nothing holds it, and never before."""

from __future__ import annotations

import gc
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.layout import Format
from jax.experimental.layout import Layout as DeviceLayout
from jax.sharding import NamedSharding

from jaxrl_sync.sharding import Layout, Plan, plan, reshard, trace
from jaxrl_sync.sharding.lending import lender
from tests.sharding.meshes import P, abstract, bits, mesh

Tree = dict[str, Any]


def setting(rows: int = 64) -> tuple[Tree, Plan]:
    """A square matrix from two devices to one other."""
    on, to = mesh((2,), ("x",)), mesh((1,), ("y",), first=4)
    host = np.random.default_rng(0).random((rows, rows), np.float32)
    params = {"w": jax.device_put(host, NamedSharding(on, P("x")))}
    target = {"w": abstract((rows, rows), "float32", to)}
    corr = trace(lambda t: {"w": t["w"].T}, params, target)
    return params, plan(corr.export_layout, Layout.of(target), corr)


def _where(result: Tree) -> int:
    return int(result["w"].addressable_shards[0].data.unsafe_buffer_pointer())


def test_a_result_that_nothing_holds_gives_its_memory_to_the_next() -> None:
    params, made = setting()
    places = set()
    for _ in range(4):
        result = reshard(params, made)
        places.add(_where(result))
        del result
        gc.collect()
    assert len(places) == 1 and lender(made).num_pools == 1


@pytest.mark.parametrize("how", ["array", "shard", "numpy", "device_put"])
def test_whoever_holds_any_part_of_a_result_keeps_its_values(how: str) -> None:
    params, made = setting()
    result = reshard(params, made)
    want = np.array(result["w"])
    held = {
        "array": lambda w: w,
        "shard": lambda w: w.addressable_shards[0].data,
        "numpy": lambda w: np.asarray(w.addressable_shards[0].data)[3:],
        "device_put": lambda w: jax.device_put(w, w.sharding),
    }[how](result["w"])
    del result
    gc.collect()
    for i in range(3):
        reshard({"w": params["w"] + i}, made)
    assert np.array_equal(bits(held), bits(want[3:] if how == "numpy" else want))
    assert lender(made).num_pools <= 2


def test_a_computation_that_still_runs_keeps_the_memory_that_it_reads() -> None:
    params, made = setting(256)

    @jax.jit
    def slow(x: Any) -> Any:
        return lax.fori_loop(0, 40, lambda _, y: jnp.sin(y @ x), x)

    result = reshard(params, made)
    want = np.array(jax.block_until_ready(slow(result["w"])))
    running = slow(result["w"])
    del result
    for i in range(5):
        reshard({"w": params["w"] * i}, made)
    assert np.array_equal(bits(running), bits(want))


def test_donated_and_deleted_results_give_their_memory_back() -> None:
    params, made = setting()
    first = reshard(params, made)
    place = _where(first)
    first["w"].delete()
    del first
    gc.collect()
    assert _where(reshard(params, made)) == place


def test_the_memory_goes_when_plan_and_results_are_gone() -> None:
    params, made = setting()
    result = reshard(params, made)
    want = np.asarray(params["w"]).T
    del made
    gc.collect()
    assert np.array_equal(bits(result["w"]), bits(want))  # a result needs no plan


def test_memory_that_one_call_still_fills_is_not_given_to_another() -> None:
    _, made = setting()
    with lender(made).take() as first, lender(made).take() as second:
        assert first is not second
    with lender(made).take() as third:
        assert third in (first, second)
    with pytest.raises(ZeroDivisionError), lender(made).take():
        raise ZeroDivisionError
    with lender(made).take() as first, lender(made).take() as second:
        assert first is not second and lender(made).num_pools == 2


@pytest.mark.parametrize("path", ["host", "device"])
def test_sources_whose_memory_is_column_major_give_the_same_values(path: str) -> None:
    params, made = setting()
    column_major = Format(DeviceLayout(major_to_minor=(1, 0)), params["w"].sharding)
    result = reshard({"w": jax.device_put(params["w"], column_major)}, made, path=path)
    assert np.array_equal(bits(result["w"]), bits(np.asarray(params["w"]).T))
