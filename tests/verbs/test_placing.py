"""Where placed bytes end up: chunks written by their rows make the slot that direct copies make."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxrl_sync.sharding import CopyTable, Edge, Layout, SlotLayout, plan, trace
from jaxrl_sync.transfer.transports.placing import choose_placement, chunks, count_chunks, count_runs
from jaxrl_sync.transfer.verbs.settings import VerbsSettings
from tests.transfer.models import convert, engine_target, mesh, trainer_params


def edge_of(
    function: object, source: object, target: object
) -> tuple[Edge, SlotLayout, dict[object, object]]:
    """The only edge of one process with itself, its slot, and the source shards."""
    correspondence = trace(function, source, target)  # type: ignore[arg-type]
    made = plan(correspondence.export_layout, Layout.of(target), correspondence)
    (edge,) = made.for_rank(0, side="source").edges
    exported = correspondence.export(source)
    shards = {
        (s.device.id, path): np.ascontiguousarray(np.asarray(s.data))
        for path, array in exported.items()
        for s in array.addressable_shards
    }
    return edge, SlotLayout.of(Layout.of(target), 0), shards  # type: ignore[return-value]


def model_edge() -> tuple[Edge, SlotLayout, dict[object, object]]:
    """The small model's edge."""
    return edge_of(convert, trainer_params(), engine_target())


@pytest.mark.parametrize("chunk_bytes", [64, 1000, 4096, 1 << 20])
def test_chunks_written_by_their_rows_make_the_slot(chunk_bytes: int) -> None:
    edge, slot, shards = model_edge()
    wanted = np.full(slot.total_bytes, 0xA5, np.uint8)
    CopyTable.direct(edge.copies).execute(shards, slot.views(wanted))
    found, hits = np.full(slot.total_bytes, 0xA5, np.uint8), np.zeros(slot.total_bytes, np.int32)
    made = list(chunks(edge, slot, chunk_bytes))
    for chunk in made:
        assert 0 < chunk.total_bytes <= chunk_bytes
        packed = np.zeros(chunk.total_bytes, np.uint8)
        chunk.table.execute(shards, packed)
        at = 0
        for local, offset, nbytes in chunk.rows.tolist():
            assert local == at, "a chunk is packed without gaps"
            found[offset : offset + nbytes] = packed[local : local + nbytes]
            hits[offset : offset + nbytes] += 1
            at += nbytes
        assert at == chunk.total_bytes
    assert len(made) == count_chunks(edge, chunk_bytes)
    np.testing.assert_array_equal(found, wanted)
    assert hits.max() == 1 and int(hits.sum()) == edge.total_bytes


def test_a_transposed_tensor_is_written_in_long_runs() -> None:
    """Packed in the target's order, a transposed matrix is one run; neighbours in the slot are merged."""
    grid = mesh((1,), ("x",))
    sharding = NamedSharding(grid, PartitionSpec())
    value = jax.device_put(jnp.arange(64 * 128, dtype=jnp.float32).reshape(64, 128), sharding)
    target = {"w": jax.ShapeDtypeStruct((128, 64), jnp.float32, sharding=sharding)}
    edge, slot, shards = edge_of(lambda p: {"w": p["w"].T}, {"w": value}, target)
    assert count_runs(edge) == 1
    (chunk,) = chunks(edge, slot, 1 << 20)
    assert chunk.rows.tolist() == [[0, 0, 64 * 128 * 4]]
    packed = np.zeros(chunk.total_bytes, np.uint8)
    chunk.table.execute(shards, packed)
    np.testing.assert_array_equal(packed.view(np.float32).reshape(128, 64), np.asarray(value).T)


def test_the_choice_and_its_reason() -> None:
    edge, _, _ = model_edge()
    runs = count_runs(edge)
    assert choose_placement(edge, VerbsSettings())[0] == "staged"
    placement, why = choose_placement(edge, VerbsSettings(min_run_bytes=1))
    assert placement == "placed" and f"{runs} contiguous runs of {edge.total_bytes // runs} bytes" in why
    placement, why = choose_placement(edge, VerbsSettings(placement="placed"))
    assert placement == "placed" and why.startswith("placed as configured")
    assert choose_placement(Edge(0, 0, ()), VerbsSettings())[0] == "staged"
    with pytest.raises(ValueError, match="placement='both', expected auto, placed or staged"):
        VerbsSettings(placement="both")  # type: ignore[arg-type]
