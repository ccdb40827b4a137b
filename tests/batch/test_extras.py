"""Named per-token arrays stay at their tokens: continued, cut, in turns, packed, in the frame."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from jaxrl_sync.batch.frame import BatchHeader, decode_batch, encode_batch
from jaxrl_sync.batch.pack import PackConfig, PackError, pack, unpack
from jaxrl_sync.batch.rollout import Episode, Reward, RolloutError, Sample, Turn


def choices(tokens: Any) -> Any:
    """Two router choices per token, [T, 2], each a function of the token."""
    tokens = np.asarray(tokens)
    return np.stack([tokens * 2, tokens * 3 + 1], axis=-1).astype(np.uint8)


def turn(prompt: list[int], tokens: list[int], **changes: Any) -> Turn:
    n = len(tokens)
    extras = (
        {"router": choices(tokens), "entropy": np.array(tokens, np.float32) / 4} if n else {"entropy": []}
    )
    settings: dict[str, Any] = {
        "prompt": prompt,
        "tokens": tokens,
        "logprobs": np.full(n, -0.5),
        "versions": np.full(n, 2),
        "extras": extras,
        **changes,
    }
    return Turn(**settings)


def sample_of(*turns: Turn) -> Sample:
    return Episode("u", "g", 0, "life", 2, turns, Reward(1.0)).sample(0.5)


def check_aligned(tokens: Any, mask: Any, extras: Any) -> None:
    assert np.array_equal(extras["router"], np.where(mask[:, None], choices(tokens), 0))
    assert np.array_equal(extras["entropy"], np.where(mask, tokens / 4, 0).astype(np.float32))


@pytest.mark.invariant(44)
def test_extras_stay_at_their_tokens_from_the_engine_to_the_frame() -> None:
    interrupted = (
        turn([9, 8], [1, 2]).followed_by(turn([], [])).followed_by(turn([], [3], finish_reason="length"))
    )
    assert interrupted.finish_reason == "length" and list(interrupted.tokens) == [1, 2, 3]
    samples = [
        sample_of(interrupted, turn([7], [4, 5]), turn([6, 6], [])),
        sample_of(turn([9], [11, 12, 13])),
        sample_of(turn([9, 9, 9], [20, 21, 22, 23, 24, 25, 26])).truncated(6),
    ]
    for s in samples:
        check_aligned(s.tokens, s.loss_mask, s.extras)
        assert s.extras["router"].dtype == np.uint8 and not s.extras["router"].flags.writeable
    batch = pack(samples, PackConfig(1, 1, 12))
    header = BatchHeader(1, 0, batch.micro_batches, 1, 12, batch.num_valid_tokens)
    frame = decode_batch(encode_batch(header, batch.for_rank(0)))
    segments = unpack(frame.fields)
    assert batch.micro_batches == 2 and len(segments) == 3
    assert sorted(len(s["tokens"]) for s in segments) == [4, 6, 10]
    for segment in segments:
        check_aligned(segment["tokens"], segment["loss_mask"], segment)


def test_extras_of_another_length_or_of_no_number_are_refused_by_name() -> None:
    with pytest.raises(RolloutError, match=r"extras 'entropy' is float64 \(1,\), .* each of 2 tokens"):
        turn([1], [2, 3], extras={"entropy": [0.5]})
    with pytest.raises(RolloutError, match="extras 'entropy'"):
        turn([1], [2, 3], extras={"entropy": ["a", "b"]})


def test_turns_and_samples_that_disagree_on_their_extras_are_refused() -> None:
    plain = turn([1], [2], extras={})
    with pytest.raises(RolloutError, match="expected the same names for all tokens"):
        sample_of(turn([1], [2]), plain)
    wide = turn([1], [2], extras={"router": np.ones((1, 3)), "entropy": np.ones(1, np.float32)})
    with pytest.raises(RolloutError, match="extras 'router' is .*expected one dtype and shape"):
        turn([1], [2]).followed_by(wide)
    with pytest.raises(PackError, match="sample 'u' has extras {}, expected .*entropy"):
        pack([sample_of(turn([1], [2])), sample_of(plain)], PackConfig(1, 1, 8))
    with pytest.raises(PackError, match="extras 'versions' has the name of a field"):
        pack([sample_of(turn([1], [2], extras={"versions": [1]}))], PackConfig(1, 1, 8))
