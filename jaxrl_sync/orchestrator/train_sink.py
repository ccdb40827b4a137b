"""TrainSink: complete groups in, batches to the trainer out.

Two coroutines. ``run_ship`` cuts the batch of each step once the trainer is at most ``lead`` steps behind
and packs it in a thread; ``run_send`` sends packed steps one after the other and takes their
acknowledgements. The frames of a step are made once: a broken connection sends the same bytes again.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jaxrl_sync.batch.connection import Ack
from jaxrl_sync.batch.frame import BatchHeader, encode_batch
from jaxrl_sync.batch.pack import PackConfig, pack
from jaxrl_sync.batch.rollout import Episode, Reward, Sample
from jaxrl_sync.orchestrator.admission import split_staleness
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.errors import DeadlineError
from jaxrl_sync.orchestrator.groups import OpenGroup, ReadyGroup
from jaxrl_sync.orchestrator.policy import Policy
from jaxrl_sync.orchestrator.scoring import Scored, Scorer
from jaxrl_sync.orchestrator.signal import Signal
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.orchestrator.trainer_link import TrainerLink

_PACK_S = 120.0


@dataclasses.dataclass(frozen=True, slots=True)
class TaskFacts:
    """One task's part of a shipped batch; ``tokens`` are those that are trained on."""

    groups: int
    samples: int
    tokens: int
    reward_mean: float
    components: Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True)
class BatchFacts:
    """What is known of one shipped batch, for metrics: counts per staleness and means over its samples."""

    step: int
    samples: int
    groups: int
    tokens: int
    loss_tokens: int
    reward_mean: float
    components: Mapping[str, float]
    extras: Mapping[str, float]
    tasks: Mapping[str, TaskFacts]
    staleness: Mapping[int, int]
    in_flight_mean: float
    in_queue_mean: float
    token_staleness_mean: float
    newest_staleness_mean: float
    oldest_staleness_mean: float
    multi_version: int
    truncated: int
    uniform_groups: int
    wait_batch_s: float
    wait_policy_s: float
    cut_at: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Packed:
    facts: BatchFacts
    frames: list[bytes]


OnStep = Callable[[BatchFacts, Ack, float], None]


class TrainSink:
    """Scores groups, queues them in the book, ships batches. ``on_step`` hears of each acknowledged step."""

    def __init__(
        self,
        config: LoopConfig,
        book: Book,
        policy: Policy,
        scorer: Scorer,
        link: TrainerLink,
        signal: Signal,
        labels: Sequence[str],
        on_cut: Callable[[], object],
        on_step: OnStep,
        on_wait: Callable[[str, float, float, int], None],
        keep: Callable[[int, list[bytes]], None] | None = None,
    ) -> None:
        self._config, self._book, self._policy = config, book, policy
        self._scorer, self._link, self._signal = scorer, link, signal
        self._on_cut, self._on_step, self._on_wait = on_cut, on_step, on_wait
        self._keep, self._labels = keep, tuple(labels)
        self._outbox: collections.deque[_Packed] = collections.deque()
        self.shipped_all = False
        self.told_last = False
        """Whether the trainer was told which batch is the last one; not if the data ended unexpectedly."""
        self.stopping = False
        self.sending = False
        self._began, self._trained_s = 0.0, 0.0
        self.done = False

    @property
    def outbox(self) -> int:
        """Packed steps that the trainer has not acknowledged."""
        return len(self._outbox)

    @property
    def trained_s(self) -> float:
        """How long steps were with the trainer in all, the one that is there now included."""
        return self._trained_s + (time.monotonic() - self._began if self.sending else 0.0)

    async def take(self, group: OpenGroup, episodes: dict[int, Episode]) -> None:
        """Score a complete group and queue or filter it; the group's own attempt fails if nobody survives."""
        scored = await self._scorer.score(group, episodes)
        if scored is None:
            if group.gid in self._book.open:
                self._book.fail(group, self._scorer.last_failure)
        elif scored.uniform and self._config.filter_uniform:
            self._book.filter(group.gid, "uniform")
        else:
            self._book.accept(group.gid, scored, scored.nbytes)
        self._signal.notify()

    async def run_ship(self) -> None:
        """Cut, pack and hand over every step in order; returns when no further batch can come."""
        while not self._book.ended():
            began = time.monotonic()
            await self._wait_policy()
            policy_s, waiting = time.monotonic() - began, time.monotonic()
            if not await self._wait_batch():
                break
            step, batch_s = self._book.step, time.monotonic() - waiting
            batch = self._book.cut()
            self._on_cut()
            self.told_last = self._book.ended()
            header = self._header(step, last=self.told_last)
            facts = _facts(step, batch, self._labels, batch_s, policy_s)
            samples = [s for g in batch for s in _scored(g).samples]
            frames = await in_thread(
                encode_frames,
                samples,
                self._pack_config(),
                header,
                self._keep,
                timeout_s=_PACK_S,
                what=f"the packing of step {step}",
            )
            self._outbox.append(_Packed(facts, frames))
            self._signal.notify()
        self.shipped_all = True
        self._signal.notify()

    async def run_send(self) -> None:
        """Send packed steps in order; returns once the last one is acknowledged."""
        while True:
            seen = self._signal.count
            if self._outbox and not self.stopping:
                await self._send(self._outbox[0])
            elif self.shipped_all and not self._outbox:
                break
            else:
                await self._signal.changed(seen, self._config.poll_s)
        self.done = True
        self._signal.notify()

    async def _send(self, packed: _Packed) -> None:
        self._began, self.sending = time.monotonic(), True
        ack = await self._link.send(packed.facts.step, packed.frames, self._config.step_timeout_s)
        self._outbox.popleft()
        took_s = time.monotonic() - self._began
        self._trained_s, self.sending = self._trained_s + took_s, False
        self._policy.commit(ack.number)
        self._on_step(packed.facts, ack, took_s)
        self._signal.notify()

    async def _wait_policy(self) -> None:
        """Until the trainer has committed all but ``lead`` of the shipped steps."""
        bound_s = (self._config.lead + 2) * self._config.step_timeout_s
        await self._signal.until(
            lambda: self._policy.committed >= self._book.step - 1 - self._config.lead,
            bound_s,
            lambda: f"the trainer to commit step {self._book.step - 1 - self._config.lead}",
        )

    async def _wait_batch(self) -> bool:
        """Until the batch of this step is there; False if none will come. Bounded by lack of progress."""
        began, quiet, last = time.time(), time.monotonic(), self._progress()
        config = self._config
        limit = config.group_timeout_s + config.engine_wait_s + config.score_timeout_s + config.stand_s
        while not self._book.ready():
            if self._book.ended():
                return False
            seen = self._signal.count
            await self._signal.changed(seen, self._config.poll_s)
            if self._progress() != last:
                quiet, last = time.monotonic(), self._progress()
            elif time.monotonic() - quiet > limit:
                raise DeadlineError(
                    f"no sample came for {limit:g} s while step {self._book.step} lacks a batch: "
                    f"{self._state()}"
                )
        self._on_wait("batch", began, time.time(), self._book.step)
        return True

    def _progress(self) -> tuple[int, ...]:
        flow, given_up = self._book.flow["train"], self._book.prompts_given_up
        return (flow.accepted, flow.filtered, flow.dropped, given_up, self._policy.committed)

    def _state(self) -> str:
        flow = self._book.flow["train"]
        return (
            f"{flow.running} samples run, {flow.queued} wait in {len(self._book.queue)} groups of "
            f"{self._config.prompts_per_step}, version {self._policy.label}"
        )

    def _header(self, step: int, last: bool) -> BatchHeader:
        every = self._config.checkpoint_every_steps
        return BatchHeader(
            step=step,
            data_rank=0,
            micro_batches=1,
            rows=self._link.rows,
            seq_len=self._link.seq_len,
            num_valid_tokens=0,
            checkpoint=last or (every > 0 and step % every == 0),
            last=last,
            cursor=self._book.source.cursor(),
        )

    def _pack_config(self) -> PackConfig:
        return PackConfig(self._link.data_ranks, self._link.rows, self._link.seq_len, overlong="truncate")


def _scored(group: ReadyGroup) -> Scored:
    payload: Any = group.payload
    assert isinstance(payload, Scored)
    return payload


def encode_frames(
    samples: list[Sample],
    config: PackConfig,
    header: BatchHeader,
    keep: Callable[[int, list[bytes]], None] | None = None,
) -> list[bytes]:
    """One frame per data rank; the same samples in the same order give the same bytes."""
    packed = pack(samples, config)
    whole = dataclasses.replace(
        header, micro_batches=packed.micro_batches, num_valid_tokens=packed.num_valid_tokens
    )
    frames = [
        encode_batch(dataclasses.replace(whole, data_rank=rank), packed.for_rank(rank))
        for rank in range(config.data_ranks)
    ]
    if keep is not None:
        keep(header.step, frames)
    return frames


def _task_facts(batch: list[ReadyGroup], labels: Sequence[str]) -> dict[str, TaskFacts]:
    """What each task has in a batch, by label; tasks without a group in it are left out."""
    groups: dict[str, list[ReadyGroup]] = {}
    for group in batch:
        groups.setdefault(labels[group.draw.part], []).append(group)
    return {label: _facts_of_task(groups[label]) for label in labels if label in groups}


def _facts_of_task(groups: list[ReadyGroup]) -> TaskFacts:
    rewards = [r for g in groups for r in _scored(g).rewards]
    return TaskFacts(
        groups=len(groups),
        samples=len(rewards),
        tokens=sum(s.num_loss_tokens for g in groups for s in _scored(g).samples),
        reward_mean=_mean([r.value for r in rewards]),
        components=_component_means(rewards),
    )


def _component_means(rewards: list[Reward]) -> dict[str, float]:
    names = sorted({n for r in rewards for n in r.components})
    return {n: _mean([r.components[n] for r in rewards if n in r.components]) for n in names}


def _facts(
    step: int, batch: list[ReadyGroup], labels: Sequence[str], wait_batch_s: float, wait_policy_s: float
) -> BatchFacts:
    samples = [s for g in batch for s in _scored(g).samples]
    rewards = [r for g in batch for r in _scored(g).rewards]
    total = [s.staleness(step) for s in samples]
    parts = [
        split_staleness(step, g.version.number, g.completed_version) for g in batch for _ in range(g.samples)
    ]
    sampled = [s.versions[s.loss_mask] for s in samples]
    ages = [step - 1 - v for v in sampled if len(v)]
    loss_tokens = sum(s.num_loss_tokens for s in samples)
    return BatchFacts(
        step=step,
        samples=len(samples),
        groups=len(batch),
        tokens=sum(len(s) for s in samples),
        loss_tokens=loss_tokens,
        reward_mean=_mean([r.value for r in rewards]),
        components=_component_means(rewards),
        tasks=_task_facts(batch, labels),
        extras=_extras_mean(samples),
        staleness=dict(sorted(collections.Counter(total).items())),
        in_flight_mean=_mean([a for a, _ in parts]),
        in_queue_mean=_mean([b for _, b in parts]),
        token_staleness_mean=sum(int(a.sum()) for a in ages) / max(1, loss_tokens),
        newest_staleness_mean=_mean([int(a.min()) for a in ages]),
        oldest_staleness_mean=_mean([int(a.max()) for a in ages]),
        multi_version=sum(s.num_versions >= 2 for s in samples),
        truncated=sum(s.finish_reason == "length" for s in samples),
        uniform_groups=sum(_scored(g).uniform for g in batch),
        wait_batch_s=wait_batch_s,
        wait_policy_s=wait_policy_s,
        cut_at=time.time(),
    )


def _extras_mean(samples: list[Sample]) -> dict[str, float]:
    """Mean over all sampled tokens of each extra that has one number per token."""
    names = [name for name, values in samples[0].extras.items() if values.ndim == 1]
    tokens = max(1, sum(s.num_loss_tokens for s in samples))
    return {name: float(sum(s.extras[name][s.loss_mask].sum() for s in samples)) / tokens for name in names}


def _mean(values: list[float] | list[int]) -> float:
    return sum(values) / len(values) if values else 0.0
