"""Sizes and rules of one engine."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.sharding.presets.quantization import Quantization

KvPolicy = Literal["keep", "recompute"]
Dtype = Literal["float32", "bfloat16"]


class EngineConfigError(UserError, ValueError):
    """An engine configuration that can't work: names the field, the value found and the value expected."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """How one engine batches, samples and swaps.

    slots: samples that decode together; a multiple of the mesh's tensor-parallel size.
    max_len: tokens of prompt and generation together that a slot has room for.
    prefill_lengths: prompt buckets; ``max_len`` is always one of them.
    prefill_rows: prompts in one prefill call.
    attend_lengths: cache lengths that a decode step may be compiled for; ``max_len`` is always one of them.
    decode_steps_per_dispatch: decode steps in one call of the jitted step; swaps, aborts and pauses happen
        between calls. Stop tokens and limits are exact for any value.
    max_stop_ids: room for stop ids per slot, the engine's end-of-sequence ids included.
    deterministic: one prefill shape and one decode shape, so that a request's tokens and log-probs depend
        neither on its neighbours nor on its slot.
    kv_policy: what a swap does to running samples: keep their cache, or compute it again with new weights.
    extras: named per-token arrays to record beside the log-probs; known: ``entropy``.
    version_probe: the weights carry a version stamp per layer (``inference.probe``), and every forward pass
        reports the least and the greatest stamp it used.
    quantization: how the layers' matrices are held and travel; None leaves them in the engine's dtype.
    adapters: LoRA adapters travel and stand beside their base matrices and are merged in every step; without
        it the trainer merges them.
    seed: the run seed of the random keys.
    """

    slots: int = 64
    max_len: int = 256
    prefill_lengths: tuple[int, ...] = (32, 128)
    prefill_rows: int = 8
    attend_lengths: tuple[int, ...] = ()
    decode_steps_per_dispatch: int = 4
    max_stop_ids: int = 4
    max_waiting: int = 4096
    eos_token_ids: tuple[int, ...] = ()
    compute_dtype: Dtype = "float32"
    deterministic: bool = False
    kv_policy: KvPolicy = "keep"
    extras: tuple[str, ...] = ()
    version_probe: bool = False
    quantization: Quantization | None = None
    adapters: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("slots", "prefill_rows", "decode_steps_per_dispatch", "max_waiting"):
            if getattr(self, name) < 1:
                raise EngineConfigError(f"engine.{name}: expected >= 1, got {getattr(self, name)}")
        if self.max_len < 2:
            raise EngineConfigError(f"engine.max_len: expected >= 2, got {self.max_len}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise EngineConfigError(
                f"engine.compute_dtype: expected float32 or bfloat16, got {self.compute_dtype!r}"
            )
        if self.kv_policy not in ("keep", "recompute"):
            raise EngineConfigError(f"engine.kv_policy: expected keep or recompute, got {self.kv_policy!r}")
        if len(self.eos_token_ids) > self.max_stop_ids:
            raise EngineConfigError(
                f"engine.max_stop_ids: expected >= {len(self.eos_token_ids)} (number of eos_token_ids), "
                f"got {self.max_stop_ids}"
            )
        unknown = sorted(set(self.extras) - {"entropy"})
        if unknown:
            raise EngineConfigError(f"engine.extras: expected names out of ['entropy'], got {unknown[0]!r}")

    @property
    def prefill_buckets(self) -> tuple[int, ...]:
        """Prompt lengths that prefill is compiled for, ascending; one in deterministic mode."""
        return self._buckets(self.prefill_lengths)

    @property
    def attend_buckets(self) -> tuple[int, ...]:
        """Cache lengths that a decode step is compiled for, ascending; one in deterministic mode."""
        return self._buckets(self.attend_lengths)

    def _buckets(self, lengths: tuple[int, ...]) -> tuple[int, ...]:
        if self.deterministic:
            return (self.max_len,)
        return tuple(sorted({n for n in lengths if 0 < n < self.max_len} | {self.max_len}))


def bucket_of(length: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds ``length``; raises ValueError when none does."""
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(f"length {length} is over the largest bucket {buckets[-1]}")
