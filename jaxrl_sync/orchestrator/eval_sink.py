"""EvalSink: one evaluation per trigger, each pinned to one version, while training goes on.

An evaluation reserves engines that hold one version at least as new as its trigger; reserved engines are
not swapped until it ends, and those that take versions by themselves are told to hold it. Its groups share
the permits of training and are never dropped as stale. Results keep their item number, so that a lost engine
costs only the items it had.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from jaxrl_sync.batch.rollout import Episode, Reward
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.dispatcher import RolloutDispatcher
from jaxrl_sync.orchestrator.engines import (
    Engine,
    EngineClient,
    EngineGoneError,
    EngineRefusedError,
    EngineSet,
)
from jaxrl_sync.orchestrator.errors import DeadlineError
from jaxrl_sync.orchestrator.groups import EngineView, OpenGroup
from jaxrl_sync.orchestrator.prompts import Prompts
from jaxrl_sync.orchestrator.scoring import Scorer
from jaxrl_sync.orchestrator.signal import Signal
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version

_MAX_RESTARTS = 3
_MAX_TRIES = 3
_HOLD_S = 5.0
_AGAIN_S = 0.1
_PIN_S = 60.0
logger = logging.getLogger("jaxrl_sync.orchestrator")


class Pins(Protocol):
    """What ``HubClient`` is to evaluations; blocking, thread-safe."""

    def pin(self, version: Version, by: str) -> None: ...
    def unpin(self, version: Version, by: str) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class EvalScore:
    """What one task reached in an evaluation."""

    accuracy: float
    reward: float
    samples: int


@dataclasses.dataclass(frozen=True, slots=True)
class EvalResult:
    """One evaluation: ``version`` made every sample; ``missing`` ones failed or were too slow. ``tasks`` has
    every task of the run by its label."""

    trigger: int
    version: Version
    accuracy: float
    reward: float
    samples: int
    missing: int
    errored: int
    seconds: float
    started_at: float
    tasks: Mapping[str, EvalScore]


@dataclasses.dataclass(eq=False)
class _Run:
    """One evaluation in progress."""

    trigger: int
    version: Version
    engines: list[Engine]
    waiting: collections.deque[tuple[int, int]]
    started: float
    started_at: float
    open: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    rewards: dict[int, list[Reward]] = dataclasses.field(default_factory=dict)
    errored: int = 0

    @property
    def over(self) -> bool:
        return not self.waiting and not self.open


class EvalSink:
    """Takes triggers (version numbers) and evaluates each exactly once, in order."""

    def __init__(
        self,
        config: LoopConfig,
        book: Book,
        engines: EngineSet,
        dispatcher: RolloutDispatcher,
        scorer: Scorer,
        signal: Signal,
        prompts: Prompts,
        client: EngineClient,
        pins: Pins,
        on_result: Callable[[EvalResult], None],
        done: set[int] | None = None,
    ) -> None:
        self._config, self._book, self._engines = config, book, engines
        self._dispatcher, self._scorer, self._signal = dispatcher, scorer, signal
        self._prompts, self._items, self._on_result = prompts, prompts.eval_items, on_result
        self._client, self._pins = client, pins
        self.pin_failures = 0
        self._releases: set[asyncio.Task[None]] = set()
        self._triggers: collections.deque[int] = collections.deque()
        self._seen: set[int] = set(done or ())
        self._last_number: int | None = None
        self._run: _Run | None = None
        self.restarts = 0
        self.draining = False

    @property
    def pending(self) -> int:
        """Evaluations triggered and not finished."""
        return len(self._triggers) + (self._run is not None)

    def trigger(self, number: int) -> bool:
        """Ask for an evaluation of version ``number``; False if that one was asked for (or done) before."""
        if number in self._seen or self._items == 0:
            return False
        self._seen.add(number)
        self._triggers.append(number)
        self._signal.notify()
        return True

    def on_version(self, number: int) -> None:
        """A version was published: trigger if it is, or passes, a multiple of ``every_steps``."""
        every, last = self._config.eval.every_steps, self._last_number
        self._last_number = number
        if every and last is not None and number // every > last // every:
            self.trigger(number)

    async def run(self) -> None:
        """Evaluate triggers as they come; returns once ``draining`` is set and none is left."""
        while True:
            seen = self._signal.count
            if self._triggers:
                await self._evaluate(self._triggers[0])
                self._triggers.popleft()
                self._signal.notify()
            elif self.draining:
                return
            else:
                await self._signal.changed(seen, self._config.poll_s)

    async def take(self, group: OpenGroup, episodes: dict[int, Episode]) -> None:
        """Score one evaluation group; what can't be scored is missing from the result."""
        run = self._run
        scored = await self._scorer.score(group, episodes)
        if (
            scored is not None
            and self._book.accept(group.gid, scored)
            and run is not None
            and run is group.tag
        ):
            run.rewards.setdefault(group.draw.item, []).extend(scored.rewards)
        elif group.gid in self._book.open:
            self._book.fail(group, "score")
        self._signal.notify()

    async def _evaluate(self, trigger: int) -> None:
        for _ in range(_MAX_RESTARTS + 1):
            run = await self._reserve(trigger)
            try:
                await self._pin(self._pins.pin, run.version)
                await self._play(run)
            finally:
                self._release(run)
            await self._pin(self._pins.unpin, run.version)
            if run.over or time.monotonic() - run.started >= self._config.eval.timeout_s:
                self._on_result(self._result(run))
                return
            self.restarts += 1
        raise DeadlineError(f"the evaluation of version {trigger} lost its engines {_MAX_RESTARTS + 1} times")

    async def _reserve(self, trigger: int) -> _Run:
        """Wait for engines that hold one version from ``trigger`` on, and keep them there."""
        deadline = time.monotonic() + self._config.eval.timeout_s
        while True:
            await self.settle()
            run = await self._find(trigger)
            await asyncio.gather(*(self._hold(run, e) for e in run.engines if e.moves_itself))
            if run.engines or time.monotonic() > deadline:
                return run
            await asyncio.sleep(_AGAIN_S)  # until it is known what they moved on to

    async def _pin(self, call: Callable[[Version, str], None], version: Version) -> None:
        """Tell the hub, if the config says so; a version that nobody keeps is evaluated all the same."""
        if not self._config.eval.pin:
            return
        try:
            await in_thread(call, version, "eval", timeout_s=_PIN_S, what=f"the pin of version {version}")
        except (TransferError, DeadlineError) as error:
            self.pin_failures += 1
            logger.warning("evaluation: %s", error)

    async def _find(self, trigger: int) -> _Run:
        found: list[Engine] = []

        def ready() -> bool:
            found[:] = self._candidates(trigger)
            return bool(found)

        await self._signal.until(
            ready,
            self._config.eval.timeout_s + self._config.swap_timeout_s,
            lambda: f"an engine to evaluate version {trigger} on: {self._engines.describe()}",
        )
        version = found[0].version
        assert version is not None
        items = collections.deque((item, 0) for item in range(self._items))
        run = _Run(trigger, version, list(found), items, time.monotonic(), time.time())
        for engine in found:
            engine.reserved = run
        self._run = run
        return run

    async def settle(self) -> None:
        """Return once every engine was told that its hold is over, or did not answer in time: what arrives
        after the next hold would end that one."""
        if self._releases:
            await asyncio.wait(self._releases)

    async def _hold(self, run: _Run, engine: Engine) -> None:
        """An engine that has moved on meanwhile, or does not answer, plays no part in this evaluation."""
        try:
            await self._client.hold(engine, run.version, self._config.eval.timeout_s, _HOLD_S)
        except (EngineGoneError, EngineRefusedError) as error:
            run.engines.remove(engine)
            engine.reserved = None
            if isinstance(error, EngineGoneError) and not error.refused:
                self._free(engine)  # it may hold all the same

    async def _let_go(self, engine: Engine) -> None:
        with contextlib.suppress(EngineGoneError, EngineRefusedError):  # its hold runs out by itself
            await self._client.release(engine, _HOLD_S)

    def _candidates(self, trigger: int) -> list[Engine]:
        """Engines of the newest common version; a share of them, all of them when nothing else needs any."""
        able = [
            e
            for e in self._engines
            if e.serves and not e.swapping and e.version is not None and e.version.number >= trigger
        ]
        if not able:
            return []
        newest = max(e.version.number for e in able if e.version is not None)
        same = [e for e in able if e.version is not None and e.version.number == newest]
        if self.draining or len(self._engines) == 1 or self._config.mode == "sync":
            return same
        return same[: max(1, int(self._config.eval.share * len(self._engines)))]

    async def _play(self, run: _Run) -> None:
        """Issue every item and wait for all, up to the evaluation's timeout or the loss of its engines."""
        deadline = run.started + self._config.eval.timeout_s
        while not run.over and time.monotonic() < deadline:
            seen = self._signal.count
            self._collect(run)
            alive = [e for e in run.engines if e.state != "gone" and e.version == run.version]
            if not alive:
                break
            able = [e for e in alive if e.serves]
            self._issue(run, able)
            self._book.eval_waiting = len(run.waiting) * self._config.eval.samples if able else 0
            if not run.over:
                await self._signal.changed(seen, self._config.poll_s)
        for gid in list(run.open):
            self._dispatcher.stop_group(self._book.cancel(gid, "cancelled", "eval"))
        self._book.eval_waiting = 0

    def _issue(self, run: _Run, engines: list[Engine]) -> None:
        while run.waiting and engines:
            engine = min(engines, key=lambda e: (self._book.load(e.name) / e.slots, e.name))
            item, tries = run.waiting[0]
            view = EngineView(engine.name, run.version, engine.slots, engine.stood_s())
            group = self._book.admit_eval(view, item, self._config.eval.samples, run, time.monotonic())
            if group is None:
                return
            run.waiting.popleft()
            run.open[group.gid] = (item, tries)
            self._dispatcher.launch(group, self)

    def _collect(self, run: _Run) -> None:
        """Groups that ended: their item is done, comes again (engine lost), or counts as missing."""
        for gid in [g for g in run.open if g not in self._book.open]:
            item, tries = run.open.pop(gid)
            if len(run.rewards.get(item, ())):
                continue
            if tries + 1 < _MAX_TRIES:
                run.waiting.append((item, tries + 1))
            else:
                run.errored += 1

    def _release(self, run: _Run) -> None:
        for engine in run.engines:
            if engine.reserved is run:
                engine.reserved = None
            if engine.moves_itself and engine.state != "gone":
                self._free(engine)
        self._run = None
        self._signal.notify()

    def _free(self, engine: Engine) -> None:
        """End a hold in the background."""
        task = asyncio.create_task(self._let_go(engine))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    def _result(self, run: _Run) -> EvalResult:
        rewards = [r for item in sorted(run.rewards) for r in run.rewards[item]]
        wanted = self._items * self._config.eval.samples
        whole = _score(rewards, wanted)
        return EvalResult(
            trigger=run.trigger,
            version=run.version,
            accuracy=whole.accuracy,
            reward=whole.reward,
            samples=whole.samples,
            missing=wanted - len(rewards),
            errored=run.errored,
            seconds=time.monotonic() - run.started,
            started_at=run.started_at,
            tasks=self._scores_by_task(run),
        )

    def _scores_by_task(self, run: _Run) -> dict[str, EvalScore]:
        rewards: dict[str, list[Reward]] = {label: [] for label in self._prompts.eval_sizes}
        for item in sorted(run.rewards):
            rewards[self._prompts.label_of_eval(item)] += run.rewards[item]
        samples = self._config.eval.samples
        return {
            label: _score(rewards[label], size * samples) for label, size in self._prompts.eval_sizes.items()
        }


def _score(rewards: Sequence[Reward], wanted: int) -> EvalScore:
    """Accuracy over all samples that were wanted, mean reward over those that came."""
    exact = sum(r.components.get("exact", float(r.value >= 1.0)) for r in rewards)
    value = sum(r.value for r in rewards)
    return EvalScore(
        exact / wanted if wanted else 0.0, value / len(rewards) if rewards else 0.0, len(rewards)
    )
