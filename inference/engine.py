"""The engine: thread-safe calls in front, one thread behind that plans, executes and commits steps.

The life of a request: ``submit`` queues it; ``step`` takes the queued events, asks the pure scheduler for a
plan, adds what only the engine knows (tokens of running samples), sends the plan to the other ranks if there
are any, executes it, folds the output back, and hands tokens and results to their owners.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import logging
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np
from jax.sharding import Mesh

from jaxrl_sync.inference import scheduler
from jaxrl_sync.inference.acceptance import check_request, mismatch
from jaxrl_sync.inference.config import EngineConfig
from jaxrl_sync.inference.engine_stats import count_step, engine_stats
from jaxrl_sync.inference.errors import (
    EngineError,
    NotServingError,
    PoisonedError,
    QueueFullError,
    RankDiedError,
    RequestError,
    SwapTimeoutError,
    VersionMismatchError,
)
from jaxrl_sync.inference.front import EngineState, EngineStats, Handle, OnTokens, SwapReport
from jaxrl_sync.inference.ledger import Ledger
from jaxrl_sync.inference.pending import PendingGroup, PendingSwap, fail, settle
from jaxrl_sync.inference.plan import StepOutput, StepPlan
from jaxrl_sync.inference.prefill import Admission, build_prefills
from jaxrl_sync.inference.request import FinishReason, PauseMode, Request, Sample, TokenChunk
from jaxrl_sync.inference.runner import Runner, SwapFailedError
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.transfer.version import Version

_IDLE_WAIT_S = 0.5
_log = logging.getLogger(__name__)


class Engine:
    """Owns a runner and the thread-safe front of it (``front.EngineFront``).

    ``step`` (or ``run``, which calls it) belongs to one thread. ``transmit`` gets every plan right before
    this rank executes it. With ``warm_up`` the first install compiles every shape before it counts as done.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: DecoderConfig,
        mesh: Mesh,
        params: Any = None,
        *,
        version: Version | None = None,
        dtype: Any = np.float32,
        transmit: Callable[[StepPlan], None] | None = None,
        warm_up: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._config, self._model, self._clock, self._transmit = config, model, clock, transmit
        self._runner = Runner(model, config, mesh, self._take, dtype)
        self._ledger = Ledger(config.slots, config.max_len, config.extras)
        self._state = scheduler.initial_state(config)
        self._warm_up_pending = warm_up
        self._wake = threading.Condition()
        self._inbox: list[scheduler.Event] = []
        self._groups: dict[int, PendingGroup] = {}
        self._uids: dict[str, int] = {}
        self._next_uid = 0
        self._swap: PendingSwap | None = None
        self._swapping = False
        self._standing: list[Future[EngineState]] = []
        self._deliveries: list[Callable[[], None]] = []
        self._poisoned: str | None = None
        self._closed = self._leaving = False
        self._decode_s: collections.deque[float] = collections.deque(maxlen=512)
        self._counts: collections.Counter[str] = collections.Counter()
        if params is not None:
            self._runner.install(params)
            self._state = dataclasses.replace(self._state, version=version or Version("local", 0))

    @property
    def config(self) -> EngineConfig:
        return self._config

    @property
    def model(self) -> DecoderConfig:
        return self._model

    @property
    def target(self) -> Any:
        """The abstract tree (with shardings) that ``install`` takes."""
        return self._runner.target

    @property
    def version(self) -> Version | None:
        return self._state.version

    @property
    def state(self) -> EngineState:
        if self._closed:
            return "closed"
        if self._poisoned is not None:
            return "poisoned"
        if self._state.version is None:
            return "starting"
        if self._state.asleep:
            return "sleeping"
        return "paused" if self._state.standing else "ready"

    # Calls from any thread.

    def submit(self, request: Request, on_tokens: OnTokens | None = None) -> Handle:
        """See ``front.EngineFront.submit``."""
        check_request(request, self._config, self._model)
        future: Future[Any] = Future()
        now = self._clock()
        deadline_s = now + request.timeout_s if request.timeout_s is not None else np.inf
        with self._wake:
            self._check_serving(request)
            uid, self._next_uid = self._next_uid, self._next_uid + 1
            self._uids[request.request_id] = uid
            self._groups[uid] = PendingGroup(request, future, on_tokens, now)
            self._post(scheduler.Submit(scheduler.Group(uid, request, deadline_s)))
        return Handle(request.request_id, future)

    def abort(self, request_ids: Iterable[str]) -> int:
        """See ``front.EngineFront.abort``."""
        with self._wake:
            uids = frozenset(self._uids[r] for r in request_ids if r in self._uids)
            self._post(scheduler.End(uids, "abort"))
        return len(uids)

    def pause(self, mode: PauseMode) -> Future[EngineState]:
        """See ``front.EngineFront.pause``."""
        if mode not in ("keep", "wait", "abort"):
            raise RequestError(f"mode: expected keep, wait or abort, got {mode!r}")
        return self._mode(scheduler.Pause(mode))

    def resume(self) -> Future[EngineState]:
        """See ``front.EngineFront.resume``."""
        return self._mode(scheduler.Resume())

    def request_swap(
        self, version: Version, take: Callable[[], Any], timeout_s: float = 60.0
    ) -> Future[SwapReport]:
        """See ``front.EngineFront.request_swap``. A swap that still waits is replaced by a new one."""
        future: Future[SwapReport] = Future()
        with self._wake:
            if self._closed:
                raise NotServingError("engine is closed")
            if version == self._state.version and self._poisoned is None and not self._state.asleep:
                settle(future, SwapReport(version, self._state.steps, 0.0))
                return future
            if (old := self._swap) is not None:
                fail(old.future, EngineError(f"swap to {old.version}: replaced by {version}"))
            self._swap = PendingSwap(version, take, future)
            self._post(scheduler.Swap(version, self._clock() + timeout_s))
        return future

    def install(self, tree: Any, version: Version) -> Future[SwapReport]:
        """See ``front.EngineFront.install``."""
        return self.request_swap(version, lambda: tree)

    def hold(self, version: Version, seconds: float) -> None:
        """See ``front.EngineFront.hold``."""
        with self._wake:
            ends = self._swapping or self._leaving or self._state.asleep
            serving = None if ends else self._state.version
            if serving != version or self._poisoned is not None:
                raise VersionMismatchError(f"hold of {version}: the engine serves {serving}")
            self._state = dataclasses.replace(self._state, held_until_s=self._clock() + seconds)

    def release(self) -> None:
        """See ``front.EngineFront.release``."""
        with self._wake:
            self._state = dataclasses.replace(self._state, held_until_s=-np.inf)
            self._wake.notify_all()

    def refuse_pins(self) -> bool:
        """Take no pin or hold of the serving version before the next swap or ``go_on``; False, and nothing
        done, while it is ``tied``."""
        with self._wake:
            self._leaving = self._leaving or not self.tied
            return self._leaving

    def stand(self) -> Future[EngineState]:
        """Admit and decode nothing before the next swap or ``go_on``; the future ends once no step runs. For
        an engine that has refused pins."""
        with self._wake:
            self._state = scheduler.asleep(self._state, lost_cache=False)
            return self._mode(scheduler.End(frozenset(), "abort"))

    def go_on(self) -> None:
        """End ``refuse_pins`` and ``stand`` without a swap."""
        with self._wake:
            self._leaving, self._state = False, dataclasses.replace(self._state, asleep=False)
            self._wake.notify_all()

    def poison(self, reason: str) -> None:
        """See ``front.EngineFront.poison``."""
        with self._wake:
            self._poisoned = reason
            self._fail_groups(PoisonedError(f"engine is poisoned: {reason}"))
            self._post(scheduler.EndAll("error"))

    def stats(self) -> EngineStats:
        """See ``front.EngineFront.stats``."""
        with self._wake:
            counted = self._config.slots, self._counts, self._decode_s
            return engine_stats(self.state, self._state, *counted, self._poisoned)

    def close(self) -> None:
        """Fail what is pending and refuse everything after; call it when ``run`` has returned."""
        with self._wake:
            self._closed = True
            self._fail_groups(NotServingError("engine is closed"))
            if self._swap is not None:
                fail(self._swap.future, NotServingError("engine is closed"))
            for future in self._standing:
                settle(future, "closed")
            self._standing.clear()
            deliveries, self._deliveries = self._deliveries, []  # of a step that raised in the middle
        for deliver in deliveries:
            deliver()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Calls from the engine's thread.

    def run(self, stop: threading.Event, busy: Callable[[float, float], None] | None = None) -> None:
        """Step until ``stop`` is set, asleep while there is nothing to do. Raises what a step raises.

        ``busy(t0, t1)`` is told of every step that decoded, in ``time.time()`` seconds.
        """
        while not stop.is_set():
            t0 = time.time()
            output = self.step()
            if output is not None:
                if busy is not None and output.steps:
                    busy(t0, time.time())
                continue
            self.wait(max(0.0, min(_IDLE_WAIT_S, self._state.next_deadline_s - self._clock())))

    def step(self) -> StepOutput | None:
        """Plan, execute and commit one step; None when there was nothing to execute."""
        with self._wake:
            events = [e for e in self._inbox if not self._refused(e)]
            self._inbox = []
            decision = scheduler.schedule(self._state, events, self._clock(), self._config)
            self._state = decision.state
            self._give_up_swap(decision.expired_swap)
            self._finish(decision.finished, streamed=False)
            self._enter(decision.admitted)
            plan = self._complete(decision)
            self._swapping = plan.swap is not None
        output = self._execute(plan) if not plan.empty else None
        with self._wake:
            self._swapping = False
            if output is not None:
                self._commit(plan, output, decision.admitted)
            self._settle_modes()
            deliveries, self._deliveries = self._deliveries, []
        for deliver in deliveries:
            deliver()
        return output

    @property
    def tied(self) -> bool:
        """Whether somebody needs the serving version: a pinned group, or a hold."""
        with self._wake:
            queued = [e.group.request for e in self._inbox if isinstance(e, scheduler.Submit)]
            pinned = self._state.pinned or any(r.version is not None for r in queued)
            return pinned or self._clock() < self._state.held_until_s

    def sleep(self, *, release_cache: bool) -> int:
        """Let go of the weights, and of the cache if told so, until the next swap; running samples go on
        then. Returns the bytes of cache that were freed. EngineError while the engine is ``tied`` and not
        closed."""
        with self._wake:
            if self.tied and not self._closed:
                raise EngineError(f"sleep: version {self._state.version} is pinned or held")
            self._state = scheduler.asleep(self._state, lost_cache=release_cache, since_s=self._clock())
        return self._runner.sleep(release_cache=release_cache)

    def wait(self, seconds: float) -> None:
        """Block until there is something to do, at most ``seconds``."""
        with self._wake:
            if not self._inbox:
                self._wake.wait(seconds)

    def warm_up(self) -> None:
        """Compile every shape now (single-rank engines with weights)."""
        self._runner.warm_up()

    def compiled(self) -> dict[str, int]:
        """Entries in the jit caches of this rank."""
        return self._runner.compiled()

    def _execute(self, plan: StepPlan) -> StepOutput | None:
        if self._transmit is not None:
            self._transmit(plan)
        try:
            return self._runner.execute(plan)
        except SwapFailedError as error:
            if self._transmit is not None:
                raise RankDiedError(f"swap to {plan.swap} failed on rank 0 after its peers got it") from error
            return self._swap_failed(plan, error)

    def _swap_failed(self, plan: StepPlan, error: SwapFailedError) -> StepOutput:
        """The weights of a swap could not be had: the rest of the plan runs on the old ones."""
        with self._wake:
            if self._swap is not None and self._swap.version == plan.swap:
                cause = error.__cause__
                self._fail(self._swap.future, cause if isinstance(cause, Exception) else error)
                self._swap = None
        if not self._runner.has_weights and (plan.steps or plan.prefills):  # it slept, and can't go on
            raise error
        return self._runner.execute(dataclasses.replace(plan, swap=None, warm_up=False))

    def _take(self, version: Version) -> Any:
        """The tree of the pending swap; the runner calls it at the step boundary."""
        swap = self._swap
        if swap is None or swap.version != version:
            raise EngineError(f"swap to {version}: no such swap is pending")
        return swap.take()

    def _complete(self, decision: scheduler.Decision) -> StepPlan:
        """The plan with the prefills that need the ledger, and the warm-up of a first install."""
        plan = decision.plan
        if decision.recompute:
            again = [self._running(slot) for slot in decision.recompute]
            plan = dataclasses.replace(plan, prefills=(*build_prefills(again, self._config), *plan.prefills))
        if plan.swap is not None and self._warm_up_pending:
            plan = dataclasses.replace(plan, warm_up=True)
        return plan

    def _running(self, slot: int) -> Admission:
        uid, sample = int(self._state.uid[slot]), int(self._state.sample[slot])
        return Admission(uid, self._state.groups[uid].request, (slot,), sample, self._ledger.tokens(slot))

    def _commit(self, plan: StepPlan, output: StepOutput, entered: tuple[int, ...]) -> None:
        for uid in entered:
            if uid in self._groups:
                self._groups[uid].prefill_s = output.prefill_s
        version = output.swapped or self._state.version
        count_step(self._counts, self._decode_s, plan, output)
        before = self._state
        self._state, finished = scheduler.commit(before, plan, output, version)
        if output.swapped is not None:
            self._warm_up_pending, self._poisoned, self._leaving = False, None, False
            self._report_swap(output, before.steps)
        if output.steps and version is not None:
            self._ledger.append(output, version)
        self._stream(before, output, finished)
        self._finish(finished, streamed=True)

    # Under the lock. Futures and callbacks wait in ``_deliveries`` until it is released.

    def _check_serving(self, request: Request) -> None:
        """Raise unless a request may enter now."""
        if self._closed:
            raise NotServingError("engine is closed")
        if self._poisoned is not None:
            raise PoisonedError(f"engine is poisoned: {self._poisoned}")
        if self._state.version is None:
            raise NotServingError("engine has no version of the weights yet")
        asleep = self._state.asleep or self._leaving
        if request.version is not None and (asleep or request.version != self._state.version):
            raise mismatch(request, self._state.version, asleep=asleep)
        if request.request_id in self._uids:
            raise RequestError(f"request_id: {request.request_id!r} is already running")
        waiting = len(self._state.waiting) + sum(isinstance(e, scheduler.Submit) for e in self._inbox)
        if waiting >= self._config.max_waiting:
            raise QueueFullError(f"queue: {waiting} groups wait, limit {self._config.max_waiting}")

    def _refused(self, event: scheduler.Event) -> bool:
        """Whether a submission's pin went out of date between ``submit`` and this step; its future fails."""
        if not isinstance(event, scheduler.Submit):
            return False
        request = event.group.request
        if request.version is None or request.version == self._state.version:
            return False
        group = self._forget(event.group.uid)
        if group is not None:
            self._fail(group.future, mismatch(request, self._state.version))
        return True

    def _enter(self, uids: Iterable[int]) -> None:
        now = self._clock()
        for uid in uids:
            if uid in self._groups:
                self._groups[uid].entered_s = now

    def _stream(
        self, before: scheduler.State, output: StepOutput, finished: tuple[scheduler.Finish, ...]
    ) -> None:
        """Queue the new tokens of groups that are listened to."""
        reasons: dict[int, FinishReason] = {f.slot: f.reason for f in finished}
        drawn = np.count_nonzero(output.tokens >= 0, axis=0)
        for slot in np.flatnonzero(drawn).tolist():
            group = self._groups.get(int(before.uid[slot]))
            if group is not None and group.on_tokens is not None:
                sample = int(before.sample[slot])
                chunk = self._ledger.chunk(slot, sample, int(drawn[slot]), reasons.get(slot))
                self._deliveries.append(functools.partial(self._listen, group.on_tokens, chunk))

    def _finish(self, finished: Iterable[scheduler.Finish], *, streamed: bool) -> None:
        """Move ended samples from the ledger to their groups, and complete groups whose last one it was."""
        now = self._clock()
        for f in finished:
            lineages: tuple[str, ...] = ()
            sample = Sample((), (), (), f.reason, dict.fromkeys(self._config.extras, ()))
            if f.slot != scheduler.FREE:
                lineages, sample = self._ledger.lineages(f.slot), self._ledger.take(f.slot, f.reason)
            group = self._groups.get(f.uid)
            if group is None:
                continue
            self._counts["samples"] += 1
            if group.on_tokens is not None and not streamed:
                chunk = TokenChunk(f.sample, (), (), (), f.reason)
                self._deliveries.append(functools.partial(self._listen, group.on_tokens, chunk))
            if group.add(f.sample, sample, lineages):
                self._forget(f.uid)
                self._deliveries.append(functools.partial(settle, group.future, group.result(now)))

    def _listen(self, on_tokens: OnTokens, chunk: TokenChunk) -> None:
        """Call a listener; one that raises is counted and must not end the engine."""
        try:
            on_tokens(chunk)
        except Exception:
            self._counts["listener_errors"] += 1
            _log.exception("a token listener raised")

    def _give_up_swap(self, expired: scheduler.Swap | None) -> None:
        if expired is not None and self._swap is not None and self._swap.version == expired.version:
            error = SwapTimeoutError(f"swap to {expired.version}: pinned groups were still running")
            self._fail(self._swap.future, error)
            self._swap = None

    def _report_swap(self, output: StepOutput, step: int) -> None:
        self._counts["swaps"] += 1
        if self._swap is not None and self._swap.version == output.swapped:
            report = SwapReport(self._swap.version, step, output.pause_s)
            self._deliveries.append(functools.partial(settle, self._swap.future, report))
            self._swap = None

    def _settle_modes(self) -> None:
        """End the futures of pauses that have taken effect, and of everything once nothing is paused."""
        if self._standing and (self._state.paused is None or self._state.standing) and not self._inbox:
            for future in self._standing:
                self._deliveries.append(functools.partial(settle, future, self.state))
            self._standing = []

    def _forget(self, uid: int) -> PendingGroup | None:
        group = self._groups.pop(uid, None)
        if group is not None:
            del self._uids[group.request.request_id]
        return group

    def _fail(self, future: Future[Any], error: Exception) -> None:
        self._deliveries.append(functools.partial(fail, future, error))

    def _fail_groups(self, error: Exception) -> None:
        """Fail every group at once (from any thread: not by way of ``_deliveries``)."""
        for uid in list(self._groups):
            group = self._forget(uid)
            if group is not None:
                fail(group.future, error)

    def _post(self, event: scheduler.Event) -> None:
        self._inbox.append(event)
        self._wake.notify_all()

    def _mode(self, event: scheduler.Event) -> Future[EngineState]:
        future: Future[EngineState] = Future()
        with self._wake:
            if self._closed:
                settle(future, "closed")
            else:
                self._standing.append(future)
                self._post(event)
        return future
