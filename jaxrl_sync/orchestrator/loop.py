"""The five components of one run, put together and supervised.

    RolloutDispatcher   opens groups, plays them on engines           dispatcher.py
    TrainSink           scores, queues, ships batches                 train_sink.py
    EvalSink            evaluates pinned versions meanwhile           eval_sink.py
    WeightWatcher       follows the hub, brings engines up to date    weight_watcher.py
    PeriodicLogger      progress, event-loop lag                      logger.py

The first component that fails ends the run; its error is the run's. Nothing here waits without a deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import ssl
import threading
import time
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sync.batch.connection import Ack, TrainerState
from jaxrl_sync.config.process import Timeline
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.dispatcher import RolloutDispatcher
from jaxrl_sync.orchestrator.engines import EngineClient, EngineSet
from jaxrl_sync.orchestrator.errors import InterruptedRunError, LoopError
from jaxrl_sync.orchestrator.eval_sink import EvalResult, EvalSink, Pins
from jaxrl_sync.orchestrator.fit import Fit
from jaxrl_sync.orchestrator.logger import PeriodicLogger, rss_bytes
from jaxrl_sync.orchestrator.play import Player
from jaxrl_sync.orchestrator.policy import Policy
from jaxrl_sync.orchestrator.prompts import Prompts
from jaxrl_sync.orchestrator.round_log import Ask, RoundLog
from jaxrl_sync.orchestrator.rundir import MetricsFile, evals_done, keep_batch
from jaxrl_sync.orchestrator.scoring import Scorer
from jaxrl_sync.orchestrator.signal import Signal
from jaxrl_sync.orchestrator.stats import RunStats
from jaxrl_sync.orchestrator.threads import CallPool
from jaxrl_sync.orchestrator.train_sink import BatchFacts, TrainSink
from jaxrl_sync.orchestrator.trainer_link import TrainerLink, TrainerWatch
from jaxrl_sync.orchestrator.weight_watcher import Directory, Swap, WeightWatcher
from jaxrl_sync.tasks.mixture import Mixture
from jaxrl_sync.transfer.version import Version

_DRAIN_S = 6.0


@dataclasses.dataclass(frozen=True)
class Parts:
    """What a loop is given: it closes none of these."""

    mixture: Mixture
    task_seed: int
    hub: Directory
    pins: Pins
    link: TrainerLink
    token: str
    run_dir: Path
    timeline: Timeline
    stop: threading.Event
    verify: ssl.SSLContext | bool = True
    """What engines are trusted with, as httpx wants it."""
    trace: Ask | None = None
    """``HubClient.trace``; without it nothing is kept of single rounds."""
    fit: Fit | None = None
    """Whether the run's members fit each other; None: nobody looks."""


class Loop:
    """One attempt at a run, from the trainer's committed version to the last step."""

    def __init__(self, config: LoopConfig, parts: Parts, state: TrainerState) -> None:
        self.config, self._parts = config, parts
        self.prompts = Prompts(parts.mixture, parts.task_seed, config.eval.prompts)
        source = self.prompts.source(config, state.cursor or None)
        self.signal = Signal()
        self.book = Book(config, source, state.number + 1)
        self.policy = Policy(state.lineage, state.number)
        self.engines = EngineSet()
        self.stats = RunStats(self.book, self.policy, config.steps, parts.mixture)
        self.phase = "starting"
        self._began_number, self._published_at = state.number, time.time()
        self.metrics = MetricsFile(parts.run_dir, resume_step=state.number)
        self._make_components()

    def _make_components(self) -> None:
        config, parts = self.config, self._parts
        self._client = EngineClient(parts.token, connections=config.permits + 64, verify=parts.verify)
        self._calls = CallPool(config.task_threads)
        player = Player(self.prompts.task, self._client, self._calls, config.score_timeout_s)
        self.dispatcher = RolloutDispatcher(
            config, self.book, self.engines, self._client, player, self.signal, self.prompts.uid
        )
        scorer = Scorer(
            self.prompts.task,
            self.book,
            self._calls,
            timeout_s=config.score_timeout_s,
            normalize_std=config.normalize_std,
        )
        self.train_sink = TrainSink(
            config,
            self.book,
            self.policy,
            scorer,
            parts.link,
            self.signal,
            parts.mixture.labels,
            self.dispatcher.drop_stale,
            self._on_step,
            self._on_wait,
            functools.partial(keep_batch, parts.run_dir) if config.keep_batches else None,
        )
        self.dispatcher.train_sink = self.train_sink
        self.engines.training = lambda: self.train_sink.sending
        self.engines.trained_s = lambda: self.train_sink.trained_s
        self.eval_sink = EvalSink(
            config,
            self.book,
            self.engines,
            self.dispatcher,
            scorer,
            self.signal,
            self.prompts,
            self._client,
            parts.pins,
            self._on_eval,
            done=evals_done(self.metrics.earlier),
        )
        self.watcher = WeightWatcher(
            config,
            parts.hub,
            self.policy,
            self.engines,
            self._client,
            self.dispatcher,
            self.signal,
            self._on_version,
            self._on_swap,
            TrainerWatch(config.trainer_wait_s, (info.name for info in parts.link.infos)),
        )
        self.round_log = None
        if parts.trace is not None:
            self.round_log = RoundLog(parts.trace, self.metrics.append, parts.timeline.record)
        self.logger = PeriodicLogger(parts.run_dir, config.log_interval_s, self.collect)

    async def run(self) -> dict[str, Any]:
        """Run to the end and return the summary; raises the error of the first component that fails."""
        self.book.check()
        self._first_eval()
        endless = {
            "RolloutDispatcher": self.dispatcher.run(),
            "WeightWatcher": self.watcher.run(),
            "PeriodicLogger": self.logger.run(),
            "stop": self._watch_stop(),
            **({"RoundLog": self.round_log.run()} if self.round_log is not None else {}),
            **({"Preflight": self._parts.fit.run()} if self._parts.fit is not None else {}),
        }
        ending = {
            "batches": self.train_sink.run_ship(),
            "TrainSink": self.train_sink.run_send(),
            "EvalSink": self.eval_sink.run(),
            "end": self._finish(),
        }
        cause, phase = "done", "ended"
        try:
            await supervise(endless, ending, self.config.shutdown_timeout_s)
        except BaseException as error:
            cause = f"{type(error).__name__}: {error}"
            phase = "interrupted" if isinstance(error, InterruptedRunError) else "failed"
            raise
        finally:
            self.phase = phase
            await self._close()
            self.book.check()
        return self.summary(cause)

    def collect(self) -> dict[str, Any]:
        """The progress of this moment; checks every identity of the accounting on the way."""
        self.book.check()
        return {
            **self.stats.progress(self.phase, self.dispatcher.tokens_generated),
            "lag_s": self.logger.lag(),
            "engines": self.engines.describe(),
            "evals_pending": self.eval_sink.pending,
            "outbox": self.train_sink.outbox,
            "swap_failures": self.watcher.swap_failures,
        }

    def summary(self, cause: str) -> dict[str, Any]:
        """The summary up to now; ``cause`` says how the run ended."""
        first = next((r for r in self.metrics.earlier if r.get("kind") == "eval"), None)
        before = None if first is None else float(first["accuracy"])
        numbers = self.stats.summary(self.dispatcher.tokens_generated, cause, before)
        return {
            **numbers,
            "lag_max_s": self.logger.lag_max_s,
            "swap_failures": self.watcher.swap_failures,
            "engines_lost": self.engines.lost,
            "preflight": self._parts.fit.state if self._parts.fit is not None else "none",
        }

    def _first_eval(self) -> None:
        """The base version is evaluated first; a resumed run repeats only an evaluation that got lost."""
        every, number = self.config.eval.every_steps, self._began_number
        if number == 0 or (every and number % every == 0):
            self.eval_sink.trigger(number)

    async def _finish(self) -> None:
        """After the last step: the last version reaches the engines and is evaluated."""
        self.phase = "running"
        sink, config = self.train_sink, self.config
        while not await self.signal.holds(lambda: sink.done, config.poll_s):
            pass  # bounded by the deadlines of the sink itself
        self.phase = "finishing"
        self.book.draining = True
        tail_s = 2 * config.swap_timeout_s + config.eval.timeout_s
        await self.signal.until(
            self._has_last_version,
            tail_s,
            lambda: f"version {self._last_version()} on every engine: {self.engines.describe()}",
        )
        self.eval_sink.trigger(self._last_version())
        self.eval_sink.draining = True
        self.signal.notify()

    def _last_version(self) -> int:
        """The last number that is published: of the last update if the trainer knew that it was the last."""
        committed = self.policy.committed
        if self.train_sink.told_last:
            return committed
        return max(self._began_number, committed - committed % self.config.publish_every)

    def _has_last_version(self) -> bool:
        label = self.policy.label
        return label is not None and label.number >= self._last_version() and self.watcher.all_current()

    async def _watch_stop(self) -> None:
        """Asked to stop: open nothing more, and let the step that is being trained be acknowledged."""
        while not self._parts.stop.is_set():
            await asyncio.sleep(0.1)
        self.phase = "stopping"
        self.book.draining = self.train_sink.stopping = True
        await self.signal.holds(lambda: not self.train_sink.sending, _DRAIN_S)
        raise InterruptedRunError(
            f"asked to stop at step {self.policy.committed} of {self.config.steps}; the run can be resumed"
        )

    def _on_step(self, facts: BatchFacts, ack: Ack, ack_s: float) -> None:
        extra = {
            "loop_lag_s": self.logger.lag(),
            "rss_bytes": rss_bytes(),
            "outbox": self.train_sink.outbox,
            "tokens_generated": self.dispatcher.tokens_generated,
        }
        self.metrics.append(self.stats.on_step(facts, ack, ack_s, extra))

    def _on_wait(self, what: str, t0: float, t1: float, step: int) -> None:
        self._parts.timeline.record("wait", t0, t1, step=step, what=what)

    def _on_eval(self, result: EvalResult) -> None:
        self.metrics.append(self.stats.on_eval(result))
        t1 = result.started_at + result.seconds
        self._parts.timeline.record("eval", result.started_at, t1, version=result.version.number)

    def _on_version(self, version: Version) -> None:
        self._published_at = time.time()
        self.eval_sink.on_version(version.number)

    def _on_swap(self, swap: Swap) -> None:
        """A version's sync lasts from its publication until every engine that serves holds it."""
        self.stats.on_swap(swap)
        if self.watcher.all_current():
            self._parts.timeline.record("sync", self._published_at, swap.t1, version=swap.number)

    async def _close(self) -> None:
        with contextlib.suppress(LoopError):
            await self.dispatcher.close()
        await self.eval_sink.settle()
        await self._client.close()
        self._calls.close()
        if self.round_log is not None:
            await self.round_log.drain()
        self.metrics.close()
        with contextlib.suppress(LoopError, OSError):
            await self.logger.write()


async def supervise(
    endless: Mapping[str, Coroutine[Any, Any, None]],
    ending: Mapping[str, Coroutine[Any, Any, None]],
    shutdown_timeout_s: float,
) -> None:
    """Run all until every one in ``ending`` has returned; then, or on the first error, cancel the rest.

    Raises the first error; a component of ``endless`` that returns is one too. After ``shutdown_timeout_s``
    of cancelling, tasks that still live are left behind and named in a ``LoopError``.
    """
    tasks = {asyncio.create_task(c, name=n): n for n, c in {**endless, **ending}.items()}
    waiting = set(ending)
    failure: BaseException | None = None
    try:
        while waiting and failure is None:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                name = tasks.pop(task)
                failure = failure or _failure_of(name, task, name in endless)
                waiting.discard(name)
    finally:
        for task in tasks:
            task.cancel()
        left = tasks and (await asyncio.wait(tasks, timeout=shutdown_timeout_s))[1]
    if failure is not None:
        raise failure
    if left:
        names = ", ".join(sorted(tasks[t] for t in left))
        raise LoopError(f"{names} did not end within {shutdown_timeout_s:g} s of being cancelled")


def _failure_of(name: str, task: asyncio.Task[None], endless: bool) -> BaseException | None:
    if task.cancelled():
        return LoopError(f"{name} was cancelled from outside")
    error = task.exception()
    if error is None and endless:
        return LoopError(f"{name} ended although it has no end")
    return error
