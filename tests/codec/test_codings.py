"""Position and value codings: exact round trips, sizes against entropy, C and numpy byte for byte."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.transfer.codec import bits, gaps, native, positions, rice, values
from jaxrl_sync.transfer.codec.errors import FrameError
from tests.codec.deltas import DTYPES, adversarial, one_step
from tests.codec.deltas import positions as random_positions

CODINGS = [
    positions.Coding("bitmap"),
    positions.Coding("bitmap", zstd=True),
    positions.Coding("u32"),
    positions.Coding("gap16"),
    positions.Coding("gap16", zstd=True),
    positions.Coding("gap8"),
    positions.Coding("gap8", zstd=True),
    positions.Coding("rice", 0),
    positions.Coding("rice", 6),
    positions.Coding("rice", 30),
]
CASES: dict[str, tuple[int, list[int]]] = {
    "none": (100, []),
    "first": (100, [0]),
    "last": (100, [99]),
    "all": (70, list(range(70))),
    "alternating": (4096, list(range(0, 4096, 2))),
    "gap of 254": (1000, [254]),
    "gap of 255": (1000, [255, 511]),
    "gap of 65534": (200_000, [65534]),
    "gap of 65535": (200_000, [65535, 131071, 131072]),
    "long run": (3_000_000, [0, 2_999_999]),
}


def _round_trip(places: npt.NDArray[np.uint32], elements: int, coding: positions.Coding) -> int:
    data, words = positions.encode(places, elements, coding)
    found = positions.decode(memoryview(data), coding, places.size, words, elements)
    assert found is not None and found.dtype == np.uint32
    np.testing.assert_array_equal(found, places)
    return len(data)


@pytest.mark.parametrize("coding", CODINGS, ids=str)
@pytest.mark.parametrize("name", CASES)
def test_positions_survive(name: str, coding: positions.Coding) -> None:
    elements, places = CASES[name]
    if coding == positions.Coding("rice", 0) and elements > 100_000:
        elements = 100_000  # a unary stream of its own length
        places = [p for p in places if p < elements]
    _round_trip(np.array(places, np.uint32), elements, coding)


@settings(max_examples=60, deadline=None)
@given(st.sets(st.integers(0, 70_000), max_size=300), st.sampled_from(CODINGS[:-3] + CODINGS[-2:]))
def test_any_set_of_positions_survives(found: set[int], coding: positions.Coding) -> None:
    _round_trip(np.array(sorted(found), np.uint32), 70_001, coding)


def test_positions_up_to_the_last_of_a_chunk_of_2_32() -> None:
    places = np.array([0, 2**31, 2**32 - 1], np.uint32)
    for coding in (positions.Coding("u32"), positions.Coding("gap16"), positions.Coding("rice", 30)):
        _round_trip(places, 2**32, coding)


@pytest.mark.parametrize("density", [0.001, 0.01])
def test_sizes_of_positions_against_the_entropy_of_independent_changes(density: float) -> None:
    elements = 1 << 23
    places = random_positions(elements, density)
    entropy = -math.log2(density) - (1 - density) / density * math.log2(1 - density)
    size = {str(c): _round_trip(places, elements, c) * 8 / places.size for c in CODINGS[3:7]}
    best = _round_trip(places, elements, positions.Coding("rice", rice.guess(places.size, elements)))
    assert best * 8 / places.size <= 1.03 * entropy
    if density == 0.01:
        assert size["gap8"] <= 1.10 * entropy
    else:
        assert size["gap16+zstd"] <= 1.10 * entropy


def test_the_guessed_rice_parameter_is_the_best_one() -> None:
    for density in (0.0007, 0.003, 0.01, 0.05, 0.3):
        places = random_positions(1 << 20, density, seed=3)
        found = gaps.gaps_of(places)
        sizes = {r: rice.num_bits(found, r) for r in range(16)}
        guess = rice.guess(places.size, 1 << 20)
        assert sizes[guess] <= 1.005 * min(sizes.values()), (density, guess, sizes)


@pytest.mark.parametrize("name", DTYPES)
def test_values_survive_for_any_bits(name: str) -> None:
    old, new = adversarial(DTYPES[name], 5000)
    kinds: tuple[values.Kind, ...] = ("overwrite", "xor", "ulp")
    for kind in kinds:
        codes = values.codes_of(new, old, kind)
        for zstd in (False, True):
            data = values.encode(codes, kind, zstd)
            found = values.decode(memoryview(data), new.size, new.dtype.itemsize, kind, zstd)
            np.testing.assert_array_equal(values.bits_from(found, old, kind), new)


def test_an_escaped_value_that_needed_none_is_refused() -> None:
    """No encoder writes it, and C never took it."""
    codes = np.array([3, 255, 256], np.uint16)
    data = bytearray(values.encode(codes, "ulp", False))
    assert data == bytes([3, 255, 255, 255, 0, 0, 1])
    np.testing.assert_array_equal(values.decode(memoryview(data), 3, 2, "ulp", False), codes)
    data[3:5] = 254, 0
    with pytest.raises(FrameError, match="an escaped value is 254, expected at least 255"):
        values.decode(memoryview(data), 3, 2, "ulp", False)


def test_no_entries_are_read_from_anywhere_in_a_frame() -> None:
    """numpy calls empty arrays aligned at odd addresses; C looks at the address."""
    for at in range(3):
        none = positions.decode(memoryview(bytes(4))[at:at], positions.Coding("gap16"), 0, 0, 100)
        assert none is not None and none.size == 0


def test_neighbouring_floats_are_one_apart_and_zeros_meet() -> None:
    floats = np.array([-1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0], np.float32)
    keys = bits.ordered(bits.as_bits(floats))
    assert np.all(keys[1:] > keys[:-1]) and int(keys[3]) - int(keys[2]) == 1
    up = np.nextafter(floats, np.float32(np.inf))
    codes = bits.zigzag(bits.as_bits(up), bits.as_bits(floats))
    assert codes[0] == codes[5] == 2  # one unit up


def test_sizes_after_one_training_step() -> None:
    before, after = one_step(1 << 22, 0.01)
    places = np.flatnonzero(before != after).astype(np.uint32)
    new, old = after[places], before[places]
    where = _round_trip(places, before.size, positions.Coding("rice", rice.guess(places.size, before.size)))
    overwrite = len(values.encode(new, "overwrite", True))
    ulp = len(values.encode(values.codes_of(new, old, "ulp"), "ulp", True))
    assert before.nbytes / (where + overwrite) >= 78
    assert before.nbytes / (where + ulp) >= 140


@pytest.mark.skipif(native.coders() is None, reason="the C kernels aren't built")
@pytest.mark.parametrize("name", CASES)
def test_c_writes_the_same_bytes_as_numpy(name: str) -> None:
    elements, found = CASES[name]
    places = np.array(found, np.uint32)
    for width in (1, 2):
        fast = native.encode_gaps(places, width)
        assert fast is not None and fast.tobytes() == gaps.encode_numpy(places, width).tobytes()
    for parameter in (3, 6, 17, 30):
        fast = native.encode_rice(places, parameter)
        assert fast is not None and fast.tobytes() == rice.encode_numpy(places, parameter).tobytes()


def _outcome(decode: object, *args: object) -> object:
    try:
        found = decode(*args)  # type: ignore[operator]
        return found.tolist()
    except FrameError:
        return "refused"


@pytest.mark.skipif(native.coders() is None, reason="the C kernels aren't built")
@settings(max_examples=200, deadline=None)
@given(
    st.binary(max_size=60),
    st.integers(0, 40),
    st.integers(0, 5000),
    st.integers(0, 8),
    st.sampled_from([1, 2]),
)
def test_c_and_numpy_decide_alike_about_any_bytes(
    data: bytes, count: int, elements: int, parameter: int, width: int
) -> None:
    stream = np.frombuffer(data, np.uint8)
    count = min(count, elements)
    least, most = count * (1 + parameter), count * (1 + parameter) + (elements >> parameter)
    if least <= stream.size * 8 < most + 8:
        fast = _outcome(native.decode_rice, stream, parameter, count, elements)
        assert fast == _outcome(rice.decode_numpy, stream, parameter, count, elements)
    words = np.frombuffer(data[: len(data) // width * width], f"<u{width}")
    if count <= words.size <= gaps.max_words(count, elements, width):
        fast = _outcome(native.decode_gaps, words, count, elements)
        assert fast == _outcome(gaps.decode_numpy, words, count, elements)
