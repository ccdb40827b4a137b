"""An engine world of the simulation: ranks that swap at one step, and what is expected of them.

The counterpart of the engine's updater (a leader and its followers, policy auto). What is swapped in and what
serves is checked here against the truth.
"""

from __future__ import annotations

import dataclasses
import math

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.version import Version

from .shells import HubNode, Limits
from .subscriber import SubscriberRank
from .weights import Truth
from .world import Network, Signal, Steps, World

STEP_S = 0.3


@dataclasses.dataclass(frozen=True)
class EngineSettings:
    """As SubscriberConfig, of all ranks of an engine. ``modes``: transports to source ranks in turn."""

    size: int = 1
    slots: int = 2
    relay: bool = False
    site: str = ""
    reliable: bool = True
    modes: tuple[str, ...] = ("shm",)
    verify: bool = False


class EngineWorld:
    """All ranks of one engine: they live and die together."""

    def __init__(
        self,
        world: World,
        network: Network,
        hub: HubNode,
        truth: Truth,
        name: str,
        settings: EngineSettings,
        limits: Limits,
    ) -> None:
        self.world, self.truth, self.name, self.limits = world, truth, name, limits
        self.size, self.slots, self.relay = settings.size, settings.slots, settings.relay
        self.site, self.reliable = settings.site, settings.reliable
        self.modes, self.verify = settings.modes, settings.verify
        self.slow_until = 0.0
        self.discards = 0
        self.crashes = 0
        self.plan = 0
        self.served: dict[int, Version] = {}
        self.verified: dict[tuple[str, int], Version] = {}
        self.ranks = [EngineRank(self, world, network, hub, r) for r in range(self.size)]

    def boot(self) -> None:
        """Start every rank, without weights."""
        self.plan, self.served, self.verified = 0, {}, {}
        for rank in self.ranks:
            rank.boot()

    def crash(self, down_s: float, reason: str) -> None:
        """All ranks die; a supervisor starts them again."""
        if any(r.alive for r in self.ranks):
            self.crashes += 1
            self.world.note(self.name, "dies: %s", reason)
            for rank in self.ranks:
                rank.kill()
            self.world.at(down_s, self.boot)

    def leave(self, down_s: float) -> None:
        """All ranks leave in order, and come back later."""

        def over() -> None:
            left[0] -= 1
            if not left[0]:
                self.crash(down_s, "left in order")

        left = [self.size]
        for rank in self.ranks:

            def go(rank: EngineRank = rank) -> Steps:
                yield from rank.leave()
                over()

            rank.spawn(go())

    def check_swap(self, rank: SubscriberRank, offer: Offer, number: int) -> None:
        """What starts to serve is whole, later than what served, and every rank has it."""
        memory = rank.memory(rank.state.serving)
        if memory is None or not memory.holds(self.truth.of(offer.version)):
            found = None if memory is None else memory.words
            self.world.violated(f"{rank.name} serves {offer.version} with the words {found}")
        before = rank.history[-1] if rank.history else None
        if before is not None and before.follows(offer.version):
            self.world.violated(f"{rank.name} went back from {before} to {offer.version}")
        rank.history.append(offer.version)
        for other in range(self.size):
            if self.verified.get((offer.round, other)) != offer.version:
                self.world.violated(
                    f"{rank.name} swaps to {offer.version} in {offer.round}, rank {other} never had it whole"
                )
        if self.served.setdefault(number, offer.version) != offer.version:
            self.world.violated(
                f"step {number} of {self.name}: {self.served[number]} and, on {rank.name}, {offer.version}"
            )


class EngineRank(SubscriberRank):
    """One process of an engine: rank 0 takes what is on offer, the others do as they are told."""

    def _reset(self) -> None:
        super()._reset()
        self.orders: list[tuple[str, int, Version | None]] = []
        self.ordered = Signal()
        self.held: Offer | None = None
        self.taken = 0

    def drive(self) -> Steps:
        """The engine's own thread."""
        yield from self._lead() if self.rank == 0 else self._follow()

    def _lead(self) -> Steps:
        engine = self.engine
        followers = engine.ranks[1:]
        while not self.lease.lost:
            if engine.slow_until > self.world.now:
                yield 0.5
                continue
            if (yield from self.poll(5.0)) is None:
                continue
            offer = self._takable()
            if offer is None:
                continue
            for follower in followers:
                follower.order("prepare", 0, None)
            try:
                offer = yield from self.prepare(offer, engine.limits.timeout_s)
            except TransferError as error:
                self.note("preparing: %s: %s", type(error).__name__, error)
                continue
            if engine.discards > 0:
                engine.discards -= 1
                self.discard(offer, "its swap failed")
                continue
            yield STEP_S
            engine.plan += 1
            for follower in followers:
                follower.order("swap", engine.plan, offer.version)
            self.swap(offer, engine.plan)
            while any(f.taken < engine.plan for f in followers):
                yield 0.1

    def order(self, what: str, number: int, version: Version | None) -> None:
        """From the leader, over the engine's own connection: in order, soon."""
        life = self.life

        def arrive() -> None:
            if self.life == life and self.alive:
                self.orders.append((what, number, version))
                self.ordered.fire()

        self.world.at(0.01, arrive)

    def _follow(self) -> Steps:
        asked: list[None] = []
        prepare = Signal()
        self.spawn(self._shadow(asked, prepare))
        while True:
            while not self.orders:
                yield self.ordered, math.inf
            what, number, version = self.orders.pop(0)
            if what == "prepare":
                asked.append(None)
                prepare.fire()
                continue
            deadline = self.clock() + self.engine.limits.timeout_s
            while self.held is None or self.held.version != version:
                left = deadline - self.clock()
                if left <= 0:
                    reason = f"rank {self.rank} has no {version} to swap in"
                    self.world.at(0.0, lambda reason=reason: self.engine.crash(1.0, reason))  # type: ignore[misc]
                    return
                if self.orders and self.orders[0][0] == "prepare":
                    self.orders.pop(0)
                    asked.append(None)
                    prepare.fire()
                    continue
                yield self.changed, min(left, 0.5)
            offer, self.held = self.held, None
            self.swap(offer, number)
            self.taken = number

    def _shadow(self, asked: list[None], signal: Signal) -> Steps:
        """As inference.updater.Shadow: prepares what the leader prepares."""
        while True:
            while not asked:
                yield signal, math.inf
            asked.pop(0)
            stale, self.held = self.held, None
            if stale is not None:
                self.discard(stale, "the leader prepares again")
            offer = yield from self.poll(self.engine.limits.timeout_s)
            if offer is None:
                continue
            try:
                self.held = yield from self.prepare(offer, self.engine.limits.timeout_s)
            except TransferError as error:
                self.note("preparing: %s: %s", type(error).__name__, error)
            self.changed.fire()
