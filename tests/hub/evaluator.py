"""Somebody who wants one version kept while training moves on: it pins it and has an engine serve it.

The counterpart of ``HubClient.pin`` with a lease, and of an evaluation's engine that asks for its version.
"""

from __future__ import annotations

from typing import Any

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub import views
from jaxrl_sync.transfer.hub.client import POLL_S
from jaxrl_sync.transfer.hub.events import Pin, Unpin
from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Tag
from jaxrl_sync.transfer.version import Version

from .engine import EngineWorld
from .shells import MODEL, Client, HubNode, LeaseOf
from .trainer import TrainerWorld
from .world import Network, Node, Steps, World

CONFIRM_S = 10.0


class Evaluator(Node):
    """Pins versions. What it was told is kept must be there until it says that it needs it no longer."""

    def __init__(
        self, world: World, network: Network, hub: HubNode, trainer: TrainerWorld, number: int
    ) -> None:
        super().__init__(world, f"evaluator{number}")
        self.network, self.hub, self.trainer = network, hub, trainer
        self.until = 0.0
        self.busy = False
        self.pinned: Version | None = None
        self.promised: tuple[Version, int] | None = None
        trainer.on_drop.append(self.check)

    def boot(self) -> None:
        """A new process that wants nothing yet."""
        self.start()
        self.pinned = self.promised = None
        self.busy = False
        self.until = 0.0
        self.client = Client(self, self.hub, self.network, self.trainer.limits)
        self.lease = LeaseOf(
            self.client,
            MemberKey("evaluator", self.name, 0),
            1,
            {},
            lambda: None,
            lambda reason: self._end(reason),
            self._again,
        )

    def _end(self, reason: str) -> None:
        self.note("ends: %s", reason)
        self.kill()
        self.promised = self.pinned = None
        self.world.at(1.0, self.boot)

    def evaluate(self, engine: EngineWorld, lasts_s: float) -> None:
        """Have an engine serve what is the newest version now, for so long."""
        if self.alive and not self.busy:  # the end of one evaluation ends this process
            self.busy = True
            self.until = self.world.now + lasts_s
            self.spawn(self._evaluate(engine))

    def _evaluate(self, engine: EngineWorld) -> Steps:
        try:
            yield from self.lease.start()
            yield from self._pin()
        except TransferError as error:
            self.note("no version to evaluate: %s", error)
        if self.promised is not None:
            version = self.promised[0]  # a hub that restarts takes the promise back
            pause_s = self.world.stream(f"{self.name} thinks").choice((0.0, 4.0))
            yield pause_s  # the engine may be past the version then
            yield from self._serve(engine, version)
            while self.world.now < self.until:
                yield 0.5
            yield from self._serve(engine, None)
        self.promised, pinned, self.pinned = None, self.pinned, None
        if pinned is not None:
            try:
                yield from self.client.call(Unpin(MODEL, pinned, self.name))
            except TransferError as error:
                self.note("unpinning: %s", error)
        self._end("evaluated")

    def _serve(self, engine: EngineWorld, version: Version | None) -> Steps:
        yield from ()
        for rank in engine.ranks:
            if rank.alive and rank.ready:
                rank.spawn(rank.want(version))

    def _pin(self) -> Steps:
        newest = yield from self.client.call(
            None, lambda state: {"version": state.newest[MODEL].version if MODEL in state.newest else None}
        )
        version = newest["version"]
        if version is None:
            return
        yield from self.client.call(Pin(MODEL, version, self.name, (self.lease.key, self.lease.incarnation)))
        self.pinned = version
        tag, deadline = Tag(MODEL, version), self.clock() + CONFIRM_S

        def ask(state: HubState) -> Any:
            seen = views.pin_state(state, tag)
            return None if seen["held"] and seen["pinned"] and not seen["confirmed"] else seen

        while (left := deadline - self.clock()) > 0:
            seen = yield from self.client.call(
                None, ask, min(left, POLL_S), empty={"held": True, "confirmed": False}
            )
            if seen["confirmed"]:
                self.promised = version, self.trainer.ranks[0].life
                self.note("is promised %s", version)
                self.check()
                return
            if not seen["held"]:
                return

    def _again(self) -> Steps:
        self.promised = None  # of a hub that forgot it nothing is promised any more
        if self.pinned is not None:
            owner = (self.lease.key, self.lease.incarnation)
            yield from self.client.call(Pin(MODEL, self.pinned, self.name, owner, True))

    def check(self) -> None:
        """The trainer, if it is still the one that promised it, has the version while the hub has the pin."""
        if self.promised is None or not self.alive or not self.hub.alive:
            return
        version, life = self.promised
        if version in self.trainer.forced:
            return
        owner = self.hub.state.pins.get(Tag(MODEL, version), {}).get(self.name)
        member = self.hub.state.members.get(self.lease.key)
        if owner is None or member is None or owner[1] != member.incarnation:
            return
        for rank in self.trainer.ranks:
            if rank.alive and rank.life == life and all(e.version != version for e in rank.held):
                self.world.violated(f"{self.name} was promised {version}, which {rank.name} gave up")
