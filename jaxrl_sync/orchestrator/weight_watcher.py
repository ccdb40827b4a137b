"""WeightWatcher: follows the hub (who serves, what is published) and brings every engine to the newest
version.

Order for a new version: the label advances, groups that it makes too stale are dropped and aborted, and
only then are the engines asked to swap, all at once and independently. An engine that fails keeps what it
has and is asked again with the next version, or after a pause. An engine that joins serves only once a swap
has brought it the version that was current when it was asked.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.dispatcher import RolloutDispatcher
from jaxrl_sync.orchestrator.engines import (
    Engine,
    EngineClient,
    EngineGoneError,
    EngineRefusedError,
    EngineSet,
)
from jaxrl_sync.orchestrator.errors import PeerDiedError
from jaxrl_sync.orchestrator.policy import Policy
from jaxrl_sync.orchestrator.signal import Signal
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.orchestrator.trainer_link import TrainerWatch
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.version import Version

_HEALTH_S = 2.0
_MEMBERS_S = 0.5
_RETRY_S = 2.0
_SILENT = 5
_FORGET_S = 30.0
_BUSY_S = 0.2


class Directory(Protocol):
    """What ``HubClient`` is to the watcher; blocking, thread-safe."""

    def members(self, role: str | None = None) -> Any: ...
    def wait_version(self, after: Version | None = None, timeout_s: float = 20.0) -> Any: ...


@dataclasses.dataclass(frozen=True, slots=True)
class Swap:
    """One engine took one version. ``pause_s`` is how long its decoding stood still.

    ``moved`` has bytes by how they moved (`jaxrl_sync.transfer.transports.base.Moved`).
    ``density`` is the share of the weights that changed where ``payload`` is a frame, ``coding`` names how it
    was written.
    """

    engine: str
    number: int
    pause_s: float
    prepare_s: float
    verify_s: float
    bytes: int
    transport: str
    t0: float
    t1: float
    payload: str = "full"
    coding: str = ""
    density: float = 1.0
    moved: Mapping[str, int] = dataclasses.field(default_factory=dict)


class WeightWatcher:
    """Owns one task per engine; feeds ``EngineSet`` and ``Policy``."""

    def __init__(
        self,
        config: LoopConfig,
        hub: Directory,
        policy: Policy,
        engines: EngineSet,
        client: EngineClient,
        dispatcher: RolloutDispatcher,
        signal: Signal,
        on_version: Callable[[Version], None],
        on_swap: Callable[[Swap], None],
        trainers: TrainerWatch,
    ) -> None:
        self._trainers = trainers
        self._config, self._hub, self._policy = config, hub, policy
        self._engines, self._client, self._dispatcher = engines, client, dispatcher
        self._signal, self._on_version, self._on_swap = signal, on_version, on_swap
        self._keepers: dict[Engine, asyncio.Task[None]] = {}
        self._swappable: Version | None = None
        self.swaps = 0
        self.swap_failures = 0
        self.last_failure = ""

    async def run(self) -> None:
        """Watch until cancelled; raises ``PeerDiedError`` when the hub stays away, or what a task raised."""
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._watch_versions(), name="versions")
                group.create_task(self._watch_members(group), name="members")
        except BaseExceptionGroup as failures:
            raise _first(failures) from None

    async def advance(self, version: Version) -> bool:
        """A version was published: label, stale drop, then swaps. False if the label was there already."""
        if not self._policy.publish(version):
            return False
        self._dispatcher.drop_stale()
        await self._dispatcher.settle_aborts()
        self._on_version(version)
        self._swappable = version
        self._signal.notify()
        return True

    def all_current(self) -> bool:
        """Whether every engine that serves holds the newest version, and one does."""
        label = self._policy.label
        serving = [e for e in self._engines if e.serves]
        return label is not None and bool(serving) and all(e.version == label for e in serving)

    async def _watch_versions(self) -> None:
        while True:
            found = await self._ask_hub(self._hub.wait_version, self._policy.label, 20.0, wait_s=20.0)
            if found is not None and found.version.lineage == self._policy.lineage:
                await self.advance(found.version)
            elif found is not None:  # what an earlier attempt left with the hub
                await asyncio.sleep(_MEMBERS_S)

    async def _watch_members(self, group: asyncio.TaskGroup) -> None:
        while True:
            members = await self._ask_hub(self._hub.members, wait_s=0.0)
            self._trainers.see((m.name for m in members if m.role == "trainer"), time.monotonic())
            infos = {
                m.name: {**m.info, "incarnation": m.incarnation}
                for m in members
                if m.role == "engine" and m.rank == 0 and "url" in m.info
            }
            joined, gone = self._engines.update(infos, await self._still_there(infos))
            for engine in gone:
                self._forget(engine, "engine_lost")
            for engine in joined:
                self._keepers[engine] = group.create_task(self._keep(engine), name=f"keep-{engine.name}")
            if joined or gone:
                self._signal.notify()
            await asyncio.sleep(_MEMBERS_S)

    async def _still_there(self, infos: Mapping[str, Any]) -> set[str]:
        """Engines that the hub does not list but that answer: they register again with a restarted hub."""
        for engine in self._engines:
            if engine.name in infos:
                engine.missing_since = None
        missing = [e for e in self._engines if e.name not in infos]
        answers = await asyncio.gather(*(self._answers(e) for e in missing))
        return {e.name for e, answered in zip(missing, answers, strict=True) if answered}

    async def _answers(self, engine: Engine) -> bool:
        now = time.monotonic()
        engine.missing_since = engine.missing_since or now
        if now - engine.missing_since > _FORGET_S:
            return False
        try:
            health = await self._client.health(engine, _HEALTH_S)
        except (EngineGoneError, EngineRefusedError):
            return False
        return health.get("version") is not None

    async def _keep(self, engine: Engine) -> None:
        """One engine from joining to its end: swap to what is newer, probe it when it is suspect."""
        while engine.state != "gone":
            seen = self._signal.count
            if engine.state == "suspect":
                await self._probe(engine)
            elif self._wants_swap(engine):
                if not await self._swap(engine):
                    await self._pause_after_failure(engine)
            else:
                await self._signal.changed(seen, self._config.poll_s)

    def _wants_swap(self, engine: Engine) -> bool:
        target = self._swappable
        if target is None or engine.version == target or engine.reserved is not None:
            return False
        if self._config.mode != "one_step_off" or engine.version is None or engine.state == "joining":
            return True
        return self._dispatcher.done_with(engine.version.number)

    async def _swap(self, engine: Engine) -> bool:
        target = self._swappable
        assert target is not None
        engine.swapping, began = True, time.time()
        try:
            mode = "keep" if engine.state == "joining" else self._config.pause_mode
            answer = await self._client.swap(engine, target, self._config.swap_timeout_s, mode)
            held = Version(str(answer["lineage"]), int(answer["number"]))
        except (EngineGoneError, EngineRefusedError, KeyError, ValueError) as error:
            self._failed(engine, error)
            return False
        finally:
            engine.swapping = False
            self._signal.notify()
        if engine.state == "gone":
            return True
        engine.version, engine.failures = held, 0
        if engine.state == "joining" and held.lineage == target.lineage and held.number >= target.number:
            engine.state = "serving"
        self.swaps += 1
        self._on_swap(_swap_row(engine.name, held.number, answer, began))
        return True

    def _failed(self, engine: Engine, error: Exception) -> None:
        self.swap_failures += 1
        self.last_failure = str(error)
        engine.failures += 1
        if isinstance(error, EngineGoneError) and engine.state == "serving":
            engine.state = "suspect"
            self._signal.notify()

    async def _pause_after_failure(self, engine: Engine) -> None:
        """Until the next version, or a while, whichever is first."""
        target = self._swappable
        await self._signal.holds(lambda: self._swappable != target or engine.state == "gone", _RETRY_S)

    async def _probe(self, engine: Engine) -> None:
        """A suspect engine serves again if it answers; its groups are lost if it refuses or stays silent."""
        try:
            health = await self._client.health(engine, _HEALTH_S)
        except (EngineGoneError, EngineRefusedError) as error:
            engine.failures += 1
            if engine.failures > _SILENT or getattr(error, "refused", False):
                self._dispatcher.engine_lost(engine, "engine_lost")
            await asyncio.sleep(_MEMBERS_S)
            return
        engine.failures = 0
        await asyncio.sleep(_BUSY_S)
        version = health.get("version")
        if health.get("state") not in ("ready", "paused", "sleeping") or version is None:
            engine.state, engine.version = "joining", None
        else:
            engine.version = Version(str(version["lineage"]), int(version["number"]))
            engine.state = "serving" if engine.version.lineage == self._policy.lineage else "joining"
        self._signal.notify()

    def _forget(self, engine: Engine, reason: str) -> None:
        self._dispatcher.engine_lost(engine, reason)
        keeper = self._keepers.pop(engine, None)
        if keeper is not None:
            keeper.cancel()

    async def _ask_hub(self, call: Callable[..., Any], *args: Any, wait_s: float) -> Any:
        """One blocking hub call; the client itself rides out a restart of the hub."""
        timeout_s = wait_s + 2 * self._config.hub_timeout_s + 30.0
        try:
            return await in_thread(call, *args, timeout_s=timeout_s, what="the hub")
        except TransferError as error:
            raise PeerDiedError(f"the hub is gone: {error}") from error


def _swap_row(engine: str, number: int, answer: dict[str, Any], began: float) -> Swap:
    return Swap(
        engine=engine,
        number=number,
        pause_s=float(answer.get("pause_s", 0.0)),
        prepare_s=float(answer.get("prepare_s") or 0.0),
        verify_s=float(answer.get("verify_s") or 0.0),
        bytes=int(answer.get("bytes") or 0),
        transport=str(answer.get("transport") or ""),
        t0=began,
        t1=time.time(),
        payload=str(answer.get("payload") or ""),
        coding=str(answer.get("coding") or ""),
        density=float(answer.get("density") or 0.0),
        moved={str(k): int(v) for k, v in (answer.get("moved") or {}).items()},
    )


def _first(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    error = failures.exceptions[0]
    return _first(error) if isinstance(error, BaseExceptionGroup) else error
