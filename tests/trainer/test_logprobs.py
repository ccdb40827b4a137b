"""Log-probs against a plain numpy decoder, against the dense form, packed against unpacked, engine's forward."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.model import logits as engine_logits
from jaxrl_sync.sharding.presets.qwen3 import convert, trainer_shapes
from jaxrl_sync.trainer.logprobs import token_logprobs
from tests.trainer.batches import (
    MODEL,
    ROWS,
    SEQ_LEN,
    build,
    host,
    micros,
    numpy_logprobs,
    packed,
    samples,
    trainer_config,
)


def _by_segment(batch: Any, logp: Any) -> dict[int, Any]:
    """Log-probs of every sample, cut out of the packed rows of one micro-batch."""
    return {p.sample: np.asarray(logp)[p.row, p.start : p.start + p.length] for p in batch.placements}


def test_the_state_of_the_model_is_the_trainer_tree() -> None:
    for tied in (False, True):
        model = dataclasses.replace(MODEL, tied_embeddings=tied)
        _, state = build(trainer_config(), model=model)
        shapes = trainer_shapes(model)
        assert jax.tree.structure(state.params) == jax.tree.structure(shapes)
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state.params, shapes)
        )


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
@pytest.mark.parametrize("tied", [False, True])
def test_packed_rows_agree_with_a_plain_decoder(tied: bool, temperature: float) -> None:
    model = dataclasses.replace(MODEL, tied_embeddings=tied)
    step, state = build(trainer_config(temperature=temperature), model=model)
    items = samples(12, seed=3, longest=14)
    batch = packed(items)
    assert batch.micro_batches == 1
    assert max(p.segment for p in batch.placements) > 1
    found = _by_segment(batch, step.logprobs(state.params, micros(step, batch)[0]))
    params = host(state.params)
    for i, item in enumerate(items):
        np.testing.assert_allclose(
            found[i], numpy_logprobs(params, model, item.tokens, temperature), atol=2e-5, rtol=0
        )


def test_packed_rows_equal_unpacked_rows() -> None:
    step, state = build(trainer_config())
    items = samples(8, seed=5, longest=9)
    together, alone = packed(items, rows=2), packed(items)
    two = trainer_config(rows=2)
    step_two, _ = build(two)
    assert (together.micro_batches, alone.micro_batches) == (2, 1) or together.micro_batches == 1
    assert max(p.segment for p in together.placements) > max(p.segment for p in alone.placements) == 1
    rows = [step_two.logprobs(state.params, m) for m in micros(step_two, together)]
    apart = _by_segment(alone, step.logprobs(state.params, micros(step, alone)[0]))
    for p in together.placements:
        mine = np.asarray(rows[p.micro])[p.row, p.start : p.start + p.length]
        np.testing.assert_allclose(mine, apart[p.sample], atol=2e-6, rtol=0)


@pytest.mark.invariant(43)
@pytest.mark.parametrize("tp", [2, 8])
def test_trainer_and_engine_agree_on_the_same_weights(tp: int) -> None:
    """Same fp32 weights in the engine's tree and the engine's own forward: 2e-5 in log-prob."""
    step, state = build(trainer_config())
    batch = packed(samples(6, seed=9))
    found = _by_segment(batch, step.logprobs(state.params, micros(step, batch)[0]))
    tree = convert(host(state.params), MODEL, tp, jnp.float32)
    for i, item in enumerate(samples(6, seed=9)):
        dense = engine_logits(tree, MODEL, jnp.asarray(item.tokens)[None], jnp.dtype(jnp.float32))[0]
        logp = np.asarray(jax.nn.log_softmax(dense))[np.arange(len(item) - 1), item.tokens[1:]]
        np.testing.assert_allclose(found[i][1:], logp, atol=2e-5, rtol=0)
        assert found[i][0] == 0.0


def _dense(hidden: Any, head: Any, targets: Any, temperature: float) -> Any:
    logp = jax.nn.log_softmax((hidden @ head) / (temperature or 1.0))
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("chunk", [1, 8, 32, 100])
def test_chunked_logprobs_equal_dense_ones_with_their_gradients(chunk: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (3, SEQ_LEN, 8))
    head = jax.random.normal(keys[1], (8, 20))
    targets = jax.random.randint(keys[2], (3, SEQ_LEN), 0, 20)
    weights = jax.random.normal(keys[3], (3, SEQ_LEN))

    def chunked(h: Any, w: Any) -> Any:
        return token_logprobs(h, w, targets, 0.8, chunk)

    def value(function: Any) -> Any:
        return jax.grad(lambda h, w: jnp.sum(function(h, w)[0] * weights), (0, 1))(hidden, head)

    def dense(h: Any, w: Any) -> Any:
        return _dense(h, w, targets, 0.8)

    for mine, plain in zip(chunked(hidden, head), dense(hidden, head), strict=True):
        np.testing.assert_allclose(mine, plain, atol=1e-5)
    for mine, plain in zip(value(chunked), value(dense), strict=True):
        np.testing.assert_allclose(mine, plain, atol=3e-5)


def _sizes(jaxpr: Any) -> set[int]:
    """Element counts of everything a jaxpr computes, inner jaxprs included."""
    found = {int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars}
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= _sizes(inner)
    return found


def test_logits_of_the_whole_batch_never_exist() -> None:
    model = dataclasses.replace(MODEL, vocab_size=512)
    step, state = build(trainer_config(logprob_chunk=8), model=model)
    micro = micros(step, packed(samples(4)))[0]
    jaxpr = jax.make_jaxpr(lambda p, a, m: step.accumulate(p, a, m))(state.params, step.zeros(), micro)
    largest = max(_sizes(jaxpr.jaxpr))
    assert ROWS * 8 * 512 <= largest < ROWS * SEQ_LEN * 512


def test_a_chunk_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence length 10: expected a multiple of the log-prob chunk 4"):
        token_logprobs(jnp.zeros((1, 10, 2)), jnp.zeros((2, 3)), jnp.zeros((1, 10), int), 1.0, 4)
