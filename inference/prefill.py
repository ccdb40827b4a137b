"""Building prefill batches: rows of prompt tokens and the per-slot numbers that go with them. numpy only."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from jaxrl_sync.inference import plan
from jaxrl_sync.inference.config import EngineConfig, bucket_of
from jaxrl_sync.inference.plan import Prefill
from jaxrl_sync.inference.request import Request, hash32


@dataclasses.dataclass(frozen=True)
class Admission:
    """One prefill row: a group's prompt, or one running sample's tokens so far (``generated``).

    Slot ``slots[j]`` becomes sample ``first_sample + j``; ``generated`` has the tokens drawn already.
    """

    uid: int
    request: Request
    slots: tuple[int, ...]
    first_sample: int
    generated: tuple[int, ...] = ()


def build_prefills(admissions: Sequence[Admission], config: EngineConfig) -> tuple[Prefill, ...]:
    """Batches of at most ``config.prefill_rows`` rows, in order, each as short as a bucket allows."""
    rows = config.prefill_rows
    return tuple(_batch(admissions[i : i + rows], config) for i in range(0, len(admissions), rows))


def token_limit(request: Request, config: EngineConfig) -> int:
    """Tokens a sample of this request may generate: its own limit, within the slot."""
    return min(request.sampling.max_tokens, config.max_len - len(request.prompt))


def stop_ids(request: Request, config: EngineConfig) -> tuple[int, ...]:
    """Ids that end a sample, each once."""
    eos = () if request.sampling.ignore_eos else config.eos_token_ids
    return tuple(dict.fromkeys((*request.sampling.stop_token_ids, *eos)))


def _batch(admissions: Sequence[Admission], config: EngineConfig) -> Prefill:
    sequences = [(*a.request.prompt, *a.generated) for a in admissions]
    T = bucket_of(max(len(s) - 1 for s in sequences), config.prefill_buckets)
    tokens = np.zeros((config.prefill_rows, T), np.int32)
    row = np.full(config.slots, -1, np.int32)
    ints = np.zeros((config.slots, plan.NUM_INTS + config.max_stop_ids), np.int32)
    floats = np.zeros((config.slots, plan.NUM_FLOATS), np.float32)
    for i, (admission, sequence) in enumerate(zip(admissions, sequences, strict=True)):
        tokens[i, : len(sequence) - 1] = sequence[:-1]
        at = list(admission.slots)
        row[at] = i
        ints[at] = _slot_ints(admission, sequence, config)
        ints[at, plan.SAMPLE] = np.arange(admission.first_sample, admission.first_sample + len(at))
        floats[at] = (admission.request.sampling.temperature, admission.request.sampling.top_p)
    return Prefill(tokens, row, ints, floats)


def _slot_ints(admission: Admission, sequence: tuple[int, ...], config: EngineConfig) -> np.ndarray:
    """One slot's row of ``Prefill.ints``, the sample index left at 0."""
    request, sampling = admission.request, admission.request.sampling
    identity = (config.seed, hash32(request.request_id)) if sampling.seed is None else (sampling.seed, 0)
    stops = stop_ids(request, config)
    values = np.zeros(plan.NUM_INTS + config.max_stop_ids, np.int64)
    values[plan.TOKEN] = sequence[-1]
    values[plan.POSITION] = len(sequence) - 1
    values[plan.REMAINING] = token_limit(request, config) - len(admission.generated)
    values[plan.TOP_K] = sampling.top_k
    values[plan.SEED], values[plan.HASH] = identity
    values[plan.NUM_INTS :] = [*stops, *[-1] * (config.max_stop_ids - len(stops))]
    return values.astype(np.uint32).view(np.int32)
