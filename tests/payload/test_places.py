"""Places of entries: C and numpy agree with each other and with the copies themselves, for any strides."""

from __future__ import annotations

import types

import numpy as np
import pytest

from jaxrl_sync.sharding import CopyTable
from jaxrl_sync.sharding.digests import add_digests, copies_digest
from jaxrl_sync.transfer.codec import native, values
from jaxrl_sync.transfer.payload.places import Places, slot_origin
from jaxrl_sync.transfer.payload.sections import bits_of_memory, sections_of, subtract_digests
from tests.payload.edges import Memory, edge, random_tree, shards, stepped

EDGE, SLOT, SOURCE, TARGET = edge()
SECTIONS = sections_of(EDGE.copies)
KINDS: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", range(len(SECTIONS)))
def test_entries_lie_where_the_copies_put_them(number: int, kind: values.Kind) -> None:
    section, rng = SECTIONS[number], np.random.default_rng(number)
    first = random_tree(rng)
    second = stepped(first, 0.3, rng)
    packed = [np.zeros(section.elements, f"<u{section.itemsize}") for _ in range(2)]
    for bits, tree in zip(packed, (first, second), strict=True):
        CopyTable.pack(section.copies).execute(shards(tree, SOURCE), bits)
    positions = np.flatnonzero(packed[0] != packed[1]).astype(np.uint32)
    old, new = packed[0][positions], packed[1][positions]
    codes = values.codes_of(new, old, kind)
    places = Places(section, slot_origin(SLOT.offset))
    results = []
    for apply in (places.apply, places.apply_numpy):
        slot, wanted = Memory(SLOT), Memory(SLOT)
        CopyTable.direct(section.copies).execute(shards(first, SOURCE), slot.views)
        CopyTable.direct(section.copies).execute(shards(second, SOURCE), wanted.views)
        before = copies_digest(section.copies, slot.views, "target")
        index, bits, change = apply(positions, codes, kind, bits_of_memory(slot.data, section.itemsize))
        assert bytes(slot.data) == bytes(wanted.data)
        np.testing.assert_array_equal(bits, new)
        after = copies_digest(section.copies, slot.views, "target")
        assert add_digests(before, change) == after
        moved = {p: d for p, d in subtract_digests(after, before).items() if d != (0, 0)}
        assert moved == change == places.change_of_digests(positions, new, old)
        results.append(index.tolist())
    assert results[0] == results[1]


@pytest.mark.skipif(native.coders() is None, reason="the C kernels aren't built")
def test_c_sees_aligned_elements_wherever_a_frame_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    number = next(i for i, s in enumerate(SECTIONS) if s.itemsize > 1)
    section, real = SECTIONS[number], native.coders()
    places, slot = Places(section, slot_origin(SLOT.offset)), Memory(SLOT)
    assert real is not None
    seen: list[bool] = []

    def apply(*args: object) -> None:
        codes = args[2]
        assert isinstance(codes, np.ndarray)
        seen.append(codes.flags.aligned)
        real.places_apply(*args)

    monkeypatch.setattr(native, "coders", lambda: types.SimpleNamespace(places_apply=apply))
    body = bytes(range(1, 2 + 2 * section.itemsize))
    codes = np.frombuffer(body, f"<u{section.itemsize}", count=2, offset=1)
    memory = bits_of_memory(slot.data, section.itemsize)
    _, new, _ = places.apply(np.array([0, 3], np.uint32), codes, "overwrite", memory)
    assert not codes.flags.aligned and seen == [True]
    np.testing.assert_array_equal(new, codes)


@pytest.mark.skipif(native.coders() is None, reason="the C kernels aren't built")
def test_c_refuses_what_does_not_fit() -> None:
    section = SECTIONS[0]
    places, slot = Places(section, slot_origin(SLOT.offset)), Memory(SLOT)
    memory = bits_of_memory(slot.data, section.itemsize)
    codes = np.zeros(2, memory.dtype)
    with pytest.raises(ValueError, match="ascend"):
        places.apply(np.array([5, 5], np.uint32), codes, "overwrite", memory)
    with pytest.raises(ValueError, match="codes has"):
        places.apply(np.array([5], np.uint32), codes, "overwrite", memory)
    last = np.array([0, section.elements - 1], np.uint32)
    with pytest.raises(ValueError, match="past the end"):
        places.apply(last, codes, "overwrite", memory[:8])
