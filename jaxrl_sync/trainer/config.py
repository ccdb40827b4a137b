"""What a trainer is told: mesh, numbers of the optimizer, the batch shape, the loss.

Plain frozen dataclasses without jax, so that the application can build and validate them in any process.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.sharding.errors import UserError

Anchor = Literal["rollout", "proximal"]
Correction = Literal["none", "clip", "tis_token", "tis_sequence", "masked_is", "decoupled"]


class TrainerConfigError(UserError, ValueError):
    """A trainer or loss setting that cannot work; the message names it, its value and what is expected."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class MeshConfig:
    """Sizes of the trainer's mesh axes; their product is the number of devices of all trainer processes."""

    dp: int = 1
    fsdp: int = 1
    tp: int = 1

    def __post_init__(self) -> None:
        for name in ("dp", "fsdp", "tp"):
            if getattr(self, name) < 1:
                raise TrainerConfigError(f"mesh.{name}={getattr(self, name)}: expected at least 1")

    @property
    def num_devices(self) -> int:
        return self.dp * self.fsdp * self.tp

    @property
    def batch_shards(self) -> int:
        """Number of pieces that the rows of a micro-batch are cut into."""
        return self.dp * self.fsdp


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
    """AdamW, global-norm clip and a learning-rate schedule in optimizer updates."""

    learning_rate: float = 1e-3
    schedule: Literal["constant", "cosine"] = "constant"
    warmup_steps: int = 0
    total_steps: int = 1000
    final_fraction: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0

    def __post_init__(self) -> None:
        if self.learning_rate < 0 or self.max_grad_norm <= 0:
            raise TrainerConfigError(
                f"learning_rate={self.learning_rate}, max_grad_norm={self.max_grad_norm}: "
                "expected >= 0 and > 0"
            )
        if self.schedule == "cosine" and self.total_steps <= self.warmup_steps:
            raise TrainerConfigError(
                f"total_steps={self.total_steps}: expected more than warmup_steps={self.warmup_steps} "
                "for a cosine schedule"
            )


@dataclasses.dataclass(frozen=True)
class TrainerConfig:
    """Mesh, numerics and the fixed shape of a micro-batch.

    ``rows`` counts the packed rows of one micro-batch over *all* data ranks, ``seq_len`` their tokens: the
    token budget of a micro-batch is ``rows * seq_len``. ``logprob_chunk`` tokens of every row get their
    logits at once. ``gather`` says when FSDP shards are gathered: all before the layer loop, or each in its
    layer. ``scan_unroll`` layers form one turn of that loop (on CPU a loop's backward pass costs up to twice
    that of the unrolled layers). ``extras`` names the per-token arrays that every batch carries beside the
    fields that the losses use; they reach stages and losses as float32 fields of the micro-batches.
    """

    mesh: MeshConfig = MeshConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    rows: int = 8
    seq_len: int = 128
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    remat: bool = False
    logprob_chunk: int = 128
    gather: Literal["step", "layer"] = "step"
    scan_unroll: int = 2
    init_std: float = 0.02
    temperature: float = 1.0
    extras: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.rows % self.mesh.batch_shards or self.rows < 1:
            raise TrainerConfigError(
                f"rows={self.rows}: expected a positive multiple of dp*fsdp={self.mesh.batch_shards}"
            )
        if self.seq_len < 2 or self.seq_len % min(self.logprob_chunk, self.seq_len):
            raise TrainerConfigError(
                f"seq_len={self.seq_len}: expected at least 2 and a multiple of "
                f"logprob_chunk={self.logprob_chunk}"
            )
        if self.temperature < 0:
            raise TrainerConfigError(f"temperature={self.temperature}: expected 0 (greedy) or more")


@dataclasses.dataclass(frozen=True)
class LossConfig:
    """The policy-gradient objective and its off-policy correction; formulas in ``losses.py``.

    ``anchor`` names the log-probs in the denominator of the clipped ratio. ``correction`` is explicit:
    ``none`` (on-policy only), ``clip`` (PPO/GRPO clip of the ratio), or an importance weight from the rollout
    policy: ``tis_token``, ``tis_sequence`` (truncated at ``is_cap``), ``masked_is`` (kept inside
    ``is_low..is_high``), ``decoupled`` (the whole weight, capped at ``is_cap`` if given). With anchor
    ``rollout`` the weight stands before a plain REINFORCE term, with anchor ``proximal`` before the clip.
    """

    anchor: Anchor = "rollout"
    correction: Correction = "none"
    clip_low: float = 0.2
    clip_high: float = 0.2
    dual_clip: float | None = None
    is_cap: float | None = 2.0
    is_low: float = 0.5
    is_high: float = 2.0
    geo_low: float | None = None
    geo_high: float | None = None
    kl_coef: float = 0.0
    kl_weighting: Literal["none", "importance"] = "none"
    entropy_coef: float = 0.0
    max_log_ratio: float = 20.0

    def __post_init__(self) -> None:
        if self.correction in ("tis_token", "tis_sequence") and self.is_cap is None:
            raise TrainerConfigError(
                f"loss.is_cap=None: expected a number for correction={self.correction!r}"
            )
        if self.correction == "decoupled" and self.anchor != "proximal":
            raise TrainerConfigError(
                f"loss.anchor={self.anchor!r}: expected 'proximal' for correction='decoupled'"
            )
        if self.dual_clip is not None and self.dual_clip <= 1:
            raise TrainerConfigError(f"loss.dual_clip={self.dual_clip}: expected more than 1")
        if (self.geo_low is None) != (self.geo_high is None):
            raise TrainerConfigError("loss.geo_low and loss.geo_high: expected both or neither")

    @property
    def needs_proximal(self) -> bool:
        """Whether the proximal stage has to run before the update."""
        return self.anchor == "proximal"

    @property
    def needs_reference(self) -> bool:
        """Whether the reference stage has to run before the update."""
        return self.kl_coef != 0.0


def validate_loss(bound: int, loss: LossConfig) -> None:
    """Refuse asynchrony (``bound`` > 0 optimizer updates of staleness) without an explicit correction."""
    if bound <= 0:
        return
    if loss.correction == "none":
        raise TrainerConfigError(
            f"loop.staleness_bound={bound} needs an explicit loss.correction, got 'none'; "
            "expected clip, tis_token, tis_sequence, masked_is or decoupled"
        )
    if loss.correction == "clip" and loss.anchor == "proximal":
        raise TrainerConfigError(
            f"loop.staleness_bound={bound} with loss.correction='clip' and loss.anchor='proximal' leaves "
            "the staleness uncorrected; expected anchor 'rollout' or another correction"
        )
