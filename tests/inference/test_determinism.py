"""Deterministic mode: neither neighbours nor slot nor batching show in a sample, bit for bit."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest

from jaxrl_sync.inference.engine import Engine
from jaxrl_sync.inference.request import GroupResult, Request, Sample
from tests.inference.engine_helpers import SMALL, ask, generate, make_engine, run_until

FIXED = dataclasses.replace(SMALL, slots=24, deterministic=True, prefill_rows=6, extras=("entropy",))


def bits(sample: Sample) -> tuple[tuple[int, ...], bytes]:
    """Tokens and the bits of the log-probs."""
    return sample.tokens, np.array(sample.logprobs, np.float32).tobytes()


def groups() -> list[Request]:
    """Requests of many lengths, temperatures and filters."""
    rng = np.random.default_rng(5)
    requests = []
    for i in range(10):
        prompt = tuple(rng.integers(0, 24, rng.integers(1, 20)).tolist())
        more = {"top_k": 5} if i % 3 == 1 else {"top_p": 0.8} if i % 3 == 2 else {}
        temperature = float(rng.choice([0.0, 0.7, 1.0, 1.3]))
        requests.append(
            ask(f"g{i}", prompt, 1 + i % 4, temperature=temperature, max_tokens=12 - i % 5, **more)
        )
    return requests


@pytest.fixture(scope="module", params=[1, 2])
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    with make_engine(FIXED, tp=request.param) as engine:
        yield engine


@pytest.fixture(scope="module")
def alone(engine: Engine) -> list[GroupResult]:
    return [generate(engine, r)[0] for r in groups()]


@pytest.mark.parametrize("order", [0, 1, 2, 3])
def test_neighbours_slots_and_order_do_not_show(engine: Engine, alone: list[GroupResult], order: int) -> None:
    shuffled = np.random.default_rng(order).permutation(len(groups())).tolist()
    together = generate(engine, *(groups()[i] for i in shuffled))
    for i, result in zip(shuffled, together, strict=True):
        assert [bits(s) for s in result.samples] == [bits(s) for s in alone[i].samples]


def test_late_arrivals_do_not_show(engine: Engine, alone: list[GroupResult]) -> None:
    handles = []
    for request in groups():
        handles.append(engine.submit(request))
        engine.step()
    for result, expected in zip(run_until(engine, handles), alone, strict=True):
        assert [bits(s) for s in result.samples] == [bits(s) for s in expected.samples]


def test_steps_per_dispatch_do_not_show(engine: Engine, alone: list[GroupResult]) -> None:
    if engine._runner.mesh.shape["tp"] == 2:
        pytest.skip("one mesh is enough: the loop is the same")
    with make_engine(dataclasses.replace(FIXED, decode_steps_per_dispatch=5)) as other:
        for result, expected in zip(generate(other, *groups()), alone, strict=True):
            assert [bits(s) for s in result.samples] == [bits(s) for s in expected.samples]


@pytest.mark.invariant(40)
@pytest.mark.invariant(41)
@pytest.mark.invariant(44)
def test_interrupted_and_resumed_gives_the_same_tokens(engine: Engine, alone: list[GroupResult]) -> None:
    """Abort after a few tokens, then send the prompt with those tokens under the same id and the rest of the
    budget: positions continue, so the random bits do too; log-probs agree within rounding of the cache."""
    whole = alone[3].samples
    request = dataclasses.replace(groups()[3], n=1)
    handle = engine.submit(request)
    engine.step()
    engine.step()
    assert engine.abort([request.request_id]) == 1
    (first,) = run_until(engine, [handle])
    part = first.samples[0]
    assert part.finish_reason == "abort" and 0 < len(part.tokens) < request.sampling.max_tokens
    rest = dataclasses.replace(
        request,
        prompt=(*request.prompt, *part.tokens),
        sampling=dataclasses.replace(
            request.sampling, max_tokens=request.sampling.max_tokens - len(part.tokens)
        ),
    )
    last = generate(engine, rest)[0].samples[0]
    assert part.tokens + last.tokens == whole[0].tokens
    assert len(part.tokens + last.tokens) == request.sampling.max_tokens
    np.testing.assert_allclose(part.logprobs + last.logprobs, whole[0].logprobs, atol=1e-5)
    entropy = part.extras["entropy"] + last.extras["entropy"]
    np.testing.assert_allclose(entropy, whole[0].extras["entropy"], atol=1e-5)


@pytest.mark.invariant(40)
def test_pause_and_resume_give_the_same_bits(engine: Engine, alone: list[GroupResult]) -> None:
    handles = [engine.submit(r) for r in groups()]
    engine.step()
    paused = engine.pause("keep")
    assert engine.step() is None and paused.result(0) == "paused"
    again = engine.pause("keep")
    assert engine.step() is None and again.result(0) == "paused"
    resumed = engine.resume()
    results = run_until(engine, handles)
    assert resumed.result(0) == "ready"
    for result, expected in zip(results, alone, strict=True):
        assert [bits(s) for s in result.samples] == [bits(s) for s in expected.samples]
