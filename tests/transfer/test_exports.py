"""Exports: their addresses are known before they are computed, and nobody's memory is taken away."""

from __future__ import annotations

import ctypes
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.sharding import trace
from jaxrl_sync.transfer import Version
from jaxrl_sync.transfer.exports import Held, export, export_kind, shards_of

MESH = Mesh(np.array(jax.devices()[:4]).reshape(4), ("x",), axis_types=(AxisType.Auto,))


def tree(seed: int, rows: int = 16) -> dict[str, jax.Array]:
    values = np.random.default_rng(seed).normal(size=(rows, rows)).astype(np.float32)
    specs = {"row": PartitionSpec("x"), "column": PartitionSpec(None, "x"), "whole": PartitionSpec()}
    return {name: jax.device_put(values, NamedSharding(MESH, spec)) for name, spec in specs.items()}


def convert(params: dict[str, Any]) -> dict[str, Any]:
    return {"row": params["row"], "half": params["column"].astype(jnp.bfloat16), "whole": params["whole"] + 1}


def test_addresses_are_known_while_the_devices_compute() -> None:
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 30, lambda _, y: y @ x, x))
    values = jax.block_until_ready(jnp.eye(1024))
    jax.block_until_ready(slow(values))
    for _ in range(5):  # the test may stand still for longer than the devices compute
        computed = slow(values)
        shards = shards_of({"w": computed})
        keys = tuple(shards)
        addresses, sizes = shards.places(keys)
        if not computed.is_ready():
            break
    else:
        pytest.fail("the export was always computed before its addresses were known")
    jax.block_until_ready(computed)
    assert addresses.tolist() == [shards[key].__array_interface__["data"][0] for key in keys]
    assert sizes == np.array([shards[key].nbytes for key in keys], np.int64).tobytes()
    np.testing.assert_array_equal(shards[keys[0]], np.asarray(values))


@pytest.mark.parametrize("dtype", ["int4", "float8_e4m3fn", "bool", "complex64", "float64"])
def test_elements_that_numpy_holds_otherwise_are_read(dtype: str) -> None:
    values = np.arange(64).reshape(8, 8) % 8
    with jax.enable_x64(True):
        array = jax.device_put(jnp.asarray(values).astype(dtype), NamedSharding(MESH, PartitionSpec("x")))
        shards = shards_of({"w": array})
        keys = tuple(shards)
        addresses, _ = shards.places(keys)
        rows = {shard.device.id: shard.index for shard in array.addressable_shards}
        for key, address in zip(keys, addresses.tolist(), strict=True):
            assert address == shards[key].__array_interface__["data"][0]
            np.testing.assert_array_equal(shards[key], np.asarray(array)[rows[key[0]]])


def held_version() -> tuple[Held, str]:
    params = tree(1)
    correspondence = trace(convert, params)
    kind = export_kind(correspondence)
    held = Held(Version("a", 1), {kind: export(correspondence, params)})
    held.look_up()
    return held, kind


def test_buffers_that_nobody_reads_go_to_a_later_export() -> None:
    held, kind = held_version()
    at = held.exports[kind]["row"].addressable_shards[0].data.unsafe_buffer_pointer()
    spare = held.retire()
    params = tree(2)
    later = export(trace(convert, params), params, spare[kind])
    assert later["row"].addressable_shards[0].data.unsafe_buffer_pointer() == at


def test_buffers_of_which_somebody_knows_an_address_stay_as_they_are() -> None:
    held, kind = held_version()
    shards = held.shards(kind, trace(convert, tree(1)))
    assert shards is not None
    keys = tuple(shards)
    addresses, sizes = shards.places(keys)
    lengths = np.frombuffer(sizes, np.int64).tolist()
    before = [ctypes.string_at(at, n) for at, n in zip(addresses.tolist(), lengths, strict=True)]
    assert held.retire() == {}
    params = tree(2)
    export(trace(convert, params), params)
    assert [ctypes.string_at(at, n) for at, n in zip(addresses.tolist(), lengths, strict=True)] == before
