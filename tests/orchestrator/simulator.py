"""A whole asynchronous run in fake time: the loop's own book and source, driven by a seeded schedule of
faults.

Nothing here sleeps or talks to anyone. Engines and the trainer are events on a heap; everything that
decides is ``Book``, ``DataSource`` and the admission arithmetic, which the asyncio components drive the
same way.
"""

from __future__ import annotations

import dataclasses
import heapq
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from jaxrl_sync.orchestrator.admission import split_staleness, staleness
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import EvalConfig, LoopConfig
from jaxrl_sync.orchestrator.groups import EngineView, OpenGroup, ReadyGroup
from jaxrl_sync.orchestrator.source import DataSource, MixedSource
from jaxrl_sync.transfer.version import Version

LINEAGE = "sim"


@dataclasses.dataclass(frozen=True)
class Faults:
    """Chances per sample or per group, and the times of engine deaths and of swaps that fail."""

    sample_error: float = 0.0
    never_ends: float = 0.0
    failing_items: frozenset[int] = frozenset()
    filtered: float = 0.0
    filtered_by_part: tuple[float, ...] = ()
    """In place of ``filtered``, one chance for each task of a mix."""
    late_completion: float = 0.0
    slow_items: frozenset[int] = frozenset()
    slow_factor: float = 1.0
    engine_deaths_s: tuple[float, ...] = ()
    swap_failure: float = 0.0
    eval_every: int = 0


@dataclasses.dataclass
class SimEngine:
    """One engine: the version it holds, None while it is down."""

    name: str
    number: int | None = 0


@dataclasses.dataclass
class Outcome:
    """What a run left behind."""

    batches: list[list[ReadyGroup]] = dataclasses.field(default_factory=list)
    staleness: Counter[int] = dataclasses.field(default_factory=Counter)
    evals: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    lengths_sampled: list[float] = dataclasses.field(default_factory=list)
    lengths_trained: list[float] = dataclasses.field(default_factory=list)
    cursors: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    trace: list[tuple[Any, ...]] = dataclasses.field(default_factory=list)
    max_bytes: int = 0
    elapsed_s: float = 0.0
    ended: bool = False


class Simulation:
    """Runs a book to its end; asserts after every event what must hold at every observable point."""

    def __init__(
        self,
        config: LoopConfig,
        *,
        seed: int,
        faults: Faults | None = None,
        size: int | None = None,
        engines: int = 2,
        start: int = 0,
        cursor: dict[str, Any] | None = None,
        train_s: float = 1.0,
        generate_s: float = 1.0,
        mix: Sequence[float] = (),
    ) -> None:
        self.config, self.faults = config, faults or Faults()
        self.rng = random.Random(seed)
        self.source: DataSource | MixedSource = DataSource(
            size, config.seed, epochs=config.epochs, cursor=None if mix else cursor
        )
        if mix:
            labels, sizes = [f"task-{k}" for k in range(len(mix))], [size] * len(mix)
            self.source = MixedSource.make(
                labels, mix, sizes, config.seed, epochs=config.epochs, cursor=cursor
            )
        self.book = Book(config, self.source, start + 1)
        self.engines = [SimEngine(f"engine-{i}", start) for i in range(engines)]
        self.committed = self.label = start
        self.training: int | None = None
        self.outbox: list[int] = []
        self.train_s, self.generate_s = train_s, generate_s
        self.now = 0.0
        self.outcome = Outcome()
        self._events: list[tuple[float, int, str, Any]] = []
        self._order = 0
        self._lengths: dict[int, float] = {}
        self._eval_left: dict[int, int] = {}

    def run(self, limit_s: float = 1e5) -> Outcome:
        """Until no further batch can come and all shipped ones are committed, or fake time runs out."""
        for at in self.faults.engine_deaths_s:
            self._push(at, "death", self.rng.randrange(len(self.engines)))
        self._push(0.0, "tick", None)
        while self._events and self.now < limit_s:
            self.now, _, kind, value = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(value)
            self._advance()
            self.book.check()
            if self.book.ended() and self.training is None and not self.outbox:
                self.outcome.ended = True
                break
        self.outcome.elapsed_s = self.now
        return self.outcome

    def shutdown(self) -> None:
        """Cancel what is open, as the dispatcher's close does."""
        for gid in list(self.book.open):
            self.book.cancel(gid, "cancelled", "shutdown")
        self.book.check()

    def _push(self, at: float, kind: str, value: Any) -> None:
        self._order += 1
        heapq.heappush(self._events, (at, self._order, kind, value))

    def _advance(self) -> None:
        for gid in self.book.expired_groups(self.now):
            assert self.book.drop_expired(gid) is not None
        self._ship()
        self._issue_eval()
        while True:
            views = [
                EngineView(e.name, Version(LINEAGE, e.number), 8)
                for e in self.engines
                if e.number is not None
            ]
            group = self.book.admit(views, self.now)
            if group is None:
                return
            self._play(group)

    def _ship(self) -> None:
        while self.committed >= self.book.step - 1 - self.config.lead:
            step = self.book.step
            batch = self.book.cut()
            if not batch:
                return
            for group in batch:
                age = staleness(step, group.version.number)
                assert age <= self.config.staleness_bound, "a trained group is older than the bound"
                assert sum(split_staleness(step, group.version.number, group.completed_version)) == age
                self.outcome.staleness[age] += group.samples
                self.outcome.lengths_trained.append(self._lengths[group.gid])
            assert [g.order for g in batch] == sorted(g.order for g in batch)
            self.outcome.batches.append(batch)
            self.outcome.cursors.append(self.source.cursor())
            self.outcome.trace.append((step, tuple(g.draw.position for g in batch)))
            self.outbox.append(step)
            for gid in self.book.stale_groups():
                assert self.book.drop_stale(gid) is not None
            self._train()

    def _train(self) -> None:
        if self.training is None and self.outbox:
            self.training = self.outbox.pop(0)
            self._push(self.now + self.train_s * self.rng.uniform(0.5, 1.5), "commit", self.training)

    def _on_tick(self, _: Any) -> None:
        self._push(self.now + 0.5, "tick", None)

    def _on_commit(self, step: int) -> None:
        assert step == self.committed + 1
        self.committed, self.training = step, None
        if step % self.config.publish_every == 0 or step == self.config.steps:
            self.label = step
            for gid in self.book.stale_groups():
                self.book.drop_stale(gid)
            for index in range(len(self.engines)):
                self._push(self.now + self.rng.uniform(0.01, 0.2), "swap", index)
            if self.faults.eval_every and step % self.faults.eval_every == 0:
                self._eval_left[step] = self.config.eval.prompts
                self.book.eval_waiting = sum(self._eval_left.values())
        self._issue_eval()
        self._train()

    def _on_swap(self, index: int) -> None:
        engine = self.engines[index]
        if engine.number is None:
            return
        if self.rng.random() < self.faults.swap_failure:
            self._push(self.now + 0.3, "swap", index)
        else:
            engine.number = self.label

    def _on_death(self, index: int) -> None:
        engine = self.engines[index]
        engine.number = None
        for gid in self.book.groups_on(engine.name):
            assert self.book.drop_lost(gid, "engine_lost") is not None
        self._push(self.now + 3.0, "restart", index)

    def _on_restart(self, index: int) -> None:
        self.engines[index].number = self.label

    def _issue_eval(self) -> None:
        for trigger in list(self._eval_left):
            while self._eval_left[trigger]:
                view = EngineView(self.engines[0].name, Version(LINEAGE, trigger), 8)
                item = self.config.eval.prompts - self._eval_left[trigger]
                group = self.book.admit_eval(view, item, self.config.eval.samples, trigger, self.now)
                if group is None:
                    break
                self._eval_left[trigger] -= 1
                self._play(group)
            if not self._eval_left[trigger]:
                del self._eval_left[trigger]
        self.book.eval_waiting = sum(self._eval_left.values())

    def _play(self, group: OpenGroup) -> None:
        faults = self.faults
        length = self.rng.expovariate(1.0) + 0.1
        if group.draw.item in faults.slow_items:
            length *= faults.slow_factor
        self._lengths[group.gid] = length
        self.outcome.lengths_sampled.append(length)
        for index in range(group.size):
            if self.rng.random() < faults.never_ends:
                continue
            at = self.now + self.generate_s * length * self.rng.uniform(0.8, 1.0)
            bad = group.draw.item in faults.failing_items or self.rng.random() < faults.sample_error
            self._push(at, "loss" if bad else "sample", (group, index))
            if self.rng.random() < faults.late_completion:
                self._push(at + 5.0, "sample", (group, index))

    def _filtered(self, group: OpenGroup) -> float:
        by_part = self.faults.filtered_by_part
        return by_part[group.draw.part] if by_part else self.faults.filtered

    def _on_sample(self, value: tuple[OpenGroup, int]) -> None:
        group, index = value
        self.book.arrive(group.gid, index, self.label)
        self._settle(group)

    def _on_loss(self, value: tuple[OpenGroup, int]) -> None:
        group, index = value
        self.book.lose(group.gid, index, "errored", "sample")
        self._settle(group)

    def _settle(self, group: OpenGroup) -> None:
        if group.gid not in self.book.open or not group.complete:
            return
        if not group.count("arrived"):
            self.book.fail(group, "sample")
        elif group.kind == "eval":
            self.book.accept(group.gid, None)
            self.outcome.evals.append((group.tag, group.draw.item))
        elif self.rng.random() < self._filtered(group):
            self.book.filter(group.gid, "uniform")
        else:
            self.book.accept(group.gid, None, 100)
        self.outcome.max_bytes = max(self.outcome.max_bytes, sum(g.nbytes for g in self.book.queue))
        self._issue_eval()


def mix_of(outcome: Outcome) -> Counter[int]:
    """Trained groups by task."""
    return Counter(g.draw.part for batch in outcome.batches for g in batch)


def loop_config(**changes: Any) -> LoopConfig:
    """A small loop: 4 prompts of 4 samples per step."""
    base: dict[str, Any] = {
        "steps": 20,
        "staleness_bound": 2,
        "prompts_per_step": 4,
        "group_size": 4,
        "group_timeout_s": 20.0,
        "eval": EvalConfig(prompts=5, timeout_s=50.0),
    }
    return LoopConfig(**{**base, **changes})
