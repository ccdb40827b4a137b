"""RolloutDispatcher: opens groups while permits, engines and staleness allow, and plays them.

It owns one asyncio task per open group. Cancelling a group (stale, too slow, its engine lost) claims it in
the book first and stops the task after; the engine is told to abort in the background.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from typing import Protocol

from jaxrl_sync.batch.rollout import Episode
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.engines import (
    Engine,
    EngineClient,
    EngineGoneError,
    EngineRefusedError,
    EngineSet,
)
from jaxrl_sync.orchestrator.errors import DeadlineError, LoopError
from jaxrl_sync.orchestrator.flow import Fate
from jaxrl_sync.orchestrator.groups import OpenGroup
from jaxrl_sync.orchestrator.play import Player
from jaxrl_sync.orchestrator.signal import Signal

_ABORT_S = 5.0
_NOT_THE_PROMPT = (408, 409, 429, 502, 503, 504)


class Sink(Protocol):
    """Takes the episodes of complete groups; ``take`` may await (scoring) and ends the group in the book."""

    async def take(self, group: OpenGroup, episodes: dict[int, Episode]) -> None:
        """Score and settle one group."""
        ...


class RolloutDispatcher:
    """Runs groups of training and evaluation. All methods belong to the event loop's thread."""

    def __init__(
        self,
        config: LoopConfig,
        book: Book,
        engines: EngineSet,
        client: EngineClient,
        player: Player,
        signal: Signal,
        uid_of: Callable[[OpenGroup], str],
    ) -> None:
        self._config, self._book, self._engines, self._client = config, book, engines, client
        self._player, self._signal, self._uid_of = player, signal, uid_of
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._aborts: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        self.train_sink: Sink | None = None
        self.tokens_generated = 0
        self._hungry_since: float | None = None

    async def run(self) -> None:
        """Open groups until the book drains; raises what a group's task raised unexpectedly."""
        while True:
            seen = self._signal.count
            self._raise_failure()
            for gid in self._book.expired_groups(time.monotonic(), self._engines.stood_s()):
                self.stop_group(self._book.drop_expired(gid))
            self._fill()
            self._check_hunger()
            await self._signal.changed(seen, self._config.poll_s)

    def launch(self, group: OpenGroup, sink: Sink) -> None:
        """Play a group that the book has just opened; its survivors go to ``sink``."""
        task = asyncio.create_task(self._play(group, sink), name=f"group-{group.gid}")
        self._tasks[group.gid] = task
        task.add_done_callback(lambda t: self._ended(group.gid, t))

    def stop_group(self, group: OpenGroup | None) -> None:
        """Stop the task of a group that the book has already given up, and abort it at its engine."""
        if group is None:
            return
        ids = sorted(self._player.outstanding.get(group.gid, ()))
        task = self._tasks.get(group.gid)
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        engine = self._engines.get(group.engine)
        if ids and engine is not None and engine.state != "gone":
            abort = asyncio.create_task(self._abort(engine, ids))
            self._aborts.add(abort)
            abort.add_done_callback(self._aborts.discard)
        self._signal.notify()

    def drop_stale(self) -> int:
        """Drop what the next batch can't take, open and queued; the engines are told in the background."""
        gids = self._book.stale_groups()
        for gid in gids:
            self.stop_group(self._book.drop_stale(gid))
        self._book.sweep()
        return len(gids)

    async def settle_aborts(self) -> None:
        """Return once every engine was told of what was dropped so far, or did not answer in time."""
        await self._settle(self._aborts)

    def engine_lost(self, engine: Engine, reason: str) -> int:
        """An engine is gone: every group on it is counted as errored, and issued again if it trains."""
        gids = self._book.groups_on(engine.name)
        for gid in gids:
            self.stop_group(self._book.drop_lost(gid, reason))
        return len(gids)

    @staticmethod
    def request_id(group: OpenGroup) -> str:
        """A function of prompt and version alone, so that a synchronous run draws the same samples again."""
        again = f"-a{group.attempt}" if group.attempt else ""
        return f"{group.kind}-{group.draw.position}-v{group.version.number}{again}"

    async def close(self) -> None:
        """Cancel all groups and their tasks; returns within the abort deadline."""
        for gid in list(self._book.open):
            self._book.cancel(gid, "cancelled", "shutdown")
        tasks = [*self._tasks.values(), *self._aborts]
        for task in tasks:
            task.cancel()
        await self._settle(tasks)

    def done_with(self, version: int) -> bool:
        """Whether ``version`` has generated all that it may."""
        return self._book.done_with(version)

    def _fill(self) -> None:
        if self._config.mode == "sync" and not self._engines.at_one_version():
            return
        while True:
            group = self._book.admit(self._engines.serving(), time.monotonic())
            if group is None:
                return
            if self.train_sink is None:
                raise LoopError("a training group was opened before a sink was there to take it")
            self.launch(group, self.train_sink)

    def _check_hunger(self) -> None:
        """Without a single engine that serves nothing moves: bounded by ``engine_wait_s``."""
        if self._engines.any_serves():
            self._hungry_since = None
            return
        now = time.monotonic()
        self._hungry_since = self._hungry_since or now
        if now - self._hungry_since > self._config.engine_wait_s:
            raise DeadlineError(
                f"no engine has served for {self._config.engine_wait_s:g} s: {self._engines.describe()}"
            )

    async def _play(self, group: OpenGroup, sink: Sink) -> None:
        engine = self._engines.get(group.engine)
        episodes: dict[int, Episode] = {}
        retry, last_reason = True, "no sample"

        def on_episode(index: int, episode: Episode) -> None:
            if self._book.arrive(group.gid, index, episode.end_version) is not None:
                episodes[index] = episode
                self.tokens_generated += episode.num_sampled_tokens
            self._signal.notify()

        def on_loss(index: int, fate: Fate, reason: str, detail: str) -> None:
            nonlocal retry, last_reason
            retry, last_reason = fate == "errored", reason
            self._book.lose(group.gid, index, fate, reason, detail)
            self._signal.notify()

        try:
            if engine is None:
                raise EngineGoneError(f"{group.engine} is gone")
            eval_ = group.kind == "eval"
            sampling = self._config.eval.sampling if eval_ else self._config.sampling
            await self._player.play(
                group,
                engine,
                lambda: self._uid_of(group),
                self.request_id(group),
                sampling,
                eval_,
                on_episode,
                on_loss,
            )
        except (EngineGoneError, EngineRefusedError) as error:
            self._engine_failed(group, engine, error)
            return
        if group.gid not in self._book.open:
            return
        if episodes:
            await sink.take(group, episodes)
        else:
            self._book.fail(group, last_reason, retry=retry)
        self._signal.notify()

    def _engine_failed(self, group: OpenGroup, engine: Engine | None, error: LoopError) -> None:
        """A refused request is its prompt's fault only if the status says so."""
        if isinstance(error, EngineRefusedError) and error.status not in _NOT_THE_PROMPT:
            if self._book.cancel(group.gid, "errored", f"refused:{error.status}") is not None:
                self._book.fail(group, str(error))
        else:
            reason = "engine_busy" if isinstance(error, EngineRefusedError) else "engine_lost"
            self._book.drop_lost(group.gid, reason)
            if engine is not None and engine.state == "serving":
                engine.state = "suspect"
        self._signal.notify()

    def _ended(self, gid: int, task: asyncio.Task[None]) -> None:
        self._tasks.pop(gid, None)
        self._player.outstanding.pop(gid, None)
        if not task.cancelled() and task.exception() is not None:
            self._failure = self._failure or task.exception()
        self._signal.notify()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure

    async def _abort(self, engine: Engine, request_ids: list[str]) -> None:
        try:
            await self._client.abort(engine, request_ids, _ABORT_S)
        except (EngineGoneError, EngineRefusedError):
            engine.failures += 1  # it will end the request at its own timeout

    async def _settle(self, tasks: Iterable[asyncio.Task[None]]) -> None:
        waiting = list(tasks)
        if waiting:
            await asyncio.wait(waiting, timeout=_ABORT_S + 1.0)
