"""The loop's bookkeeping: every decision about groups, with no I/O, clock or randomness of its own.

The asyncio components are shells around this one object and the simulator of the tests drives it too. Every
method that ends samples does so whole, before its caller can await anything: a completion that races with a
cancellation finds its group gone.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

from jaxrl_sync.orchestrator import admission
from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.errors import BarrenError, FlowError
from jaxrl_sync.orchestrator.flow import Fate, Flow, Kind, Permits
from jaxrl_sync.orchestrator.groups import EngineView, OpenGroup, ReadyGroup, Record
from jaxrl_sync.orchestrator.source import Draw, Source
from jaxrl_sync.transfer.version import Version

_AHEAD = 0.5
_MAX_LOSSES = 8


class Book:
    """All groups of one run from admission to shipping. ``step`` is the next batch to ship."""

    def __init__(self, config: LoopConfig, source: Source, step: int) -> None:
        self.config, self.source, self.step = config, source, step
        self.flow: dict[Kind, Flow] = {"train": Flow(), "eval": Flow()}
        self.permits = Permits(config.permits)
        self.open: dict[int, OpenGroup] = {}
        self.queue: list[ReadyGroup] = []
        self.retries: collections.deque[tuple[Draw, int]] = collections.deque()
        self.reasons: collections.Counter[str] = collections.Counter()
        self.records: collections.deque[Record] = collections.deque(maxlen=256)
        self.details: dict[str, str] = {}
        self.late = 0
        self.prompts_given_up = 0
        self.eval_waiting = 0
        self.draining = False
        self._loads: collections.Counter[str] = collections.Counter()
        self._losses: collections.Counter[int] = collections.Counter()
        self._in_flight: collections.Counter[Kind] = collections.Counter()
        self._failed_in_row = 0
        self._empty_in_row = 0
        self._next_gid = 0

    # Admission

    def admit(self, engines: Sequence[EngineView], now: float) -> OpenGroup | None:
        """Open one training group on the least loaded engine that may take it; None if none may.

        ``engines`` are those that serve; an engine whose version leaves no room within the staleness bound is
        passed over, whatever the others may take.
        """
        if self.draining or not self._train_permits_free():
            return None
        outstanding = self.outstanding
        fit = [e for e in engines if self._takes_more(e) and self._room(e.version.number, outstanding) > 0]
        prompt = self._next_prompt() if fit else None
        if prompt is None:
            return None
        engine = self._least_loaded(fit)
        draw, attempt = prompt
        return self._open(
            "train", draw, attempt, engine, self.config.group_size, now, self.config.group_timeout_s
        )

    def admit_eval(
        self, engine: EngineView, item: int, samples: int, tag: Any, now: float
    ) -> OpenGroup | None:
        """Open one evaluation group on ``engine`` if permits allow; evaluation never waits for staleness."""
        if self.permits.free < samples or not self._eval_share_free(samples):
            return None
        timeout_s = self.config.eval.timeout_s
        return self._open("eval", Draw(item, item, 0), 0, engine, samples, now, timeout_s, tag)

    def room(self, version: int) -> int:
        """Samples that staleness still lets in on ``version``."""
        return self._room(version, self.outstanding)

    def done_with(self, version: int) -> bool:
        """Whether all that ``version`` may generate is generated and scored (the end of a turn)."""
        if any(g.kind == "train" for g in self.open.values()):
            return False
        over = self.draining or (self.source.exhausted and not self.retries)
        return over or self._within_bound(version, self.outstanding) <= 0

    @property
    def outstanding(self) -> int:
        """Training samples that will want a place in a batch: those of open groups and queued ones."""
        whole = self.config.batch_by == "groups"
        queued = sum(g.size if whole else g.samples for g in self.queue)
        return queued + sum(g.size for g in self.open.values() if g.kind == "train")

    def load(self, engine: str) -> int:
        """Samples running on ``engine``."""
        return self._loads[engine]

    def in_flight(self, kind: Kind) -> int:
        """Samples of ``kind`` that hold a permit."""
        return self._in_flight[kind]

    # Members of an open group

    def arrive(self, gid: int, index: int, version: int) -> OpenGroup | None:
        """Sample ``index`` is generated, its last token on ``version``; its permit returns.

        Returns the group, or None if the group was cancelled before (the late sample is only counted).
        """
        group = self.open.get(gid)
        if group is None or group.members[index] != "running":
            self.late += 1
            return None
        group.members[index] = "arrived"
        group.completed_version = max(group.completed_version, version)
        self._release(group, 1)
        return group

    def lose(self, gid: int, index: int, fate: Fate, reason: str, detail: str = "") -> OpenGroup | None:
        """Sample ``index`` ends without a result (or its scoring failed); the others of its group go on.

        ``reason`` is one of a few words that are counted; ``detail`` is what error messages show of it.
        """
        group = self.open.get(gid)
        if group is None or group.members[index] not in ("running", "arrived"):
            self.late += 1
            return None
        self._end_members(group, [index], fate, reason)
        if detail:
            self.details[reason] = detail[:300]
        return group

    def cancel(self, gid: int, fate: Fate, reason: str) -> OpenGroup | None:
        """End all of a group at once, arrived members too; permits return. None if it is gone already."""
        group = self.open.pop(gid, None)
        if group is None:
            return None
        alive = [i for i, m in enumerate(group.members) if m in ("running", "arrived")]
        self._end_members(group, alive, fate, reason)
        return group

    # End of a group

    def accept(self, gid: int, payload: Any, nbytes: int = 0) -> bool:
        """Queue the survivors of a complete group; False if it is gone or too old for the next batch."""
        group = self._take_complete(gid)
        if group is None:
            return False
        survivors = group.count("arrived")
        self.flow[group.kind] = self.flow[group.kind].settle("accepted", survivors)
        if group.kind == "eval":
            self.flow["eval"] = self.flow["eval"].ship(survivors)
            return True
        self._failed_in_row = self._empty_in_row = 0
        ready = ReadyGroup(
            group.gid,
            group.draw,
            group.attempt,
            group.version,
            max(group.completed_version, group.version.number),
            survivors,
            group.size,
            payload,
            nbytes,
        )
        self.queue.append(ready)
        return ready not in self.sweep()

    def filter(self, gid: int, reason: str) -> bool:
        """A complete group carries nothing to learn from: its prompt is consumed without training."""
        group = self._take_complete(gid)
        if group is None:
            return False
        self._settle(group, "filtered", group.count("arrived"), reason)
        self._give_up(group.draw, reason, failed=False)
        return True

    def fail(self, group: OpenGroup, reason: str, *, retry: bool = True) -> None:
        """No sample of ``group`` is left: issue its prompt again, or give it up after the retry cap."""
        self.open.pop(group.gid, None)
        if group.kind == "eval":
            return
        if retry and group.attempt < self.config.retry_cap:
            self.retries.append((group.draw, group.attempt + 1))
        else:
            self._give_up(group.draw, reason)

    # What time and versions do to groups

    def stale_groups(self) -> list[int]:
        """Open training groups that no batch from ``step`` on may take; evaluation is never stale."""
        return [g.gid for g in self.open.values() if g.kind == "train" and self._is_stale(g.version)]

    def drop_stale(self, gid: int) -> OpenGroup | None:
        """Cancel one stale open group; its prompt comes again, up to the retry cap."""
        group = self.cancel(gid, "cancelled", "stale")
        if group is not None:
            self.fail(group, "stale")
        return group

    def expired_groups(self, now: float, stood_s: Mapping[str, float] | None = None) -> list[int]:
        """Open groups past their timeout; ``stood_s``: how long engines (by name) have stood still in all."""
        stood = stood_s or {}
        return [
            g.gid for g in self.open.values() if g.age_s(now, stood.get(g.engine, g.stood_s)) > g.timeout_s
        ]

    def drop_expired(self, gid: int) -> OpenGroup | None:
        """Cancel one group that takes too long; its prompt is given up (it would take as long again)."""
        group = self.cancel(gid, "cancelled", "timeout")
        if group is not None:
            self.fail(group, "timeout", retry=False)
        return group

    def groups_on(self, engine: str) -> list[int]:
        """Open groups with members that still run on ``engine``."""
        return [g.gid for g in self.open.values() if g.engine == engine and not g.complete]

    def drop_lost(self, gid: int, reason: str) -> OpenGroup | None:
        """A group's engine is gone: its samples are counted as errored and its prompt is issued again.

        That is no attempt of the prompt's, unless it is there every time that an engine is lost.
        """
        group = self.cancel(gid, "errored", reason)
        if group is not None and group.kind == "train":
            self._losses[group.draw.position] += reason == "engine_lost"
            if self._losses[group.draw.position] > _MAX_LOSSES:
                self.fail(group, reason)
            else:
                self.retries.append((group.draw, group.attempt))
        return group

    def sweep(self) -> list[ReadyGroup]:
        """Drop queued groups that are too old for ``step``; their prompts come again, up to the retry cap."""
        stale = [g for g in self.queue if self._is_stale(g.version)]
        for group in stale:
            self.queue.remove(group)
            self.flow["train"] = self.flow["train"].drop_queued(group.samples)
            self._note("train", group.gid, group.samples, "dropped", "stale")
            if group.attempt < self.config.retry_cap:
                self.retries.append((group.draw, group.attempt + 1))
            else:
                self._give_up(group.draw, "stale")
        return stale

    # Batches

    def ready(self) -> bool:
        """Whether ``cut`` would give a batch now."""
        return bool(self._next_batch())

    def cut(self) -> list[ReadyGroup]:
        """Take the batch of ``step``, oldest dispatch first, and move on to the next step; [] if there is
        none.

        The prompts of the batch are consumed, so ``source.cursor()`` read after this belongs to the batch.
        """
        batch = self._next_batch()
        if not batch:
            return []
        taken = {g.gid for g in batch}
        self.queue = [g for g in self.queue if g.gid not in taken]
        self.flow["train"] = self.flow["train"].ship(sum(g.samples for g in batch))
        for group in batch:
            self._losses.pop(group.draw.position, None)
            self.source.consume(group.draw.position)
        self.step += 1
        self.sweep()
        return batch

    def ended(self) -> bool:
        """Whether no further batch can come: all steps shipped, or the data ended and nothing is left."""
        if self.step > self.config.steps:
            return True
        return self._data_ended() and not self._next_batch()

    def idle(self) -> bool:
        """Nothing in flight, queued, waiting to be issued again or waiting to be evaluated."""
        return not (self.open or self.queue or self.retries or self.eval_waiting)

    def check(self) -> None:
        """Raise ``FlowError`` unless the counters agree with the groups themselves."""
        groups = self.open.values()
        held = sum(g.count("running") for g in groups)
        found = {"permits": held, "loads": held, "queued": sum(g.samples for g in self.queue)}
        loads = sum(self._loads.values())
        counted = {"permits": self.permits.held, "loads": loads, "queued": self.flow["train"].queued}
        for kind in ("train", "eval"):
            found[kind] = sum(g.count("running") + g.count("arrived") for g in groups if g.kind == kind)
            counted[kind] = self.flow[kind].running
        if found != counted:
            raise FlowError(f"groups hold {found}, the counters say {counted}")

    def _next_batch(self) -> list[ReadyGroup]:
        if self.step > self.config.steps or self._must_wait():
            return []
        self.queue.sort(key=lambda g: g.order)
        by_groups = self.config.batch_by == "groups"
        wanted = self.config.prompts_per_step if by_groups else self.config.samples_per_step
        batch: list[ReadyGroup] = []
        have = 0
        for group in self.queue:
            batch.append(group)
            have += 1 if by_groups else group.samples
            if have >= wanted:
                return batch
        return batch if self._data_ended() and self.config.last_batch == "short" else []

    def _must_wait(self) -> bool:
        """Whether the batch waits for running groups, which their timeout bounds.

        Either the policy asks not to let them grow too old, or the data is over and only they can tell
        whether this batch is the last one.
        """
        train = [g for g in self.open.values() if g.kind == "train"]
        if self.source.exhausted and len(self.queue) <= self.config.prompts_per_step:
            return bool(train)
        if self.config.stale_policy == "drop":
            return False
        return any(self._is_stale(g.version, self.step + 1) for g in train)

    def _data_ended(self) -> bool:
        running = any(g.kind == "train" for g in self.open.values())
        return self.source.exhausted and not self.retries and not running

    def _takes_more(self, engine: EngineView) -> bool:
        """An engine gets half as much again as it has slots: none idles, and nothing ages in its queue."""
        return self._loads[engine.name] < engine.slots * (1 + _AHEAD)

    def _room(self, version: int, outstanding: int) -> int:
        depth = self.config.pipeline_depth or self.config.steps
        ahead = depth * self.config.samples_per_step - outstanding
        return min(ahead, self._within_bound(version, outstanding))

    def _within_bound(self, version: int, outstanding: int) -> int:
        return admission.capacity(
            step=self.step,
            version=version,
            bound=self.config.staleness_bound,
            samples_per_step=self.config.samples_per_step,
            outstanding=outstanding,
            last_step=self.config.steps,
        )

    def _is_stale(self, version: Version, step: int | None = None) -> bool:
        return admission.staleness(step or self.step, version.number) > self.config.staleness_bound

    def _next_prompt(self) -> tuple[Draw, int] | None:
        if self.retries:
            return self.retries.popleft()
        draw = self.source.draw()
        return None if draw is None else (draw, 0)

    def _train_permits_free(self) -> bool:
        reserved = 0
        if self.eval_waiting:
            share = int(self.config.eval.share * self.permits.cap)
            reserved = max(0, min(share, self.eval_waiting) - self.in_flight("eval"))
        return self.permits.free - reserved >= self.config.group_size

    def _eval_share_free(self, samples: int) -> bool:
        share = max(samples, int(self.config.eval.share * self.permits.cap))
        return self.in_flight("eval") + samples <= share

    def _least_loaded(self, engines: Sequence[EngineView]) -> EngineView:
        return min(engines, key=lambda e: (self.load(e.name) / max(1, e.slots), e.name))

    def _open(
        self,
        kind: Kind,
        draw: Draw,
        attempt: int,
        engine: EngineView,
        size: int,
        now: float,
        timeout_s: float,
        tag: Any = None,
    ) -> OpenGroup:
        self.permits = self.permits.acquire(size)
        self._loads[engine.name] += size
        self._in_flight[kind] += size
        self.flow[kind] = self.flow[kind].submit(size)
        gid = self._next_gid
        self._next_gid += 1
        group = OpenGroup(
            gid, kind, draw, attempt, engine.name, engine.version, now, timeout_s, ["running"] * size, tag
        )
        group.stood_s = engine.stood_s
        self.open[gid] = group
        return group

    def _release(self, group: OpenGroup, n: int) -> None:
        self.permits = self.permits.release(n)
        self._loads[group.engine] -= n
        self._in_flight[group.kind] -= n

    def _end_members(self, group: OpenGroup, indices: Sequence[int], fate: Fate, reason: str) -> None:
        holding = sum(group.members[i] == "running" for i in indices)
        for i in indices:
            group.members[i] = "errored" if fate == "errored" else "cancelled"
        self._release(group, holding)
        self._settle(group, fate, len(indices), reason)

    def _take_complete(self, gid: int) -> OpenGroup | None:
        group = self.open.get(gid)
        if group is None or not group.complete or not group.count("arrived"):
            return None
        return self.open.pop(gid)

    def _settle(self, group: OpenGroup, fate: Fate, n: int, reason: str) -> None:
        self.flow[group.kind] = self.flow[group.kind].settle(fate, n)
        if n:
            self._note(group.kind, group.gid, n, fate, reason)

    def _note(self, kind: Kind, gid: int, n: int, fate: Fate, reason: str) -> None:
        self.records.append(Record(kind, gid, n, fate, reason))
        self.reasons[f"{kind}/{fate}/{reason}"] += n

    def _give_up(self, draw: Draw, reason: str, *, failed: bool = True) -> None:
        """Forfeit a prompt that gave nothing; failures in a row count one by one, empty groups by batches."""
        self._losses.pop(draw.position, None)
        self.source.forfeit(draw.position)
        self.prompts_given_up += failed
        self._failed_in_row += failed
        self._empty_in_row += 1
        cap = self.config.barren_cap
        if self._failed_in_row >= cap or self._empty_in_row >= cap * self.config.prompts_per_step:
            raise BarrenError(
                f"{self._empty_in_row} prompts in a row gave nothing to train on (cap: {cap} that fail or "
                f"{cap} batches that are filtered); the last one, item {draw.item}, ended as: "
                f"{self.details.get(reason, reason)}"
            )
