"""The trainer world of the simulation: ranks that publish versions and write them to whoever is ready.

The counterpart of ``publisher.Publisher`` and ``outbound.Outbound``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.client import HubRefused
from jaxrl_sync.transfer.hub.state import MemberKey
from jaxrl_sync.transfer.outcome import Ledger, RankKey, RankOutcome, open_ranks, settle
from jaxrl_sync.transfer.version import Version

from .shells import MODEL, Client, HubNode, LeaseOf, Limits, receive
from .weights import WORDS, Export, Truth
from .world import Network, Node, Pipe, Signal, Steps, World

HISTORY = 4
PIECES = 4
WORD_S = 0.04


class TrainerWorld:
    """All ranks of one trainer: they live and die together, a new life is a new lineage."""

    def __init__(
        self, world: World, network: Network, hub: HubNode, truth: Truth, size: int, limits: Limits, keep: int
    ) -> None:
        self.world, self.truth, self.limits, self.keep_versions = world, truth, limits, keep
        self.period_s = 3.0
        self.frames = False
        self.lineage = ""
        self.last = 0
        self.target = 1 << 30
        self.restart_at = math.inf
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

    def crash(self, down_s: float, reason: str) -> None:
        """All ranks die; a supervisor starts them again."""
        if any(r.alive for r in self.ranks):
            self.world.note("trainer", "dies: %s", reason)
            for rank in self.ranks:
                rank.kill()
            self.world.at(down_s, self.boot)


class TrainerRank(Node):
    """One publisher process."""

    def __init__(
        self, trainer: TrainerWorld, world: World, network: Network, hub: HubNode, rank: int
    ) -> None:
        super().__init__(world, f"trainer.{rank}")
        self.trainer, self.network, self.hub, self.rank = trainer, network, hub, rank
        self.published = 0
        self.positions: range = range(0)
        self._reset()

    def _reset(self) -> None:
        self.published = 0
        self.stall_s = 0.0
        self.held: list[Export] = []
        self.spare: list[Export] = []
        self.history: list[Version] = []
        self.tickets: dict[Version, Ledger] = {}
        self.links: dict[int, tuple[RankKey, Pipe]] = {}
        self._announcing: list[Version] = []
        self._to_announce = Signal()

    def boot(self) -> None:
        """A new process of the trainer's present life."""
        self.start()
        self._reset()
        size = len(self.trainer.ranks)
        self.positions = range(self.rank * WORDS // size, (self.rank + 1) * WORDS // size)
        self.client = Client(self, self.hub, self.network, self.trainer.limits)
        self.lease = LeaseOf(
            self.client,
            MemberKey("publisher", "trainer", self.rank),
            size,
            {"model": MODEL, "address": f"{self.name}#{self.life}", "source": "s", "source_digest": "s"},
            lambda: None,
            lambda reason: self.trainer.crash(1.0, reason),
            self._rejoin,
        )
        self.spawn(self._train())

    def _train(self) -> Steps:
        try:
            yield from self.lease.start()
        except TransferError as error:
            reason = str(error)
            self.world.at(0.0, lambda: self.trainer.crash(1.0, reason))
            return
        self.spawn(self._announce_all())
        draw = self.world.stream(f"{self.name} steps")
        leader = self.trainer.ranks[0]
        while True:
            step_s = 0.7 + 0.6 * draw.random()
            began = self.world.now
            while self.rank == 0 and self.world.now < began + self.trainer.period_s * step_s:
                yield 0.25
            while any(r.published < self.published for r in self.trainer.ranks) or (
                self.rank and leader.published == self.published
            ):
                yield 0.05 * (0.5 + draw.random())  # the ranks of one world step together
            if self.published < self.trainer.target:
                self.publish(Version(self.trainer.lineage, self.published + 1))
            else:
                yield 1.0

    def publish(self, version: Version) -> None:
        """As Publisher.publish: an export in buffers of its own, older ones retired and used again."""
        words = self.trainer.truth.of(version)
        export = next((s for s in self.spare if s.readers == 0), None)
        if export is None:
            export = Export(version, words)
        else:
            self.spare.remove(export)
            export.version, export.words[:], export.retired = version, words, False
        self.held.append(export)
        keep = self.trainer.keep_versions
        for old in self.held[:-keep]:
            old.retired = True
            self.spare = [old]
        self.held = self.held[-keep:]
        self.history = [*self.history, version][-HISTORY:]
        self.tickets[version] = {key: RankOutcome() for key, _ in self.links.values()}
        self.published = version.number
        self.note("publishes %s", version)
        self._announcing.append(version)
        self._to_announce.fire()

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

    def _announce(self, version: Version) -> Steps:
        event = machine.Announce(self.lease.key, self.lease.incarnation, MODEL, version, WORDS, 0.0)
        yield from self.lease.call(event)

    def _rejoin(self) -> Steps:
        for export in list(self.held):
            try:
                self.world.moment("announced", self)
                yield from self._announce(export.version)
            except HubRefused as error:
                if error.code != "regress":
                    raise

    # Links.

    def accept(self, pipe: Pipe, key: RankKey, mode: str) -> None:
        """A subscriber rank connected."""
        self.spawn(self._serve_link(pipe, key, mode))

    def _serve_link(self, pipe: Pipe, key: RankKey, mode: str) -> Steps:
        self.links[id(pipe)] = key, pipe
        reason = "closed"
        try:
            while True:
                message = yield from receive(pipe, self, math.inf)
                match message["kind"]:
                    case "open":
                        pipe.send(self.name, {"kind": "opened"})
                    case "ready":
                        yield from self._serve(pipe, mode, message)
                    case "installed":
                        self._installed(key, message["version"])
                    case "gave_up":
                        self._settle(message["version"], key, RankOutcome("aborted", message["reason"]))
        except TransferError as error:
            reason = f"{type(error).__name__}: {error}"
        pipe.close(self.name)
        del self.links[id(pipe)]
        self.note("link to %s.%s ended: %s", *key, reason)
        if all(other != key for other, _ in self.links.values()):
            for version in self.tickets:
                self._settle(version, key, RankOutcome("failed", reason))

    def _settle(self, version: Version, key: RankKey, result: RankOutcome) -> None:
        ledger = self.tickets.get(version)
        if ledger is not None and key in ledger:
            self.tickets[version] = settle(ledger, key, result)

    def _installed(self, key: RankKey, version: Version) -> None:
        if version in self.tickets:
            self.tickets[version] = settle(self.tickets[version], key, RankOutcome("installed"))
        for older in self.tickets:
            if version.follows(older) or older.lineage != version.lineage:
                self._settle(older, key, RankOutcome("superseded"))

    def _serve(self, pipe: Pipe, mode: str, ready: dict[str, Any]) -> Steps:
        """Write one version, as Outbound._serve; DeadlineError ends the link."""
        version, about = ready["version"], {"round": ready["round"]}
        export = next((e for e in self.held if e.version == version), None)
        if export is None or export.retired:
            pipe.send(self.name, {"kind": "refused", **about})
            return
        deadline = self.clock() + min(ready["timeout_s"], self.trainer.limits.timeout_s)
        wanted = [i for i in self.positions if i in ready["memory"].words]
        base = ready["base"]
        frame = self.trainer.frames and base in self.history and base != version
        pipe.send(self.name, {"kind": "begin", "payload": "frame" if frame else "full", **about})
        export.readers += 1
        try:
            if frame:
                yield WORD_S
                old = self.trainer.truth.of(base)
                changed = {i: export.words[i] for i in wanted if export.words[i] != old[i]}
                pipe.send(self.name, {"kind": "frame", "base": base, "changed": changed, **about})
            else:
                yield from self._write(pipe, mode, ready["memory"], wanted, export, deadline, about)
            pipe.send(self.name, {"kind": "done", "version": version, **about})
            yield WORD_S
            pipe.send(self.name, {"kind": "sums", "words": {i: export.words[i] for i in wanted}, **about})
        finally:
            export.readers -= 1

    def _write(
        self,
        pipe: Pipe,
        mode: str,
        memory: Any,
        wanted: list[int],
        export: Export,
        deadline: float,
        about: Any,
    ) -> Steps:
        """Word by word; the deadline is looked at between pieces only."""
        piece = max(1, len(wanted) // PIECES)
        draw = self.world.stream(f"{self.name} writes")
        put: dict[str, Callable[[int], object]] = {
            "shm": lambda i: memory.write(i, export.words[i], self.name),
            "verbs": lambda i: pipe.send(self.name, {"place": memory, "at": i, "word": export.words[i]}),
            "tcp": lambda i: pipe.send(
                self.name, {"kind": "chunk", "at": i, "word": export.words[i], **about}
            ),
        }
        for number, position in enumerate(wanted):
            if number % piece == 0 and self.clock() > deadline:
                raise DeadlineError("the round ended before all was written")
            if number == len(wanted) // 2:
                self.world.moment("writing", self)
            yield WORD_S * (0.5 + draw.random()) * self.network.weather.slow
            if self.stall_s:  # this thread alone: a page that is fetched, a core that others have
                stall_s, self.stall_s = self.stall_s, 0.0
                yield stall_s
            put[mode](position)
        if mode == "verbs":  # completions of the last writes
            while not pipe.quiet(self.name):
                if self.clock() > deadline:
                    raise DeadlineError("writes were not completed in time")
                yield WORD_S
