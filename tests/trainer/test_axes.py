"""The table from logical to mesh axes and its refusals."""

from __future__ import annotations

import dataclasses

import jax
import pytest
from jax.sharding import PartitionSpec as P

from jaxrl_sync.trainer import axes
from jaxrl_sync.trainer.config import MeshConfig, TrainerConfig, TrainerConfigError
from jaxrl_sync.trainer.trainer import data_rank
from tests.trainer.batches import MODEL


def test_every_tensor_has_its_place() -> None:
    mesh = axes.make_mesh(MeshConfig(2, 2, 2))
    where = axes.param_shardings(MODEL, mesh)
    assert where["layers"]["attn"]["q_proj"]["kernel"].spec == P(None, "fsdp", "tp", None)
    assert where["layers"]["mlp"]["down_proj"]["kernel"].spec == P(None, "tp", "fsdp")
    assert where["embed"]["embedding"].spec == P("tp", "fsdp")
    assert axes.batch_sharding(mesh).spec == P(("dp", "fsdp"), None)
    assert data_rank(mesh, 8) == (0, 1)


def test_key_and_value_heads_that_are_fewer_than_devices_are_whole_on_each() -> None:
    mesh = axes.make_mesh(MeshConfig(1, 1, 8))
    where = axes.param_shardings(MODEL, mesh)["layers"]["attn"]
    assert where["q_proj"]["kernel"].spec == P(None, "fsdp", "tp", None)
    assert where["k_proj"]["kernel"].spec == where["v_proj"]["kernel"].spec == P(None, "fsdp", None, None)


def test_two_logical_axes_on_one_mesh_axis_are_an_error() -> None:
    rules = axes.RULES | {"embed": "tp"}
    with pytest.raises(TrainerConfigError, match="'heads' .* both land on mesh axis 'tp'"):
        axes.spec(("layer", "embed", "heads", "head_dim"), rules)
    with pytest.raises(TrainerConfigError, match="logical axis 'nose' is not in the table"):
        axes.spec(("nose",))


def test_a_dimension_that_does_not_divide_is_an_error() -> None:
    mesh = axes.make_mesh(MeshConfig(1, 1, 4), jax.devices()[:4])
    model = dataclasses.replace(MODEL, num_heads=12, num_kv_heads=6)
    message = (
        r"layers/attn/k_proj/kernel: dimension 2 of \(2, 16, 6, 4\) has 6 elements, expected a multiple of 4"
    )
    with pytest.raises(TrainerConfigError, match=message):
        axes.param_shardings(model, mesh)
    with pytest.raises(TrainerConfigError, match="needs 4 devices, found 8"):
        axes.make_mesh(MeshConfig(1, 4, 1))
    with pytest.raises(TrainerConfigError, match=r"rows=6: expected a positive multiple of dp\*fsdp=4"):
        TrainerConfig(mesh=MeshConfig(2, 2, 1), rows=6)
    with pytest.raises(TrainerConfigError, match="seq_len=100: expected at least 2 and a multiple of"):
        TrainerConfig(seq_len=100, logprob_chunk=64)
