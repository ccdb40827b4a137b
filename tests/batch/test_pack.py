"""Packing loses nothing, trains nothing twice and counts the same whatever the order."""

from __future__ import annotations

import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxrl_sync.batch.pack import FIELDS, PackConfig, PackedBatch, PackError, pack, unpack
from jaxrl_sync.batch.rollout import Sample
from tests.batch.strategies import make_sample, samples_and_config

Case = tuple[list[Sample], PackConfig]


def content(s: Sample) -> bytes:
    """What of a sample travels, as bytes that can be compared and sorted."""
    advantages = np.where(s.loss_mask, np.float32(s.advantage), np.float32(0))
    parts = (s.tokens, s.loss_mask, s.logprobs, s.versions, advantages, np.arange(len(s), dtype=np.int32))
    return b"|".join(p.tobytes() for p in parts)


def contents(batch: PackedBatch) -> list[bytes]:
    """The same of every segment of a batch."""
    names = ("tokens", "loss_mask", "rollout_logprobs", "versions", "advantages", "positions")
    return [b"|".join(seg[n].tobytes() for n in names) for seg in unpack(batch.fields)]


@given(samples_and_config())
def test_unpack_gives_back_every_sample_once(case: Case) -> None:
    samples, config = case
    batch = pack(samples, config)
    assert sorted(contents(batch)) == sorted(map(content, samples))
    for p in batch.placements:
        row = batch.fields["tokens"][p.data_rank, p.micro, p.row]
        assert row[p.start : p.start + p.length].tolist() == samples[p.sample].tokens.tolist()
    assert [p.sample for p in batch.placements] == list(range(len(samples)))


@pytest.mark.invariant(49)
@given(samples_and_config())
def test_padding_carries_no_gradient_and_no_rank_or_micro_batch_stays_empty(case: Case) -> None:
    samples, config = case
    batch = pack(samples, config)
    padding = batch.fields["segments"] == 0
    for name in ("loss_mask", "advantages", "tokens", "positions", "versions", "rollout_logprobs"):
        assert not batch.fields[name][padding].any(), name
    filled = batch.fields["segments"].any(-1)  # [ranks, micro, rows]
    cells = filled.size
    assert filled.sum() >= min(len(samples), cells), "a row is empty though a sample could fill it"
    rows_per_rank = filled.sum((1, 2))
    assert rows_per_rank.max() - rows_per_rank.min() <= 1, "rows are dealt evenly over ranks"
    per_micro = filled.sum(2)
    assert per_micro.max() - per_micro.min() <= 1, "and over micro-batches"


@pytest.mark.invariant(46)
@given(samples_and_config(), st.randoms(use_true_random=False), st.integers(1, 3), st.integers(1, 5))
def test_the_denominator_depends_on_the_samples_alone(
    case: Case, rng: random.Random, ranks: int, rows: int
) -> None:
    samples, config = case
    expected = sum(s.num_loss_tokens for s in samples)
    other = PackConfig(ranks, rows, config.seq_len + 3)
    shuffled = rng.sample(samples, len(samples))
    for batch in (pack(samples, config), pack(shuffled, config), pack(shuffled, other)):
        assert batch.num_valid_tokens == expected == batch.fields["loss_mask"].sum()
        assert sorted(contents(batch)) == sorted(map(content, samples))


@given(samples_and_config())
def test_the_same_samples_give_the_same_bytes(case: Case) -> None:
    samples, config = case
    first, second = pack(samples, config), pack(list(samples), config)
    for name, dtype in FIELDS.items():
        assert first.fields[name].dtype == dtype
        assert first.fields[name].tobytes() == second.fields[name].tobytes()
    assert first.placements == second.placements


@settings(max_examples=50)
@given(st.lists(st.integers(1, 64), min_size=64, max_size=200), st.integers(2, 4))
def test_tokens_are_balanced_over_ranks(lengths: list[int], ranks: int) -> None:
    batch = pack([make_sample(n, i) for i, n in enumerate(lengths)], PackConfig(ranks, 4, 64))
    tokens = (batch.fields["segments"] > 0).sum((1, 2, 3))
    assert tokens.max() - tokens.min() <= 64, "no further apart than one row"


def test_first_fit_fills_rows_well() -> None:
    rng = np.random.default_rng(0)
    samples = [make_sample(int(n), i) for i, n in enumerate(rng.integers(4, 40, 400))]
    batch = pack(samples, PackConfig(1, 8, 128))
    tokens = sum(len(s) for s in samples)
    assert batch.micro_batches <= -(-int(tokens / 0.95) // (8 * 128))
    assert batch.fill > 0.9


def test_segments_and_positions_of_a_row_by_hand() -> None:
    batch = pack([make_sample(3, 0), make_sample(2, 1), make_sample(4, 2)], PackConfig(1, 1, 8))
    assert batch.micro_batches == 2
    rows = {tuple(r) for r in batch.fields["segments"].reshape(-1, 8).tolist()}
    assert rows == {(1, 1, 1, 2, 2, 2, 2, 0), (1, 1, 0, 0, 0, 0, 0, 0)}
    assert batch.fields["positions"][0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2, 3, 0]


def test_an_overlong_sample_is_named_or_counted() -> None:
    samples = [make_sample(5, 0), make_sample(12, 1, name="train/17")]
    with pytest.raises(PackError, match="sample 'train/17' has 12 tokens, expected at most .* 8"):
        pack(samples, PackConfig(1, 2, 8))
    batch = pack(samples, PackConfig(1, 2, 8, overlong="truncate"))
    assert (batch.truncated_samples, batch.truncated_tokens) == (1, 4)
    assert batch.num_valid_tokens == samples[0].loss_mask.sum() + samples[1].loss_mask[:8].sum()


def test_configs_and_batches_that_cannot_be_are_refused() -> None:
    with pytest.raises(PackError, match="rows=0, expected at least 1"):
        PackConfig(1, 0, 8)
    with pytest.raises(PackError, match="overlong='drop'"):
        PackConfig(1, 1, 8, overlong="drop")  # type: ignore[arg-type]
    with pytest.raises(PackError, match="no samples to pack"):
        pack([], PackConfig(1, 1, 8))


def test_fewer_samples_than_ranks_still_gives_every_rank_its_shape() -> None:
    batch = pack([make_sample(3, 0)], PackConfig(4, 2, 8, min_micro_batches=2))
    for d in range(4):
        assert {a.shape for a in batch.for_rank(d).values()} == {(2, 2, 8)}
    assert batch.num_valid_tokens == batch.fields["loss_mask"].sum()
