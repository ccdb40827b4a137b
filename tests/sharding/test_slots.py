from __future__ import annotations

import mmap

import numpy as np
import pytest

from jaxrl_sync.sharding import Layout, MappingError, SlotLayout
from jaxrl_sync.sharding.paper import PaperMesh, layout
from jaxrl_sync.sharding.pool import shards_over
from tests.sharding.meshes import abstract, mesh


def test_offsets_are_aligned_disjoint_and_in_order() -> None:
    paper = PaperMesh.parse("tp=4", 2)
    shapes = {"b": (8, 3), "a": (5,), "s": (), "e": (0, 4), "z": (4, 4)}
    made = layout(
        {k: paper.placement(s, ("tp",) if s and s[0] % 4 == 0 else ()) for k, s in shapes.items()}, "int8"
    )
    slot = SlotLayout.of(made, 1)
    assert [(e.device, e.path) for e in slot.entries] == [(d, p) for d in (2, 3) for p in sorted(shapes)]
    end = 0
    for e in slot.entries:
        assert e.offset % 64 == 0 and e.offset >= end
        end = e.offset + e.nbytes
    assert [slot.offset(d, "a") % mmap.PAGESIZE for d in (2, 3)] == [0, 0]
    assert slot.total_bytes % mmap.PAGESIZE == 0 and slot.total_bytes >= end
    assert slot[2, "b"].shape == (2, 3)
    with pytest.raises(MappingError, match="no shard of tensor 'b' on device 0"):
        slot.offset(0, "b")


def test_views_cover_the_memory_without_copying_it_and_jax_aliases_them() -> None:
    made = Layout.of({"w": abstract((4, 8), "bfloat16", mesh((2,), ("x",)), "x")})
    slot = SlotLayout.of(made, 0)
    memory = np.frombuffer(mmap.mmap(-1, slot.total_bytes), np.uint8)
    views = slot.views(memory)
    assert views[1, "w"].shape == (2, 8)
    views[1, "w"].view(np.uint16)[:] = 7
    assert memory[slot.offset(1, "w")] == 7
    shards = shards_over(made, views)
    for key, view in views.items():
        assert shards[key].unsafe_buffer_pointer() == view.__array_interface__["data"][0]
    with pytest.raises(MappingError, match="needs"):
        slot.views(memory[: slot.total_bytes - 1])


def test_an_unaligned_view_would_have_been_copied_silently() -> None:
    made = Layout.of({"w": abstract((16,), "float32", mesh((1,), ("x",)))})
    memory = np.frombuffer(mmap.mmap(-1, mmap.PAGESIZE), np.uint8)
    view = memory[4:68].view(np.float32)
    assert (
        shards_over(made, {(0, "w"): view})[0, "w"].unsafe_buffer_pointer()
        != view.__array_interface__["data"][0]
    )
