"""The orchestrator process: finds hub and trainer, runs the loop, writes the summary. Never imports jax."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from typing import Any

from jaxrl_sync.config.process import ProcessContext
from jaxrl_sync.orchestrator.config import LoopConfig, loop_config
from jaxrl_sync.orchestrator.errors import DeadlineError
from jaxrl_sync.orchestrator.eval_sink import Pins
from jaxrl_sync.orchestrator.fit import Fit
from jaxrl_sync.orchestrator.loop import Loop, Parts
from jaxrl_sync.orchestrator.rundir import write_summary
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.orchestrator.trainer_link import TrainerInfo, TrainerLink, TrainerWatch
from jaxrl_sync.tasks.mixture import Mixture, make_mixture
from jaxrl_sync.transfer.errors import PeerLost
from jaxrl_sync.transfer.hub.client import HubClient, Lease
from jaxrl_sync.transfer.tls import verify_of
from jaxrl_sync.transfer.version import Version

_HELLO_S = 30.0
_LOOK_S = 0.2


def run(context: ProcessContext) -> None:
    """Run the loop of ``context.config`` to its end; raises a ``UserError`` that names the cause otherwise.

    Returns early, without an error, only if ``context.stop`` was set before the trainer was there.
    """
    config = loop_config(context.config)
    mixture = make_mixture(context.config.task)
    hub_url = context.wait_hub(config.start_timeout_s)
    with HubClient(hub_url, context.token_file, timeout_s=config.hub_timeout_s) as hub:
        lease = hub.register("orchestrator", context.name, ttl_s=context.config.hub.ttl_s)
        context.announce()
        with lease:
            asyncio.run(_run(context, config, mixture, hub, RunPins(hub, lease)))


@dataclasses.dataclass(frozen=True)
class RunPins:
    """Pins that end with this process: nobody would end those of one that was killed."""

    hub: HubClient
    lease: Lease

    def pin(self, version: Version, by: str) -> None:
        """See ``HubClient.pin``; the pin is the lease's."""
        self.hub.pin(version, by, lease=self.lease)

    def unpin(self, version: Version, by: str) -> None:
        """See ``HubClient.unpin``."""
        self.hub.unpin(version, by)


async def _run(
    context: ProcessContext, config: LoopConfig, mixture: Mixture, hub: HubClient, pins: Pins
) -> None:
    timeline = context.open_timeline()
    link: TrainerLink | None = None
    fit = _fit(context, config, hub)
    try:
        link = await _connect_trainer(context, config, hub, fit)
        if link is None:
            return
        state = await link.connect()
        parts = Parts(
            mixture=mixture,
            task_seed=context.config.task.seed,
            hub=hub,
            pins=pins,
            link=link,
            token=hub.token,
            trace=hub.trace,
            verify=verify_of(context.wait_hub(config.start_timeout_s)),
            run_dir=context.run_dir,
            timeline=timeline,
            stop=context.stop,
            fit=fit,
        )
        await _run_loop(context, config, parts, state)
    finally:
        if link is not None:
            link.close()
        timeline.close()


def _fit(context: ProcessContext, config: LoopConfig, hub: HubClient) -> Fit:
    """Preflight of all engines that take versions from the trainer's processes: those that live in them, or
    read a folder, tell the hub nothing."""
    engine, ttl_s = context.config.engine, context.config.hub.ttl_s
    engines = (
        engine.replicas - {"disaggregated": 0, "mixed": 1, "colocated": engine.replicas}[engine.placement]
    )
    if context.config.sync.transport == "file":
        engines = 0
    limit_s, hub_timeout_s = config.start_timeout_s, config.hub_timeout_s
    return Fit(hub.preflight, engines, limit_s=limit_s, hub_timeout_s=hub_timeout_s, ttl_s=ttl_s)


async def _run_loop(context: ProcessContext, config: LoopConfig, parts: Parts, state: Any) -> None:
    loop = Loop(config, parts, state)
    cause = "done"
    try:
        await loop.run()
    except BaseException as error:
        cause = f"{type(error).__name__}: {error}"
        raise
    finally:
        write_summary(context.run_dir, loop.summary(cause))


async def _connect_trainer(
    context: ProcessContext, config: LoopConfig, hub: HubClient, fit: Fit
) -> TrainerLink | None:
    """Wait until every trainer process takes batches; None if this process is asked to stop meanwhile.

    Trainer processes register when they start and say where they take batches when they are ready. One that
    registered and left, or did not come at all, ends the wait with its name.
    """
    wanted, began = context.config.trainer.processes, time.monotonic()
    watch = TrainerWatch(config.trainer_wait_s)
    while not context.stop.is_set():
        timeout_s = config.hub_timeout_s + _HELLO_S
        members = await in_thread(hub.members, "trainer", timeout_s=timeout_s, what="the hub")
        ready = [m for m in members if "data_url" in m.info]
        if len(ready) >= wanted:
            infos = [TrainerInfo.of(m.name, m.info) for m in sorted(ready, key=lambda m: m.rank)]
            return TrainerLink(infos, lambda name: _lookup(hub, name), token=hub.token, run_id=hub.run_id)
        watch.see((m.name for m in members), time.monotonic())
        if time.monotonic() - began > config.start_timeout_s:
            raise DeadlineError(
                f"{len(ready)} of {wanted} trainer processes ready after {config.start_timeout_s:g} s, "
                f"{len(members)} registered"
            )
        await fit.look()
        await asyncio.sleep(_LOOK_S)
    return None


def _lookup(hub: HubClient, name: str) -> TrainerInfo:
    for member in hub.members("trainer"):
        if member.name == name and "data_url" in member.info:
            return TrainerInfo.of(member.name, member.info)
    raise PeerLost(f"trainer process {name} is not registered")
