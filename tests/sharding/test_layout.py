from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding

from jaxrl_sync.sharding import Box, Layout, MappingError
from jaxrl_sync.sharding.box import overlap_of
from tests.sharding.meshes import P, abstract, mesh


def test_boxes_of_several_axes_on_one_dimension_and_replicas() -> None:
    on = mesh((2, 4), ("x", "y"))
    layout = Layout.of(
        {"a": abstract((8, 4), jnp.bfloat16, on, ("x", "y")), "b": abstract((4, 8), "int8", on, "x")}
    )
    assert [s.box for s in layout["a"].shards] == [Box((i, 0), (i + 1, 4)) for i in range(8)]
    assert len(layout["b"].placement.by_box) == 2
    assert [s.device for s in layout["b"].placement.by_box[Box((0, 0), (2, 8))]] == [0, 1, 2, 3]
    assert layout.total_bytes == 8 * 4 * 2 + 4 * 8


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_live_arrays_and_abstract_ones_agree(axis_type: AxisType) -> None:
    on = jax.make_mesh((2, 4), ("x", "y"), axis_types=(axis_type,) * 2)
    sharding = NamedSharding(on, P("y", "x"))
    live = jax.device_put(jnp.ones((8, 6)), sharding)
    assert Layout.of({"w": live}) == Layout.of(
        {"w": jax.ShapeDtypeStruct((8, 6), jnp.float32, sharding=sharding)}
    )
    for shard in live.addressable_shards:
        assert Layout.of({"w": live})["w"].placement.by_device[shard.device.id].box.shape == shard.data.shape


def test_uneven_dimension_has_short_and_empty_last_shards() -> None:
    layout = Layout.of({"u": abstract((5, 3), "float32", mesh((4,), ("x",)), "x")})
    assert [s.box.shape[0] for s in layout["u"].shards] == [2, 2, 1, 0]
    assert layout["u"].placement.defect is None


def test_scalars_empty_and_size_one_dimensions() -> None:
    on = mesh((2,), ("x",))
    tree = {"s": abstract((), "float32", on), "e": abstract((0, 4), "float32", on, None, "x"),
            "o": abstract((1, 4), "float32", on, None, "x")}  # fmt: skip
    layout = Layout.of(tree)
    assert layout["s"].shards[0].box == Box((), ())
    assert layout["s"].shards[0].box.volume == 1
    assert layout["e"].total_bytes == 0
    assert [s.box.shape for s in layout["o"].shards] == [(1, 2), (1, 2)]


def test_bytes_round_trip_and_digest_is_a_golden_number() -> None:
    on = mesh((2, 2), ("x", "y"))
    tree = {"b": {"k": abstract((4, 6), "bfloat16", on, "x", "y")}, "a": abstract((3,), "float32", on)}
    layout = Layout.of(tree)
    again = Layout.from_bytes(layout.to_bytes())
    assert again == layout and again.digest == layout.digest
    assert list(layout) == ["a", "b/k"]
    # Equal on every version of Python, numpy and jax; change only together with the version byte.
    assert layout.digest == "452d6b9085346c6254de7588c4062c2a"


@pytest.mark.parametrize("cut", [0, 5, 20, 30])
def test_corrupted_bytes_are_refused(cut: int) -> None:
    data = Layout.of({"a": abstract((3,), "float32", mesh((2,), ("x",)))}).to_bytes()
    with pytest.raises(MappingError):
        Layout.from_bytes(data[:cut])
    with pytest.raises(MappingError):
        Layout.from_bytes(data + b"\x00")


def test_nnx_state_linen_params_and_dataclasses_get_plain_paths() -> None:
    from flax import linen, nnx

    class Toy(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.up = nnx.Linear(2, 3, rngs=rngs)
            self.blocks = nnx.List([nnx.Linear(3, 3, rngs=rngs)])

    state = nnx.state(Toy(nnx.Rngs(0)))
    assert list(Layout.of(state)) == ["blocks/0/bias", "blocks/0/kernel", "up/bias", "up/kernel"]
    params = linen.Dense(3).init(jax.random.key(0), jnp.ones((1, 2)))
    assert list(Layout.of(params)) == ["params/bias", "params/kernel"]

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Pair:
        left: jax.Array
        right: jax.Array

    assert list(Layout.of(Pair(jnp.ones(2), jnp.ones(3)))) == ["left", "right"]


def test_a_leaf_without_sharding_names_itself() -> None:
    with pytest.raises(MappingError, match="'w/b'"):
        Layout.of({"w": {"b": np.ones(3)}})


def test_a_missing_tensor_names_the_nearest() -> None:
    layout = Layout.of({"layers/kernel": jnp.ones(3)})
    with pytest.raises(MappingError, match="nearest: 'layers/kernel'"):
        layout["layer/kernel"]


def test_partly_overlapping_boxes_are_found() -> None:
    start = np.array([[0, 0], [2, 2], [4, 0]], np.int64)
    stop = np.array([[3, 3], [5, 5], [6, 2]], np.int64)
    assert overlap_of(start, stop) == (0, 1)
    stop[0] = [2, 2]
    assert overlap_of(start, stop) is None


def test_repr_shows_split_and_replicas() -> None:
    on = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y"))
    text = repr(Layout.of({"w": abstract((4, 4), "float32", on, "x")}))
    assert "w: float32[4, 4] split 2x1, 2 replicas" in text
