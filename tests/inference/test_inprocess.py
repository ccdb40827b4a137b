"""A colocated engine's weights: bit for bit the conversion's, and not copied where layouts allow."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.inprocess import InProcess
from jaxrl_sync.inference.process import engine_convert
from jaxrl_sync.inference.runner import target_tree
from jaxrl_sync.trainer.axes import param_shardings
from tests.inference.engine_helpers import SMALL, TINY, tp_mesh, trainer_weights


def _trainer(fsdp: int, tp: int, seed: int = 0) -> Any:
    devices = np.array(jax.devices()[: fsdp * tp], dtype=object).reshape(1, fsdp, tp)
    mesh = Mesh(devices, ("dp", "fsdp", "tp"), axis_types=(AxisType.Auto,) * 3)
    return jax.tree.map(jax.device_put, trainer_weights(seed), param_shardings(TINY, mesh))


def _pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


def _made(fsdp: int, tp: int, dtype: str) -> tuple[InProcess, Any, Any, Any]:
    mesh = tp_mesh(fsdp * tp)
    convert = engine_convert(TINY, SMALL, fsdp * tp, dtype)
    target = target_tree(TINY, SMALL, mesh, jnp.dtype(dtype))
    params = _trainer(fsdp, tp)
    return InProcess(convert, params, target), params, target, convert


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("fsdp", "tp"), [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_the_installed_tree_is_the_conversion_bit_for_bit(fsdp: int, tp: int, dtype: str) -> None:
    inside, params, target, convert = _made(fsdp, tp, dtype)
    for seed in (0, 1):
        tree = jax.tree.map(lambda x, p: jax.device_put(x, p.sharding), trainer_weights(seed), params)
        found = inside.take(tree).tree
        wanted = jax.jit(convert)(trainer_weights(seed))
        pairs = jax.tree_util.tree_leaves_with_path(found)
        for (path, mine), theirs, place in zip(
            pairs, jax.tree.leaves(wanted), jax.tree.leaves(target), strict=True
        ):
            assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes(), path
            assert mine.sharding.is_equivalent_to(place.sharding, mine.ndim), path


@pytest.mark.parametrize(
    ("fsdp", "tp", "shared"),
    [
        (1, 1, {"embed", "final_norm", "lm_head"}),
        (1, 2, {"final_norm", "lm_head"}),
        (2, 1, {"final_norm"}),
    ],
)
def test_tensors_of_equal_layout_are_the_trainers_own_buffers(fsdp: int, tp: int, shared: set[str]) -> None:
    inside, params, _, _ = _made(fsdp, tp, "float32")
    assert set(inside.shared) == shared
    installed = inside.take(params)
    owners = {
        "embed": params["embed"]["embedding"],
        "final_norm": params["final_norm"]["scale"],
        "lm_head": params["lm_head"]["kernel"],
    }
    for path in shared:
        assert _pointers(installed.tree[path]) == _pointers(owners[path]), path
    total = sum(s.data.nbytes for x in jax.tree.leaves(installed.tree) for s in x.addressable_shards)
    assert installed.shared_bytes > 0 and installed.copied_bytes + installed.shared_bytes == total
    theirs = {p for x in jax.tree.leaves(params) for p in _pointers(x)}
    copied = installed.tree["layers"]["0"]["qkv"]
    assert not theirs & set(_pointers(copied))


def test_a_cast_shares_nothing() -> None:
    inside, params, _, _ = _made(1, 1, "bfloat16")
    assert inside.shared == {} and inside.take(params).shared_bytes == 0


def test_shared_buffers_die_with_the_donated_ones() -> None:
    """What the docstring warns of: the engine has to sleep while the trainer updates."""
    inside, params, _, _ = _made(1, 1, "float32")
    tree = inside.take(params).tree
    jax.jit(lambda x: x + 1, donate_argnums=0)(params["lm_head"]["kernel"])
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(tree["lm_head"])


def test_quantized_weights_are_computed_on_the_way() -> None:
    from jaxrl_sync.sharding.presets.quantization import Quantization

    config = EngineConfig(slots=8, max_len=32, quantization=Quantization("int8", "128x128"))
    mesh = tp_mesh(2)
    convert = engine_convert(TINY, config, 2, "float32")
    target = target_tree(TINY, config, mesh, jnp.dtype("float32"))
    params = _trainer(2, 1)
    found = InProcess(convert, params, target).take(params).tree
    wanted = jax.jit(convert)(trainer_weights(0))
    for mine, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(theirs).tobytes()
    assert NamedSharding(mesh, PartitionSpec()).mesh == mesh
