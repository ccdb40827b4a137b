"""Packing of samples into rows of a fixed length, for every data rank of one training step.

Samples go by first-fit decreasing into rows of ``seq_len`` tokens (the token budget of a row; a micro-batch
has ``rows`` of them per data rank). Rows left over are filled by splitting rows that hold several samples, so
that a row is empty only when there are fewer samples than rows. Rows are then dealt to data ranks, heaviest
first, to the rank that holds the fewest tokens. All of it is deterministic: the same samples in the same
order give the same bytes.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from jaxrl_sync.batch.rollout import Sample
from jaxrl_sync.sharding.errors import UserError

# Per-token fields of a batch, [micro, rows, S] each, in wire order.
FIELDS: Mapping[str, np.dtype[Any]] = {
    "tokens": np.dtype(np.int32),
    "positions": np.dtype(np.int32),
    "segments": np.dtype(np.int32),
    "loss_mask": np.dtype(np.bool_),
    "advantages": np.dtype(np.float32),
    "rollout_logprobs": np.dtype(np.float32),
    "versions": np.dtype(np.int32),
}

Fields = dict[str, npt.NDArray[Any]]


class PackError(UserError, ValueError):
    """A batch that cannot be packed as configured: names the sample, its length and the limit."""


@dataclasses.dataclass(frozen=True, slots=True)
class PackConfig:
    """Shape of a packed batch.

    ``rows`` per micro-batch and data rank, ``seq_len`` tokens per row. ``min_micro_batches`` keeps shapes
    (and compiled functions) the same from step to step. ``overlong`` says what happens to a sample of more
    than ``seq_len`` tokens: ``error`` raises ``PackError``, ``truncate`` keeps its head and counts it.
    """

    data_ranks: int
    rows: int
    seq_len: int
    min_micro_batches: int = 1
    overlong: Literal["error", "truncate"] = "error"

    def __post_init__(self) -> None:
        for name in ("data_ranks", "rows", "seq_len", "min_micro_batches"):
            if getattr(self, name) < 1:
                raise PackError(f"{name}={getattr(self, name)}, expected at least 1")
        if self.overlong not in ("error", "truncate"):
            raise PackError(f"overlong={self.overlong!r}, expected 'error' or 'truncate'")


@dataclasses.dataclass(frozen=True, slots=True)
class Placement:
    """Where one sample lies: its row is ``fields[data_rank, micro, row]``, ``start`` and ``length`` in it."""

    sample: int
    data_rank: int
    micro: int
    row: int
    segment: int
    start: int
    length: int


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PackedBatch:
    """One step's batch: ``fields`` are [data_ranks, micro, rows, S].

    ``num_valid_tokens`` is the global loss denominator N: trainable tokens of all ranks and micro-batches,
    counted from the samples before any correction masks anything.
    """

    config: PackConfig
    micro_batches: int
    num_valid_tokens: int
    fields: Fields
    placements: tuple[Placement, ...]
    truncated_samples: int
    truncated_tokens: int

    def for_rank(self, data_rank: int) -> Fields:
        """Views [micro, rows, S] of the fields that one data rank trains on."""
        return {name: array[data_rank] for name, array in self.fields.items()}

    @property
    def fill(self) -> float:
        """Share of token places that hold a token."""
        segments = self.fields["segments"]
        return float((segments > 0).sum() / segments.size)


def pack(samples: Sequence[Sample], config: PackConfig) -> PackedBatch:
    """Packs samples into ``config``'s rows; raises ``PackError`` for no samples or an overlong one.

    Segment ids count from 1 in each row, 0 is padding; positions restart at 0 in every segment. The number
    of micro-batches is the same for every rank. Extras of the samples become fields under their own names,
    [data_ranks, micro, rows, S, ...]; all samples must have the same ones.
    """
    if not samples:
        raise PackError("no samples to pack, expected at least one")
    extras = _extra_kinds(samples)
    kept = [_fit(s, config) for s in samples]
    bins = _first_fit([len(s) for s in kept], config.seq_len)
    per_micro = config.data_ranks * config.rows
    micro_batches = max(config.min_micro_batches, -(-len(bins) // per_micro))
    bins = _spread(bins, [len(s) for s in kept], micro_batches * per_micro)
    placements = _deal(bins, [len(s) for s in kept], config, micro_batches)
    fields = _write(kept, placements, config, micro_batches, extras)
    lost = [len(s) - len(k) for s, k in zip(samples, kept, strict=True)]
    return PackedBatch(
        config=config,
        micro_batches=micro_batches,
        num_valid_tokens=sum(s.num_loss_tokens for s in kept),
        fields=fields,
        placements=tuple(placements),
        truncated_samples=sum(n > 0 for n in lost),
        truncated_tokens=sum(lost),
    )


def unpack(fields: Mapping[str, npt.NDArray[Any]]) -> list[Fields]:
    """The segments of packed fields [..., S], each a dictionary of [T] arrays, in row order.

    Extras [..., S, ...] come back as [T, ...].
    """
    at = fields["segments"].ndim - 1
    rows = {name: array.reshape(-1, *array.shape[at:]) for name, array in fields.items()}
    out: list[Fields] = []
    for r, segments in enumerate(rows["segments"]):
        for segment in range(1, int(segments.max(initial=0)) + 1):
            where = segments == segment
            out.append({name: array[r][where] for name, array in rows.items()})
    return out


def _extra_kinds(samples: Sequence[Sample]) -> dict[str, tuple[np.dtype[Any], tuple[int, ...]]]:
    """Name -> dtype and shape per token of the samples' extras; ``PackError`` unless they all agree."""
    kinds = {name: (values.dtype, values.shape[1:]) for name, values in samples[0].extras.items()}
    for sample in samples:
        found = {name: (values.dtype, values.shape[1:]) for name, values in sample.extras.items()}
        if found != kinds:
            raise PackError(f"sample {sample.uid!r} has extras {found}, expected {kinds} as the others")
    taken = sorted(kinds.keys() & FIELDS.keys())
    if taken:
        raise PackError(f"extras {taken[0]!r} has the name of a field, expected another one")
    return kinds


def _fit(sample: Sample, config: PackConfig) -> Sample:
    if len(sample) <= config.seq_len:
        return sample
    if config.overlong == "error":
        raise PackError(
            f"sample {sample.uid!r} has {len(sample)} tokens, expected at most trainer seq_len ="
            f" {config.seq_len} (or overlong = 'truncate')"
        )
    return sample.truncated(config.seq_len)


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """First-fit decreasing: sample indices per row."""
    bins: list[list[int]] = []
    free: list[int] = []
    first = 0  # rows before this one cannot take even the shortest sample
    shortest = min(lengths)
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        while first < len(free) and free[first] < shortest:
            first += 1
        for b in range(first, len(bins)):
            if free[b] >= lengths[i]:
                bins[b].append(i)
                free[b] -= lengths[i]
                break
        else:
            bins.append([i])
            free.append(capacity - lengths[i])
    return bins


def _spread(bins: list[list[int]], lengths: Sequence[int], rows: int) -> list[list[int]]:
    """Splits the heaviest rows of several samples until there are ``rows`` or none can be split."""
    done: list[list[int]] = [b for b in bins if len(b) == 1]
    heap = [(-sum(lengths[i] for i in b), n, b) for n, b in enumerate(bins) if len(b) > 1]
    heapq.heapify(heap)
    count = len(bins)
    while heap and len(heap) + len(done) < rows:
        _, _, b = heapq.heappop(heap)
        for half in (b[0::2], b[1::2]):
            if len(half) > 1:
                heapq.heappush(heap, (-sum(lengths[i] for i in half), count, half))
            else:
                done.append(half)
            count += 1
    return done + [b for _, _, b in heap]


def _deal(
    bins: list[list[int]], lengths: Sequence[int], config: PackConfig, micro_batches: int
) -> list[Placement]:
    """Deals rows to ranks, heaviest first to the lightest; a rank's rows go round its micro-batches."""
    weight = {n: sum(lengths[i] for i in b) for n, b in enumerate(bins)}
    order = sorted(range(len(bins)), key=lambda n: (-weight[n], bins[n]))
    ranks = [(0, 0, d) for d in range(config.data_ranks)]  # (rows taken, tokens taken, rank)
    placements: list[Placement] = []
    for n in order:
        taken, tokens, d = heapq.heappop(ranks)
        row, micro = divmod(taken, micro_batches)
        start = 0
        for segment, i in enumerate(sorted(bins[n]), start=1):
            placements.append(Placement(i, d, micro, row, segment, start, lengths[i]))
            start += lengths[i]
        heapq.heappush(ranks, (taken + 1, tokens + weight[n], d))
    return sorted(placements, key=lambda p: p.sample)


def _write(
    samples: Sequence[Sample],
    placements: Sequence[Placement],
    config: PackConfig,
    micro_batches: int,
    extras: Mapping[str, tuple[np.dtype[Any], tuple[int, ...]]],
) -> Fields:
    shape = (config.data_ranks, micro_batches, config.rows, config.seq_len)
    fields: Fields = {name: np.zeros(shape, dtype) for name, dtype in FIELDS.items()}
    fields |= {name: np.zeros((*shape, *more), dtype) for name, (dtype, more) in extras.items()}
    for p in placements:
        sample = samples[p.sample]
        at = (p.data_rank, p.micro, p.row, slice(p.start, p.start + p.length))
        fields["tokens"][at] = sample.tokens
        fields["positions"][at] = np.arange(p.length)
        fields["segments"][at] = p.segment
        fields["loss_mask"][at] = sample.loss_mask
        fields["advantages"][at] = np.where(sample.loss_mask, sample.advantage, 0.0)
        fields["rollout_logprobs"][at] = np.where(sample.loss_mask, sample.logprobs, 0.0)
        fields["versions"][at] = sample.versions
        for name in extras:
            fields[name][at] = sample.extras[name]
    return fields
