"""Frames: what goes in comes out; what is damaged, foreign, replayed or hostile is refused by name."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest

from jaxrl_sync.transfer.codec import frame, positions, values
from jaxrl_sync.transfer.codec.errors import CorruptFrame, FrameError, TruncatedFrame, WrongBase, WrongPlan
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version
from tests.codec import hostile
from tests.codec.deltas import DTYPES, adversarial

FRAMES = hostile.sound_frames()
SMALL = FRAMES[5]


def _resealed(data: bytearray) -> bytes:
    return hostile.resealed(bytes(data))


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("coding", hostile.position_codings()[1:], ids=str)
def test_changes_survive(name: str, coding: positions.Coding) -> None:
    dtype = DTYPES[name]
    count = 3000
    old, new = adversarial(dtype, count)
    elements = count if coding.kind == "all" else 2 * count
    places = None if coding.kind == "all" else np.arange(0, elements, 2, dtype=np.uint32)
    kinds: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    for kind in kinds:
        for zstd in (False, True):
            changes = frame.Changes(elements, places, values.codes_of(new, old, kind), kind)
            data = frame.encode(hostile.HEAD, [changes], [frame.Coding(coding, kind, zstd)])
            (found,) = frame.decode(data).sections([(elements, dtype.itemsize)])
            assert found.positions is None or np.array_equal(found.positions, np.arange(0, elements, 2))
            assert (found.positions is None) == (places is None)
            np.testing.assert_array_equal(values.bits_from(found.codes, old, found.kind), new)


def test_a_frame_says_what_it_is() -> None:
    found = frame.decode(SMALL)
    head = dataclasses.replace(found.head, sections=())
    assert head == hostile.HEAD
    found.check(head.plan, 0, 1)
    found.check_versions(head.base, head.version)
    assert sum(s.count for s in found.head.sections) == 160


@pytest.mark.invariant(39)
def test_every_shorter_frame_is_refused() -> None:
    for length in range(len(SMALL)):
        with pytest.raises(TruncatedFrame):
            frame.decode(SMALL[:length])
    with pytest.raises(TruncatedFrame):
        frame.decode(SMALL + b"\0")


@pytest.mark.invariant(39)
def test_every_flipped_bit_is_refused() -> None:
    for data in (FRAMES[0], SMALL, FRAMES[7]):
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            with pytest.raises(FrameError):
                frame.decode(flipped)
    flipped = bytearray(SMALL)
    flipped[-20] ^= 1
    with pytest.raises(CorruptFrame, match="digest"):
        frame.decode(flipped)


@pytest.mark.invariant(39)
def test_a_frame_on_another_base_or_for_another_version_is_refused() -> None:
    found = frame.decode(SMALL)
    base, version = hostile.HEAD.base, hostile.HEAD.version
    later, foreign = Version(base.lineage, 5), Version("bbbbbbbbbbbb", base.number)
    for wrong in (None, later, foreign, version):
        with pytest.raises(WrongBase, match="aaaaaaaaaaaa:3"):
            found.check_versions(wrong, version)
    for wrong in (later, foreign, base):
        with pytest.raises(WrongBase, match="for version aaaaaaaaaaaa:4"):
            found.check_versions(base, wrong)


def test_a_frame_of_another_plan_or_edge_is_refused() -> None:
    found = frame.decode(SMALL)
    for plan, source, target in (("00", 0, 1), (hostile.HEAD.plan, 1, 1), (hostile.HEAD.plan, 0, 0)):
        with pytest.raises(WrongPlan, match="5eed"):
            found.check(plan, source, target)


def test_sections_other_than_the_expected_ones_are_refused_before_they_are_decoded() -> None:
    found = frame.decode(SMALL)
    expected = [(s.elements, s.itemsize) for s in found.head.sections]
    for wrong in (expected[:-1], [*expected, (1, 1)], [(1001, 1), *expected[1:]], [(1000, 2), *expected[1:]]):
        with pytest.raises(FrameError, match="expected"):
            found.sections(wrong)


@pytest.mark.parametrize(
    ("at", "value", "message"),
    [
        (4, struct.pack("<H", 2), "format 2"),
        (0, b"NOPE", "NOPE"),
        (20, b"\0", "plan digest"),
    ],
)
def test_heads_that_say_nonsense_are_refused(at: int, value: bytes, message: str) -> None:
    data = bytearray(SMALL)
    data[at : at + len(value)] = value
    if at >= 20:
        data = bytearray(_resealed(data))
    with pytest.raises(FrameError, match=message):
        frame.decode(data)


def test_no_memory_is_taken_for_what_a_frame_only_claims() -> None:
    """2^32 changed elements, in a frame of a few hundred bytes."""
    claim = frame.Section(1 << 32, 1 << 32, 1 << 32, 40, 40, 2, frame.Coding(positions.Coding("gap8")))
    for kind in ("u32", "gap8", "gap16", "rice", "bitmap", "all"):
        for zstd in (False, True):
            packed = zstd and kind in ("gap8", "gap16", "bitmap")
            coding = frame.Coding(positions.Coding(kind, 0, packed), "overwrite", zstd)
            section = dataclasses.replace(claim, coding=coding)
            data = frame.seal(hostile.HEAD, [section], [bytes(80)])
            tracemalloc.start()
            with pytest.raises(FrameError):
                frame.decode(data).sections([(1 << 32, 2)])
            peak = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            assert peak < 1 << 20, (kind, zstd, peak)


def test_a_zstd_plane_that_would_grow_is_refused_by_its_header() -> None:
    import zstandard

    bomb = zstandard.ZstdCompressor().compress(bytes(1 << 26))
    body = struct.pack("<Q", len(bomb)) + bomb
    coding = frame.Coding(positions.Coding("gap8", zstd=True))
    section = frame.Section(1000, 10, 10, len(body), 20, 2, coding)
    with pytest.raises(FrameError, match="says 67108864 bytes of content, expected 10"):
        frame.decode(frame.seal(hostile.HEAD, [section], [body, bytes(20)])).sections([(1000, 2)])


@pytest.mark.parametrize("data", FRAMES, ids=lambda d: str(len(d)))
def test_sound_frames_are_taken(data: bytes) -> None:
    assert hostile.take(data)


def test_mutated_frames_are_taken_or_refused_by_name() -> None:
    tried, taken = hostile.run(2.0, seed=1)
    assert tried >= 200 and taken < tried


def test_errors_of_frames_are_transfer_errors() -> None:
    assert issubclass(FrameError, TransferError) and issubclass(WrongBase, TransferError)
