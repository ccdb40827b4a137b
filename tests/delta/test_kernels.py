"""The delta kernels in C against numpy: every pattern of bits, any number of threads, any hostile stream."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.delta import sparse
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP, XOR, DeltaError, host_bits
from tests.delta.bits import DTYPES, PATTERNS, SIZES, pair, same_bits

native: Any = kernels()
pytestmark = pytest.mark.skipif(native is None, reason="the C kernels are not built")


def in_numpy(call: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(sparse, "kernels", lambda: None)
        return call()


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_compare_equals_numpy(dtype: str, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for n in (*SIZES, 70_001):
        old, new = pair(dtype, n, pattern)
        expected = in_numpy(lambda old=old, new=new: sparse.compare(old, new, keep_old=True), monkeypatch)
        for threads in (1, 3):
            found = sparse.compare(old, new, keep_old=True, room=8, threads=threads)
            assert same_bits(found.positions, expected.positions)
            assert same_bits(found.new, expected.new)
            assert same_bits(found.old, expected.old)


def test_compare_reads_unaligned_windows_and_both_forms_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = pair("bfloat16", 5000, "one percent")
    for start in (1, 7, 33):
        found = sparse.compare(old[start:], new[start:])
        expected = in_numpy(lambda a=start: sparse.compare(old[a:], new[a:]), monkeypatch)
        assert same_bits(found.positions, expected.positions)
        assert found.elements == 5000 - start


def test_overflow_returns_the_true_count_and_stores_what_fits() -> None:
    old, new = (host_bits(a) for a in pair("bfloat16", 100_000, "alternating"))
    positions, values = np.zeros(100, np.uint32), np.zeros(100, np.uint16)
    assert native.delta_compare(old, new, 2, positions, values, None, 2) == 50_000
    assert np.array_equal(positions, np.arange(0, 200, 2))
    assert same_bits(values, new[positions])


@pytest.mark.parametrize("kind", [OVERWRITE, XOR, ULP])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "int8"])
def test_fused_pass_writes_what_the_codec_writes(
    dtype: str, kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for pattern in PATTERNS:
        for n in (0, 1, 1025, 140_001):
            old, new = pair(dtype, n, pattern)
            expected = in_numpy(lambda a=old, b=new: sparse.compare_coded(a, b, kind), monkeypatch)
            for threads in (1, 3):
                found = sparse.compare_coded(old, new, kind, room=4, threads=threads)
                assert found.count == expected.count
                assert same_bits(found.gaps, expected.gaps)
                assert same_bits(found.values, expected.values)
                assert same_bits(found.escapes, expected.escapes)
            for threads in (1, 2):
                shadow = old.copy()
                sparse.apply_coded(shadow, found, threads=threads)
                assert same_bits(shadow, new)
            shadow = old.copy()
            sparse.apply_coded(shadow, found)
            assert same_bits(shadow, new)
            shadow = old.copy()
            in_numpy(lambda a=shadow, f=found: sparse.apply_coded(a, f), monkeypatch)
            assert same_bits(shadow, new)


@pytest.mark.parametrize("dtype", DTYPES)
def test_apply_gives_the_new_bits_and_returns_the_old(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for pattern in PATTERNS:
        old, new = pair(dtype, 5000, pattern)
        delta = sparse.compare(old, new, keep_old=True)
        for run in (lambda f: f(), lambda f: in_numpy(f, monkeypatch)):
            shadow = old.copy()
            before = run(lambda s=shadow, d=delta: sparse.apply_into(s, d, keep_old=True))
            assert same_bits(shadow, new)
            assert same_bits(before, delta.old)
            sparse.apply_into(shadow, delta)
            assert same_bits(shadow, new), "overwrite is idempotent"


@pytest.mark.parametrize(
    ("positions", "words"),
    [([5, 5], "ascend"), ([7, 3], "ascend"), ([3, 100], "past the end"), ([2**32 - 1], "past the end")],
)
def test_a_bad_delta_is_refused_before_the_first_write(
    positions: list[int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    delta = sparse.Delta(100, np.array(positions, np.uint32), np.ones(len(positions), np.uint16))
    buffer = np.zeros(100, np.uint16)
    for run in (lambda f: f(), lambda f: in_numpy(f, monkeypatch)):
        with pytest.raises(DeltaError, match=words):
            run(lambda: sparse.apply_into(buffer, delta))
        assert not buffer.any()


def test_arguments_that_do_not_fit_are_named() -> None:
    delta = sparse.Delta(100, np.array([1], np.uint32), np.ones(1, np.uint16))
    with pytest.raises(DeltaError, match="onto a buffer of 99 uint16"):
        sparse.apply_into(np.zeros(99, np.uint16), delta)
    read_only = np.zeros(100, np.uint16)
    read_only.flags.writeable = False
    with pytest.raises(DeltaError, match="read-only"):
        sparse.apply_into(read_only, delta)
    with pytest.raises(DeltaError, match="int64"):
        sparse.compare(np.zeros(3, np.int64), np.zeros(3, np.int64))
    with pytest.raises(ValueError, match="itemsize is 3"):
        native.delta_compare(b"", b"", 3, b"", b"", None, 1)
    with pytest.raises(ValueError, match="aligned"):
        native.gaps_decode(b"\0", 2, 1, np.zeros(1, np.uint32))
    with pytest.raises(ValueError, match="new has 2 elements, expected 3"):
        native.delta_compare(b"abc", b"ab", 1, bytearray(4), bytearray(1), None, 1)


@pytest.mark.parametrize("kind", [OVERWRITE, ULP])
def test_streams_that_do_not_fit_together_are_refused_in_both_forms(
    kind: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = np.zeros(1000, np.uint16)
    new = old.copy()
    new[[3, 700]] = 9, 40_000
    good = sparse.compare_coded(old, new, kind)
    assert good.count == 2 and good.escapes.size == (kind == ULP)
    more = lambda stream: np.append(stream, stream.dtype.type(77))  # noqa: E731
    bad = [
        dataclasses.replace(good, values=more(good.values)),
        dataclasses.replace(good, values=good.values[:1]),
        dataclasses.replace(good, escapes=more(good.escapes)),
        dataclasses.replace(good, count=3),
        dataclasses.replace(good, escapes=np.full_like(good.escapes, 254), count=good.count + (kind != ULP)),
    ]
    for run in (lambda f: f(), lambda f: in_numpy(f, monkeypatch)):
        for coded in bad:
            buffer = old.copy()
            with pytest.raises(DeltaError):
                run(lambda b=buffer, c=coded: sparse.apply_coded(b, c))
            assert not buffer.any()
        buffer = old.copy()
        run(lambda b=buffer: sparse.apply_coded(b, good))
        assert same_bits(buffer, new)


def test_mask_and_comparison_find_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    for n in SIZES:
        old, new = pair("bfloat16", n, "one percent")
        bits = np.packbits(host_bits(old) != host_bits(new), bitorder="little")
        words = np.frombuffer(bits.tobytes().ljust(-(-n // 32) * 4, b"\0"), np.uint32)
        expected = sparse.compare(old, new)
        for found in (
            sparse.from_mask(words, new),
            in_numpy(lambda w=words, b=new: sparse.from_mask(w, b), monkeypatch),
        ):
            assert same_bits(found.positions, expected.positions)
            assert same_bits(found.new, expected.new)


def test_union_serves_a_receiver_that_skipped_a_version() -> None:
    old, first = pair("float16", 5000, "one percent", seed=1)
    second = first.copy()
    second[::97] = old[::97]
    merged = sparse.union(sparse.compare(old, first), sparse.compare(first, second))
    shadow = old.copy()
    sparse.apply_into(shadow, merged)
    assert same_bits(shadow, second)


ascending = st.lists(st.integers(0, 2**32 - 1), max_size=40, unique=True).map(sorted)


@settings(max_examples=200, deadline=None)
@given(ascending, st.sampled_from([1, 2]))
def test_gaps_round_trip(positions: list[int], width: int) -> None:
    at = np.array([p // (1 if width == 2 else 4096) for p in positions], np.uint32)
    at = np.unique(at)
    size = native.gaps_encode(at, width, np.zeros(0, f"u{width}"))
    out = np.zeros(size // width, f"u{width}")
    assert native.gaps_encode(at, width, out) == size
    found = np.zeros(at.size, np.uint32)
    native.gaps_decode(out, width, 2**32, found)
    assert np.array_equal(found, at)


@settings(max_examples=200, deadline=None)
@given(ascending, st.integers(8, 30))
def test_rice_round_trip(positions: list[int], parameter: int) -> None:
    at = np.array(positions, np.uint32)
    size = native.rice_encode(at, parameter, bytearray(0))
    if size > 1 << 22:
        return
    out = np.zeros(size, np.uint8)
    assert native.rice_encode(at, parameter, out) == size
    found = np.zeros(at.size, np.uint32)
    native.rice_decode(out, parameter, 2**32, found)
    assert np.array_equal(found, at)


@settings(max_examples=400, deadline=None)
@given(
    st.binary(max_size=200), st.integers(0, 60), st.integers(0, 5000), st.integers(0, 30), st.integers(0, 2)
)
def test_no_stream_leaves_its_buffers(
    data: bytes, count: int, elements: int, parameter: int, kind: int
) -> None:
    """Refused or decoded to ascending positions inside; the guard elements around the buffers stay."""
    words = np.frombuffer(data[: len(data) // 2 * 2], np.uint16)
    stream = np.frombuffer(data, np.uint8)
    for decode in (
        lambda out: native.gaps_decode(stream, 1, elements, out),
        lambda out: native.gaps_decode(words, 2, elements, out),
        lambda out: native.rice_decode(stream, parameter, elements, out),
    ):
        room = np.full(count + 2, 7, np.uint32)
        try:
            decode(room[1:-1])
        except ValueError:
            pass
        else:
            found = room[1:-1].astype(np.int64)
            assert np.all(np.diff(found) > 0)
            assert count == 0 or found[-1] < elements
        assert room[0] == room[-1] == 7
    buffer = np.full(elements + 2, 7, np.uint16)
    values = np.zeros(count, np.uint8 if kind == ULP else np.uint16)
    escapes = words[: count // 2] if kind == ULP else words[:0]
    before = buffer.copy()
    try:
        native.delta_apply_gaps(buffer[1:-1], 2, stream, values, escapes, count, kind)
    except ValueError:
        assert np.array_equal(buffer, before), "a refused stream leaves no trace"
    assert buffer[0] == buffer[-1] == 7


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=64), st.binary(max_size=64), st.sampled_from([1, 2, 4]))
def test_ulp_codes_are_a_bijection(a: bytes, b: bytes, width: int) -> None:
    n = min(len(a), len(b)) // width
    new, old = (np.frombuffer(x[: n * width], f"u{width}") for x in (a, b))
    codes, back = np.zeros(n, new.dtype), np.zeros(n, new.dtype)
    native.zigzag(new, old, width, codes)
    native.unzigzag(codes, old, width, back)
    assert same_bits(back, new)
    small, large = np.zeros(n, np.uint8), np.zeros(n, new.dtype)
    escapes = native.ulp_encode(new, old, width, small, large)
    native.ulp_decode(small, large[:escapes], old, width, back)
    assert same_bits(back, new)
    if escapes:
        with pytest.raises(ValueError, match="ends inside"):
            native.ulp_decode(small, large[: escapes - 1], old, width, back)
