"""The frame gives back what was put in, and nothing but an intact frame is decoded."""

from __future__ import annotations

import json
import struct
import tracemalloc
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.batch.frame import (
    DTYPES,
    MAGIC,
    PREFIX_BYTES,
    BatchHeader,
    FrameError,
    FrameLimits,
    decode,
    decode_batch,
    encode,
    encode_batch,
    read_prefix,
)
from jaxrl_sync.batch.pack import FIELDS, PackConfig, pack
from tests.batch.strategies import make_sample


def batch_frame(step: int = 7) -> bytes:
    batch = pack([make_sample(5, i) for i in range(6)], PackConfig(1, 2, 16))
    header = BatchHeader(step, 0, batch.micro_batches, 2, 16, batch.num_valid_tokens, cursor={"position": 6})
    return encode_batch(header, batch.for_rank(0))


def forge(header: Any, payload: bytes = b"", header_bytes: int | None = None) -> bytes:
    """A frame with a right digest around any header text and payload."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    body = text + bytes(-len(text) % 64) + payload + bytes(-len(payload) % 64)
    size = len(text) if header_bytes is None else header_bytes
    prefix = struct.pack("<8sHHIQ16s24x", MAGIC, 1, 0, size, len(payload) + -len(payload) % 64, _digest(body))
    return prefix + body


def _digest(body: bytes) -> bytes:
    return xxhash.xxh3_128_digest(body)


@given(
    st.dictionaries(
        st.text(max_size=8),
        st.tuples(st.sampled_from(DTYPES), st.lists(st.integers(0, 5), max_size=4), st.integers(0, 2**20)),
        max_size=6,
    ),
    st.dictionaries(st.sampled_from("abc"), st.integers(-5, 5)),
)
def test_any_arrays_come_back_bit_for_bit(
    specs: dict[str, tuple[str, list[int], int]], header: dict[str, Any]
) -> None:
    arrays = {}
    for name, (dtype, shape, seed) in specs.items():
        raw = np.random.default_rng(seed).integers(0, 256, [*shape, np.dtype(dtype).itemsize], np.uint8)
        raw = raw & 1 if dtype == "bool" else raw
        arrays[name] = np.ascontiguousarray(raw).view(dtype)[..., 0]
    data = encode(header, arrays)
    found_header, found = decode(data)
    assert found_header == header and list(found) == list(arrays)
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].shape) == (array.dtype, array.shape)
        assert found[name].tobytes() == array.tobytes()
        assert not found[name].flags.writeable


def test_a_batch_comes_back_with_its_header_and_aligned_views() -> None:
    batch = pack([make_sample(5, i) for i in range(6)], PackConfig(1, 2, 16))
    header = BatchHeader(
        7, 0, batch.micro_batches, 2, 16, batch.num_valid_tokens, True, True, {"position": 6}
    )
    data = encode_batch(header, batch.for_rank(0))
    frame = decode_batch(data)
    assert frame.header == header
    base = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    for name in FIELDS:
        assert np.array_equal(frame.fields[name], batch.for_rank(0)[name])
        assert (frame.fields[name].__array_interface__["data"][0] - base) % 64 == 0


def test_named_extras_travel_beside_the_fields() -> None:
    batch = pack([make_sample(5, i) for i in range(6)], PackConfig(1, 2, 16))
    header = BatchHeader(7, 0, batch.micro_batches, 2, 16, batch.num_valid_tokens)
    routes = np.arange(batch.micro_batches * 2 * 16 * 4, dtype=np.uint8).reshape(
        batch.micro_batches, 2, 16, 4
    )
    frame = decode_batch(encode_batch(header, {**batch.for_rank(0), "routes": routes}))
    assert np.array_equal(frame.fields["routes"], routes)
    with pytest.raises(FrameError, match="field 'routes' has shape"):
        encode_batch(header, {**batch.for_rank(0), "routes": routes[:, :1]})


@given(st.data())
def test_every_changed_byte_is_noticed(data: st.DataObject) -> None:
    frame = bytearray(batch_frame())
    at = data.draw(st.integers(0, len(frame) - 1))
    frame[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(FrameError):
        decode_batch(frame)


@given(st.integers(0, 2000), st.binary(max_size=80))
def test_every_cut_or_lengthened_frame_is_refused(cut: int, more: bytes) -> None:
    frame = batch_frame()
    with pytest.raises(FrameError):
        decode_batch(frame[: min(cut, len(frame) - 1)])
    if more:
        with pytest.raises(FrameError):
            decode_batch(frame + more)


@settings(max_examples=200)
@given(st.binary(max_size=300), st.booleans())
def test_random_bytes_never_do_more_than_raise(data: bytes, with_magic: bool) -> None:
    with pytest.raises(FrameError):
        decode_batch(MAGIC + b"\1\0\0\0" + data if with_magic else data)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=6) | st.sampled_from(DTYPES),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["fields", "dtype", "shape", "tokens", "step", "cursor"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)


@settings(max_examples=200)
@given(json_values, st.binary(max_size=200))
def test_a_hostile_header_with_a_right_digest_is_refused(header: Any, payload: bytes) -> None:
    with pytest.raises(FrameError):
        decode_batch(forge(header, payload))


@settings(max_examples=200)
@given(
    st.dictionaries(
        st.sampled_from(sorted(FIELDS)),
        st.fixed_dictionaries(
            {
                "dtype": st.sampled_from(["int32", "float32", "bool", "object", "O", "<i4", "V8", 3]),
                "shape": st.lists(
                    st.integers(-2, 2**40) | st.booleans() | st.just(0) | st.none(), max_size=4
                ),
            }
        ),
    ),
    st.binary(max_size=256),
)
def test_hostile_fields_with_a_right_digest_never_escape(specs: dict[str, Any], payload: bytes) -> None:
    try:
        _, arrays = decode(forge({"fields": specs}, payload))
    except FrameError:
        return
    assert sum(a.nbytes for a in arrays.values()) <= len(payload) + 63


@pytest.mark.parametrize(
    ("header", "payload", "message"),
    [
        (b"\xff\xfe", b"", "not JSON"),
        (b"[" * 100_000, b"", "not JSON"),
        (b'{"fields": {}, "x": NaN}', b"", "not JSON"),
        (b'{"fields": {}, "x": ' + b"9" * 5000 + b"}", b"", "not JSON"),
        ([], b"", "header is a list"),
        ({}, b"", "needs 'fields'"),
        ({"fields": {str(i): {"dtype": "int8", "shape": [0]} for i in range(65)}}, b"", "at most 64"),
        ({"fields": {"a": {"dtype": "object", "shape": [1]}}}, b"12345678", "dtype 'object'"),
        ({"fields": {"a": {"dtype": ["int8"], "shape": [1]}}}, b"1", "dtype"),
        ({"fields": {"a": {"dtype": "int8", "shape": [-1]}}}, b"1", "integers from 0"),
        ({"fields": {"a": {"dtype": "int8", "shape": [True]}}}, b"1", "integers from 0"),
        ({"fields": {"a": {"dtype": "int8", "shape": [1] * 9}}}, b"1", "at most 8"),
        ({"fields": {"a": {"dtype": "int64", "shape": [2**31, 2**31]}}}, b"1", "bytes are left"),
        ({"fields": {"a": {"dtype": "bool", "shape": [2]}}}, b"\1\2", "byte above 1"),
        ({"fields": {"a": {"dtype": "int8", "shape": [1]}}}, bytes(128), "64 bytes more"),
    ],
)
def test_hostile_frames_are_refused_by_name(header: Any, payload: bytes, message: str) -> None:
    with pytest.raises(FrameError, match=message):
        decode(forge(header, payload))


def test_empty_arrays_with_absurd_dimensions_cost_nothing() -> None:
    specs = {"a": {"dtype": "int64", "shape": [0, 2**32, 2**32]}}
    try:
        _, arrays = decode(forge({"fields": specs}))
    except FrameError:
        return
    assert arrays["a"].size == 0


def test_announced_sizes_are_checked_before_memory_is_taken() -> None:
    prefix = struct.pack("<8sHHIQ16s24x", MAGIC, 1, 0, 2**31, 64, bytes(16))
    with pytest.raises(FrameError, match="header of 2147483648 bytes, expected at most 1048576"):
        read_prefix(prefix)
    prefix = struct.pack("<8sHHIQ16s24x", MAGIC, 1, 0, 64, 2**40, bytes(16))
    with pytest.raises(FrameError, match="payload of 1099511627776 bytes"):
        read_prefix(prefix)
    with pytest.raises(FrameError, match="payload of 128 bytes"):
        decode(forge({"fields": {}}, bytes(128)), FrameLimits(payload_bytes=64))
    tracemalloc.start()
    with pytest.raises(FrameError):
        decode(forge({"fields": {"a": {"dtype": "int8", "shape": [2**32]}}}, bytes(64)))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("step", -1, "'step' is -1"),
        ("step", True, "'step' is True"),
        ("rows", 3, "has shape"),
        ("last", 1, "'last' is 1"),
        ("cursor", [], "'cursor' is"),
        ("more", 1, "expected"),
    ],
)
def test_a_batch_header_is_checked_key_by_key(key: str, value: Any, message: str) -> None:
    header, arrays = decode(batch_frame())
    with pytest.raises(FrameError, match=message):
        decode_batch(encode({**header, key: value}, arrays))


def test_a_batch_without_a_field_or_with_another_dtype_is_refused() -> None:
    header, arrays = decode(batch_frame())
    with pytest.raises(FrameError, match="no field 'advantages'"):
        decode_batch(encode(header, {k: v for k, v in arrays.items() if k != "advantages"}))
    with pytest.raises(FrameError, match="'tokens' has dtype int64, expected int32"):
        decode_batch(encode(header, {**arrays, "tokens": arrays["tokens"].astype(np.int64)}))
    with pytest.raises(FrameError, match="dtype complex64"):
        encode({}, {"a": np.zeros(2, np.complex64)})


def test_another_format_version_is_named() -> None:
    frame = bytearray(batch_frame())
    frame[8:10] = struct.pack("<H", 2)
    with pytest.raises(FrameError, match="frame format 2, expected 1"):
        read_prefix(frame[:PREFIX_BYTES])
