"""Log-probs against a numpy decoder, the dense form, unpacked rows and the engine's own forward."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxrl_sync.inference.model import logits as engine_logits
from jaxrl_sync.sharding.presets.qwen3 import RopeScaling, convert, trainer_shapes
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
    for tied, normed in ((False, True), (True, True), (False, False)):
        model = dataclasses.replace(MODEL, tied_embeddings=tied, qk_norm=normed)
        _, state = build(trainer_config(), model=model)
        shapes = trainer_shapes(model)
        assert str(jax.tree.structure(state.params)) == str(jax.tree.structure(shapes))
        assert jax.tree.all(
            jax.tree.map(lambda a, b: a.shape == b.shape and a.dtype == b.dtype, state.params, shapes)
        )


LLAMA3 = RopeScaling(8.0, 1.0, 4.0, 8)


@pytest.mark.parametrize(
    ("changes", "temperature"),
    [
        ({}, 1.0),
        ({"tied_embeddings": True}, 0.7),
        ({}, 0.0),
        ({"qk_norm": False}, 1.0),
        ({"qk_norm": False, "rope_theta": 100.0, "rope_scaling": LLAMA3}, 1.0),
    ],
)
def test_packed_rows_agree_with_a_plain_decoder(changes: dict[str, Any], temperature: float) -> None:
    model = dataclasses.replace(MODEL, **changes)
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
    items = samples(6, seed=9)
    batch = packed(items)
    found = _by_segment(batch, step.logprobs(state.params, micros(step, batch)[0]))
    tokens = np.stack([np.pad(item.tokens, (0, SEQ_LEN - len(item))) for item in items])

    @jax.jit
    def engine(params: Any) -> Any:
        tree = convert(params, MODEL, tp, jnp.float32)
        return jax.nn.log_softmax(engine_logits(tree, MODEL, jnp.asarray(tokens), jnp.dtype(jnp.float32)))

    dense = np.asarray(engine(host(state.params)))
    for i, item in enumerate(items):
        logp = dense[i, np.arange(len(item) - 1), item.tokens[1:]]
        np.testing.assert_allclose(found[i][1:], logp, atol=2e-5, rtol=0)
        assert found[i][0] == 0.0


def _dense(hidden: Any, head: Any, targets: Any, temperature: float) -> Any:
    logp = jax.nn.log_softmax((hidden @ head) / (temperature or 1.0))
    entropy = -jnp.sum(jnp.exp(logp) * logp, -1)
    return jnp.take_along_axis(logp, targets[..., None], -1)[..., 0], entropy


@pytest.mark.parametrize("chunk", [1, 8, 100])
def test_chunked_logprobs_equal_dense_ones_with_their_gradients(chunk: int) -> None:
    keys = jax.random.split(jax.random.key(0), 4)
    hidden = jax.random.normal(keys[0], (3, SEQ_LEN, 8))
    head = jax.random.normal(keys[1], (8, 20))
    targets = jax.random.randint(keys[2], (3, SEQ_LEN), 0, 20)
    weights = jax.random.normal(keys[3], (3, SEQ_LEN))

    def with_gradients(function: Any) -> Any:
        def total(h: Any, w: Any) -> Any:
            logp, entropy = function(h, w, targets)
            return jnp.sum(logp * weights), (logp, entropy)

        return jax.jit(jax.grad(total, (0, 1), has_aux=True))(hidden, head)

    mine = with_gradients(lambda h, w, t: token_logprobs(h, w, t, 0.8, chunk))
    plain = with_gradients(lambda h, w, t: _dense(h, w, t, 0.8))
    for a, b in zip(jax.tree.leaves(mine), jax.tree.leaves(plain), strict=True):
        np.testing.assert_allclose(a, b, atol=3e-5)


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
    model = dataclasses.replace(MODEL, vocab_size=4096)
    step, state = build(trainer_config(logprob_chunk=8), model=model)
    micro = micros(step, packed(samples(4)))[0]
    assert ROWS * 8 * 4096 == 1 << 18  # logits of one chunk
    jaxpr = jax.make_jaxpr(lambda p, a, m: step.accumulate(p, a, m))(state.params, step.zeros(), micro)
    largest = max(_sizes(jaxpr.jaxpr))
    assert 1 << 18 <= largest < ROWS * SEQ_LEN * 4096


def test_a_chunk_that_does_not_divide_is_an_error() -> None:
    with pytest.raises(ValueError, match="sequence length 10: expected a multiple of the log-prob chunk 4"):
        token_logprobs(jnp.zeros((1, 10, 2)), jnp.zeros((2, 3)), jnp.zeros((1, 10), int), 1.0, 4)
