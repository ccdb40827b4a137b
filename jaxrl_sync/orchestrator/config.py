"""What the loop needs to know, as frozen dataclasses; ``loop_config`` makes them from the run's config."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from jaxrl_sync.config import RunConfig
from jaxrl_sync.sharding.errors import UserError


class LoopConfigError(UserError, ValueError):
    """Loop settings that exclude each other."""

    exit_code = 2


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How tokens are drawn; ``top_k`` 0 and ``top_p`` 1 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    max_tokens: int = 64

    def as_request(self, stop_token_ids: tuple[int, ...], max_tokens: int) -> dict[str, Any]:
        """The ``sampling`` table of one engine request, seeded by the run seed and the request id."""
        table = dataclasses.asdict(self)
        return {**table, "max_tokens": max_tokens, "stop_token_ids": list(stop_token_ids), "seed": None}


@dataclasses.dataclass(frozen=True)
class EvalConfig:
    """When and how the policy is evaluated; ``every_steps`` 0 leaves only the first and the last version."""

    every_steps: int = 0
    prompts: int = 64
    samples: int = 1
    timeout_s: float = 180.0
    pin: bool = False
    """Pin the version at the hub meanwhile."""
    share: float = 0.5
    """Largest part of the permits and of the engines that evaluation may hold while training wants them."""
    sampling: SamplingConfig = SamplingConfig(temperature=0.0)


@dataclasses.dataclass(frozen=True)
class LoopConfig:
    """Batch, staleness, permits and deadlines of one run. A *sample* is one member of a group."""

    steps: int
    staleness_bound: int
    prompts_per_step: int
    group_size: int
    mode: Literal["sync", "one_step_off", "async"] = "async"
    """``sync``: nothing is generated until every engine that serves holds the newest version;
    ``one_step_off``: an engine is asked to swap once the batch of its version is complete."""
    seed: int = 0
    max_in_flight: int = 0
    """Permits, in samples, of training and evaluation together; 0: as many as the staleness bound can use."""
    pipeline_depth: int = 0
    """Batches' worth of samples that may run or wait beyond what is shipped, whatever staleness allows: what
    would only wait is generated later, on newer weights. 0: as many as the staleness bound lets in."""
    lead: int = 1
    """Batches that may be shipped ahead of the trainer's committed version."""
    publish_every: int = 1
    retry_cap: int = 2
    barren_cap: int = 32
    """Prompts in a row that give nothing before the run ends."""
    filter_uniform: bool = False
    normalize_std: bool = True
    stale_policy: Literal["wait", "drop"] = "wait"
    """What a batch does about running groups that it would make too stale: ``wait`` for them (at most their
    timeout), so that slow prompts are trained as often as they are sampled; or let them be dropped."""
    batch_by: Literal["groups", "samples"] = "groups"
    last_batch: Literal["short", "drop"] = "short"
    """What happens to the rest when the data ends before the steps do."""
    epochs: int | None = None
    """Passes over a finite data set; None goes round for ever."""
    checkpoint_every_steps: int = 0
    pause_mode: Literal["keep", "wait", "abort"] = "keep"
    """``keep`` swaps between two decode steps; ``wait`` lets running samples end before; ``abort`` cuts them
    off and resumes them on the new weights."""
    group_timeout_s: float = 120.0
    swap_timeout_s: float = 60.0
    step_timeout_s: float = 180.0
    """How long a batch may wait for its acknowledgement, a colocated engine's turn before it included."""
    stand_s: float = 0.0
    """How long a colocated engine may stand still for a batch; ``group_timeout_s`` doesn't run meanwhile."""
    start_timeout_s: float = 240.0
    engine_wait_s: float = 120.0
    """How long the loop goes on without a single engine that serves."""
    trainer_wait_s: float = 30.0
    """How long the loop goes on while the hub's directory lacks a trainer process."""
    hub_timeout_s: float = 30.0
    score_timeout_s: float = 60.0
    task_threads: int = 8
    """Calls of the task (prompts, environments, scores) that may run at once."""
    shutdown_timeout_s: float = 20.0
    log_interval_s: float = 1.0
    keep_batches: bool = False
    poll_s: float = 0.5
    sampling: SamplingConfig = SamplingConfig()
    eval: EvalConfig = EvalConfig()

    def __post_init__(self) -> None:
        if self.max_in_flight and self.max_in_flight < max(self.group_size, self.eval.samples):
            largest = max(self.group_size, self.eval.samples)
            raise LoopConfigError(
                f"loop.inflight_groups allows {self.max_in_flight} samples, which can't hold one group of "
                f"{largest} (loop.group_size={self.group_size}, eval.samples={self.eval.samples})"
            )
        if self.staleness_bound < self.publish_every - 1:
            raise LoopConfigError(
                f"sync.every_steps={self.publish_every} needs loop.staleness_bound >= "
                f"{self.publish_every - 1}, found {self.staleness_bound}: the steps between two publishes "
                "train on older samples"
            )

    @property
    def permits(self) -> int:
        """Samples that may be in flight at once."""
        wanted = (self.staleness_bound + 1) * self.prompts_per_step * self.group_size
        return self.max_in_flight or max(wanted, self.eval.samples)

    @property
    def samples_per_step(self) -> int:
        """Samples of one full batch."""
        return self.prompts_per_step * self.group_size


def loop_config(run: RunConfig) -> LoopConfig:
    """The loop's part of the resolved config."""
    loop, sampling = run.loop, run.loop.sampling
    train = SamplingConfig(sampling.temperature, sampling.top_k, sampling.top_p, sampling.max_tokens)
    return LoopConfig(
        steps=run.run.steps,
        seed=run.run.seed,
        staleness_bound=loop.staleness_bound,
        mode=run.sync.mode,
        prompts_per_step=loop.prompts_per_step,
        group_size=loop.group_size,
        max_in_flight=loop.inflight_groups * loop.group_size,
        pipeline_depth=loop.pipeline_depth,
        lead=loop.target_lag,
        publish_every=run.sync.every_steps,
        retry_cap=loop.retry_cap,
        barren_cap=loop.max_consecutive_drops,
        filter_uniform=loop.drop_uniform_groups,
        normalize_std=run.loss.normalize_std,
        stale_policy=loop.stale_policy,
        batch_by=loop.batch_by,
        last_batch=loop.last_batch,
        epochs=loop.epochs,
        engine_wait_s=loop.engine_wait_s,
        trainer_wait_s=loop.trainer_wait_s,
        score_timeout_s=loop.task_timeout_s,
        task_threads=loop.task_threads,
        checkpoint_every_steps=run.trainer.checkpoint_every_steps,
        pause_mode=run.sync.pause_mode,
        group_timeout_s=loop.group_timeout_s,
        swap_timeout_s=loop.swap_timeout_s,
        step_timeout_s=loop.step_timeout_s + _turn_s(run),
        stand_s=0.0 if run.engine.placement == "disaggregated" else loop.step_timeout_s + _turn_s(run),
        start_timeout_s=run.run.start_timeout_s,
        keep_batches=run.run.keep_batches,
        sampling=train,
        eval=EvalConfig(
            every_steps=run.eval.every_steps,
            prompts=run.eval.prompts,
            samples=run.eval.samples,
            timeout_s=run.eval.timeout_s,
            pin=run.eval.pin,
            share=run.eval.share,
            sampling=dataclasses.replace(train, temperature=run.eval.temperature),
        ),
    )


def _turn_s(run: RunConfig) -> float:
    """How long a batch may wait until an engine in the trainer's processes has ended what it must: an
    evaluation that holds its version, then what ``sync.pause_mode`` lets end."""
    if run.engine.placement == "disaggregated":
        return 0.0
    return run.eval.timeout_s + (run.loop.group_timeout_s if run.sync.pause_mode == "wait" else 0.0)
