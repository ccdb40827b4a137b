"""The FFI handlers: in place, batched, refusing what does not fit; and plain XLA where XLA refuses them."""

from __future__ import annotations

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.transfer.delta import ffi, sparse
from jaxrl_sync.transfer.delta.bits import OVERWRITE, ULP, XOR, DeltaError
from jaxrl_sync.transfer.delta.decode import stack_coded
from jaxrl_sync.transfer.delta.encode import encode_local, implementation_for
from tests.delta.bits import PATTERNS, pair, same_bits

needs_ffi = pytest.mark.skipif(not ffi.available(), reason="no FFI kernels in this build")


@needs_ffi
def test_ffi_writes_a_donated_buffer_in_place_and_refuses_bad_deltas() -> None:
    old, new = pair("bfloat16", 4096, "one percent")
    delta = sparse.compare(old, new)
    shadow = jnp.array(old)
    where = shadow.unsafe_buffer_pointer()
    run = jax.jit(lambda s, p, v, c: ffi.apply(s, p, v, c, 0, 4096), donate_argnums=0)
    shadow = run(shadow, delta.positions, delta.new, np.uint32(delta.count))
    assert shadow.unsafe_buffer_pointer() == where
    assert same_bits(shadow, new)
    with pytest.raises(jax.errors.JaxRuntimeError, match="past the end"):
        jax.block_until_ready(
            run(shadow, np.array([4096], np.uint32), np.array([1], np.uint16), np.uint32(1))
        )
    kept = jnp.array(new)
    with pytest.raises(jax.errors.JaxRuntimeError, match="overflowed"):
        jax.block_until_ready(run(kept, np.array([5], np.uint32), np.array([1], np.uint16), np.uint32(2)))


@needs_ffi
def test_ffi_refuses_elements_of_another_width_before_it_reads_them() -> None:
    wide, narrow = jnp.zeros(64, jnp.float32), jnp.zeros(64, jnp.bfloat16)
    positions, one = jnp.arange(64, dtype=jnp.uint32), jnp.uint32(1)
    with pytest.raises(DeltaError, match="old are bfloat16, 2 bytes wide, expected 4"):
        ffi.encode(narrow, wide, 64, 0, 64, False, 1)
    with pytest.raises(DeltaError, match="values are bfloat16, 2 bytes wide, expected 4"):
        ffi.apply(wide, positions, narrow, one, 0, 64)
    with pytest.raises(DeltaError, match="32 values for 64 positions"):
        ffi.apply(wide, positions, wide[:32], one, 0, 64)
    with pytest.raises(DeltaError, match="gaps are uint32, 4 bytes wide, expected 1"):
        ffi.apply_coded(wide, positions, wide, wide, jnp.zeros(3, jnp.uint32), OVERWRITE, 0, 64)


@needs_ffi
def test_ffi_under_vmap_loops_over_leading_dimensions() -> None:
    pairs = [pair("bfloat16", 1000, pattern) for pattern in ("one percent", "ends", "all")]
    old, new = (jnp.asarray(np.stack([p[k] for p in pairs])) for k in (0, 1))
    found = jax.jit(jax.vmap(lambda a, b: ffi.encode(a, b, 1000, 0, 1000, True, 1)))(old, new)
    shadow = jax.jit(jax.vmap(lambda s, p, v, c: ffi.apply(s, p, v, c, 0, 1000)))(
        old, *(found[k] for k in (1, 2, 0))
    )
    for i, (a, b) in enumerate(pairs):
        expected = sparse.compare(a, b, keep_old=True)
        assert int(found[0][i]) == expected.count
        for part, wanted in zip(found[1:], (expected.positions, expected.new, expected.old), strict=True):
            assert same_bits(np.asarray(part[i])[: expected.count], wanted)
    assert same_bits(shadow, new)


@needs_ffi
@pytest.mark.parametrize("kind", [OVERWRITE, XOR, ULP])
def test_ffi_codes_and_applies_the_codecs_streams(kind: int) -> None:
    encode = jax.jit(lambda a, b: ffi.encode_coded(a, b, kind, (5100, 5000, 5000), 0, 5000, 2))
    apply = jax.jit(lambda s, g, v, e, n: ffi.apply_coded(s, g, v, e, n, kind, 0, 5000))
    for pattern in PATTERNS:
        old, new = pair("bfloat16", 5000, pattern)
        coded = sparse.compare_coded(old, new, kind)
        sizes, gaps, values, escapes = encode(jnp.asarray(old), jnp.asarray(new))
        assert [int(s) for s in sizes] == [coded.count, coded.gaps.size, coded.escapes.size]
        for stream, expected in ((gaps, coded.gaps), (values, coded.values), (escapes, coded.escapes)):
            host = np.asarray(stream)
            assert same_bits(host[: expected.size], expected)
            assert not host[expected.size :].any()
        room = 0 if kind != ULP else 5000
        assert same_bits(apply(jnp.asarray(old), *stack_coded(coded, (5100, 5000, room))), new)


@needs_ffi
def test_ffi_reads_its_operands_without_a_copy_of_them() -> None:
    old = jnp.zeros((64, 64), jnp.bfloat16)
    compiled = jax.jit(lambda a, b: ffi.encode(a, b, 16, 100, 900, False, 1)).lower(old, old).compile()
    text = compiled.as_text()
    assert text is not None and "copy(" not in text and "convert(" not in text


def test_a_refused_registration_is_one_line_and_plain_xla(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RuntimeError("handler was built against a newer API")

    monkeypatch.setattr(jax.ffi, "register_ffi_target", refuse)
    ffi.available.cache_clear()
    try:
        with caplog.at_level(logging.INFO):
            assert not ffi.available()
            assert not ffi.available()
        assert implementation_for(jnp.zeros(1).sharding) == "xla"
        assert len([r for r in caplog.records if "plain XLA" in r.message]) == 1
        old, new = pair("bfloat16", 2000, "one percent")
        form = implementation_for(jnp.zeros(1).sharding)
        found = jax.jit(lambda a, b: encode_local(a, b, 200, form))(jnp.asarray(old), jnp.asarray(new))
        expected = sparse.compare(old, new)
        assert same_bits(np.asarray(found[1])[: expected.count], expected.positions)
    finally:
        monkeypatch.undo()
        ffi.available.cache_clear()
