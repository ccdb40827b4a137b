"""The trainer world of the simulation: ranks that publish versions, keep what is pinned, and serve links.

The counterpart of ``publisher.Publisher`` with ``retained``; what stays is decided by ``retention.decide``.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub import fleet, views
from jaxrl_sync.transfer.hub.client import POLL_S, HubRefused
from jaxrl_sync.transfer.hub.events import Announce, Hold, Unpublish
from jaxrl_sync.transfer.hub.state import Fanout, Holding, HubState, MemberKey, Tag
from jaxrl_sync.transfer.outcome import Ledger, RankKey, RankOutcome, open_ranks, settle
from jaxrl_sync.transfer.publisher import PIN_GRACE_TTLS
from jaxrl_sync.transfer.retention import Decision, Stock, decide
from jaxrl_sync.transfer.version import Version

from .serving import WORD_S, Reading, Server
from .shells import MODEL, Client, HubNode, LeaseOf, Limits
from .weights import WORDS, Buffer, Truth, Word
from .world import Network, Signal, Steps, World

HISTORY = 4
RETRY_S = 0.5


@dataclasses.dataclass(frozen=True)
class TrainerSettings:
    """As PublisherConfig. ``copies``: so many pinned versions may lie in host memory, None: any number."""

    keep_versions: int = 1
    copies: int | None = None
    frames: bool = False
    fanout: Fanout = Fanout()
    period_s: float = 3.0


@dataclasses.dataclass(eq=False)
class Export:
    """A held version: its buffer, which is its copy in host memory once the export buffers are gone."""

    version: Version
    buffer: Buffer
    copy: Buffer | None = None
    exported: bool = True

    @property
    def stock(self) -> Stock:
        """As retention sees it."""
        return Stock(self.version, 1, self.copy is not None, self.exported)


class BufferReading(Reading):
    """A reader of a held version; its buffer isn't used again before the reader is through."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        buffer.readers += 1

    def word(self, position: int) -> Word:
        return self._buffer.words[position]

    def close(self) -> None:
        self._buffer.readers -= 1


class TrainerWorld:
    """All ranks of one trainer: they live and die together, a new life is a new lineage."""

    def __init__(
        self,
        world: World,
        network: Network,
        hub: HubNode,
        truth: Truth,
        size: int,
        limits: Limits,
        settings: TrainerSettings,
    ) -> None:
        self.world, self.truth, self.limits, self.settings = world, truth, limits, settings
        self.period_s = settings.period_s
        self.lineage = ""
        self.target = 1 << 30
        self.stepped = Signal()
        self.on_drop: list[Callable[[], None]] = []
        self.withdrawing: set[Version] = set()
        """What was to be withdrawn in order, whatever became of it."""
        self.forced: set[Version] = set()
        self.withdrawn: dict[Version, float] = {}
        """When a rank had given a version up, as nobody read it there any more."""
        self.ranks = [TrainerRank(self, world, network, hub, r) for r in range(size)]

    @property
    def newest(self) -> Version | None:
        """The version that every rank has published last."""
        number = min(r.published for r in self.ranks)
        return Version(self.lineage, number) if number else None

    def boot(self) -> None:
        """Start every rank."""
        self.lineage = self.truth.lineage()
        for rank in self.ranks:
            rank.boot()

    def unpublish(self, number: int, force: bool) -> None:
        """Withdraw one of the versions that are held, on every rank."""
        held = [e.version for e in self.ranks[0].held]
        if not held or not all(r.alive for r in self.ranks):
            return
        version = held[number % len(held)]
        self.withdrawing.add(version)
        if force:
            self.forced.add(version)
        for rank in self.ranks:
            rank.spawn(rank.unpublish(version, force))

    def crash(self, down_s: float, reason: str) -> None:
        """All ranks die; a supervisor starts them again."""
        if any(r.alive for r in self.ranks):
            self.world.note("trainer", "dies: %s", reason)
            for rank in self.ranks:
                rank.kill()
            self.world.at(down_s, self.boot)


class TrainerRank(Server):
    """One publisher process."""

    def __init__(
        self, trainer: TrainerWorld, world: World, network: Network, hub: HubNode, rank: int
    ) -> None:
        super().__init__(world, network, f"trainer.{rank}", trainer.limits)
        self.trainer, self.hub, self.rank = trainer, hub, rank
        self._reset()

    def _reset(self) -> None:
        self.published = self.begun = 0
        """Versions whose publish has ended, and the one that is under way: it may wait for room."""
        self.stall_s = 0.0
        self.links = {}
        self.held: list[Export] = []
        self.spare: list[Buffer] = []
        self.pinned: frozenset[Version] = frozenset()
        self._pins_told: frozenset[Version] = frozenset()
        self.history: list[Version] = []
        self.tickets: dict[Version, Ledger] = {}
        self.room = Signal()
        self._rejoined_at = -math.inf
        self._told = 0
        self._announcing: list[Version] = []
        self._to_announce = Signal()

    def boot(self) -> None:
        """A new process of the trainer's present life."""
        self.start()
        self._reset()
        self.client = Client(self, self.hub, self.network, self.limits)
        info = {"model": MODEL, "address": f"{self.name}#{self.life}", "source_digest": "s", "site": ""}
        self.lease = LeaseOf(
            self.client,
            MemberKey("publisher", "trainer", self.rank),
            len(self.trainer.ranks),
            info,
            lambda: None,
            lambda reason: self.trainer.crash(1.0, reason),
            self._rejoin,
        )
        self.spawn(self._train())

    def holds(self) -> list[int]:
        """A contiguous share of the words."""
        size = len(self.trainer.ranks)
        return list(range(self.rank * WORDS // size, (self.rank + 1) * WORDS // size))

    def _train(self) -> Steps:
        try:
            yield from self.lease.start()
        except TransferError as error:
            reason = str(error)
            self.world.at(0.0, lambda: self.trainer.crash(1.0, reason))
            return
        self.spawn(self._announce_all())
        self.spawn(self._follow_pins())
        draw = self.world.stream(f"{self.name} steps")
        leader = self.trainer.ranks[0]
        while True:
            step_s = 0.7 + 0.6 * draw.random()
            began = self.world.now
            while self.rank == 0 and (left := began + self.trainer.period_s * step_s - self.world.now) > 0:
                yield min(left, 1.0)
            while any(r.published < self.published for r in self.trainer.ranks) or (
                self.rank and leader.published == self.published
            ):
                yield self.trainer.stepped, 1.0  # the ranks of one world step together
                yield 0.05 * draw.random()
            if self.published < self.trainer.target:
                self.begun = self.published + 1
                yield from self.publish(Version(self.trainer.lineage, self.begun))
            else:
                yield 1.0

    # What is held.

    def publish(self, version: Version) -> Steps:
        """As Publisher.publish: waits for room, then an export in buffers of its own."""
        limit = self.clock() + self.limits.timeout_s
        while self._decide((Stock(version, 0),)).wait:
            if self.clock() > limit:
                self.note("%s isn't published: pinned versions leave no room", version)
                return
            yield self.room, 0.5
        words = self.trainer.truth.of(version)
        buffer = next((s for s in self.spare if s.readers == 0), None)
        if buffer is None:
            buffer = Buffer(words)
        else:
            self.spare.remove(buffer)
            buffer.words[:] = words
        self.held.append(Export(version, buffer))
        self._tidy()
        self.history = [*self.history, version][-HISTORY:]
        self.tickets[version] = {key: RankOutcome() for key, _ in self.links.values()}
        self.published = version.number
        self.trainer.stepped.fire()
        self.note("publishes %s", version)
        self._announcing.append(version)
        self._to_announce.fire()

    def _decide(self, coming: tuple[Stock, ...] = ()) -> Decision:
        settings = self.trainer.settings
        stocks = [e.stock for e in self.held]
        return decide([*stocks, *coming], self.pinned, settings.keep_versions, settings.copies)

    def _tidy(self) -> None:
        decision = self._decide()
        for export in list(self.held):
            if export.version in decision.retire:
                self.held.remove(export)
                self.spare = [export.buffer]
            elif export.version in decision.shed and export.copy is not None:
                self.spare = [export.buffer]
                export.buffer, export.exported = export.copy, False
        self.room.fire()
        for look in self.trainer.on_drop if decision.retire else ():
            look()

    def unpublish(self, version: Version, force: bool) -> Steps:
        """As Publisher.unpublish."""
        limit = self.clock() + self.limits.timeout_s
        try:
            while not (yield from self._withdraw(version, force)):
                left = limit - self.clock()
                if left <= 0:
                    self.note("%s is withdrawn and still read", version)
                    return
                yield from self._wait_drained(version, min(left, POLL_S))
            export = next((e for e in self.held if e.version == version), None)
            if export is not None:
                self.note("gives up %s", version)
                self.held.remove(export)
                self.spare = [export.buffer]
                self.trainer.withdrawn.setdefault(version, self.world.now)
                for look in self.trainer.on_drop:
                    look()
            self.room.fire()
            yield from self._hold()
        except TransferError as error:
            self.note("withdrawing %s: %s", version, error)

    def _withdraw(self, version: Version, force: bool) -> Generator[Any, Any, bool]:
        """Whether it may be given up now. TransferError where it stays."""
        key, incarnation = self.lease.key, self.lease.incarnation
        seen = yield from self.lease.call(Unpublish(key, incarnation, MODEL, version, force))
        if seen["last_reliable"] and not force:
            raise TransferError("it is needed and has no other reliable copy: it stays")
        state = self.hub.state
        if seen["drained"] and self.hub.alive and self.client.epoch == state.epoch:
            for entry in fleet.readers(state, fleet.Source("publisher", key.name), Tag(MODEL, version)):
                self.world.violated(f"{self.name} may give up {version}, which {entry.engine} reads")
        return bool(seen["drained"])

    def _wait_drained(self, version: Version, poll_s: float) -> Steps:
        key, incarnation, tag = self.lease.key, self.lease.incarnation, Tag(MODEL, version)

        def ask(state: HubState) -> Any:
            refused = views.unknown(state, key, incarnation)
            found = views.unpublished(state, key, tag)
            waiting = found["withdrawn"] and not found["drained"]
            return refused or (None if waiting else found)

        yield from self.lease.ask(ask, poll_s, empty={})

    def read(self, version: Version, deadline: float) -> Generator[Any, Any, Reading | str]:
        """The words of a held version."""
        yield from ()
        export = next((e for e in self.held if e.version == version), None)
        return f"version {version} was superseded" if export is None else BufferReading(export.buffer)

    def frame_base(self, base: Version | None, version: Version) -> dict[int, Word] | None:
        """What a version of the last few consisted of."""
        if not self.trainer.settings.frames or base is None or base not in self.history or base == version:
            return None
        return dict(enumerate(self.trainer.truth.of(base)))

    # The hub.

    def _announce_all(self) -> Steps:
        while True:
            while not self._announcing:
                yield self._to_announce, math.inf
            version = self._announcing.pop(0)
            try:
                self.world.moment("announced", self)
                yield from self._announce(version)
            except HubRefused as error:
                if error.code != "regress" or self.published <= version.number:
                    self.note("%s isn't announced: %s", version, error)
                    continue
                for key in open_ranks(self.tickets[version]):
                    self._settle(version, key, RankOutcome("superseded"))
            except TransferError as error:
                self.note("%s isn't announced: %s", version, error)

    def _holdings(self) -> dict[Version, Holding]:
        return {
            e.version: Holding("published" if e.exported else "offloaded", e.version in self.pinned)
            for e in self.held
        }

    def _announce(self, version: Version) -> Steps:
        self._told += 1
        lease, fanout = self.lease, self.trainer.settings.fanout
        held = self._holdings()
        yield from lease.call(
            Announce(lease.key, lease.incarnation, MODEL, version, WORDS, 0.0, held, self._told, fanout)
        )

    def _hold(self) -> Steps:
        self._told += 1
        lease = self.lease
        yield from lease.call(Hold(lease.key, lease.incarnation, MODEL, self._holdings(), self._told))

    def _rejoin(self) -> Steps:
        self._rejoined_at = self.clock()
        for export in self.held[-1:]:
            try:
                self.world.moment("announced", self)
                yield from self._announce(export.version)
            except HubRefused as error:
                if error.code != "regress":
                    raise
                yield from self._hold()

    def _grace_s(self) -> float:
        return max(0.0, self._rejoined_at + PIN_GRACE_TTLS * self.limits.ttl_s - self.clock())

    def _follow_pins(self) -> Steps:
        """Learn which versions are pinned, keep them, and say so."""
        known: list[Version] = []
        key, incarnation = self.lease.key, self.lease.incarnation
        while not self.lease.lost:
            grace_s = self._grace_s()

            def ask(state: HubState, known: list[Version] = known) -> Any:
                found = views.pinned(state, MODEL)
                return views.unknown(state, key, incarnation) or (None if found == known else found)

            try:
                found = yield from self.lease.ask(ask, min(POLL_S, grace_s or POLL_S), empty=known)
                yield from self._pin(set(found))
                known = found
            except TransferError as error:
                self.note("following pins: %s", error)
                yield RETRY_S

    def _pin(self, versions: set[Version]) -> Steps:
        before = self.pinned
        pinned = frozenset(versions | before if self._grace_s() else versions)
        self.pinned = pinned
        self._tidy()
        if pinned == self._pins_told:
            return
        yield from self._hold()
        self._pins_told = pinned
        while wanted := [e for e in self.held if e.version in self._decide().copy]:
            yield WORD_S
            wanted[0].copy = Buffer(tuple(wanted[0].buffer.words))
        self._tidy()
        if pinned - before:
            yield from self._hold()

    # What readers say.

    def _settle(self, version: Version, key: RankKey, result: RankOutcome) -> None:
        ledger = self.tickets.get(version)
        if ledger is not None and key in ledger:
            self.tickets[version] = settle(ledger, key, result)

    def on_installed(self, key: RankKey, version: Version) -> None:
        """It is settled, and older ones are superseded."""
        if version in self.tickets:
            self.tickets[version] = settle(self.tickets[version], key, RankOutcome("installed"))
        for older in self.tickets:
            if version.follows(older) or older.lineage != version.lineage:
                self._settle(older, key, RankOutcome("superseded"))

    def on_gave_up(self, key: RankKey, version: Version, reason: str) -> None:
        """It may still come back and take it."""
        self._settle(version, key, RankOutcome("aborted", reason))

    def on_link_ended(self, key: RankKey, reason: str) -> None:
        """What it still owed is failed."""
        if all(other != key for other, _ in self.links.values()):
            for version in self.tickets:
                self._settle(version, key, RankOutcome("failed", reason))
