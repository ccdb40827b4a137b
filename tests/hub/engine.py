"""An engine world of the simulation: ranks that swap at one step, and what is expected of them.

The counterpart of the engine's updater (a leader and its followers, policy auto). What is swapped in and what
serves is checked here against the truth.
"""

from __future__ import annotations

import dataclasses
import math

from jaxrl_sync.transfer import receiving
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
    eager: bool = False


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
        self.eager = settings.eager and settings.slots > 1
        self.modes, self.verify = settings.modes, settings.verify
        self.slow_until = 0.0
        self.discards = 0
        self.crashes = 0
        self.rollbacks = 0
        """Times that all its ranks went back to the version before."""
        self.withdrawn: dict[Version, float] = {}
        """When the trainer had given versions up."""
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

    def rollback(self) -> None:
        """All ranks serve the version before again from one step on, where all of them still have it."""
        leader, *followers = self.ranks
        behind = any(f.taken < self.plan or f.orders for f in followers)
        if behind or not all(r.alive and r.ready and _can_roll_back(r) for r in self.ranks):
            return
        self.rollbacks += 1
        self.plan += 1
        for follower in followers:
            follower.order("rollback", self.plan, leader.state.installed)
        leader.rollback(self.plan)

    def check_rollback(self, rank: SubscriberRank, left: Version | None, number: int) -> None:
        """What serves again has the exact bits that it had, on every rank, and is what served before."""
        version, memory = rank.state.installed, rank.memory(rank.state.serving)
        assert version is not None and left is not None
        if memory is None or not memory.holds(self.truth.of(version)):
            found = None if memory is None else memory.words
            self.world.violated(f"{rank.name} went back to {version} with the words {found}")
        if version == left or version not in rank.history:
            self.world.violated(f"{rank.name} went back from {left} to {version}, which it never served")
        rank.history.append(version)
        rank.left = left
        self._check_step(rank, version, number)

    def check_swap(self, rank: SubscriberRank, offer: Offer, number: int) -> None:
        """What starts to serve is whole, later than what served, and every rank has it.

        It isn't what was rolled back, nor what its source had given up before this rank began to take it.
        """
        memory = rank.memory(rank.state.serving)
        if memory is None or not memory.holds(self.truth.of(offer.version)):
            found = None if memory is None else memory.words
            self.world.violated(f"{rank.name} serves {offer.version} with the words {found}")
        before = rank.history[-1] if rank.history else None
        if before is not None and before.follows(offer.version):
            self.world.violated(f"{rank.name} went back from {before} to {offer.version}")
        if offer.version == rank.left:
            self.world.violated(f"{rank.name} serves {offer.version} again, which was rolled back")
        gone_at = self.withdrawn.get(offer.version, math.inf)
        new_reader = offer.role == "publisher" and offer.version not in rank.history
        if new_reader and rank.begun_at.get(offer.round, 0.0) > gone_at:
            self.world.violated(f"{rank.name} serves {offer.version}, taken after it was withdrawn")
        rank.left = None
        rank.history.append(offer.version)
        for other in range(self.size):
            if self.verified.get((offer.round, other)) != offer.version:
                self.world.violated(
                    f"{rank.name} swaps to {offer.version} in {offer.round}, rank {other} never had it whole"
                )
        self._check_step(rank, offer.version, number)

    def _check_step(self, rank: SubscriberRank, version: Version, number: int) -> None:
        if self.served.setdefault(number, version) != version:
            self.world.violated(
                f"step {number} of {self.name}: {self.served[number]} and, on {rank.name}, {version}"
            )


def _can_roll_back(rank: SubscriberRank) -> bool:
    try:
        receiving.rollback(rank.state)
    except TransferError:
        return False
    return True


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
            if self.state.filling is None:  # a rollback gave it up: it had brought nothing
                continue
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
            if what == "rollback":
                if not self._go_back(number):
                    return
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

    def _go_back(self, number: int) -> bool:
        """Whether the rank could roll back; else its engine ends as a whole."""
        try:
            self.rollback(number)
        except TransferError as error:
            reason = f"rank {self.rank} can't roll back as the others did: {error}"
            self.world.at(0.0, lambda: self.engine.crash(1.0, reason))
            return False
        if self.held is not None and self.state.filling is None:
            self.held = None
        self.taken = number
        return True

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
