"""One schedule of faults over a simulated run: a hub, a trainer world, engines of several ranks, a network.

The protocol's decisions are the product's own (``hub.machine``, ``receiving``, ``outcome``,
``payload.shadow``); shells around them live in `shells`, `trainer` and `engine`. `Simulation.run` plays the
faults, then lets them end, and expects the fleet to come to rest on the newest version. A broken one is a
`world.Violation` whose message tells what happened.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, get_args

from jaxrl_sync.transfer.hub.state import Fanout, FanoutKind, HubState, MemberKey, Round, Tag
from jaxrl_sync.transfer.outcome import conclude, open_ranks
from jaxrl_sync.transfer.version import Version

from .engine import EngineRank, EngineSettings, EngineWorld
from .evaluator import Evaluator
from .shells import MODEL, TICK_S, HubNode, Limits
from .trainer import TrainerSettings, TrainerWorld
from .weights import Truth
from .world import Network, Node, Violation, World

Kind = Literal[
    "kill hub",
    "kill trainer",
    "kill engine",
    "stop",
    "partition",
    "isolate",
    "loss",
    "duplicates",
    "slow network",
    "slow engine",
    "clock jump",
    "reset links",
    "half open",
    "discard",
    "stall a write",
    "leave",
    "evaluate",
    "pause training",
    "unpublish",
    "roll back",
]
Phase = Literal[
    "", "registered", "announced", "begun", "writing", "receiving", "verified", "prepared", "swapped"
]
PHASES: tuple[Phase, ...] = get_args(Phase)
KINDS: tuple[Kind, ...] = get_args(Kind)
CONVERGE_S = 150.0
FORCED_S = 15.0
"""A version is withdrawn whoever needs it where its fault lasts so long."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """``after_s`` the one before, this happens to ``who`` (a number that is folded onto what there is).

    With a phase it waits from then on for the first node to get there, and happens to that one.
    """

    after_s: float
    kind: Kind
    who: int = 0
    lasts_s: float = 3.0
    phase: Phase = ""


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A fleet and what happens to it. ``seed`` decides delays and everything else that chance decides."""

    seed: int = 0
    trainer_ranks: int = 1
    engines: tuple[int, ...] = (1,)
    modes: tuple[str, ...] = ("shm",)
    verify: bool = False
    frames: bool = False
    fanout: FanoutKind = "star"
    relays: bool = False
    two_sites: bool = False
    slots: int = 2
    keep_versions: int = 1
    copies: int | None = None
    ttl_s: float = 6.0
    period_s: float = 3.0
    trains_on: bool = True
    faults: tuple[Fault, ...] = ()

    def __str__(self) -> str:
        head = repr(dataclasses.replace(self, faults=())).removesuffix("faults=())")
        return "\n".join([f"{head}faults=(", *(f"    {fault!r}," for fault in self.faults), "))"])


class Simulation:
    """The world of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        limits = Limits(ttl_s=schedule.ttl_s)
        self.world = World(schedule.seed)
        self.network = Network(self.world)
        self.truth = Truth(self.world)
        self.hub = HubNode(self.world, self.network, self._watch)
        self.trainer = TrainerWorld(
            self.world,
            self.network,
            self.hub,
            self.truth,
            schedule.trainer_ranks,
            limits,
            TrainerSettings(
                schedule.keep_versions,
                schedule.copies,
                schedule.frames,
                Fanout(schedule.fanout),
                schedule.period_s,
            ),
        )
        self.evaluators = [Evaluator(self.world, self.network, self.hub, self.trainer, i) for i in range(2)]
        self.engines = [
            EngineWorld(
                self.world,
                self.network,
                self.hub,
                self.truth,
                f"engine{i}",
                self._settings(i, size),
                limits,
            )
            for i, size in enumerate(schedule.engines)
        ]
        for engine in self.engines:
            engine.withdrawn = self.trainer.withdrawn
        self._healed: list[Callable[[], None]] = []
        self._newest: dict[str, Version] = {}
        self._waiting: list[Fault] = []
        self.world.on_moment = self._moment

    def _settings(self, number: int, size: int) -> EngineSettings:
        schedule = self.schedule
        site = "far" if schedule.two_sites and number else ""
        reliable = number != 1 or not schedule.relays
        eager = schedule.seed % 3 == 2  # their rounds begin with the offer
        return EngineSettings(
            size, schedule.slots, schedule.relays, site, reliable, schedule.modes, schedule.verify, eager
        )

    # Properties that hold at every moment.

    def _watch(self, hub: HubNode, before: HubState) -> None:
        """After every change of the hub's state."""
        state = hub.state
        if state.closed is not before.closed:
            for key, entry in state.closed.items():
                if key not in before.closed and entry.state == "committed":
                    self._check_committed(entry.engine, key, entry.version)
        if state.installed is not before.installed:
            self._check_installed(state)
        if state.rounds is not before.rounds:
            engines = [(r.engine, r.model) for r in state.rounds.values()]
            if len(engines) != len(set(engines)):
                self.world.violated(f"an engine has two open rounds: {sorted(engines)}")
        for key, entry in state.rounds.items():
            old = before.rounds.get(key)
            if old is None:
                self._check_offer(state, entry)
            if entry.begun and not (old is not None and old.begun):
                self._check_source(state, entry)
        for member in state.members.values():
            if member.expires <= hub.clock() - TICK_S:
                self.world.violated(f"{member.key} is still a member after its lease ran out")
        for entry in state.rounds.values():
            if entry.deadline is not None and hub.clock() > entry.deadline + TICK_S:
                self.world.violated(f"round {entry.id} is open after its deadline")
        newest = state.newest.get(MODEL)
        if newest is not None and newest is not before.newest.get(MODEL):
            last = self._newest.get(state.epoch + newest.version.lineage)  # a restarted hub knew nothing
            if last is not None and last.follows(newest.version):
                self.world.violated(f"the hub's newest version went back from {last} to {newest.version}")
            self._newest[state.epoch + newest.version.lineage] = newest.version
            for rank in self.trainer.ranks:
                if newest.version.lineage == self.trainer.lineage and rank.published < newest.version.number:
                    self.world.violated(
                        f"{newest.version} is published, but {rank.name} has only {rank.published}"
                    )

    def _check_installed(self, state: HubState) -> None:
        """Nobody is said to hold what it never held."""
        for key, version in state.installed.items():
            if key.role != "subscriber":
                continue
            node, member = self.world.nodes[f"{key.name}.{key.rank}"], state.members.get(key)
            current = member is not None and member.incarnation == f"{node.name}#{node.life}"
            if current and isinstance(node, EngineRank) and version not in node.history:
                self.world.violated(f"the hub believes that {node.name} has {version}, which it never served")

    def _check_offer(self, state: HubState, entry: Round) -> None:
        """A round begins with live members on both sides."""
        sources = {MemberKey(entry.role, entry.world, r): i for r, i in entry.sources.items()}
        targets = {MemberKey("subscriber", entry.engine, r): i for r, i in entry.incarnations.items()}
        for key, incarnation in (sources | targets).items():
            member = state.members.get(key)
            if member is None or member.incarnation != incarnation:
                self.world.violated(f"{entry.id} is offered although {key} is gone")

    def _check_source(self, state: HubState, entry: Round) -> None:
        """Nobody begins to read from a trainer what one of its ranks doesn't hold or withdraws."""
        tag = Tag(entry.model, entry.version)
        for rank in entry.sources if entry.role == "publisher" else ():
            holding = state.holdings.get(MemberKey("publisher", entry.world, rank), {}).get(tag)
            if holding is None or holding.state == "draining":
                self.world.violated(f"{entry.engine} begins to read {entry.version}, which is withdrawn")

    def _check_committed(self, name: str, round_id: str, version: Version) -> None:
        engine = next(e for e in self.engines if e.name == name)
        for rank in engine.ranks:
            if version not in rank.history:
                self.world.violated(f"{round_id} is committed, but {rank.name} never served {version}")

    # Faults.

    def _nodes(self) -> list[Node]:
        return [self.hub, *self.trainer.ranks, *(r for e in self.engines for r in e.ranks), *self.evaluators]

    def _for(self, seconds: float, begin: Callable[[], None], end: Callable[[], None]) -> None:
        """Something that ends by itself, or when all faults do."""
        begin()
        self._healed.append(end)

        def over() -> None:
            if end in self._healed:
                self._healed.remove(end)
                end()

        self.world.at(seconds, over)

    def _moment(self, phase: str, node: Node) -> None:
        """A node got to a phase: what waits for it happens."""
        found = next((f for f in self._waiting if f.phase == phase), None)
        if found is not None:
            self._waiting.remove(found)
            self.world.at(0.0, lambda: self._strike(found, node))

    def _strike(self, fault: Fault, node: Node | None = None) -> None:
        nodes, weather = self._nodes(), self.network.weather
        node = nodes[fault.who % len(nodes)] if node is None else node
        where = f"{node.name} at {fault.phase}" if fault.phase else node.name
        self.world.note("FAULT", "%s (%s) for %.1f s", fault.kind, where, fault.lasts_s)
        engine = self.engines[fault.who % len(self.engines)]
        if isinstance(node, EngineRank):
            engine = node.engine
        match fault.kind:
            case "kill hub":
                if self.hub.alive:
                    self.hub.kill()
                    self.world.at(fault.lasts_s, self.hub.boot)
            case "kill trainer":
                self.trainer.crash(fault.lasts_s, "killed")
            case "kill engine":
                engine.crash(fault.lasts_s, "killed")
            case "stop":
                node.stopped_until = max(node.stopped_until, self.world.now + fault.lasts_s)
            case "partition" | "isolate":
                self._partition(fault, nodes, node)
            case "loss":
                self._for(
                    fault.lasts_s, lambda: setattr(weather, "loss", 0.3), lambda: setattr(weather, "loss", 0)
                )
            case "duplicates":
                self._for(
                    fault.lasts_s * 3,
                    lambda: setattr(weather, "duplicates", 0.3),
                    lambda: setattr(weather, "duplicates", 0),
                )
            case "slow network":
                self._for(
                    fault.lasts_s, lambda: setattr(weather, "slow", 60.0), lambda: setattr(weather, "slow", 1)
                )
            case "slow engine":
                engine.slow_until = max(engine.slow_until, self.world.now + fault.lasts_s)
            case "clock jump":
                node.offset_s += fault.lasts_s if fault.who % 3 else -min(fault.lasts_s, 5.0)
            case "reset links":
                for pipe in [p for p in self.network.pipes if node.name in p.names]:
                    pipe.reset()
            case "half open":
                for pipe in [p for p in self.network.pipes if node.name in p.names][:1]:
                    pipe.black_hole = node.name
                    self._healed.append(pipe.reset)
            case "leave":
                engine.leave(fault.lasts_s)
            case "evaluate":
                self.evaluators[fault.who % 2].evaluate(engine, fault.lasts_s)
            case "discard":
                engine.discards += 1
            case "stall a write":  # longer than its round may last
                limits_s = self.trainer.limits.timeout_s
                self.trainer.ranks[fault.who % len(self.trainer.ranks)].stall_s = limits_s + fault.lasts_s
            case "unpublish":
                self.trainer.unpublish(fault.who, force=fault.lasts_s >= FORCED_S)
            case "roll back":
                engine.rollback()
            case "pause training":
                period_s = self.schedule.period_s
                self._for(
                    fault.lasts_s,
                    lambda: setattr(self.trainer, "period_s", 1e3),
                    lambda: setattr(self.trainer, "period_s", period_s),
                )

    def _partition(self, fault: Fault, nodes: list[Node], node: Node) -> None:
        """Two groups (or one node and all others) hear nothing of each other; keep-alive ends what lasts."""
        alone = fault.kind == "isolate"
        count = 1 if alone else 1 + fault.who % max(1, len(nodes) - 1)
        order = sorted(nodes, key=lambda n: self.world.stream(f"partition {fault}").random())
        left = [node] if alone else order[:count]
        pairs = [frozenset((a.name, b.name)) for a in left for b in nodes if b not in left]
        weather = self.network.weather

        def keepalive() -> None:
            for pipe in list(self.network.pipes):
                if weather.cut(*pipe.names):
                    pipe.reset()

        self._for(fault.lasts_s, lambda: weather.change(pairs, 1), lambda: weather.change(pairs, -1))
        if fault.lasts_s > 20.0:
            self.world.at(20.0, keepalive)

    # The run.

    def run(self) -> World:
        """Play the schedule; Violation when a property doesn't hold."""
        self.hub.boot()
        self.trainer.boot()
        for engine in self.engines:
            engine.boot()
        for evaluator in self.evaluators:
            evaluator.boot()
        for fault in self.schedule.faults:
            self.world.run(self.world.now + fault.after_s)
            if not self.world.violations:
                self._waiting.append(fault) if fault.phase else self._strike(fault)
        self.world.run(self.world.now + 1.0)
        if not self.world.violations:
            self._heal()
            self._converge()
        if self.world.violations:
            raise Violation(self._message())
        return self.world

    def _message(self) -> str:
        return f"{self.world.violations[0]}\n{self.schedule}\n{self.world.story()}"

    def _heal(self) -> None:
        self.world.note("FAULT", "all faults end")
        healed, self._healed, self._waiting = self._healed, [], []
        for end in healed:
            end()
        for node in self._nodes():
            node.stopped_until = min(node.stopped_until, self.world.now)
        for engine in self.engines:
            engine.slow_until, engine.discards = 0.0, 0
        for evaluator in self.evaluators:
            evaluator.until = 0.0

    def _converge(self) -> None:
        """Training goes on a little or not at all, then every engine must serve the last version."""
        if self.schedule.trains_on:
            self.world.run(self.world.now + 8.0)
        self.trainer.target = max(1, *(max(r.published, r.begun) for r in self.trainer.ranks))
        last = Version(self.trainer.lineage, self.trainer.target)
        left = {r.left for e in self.engines for r in e.ranks}
        if last in self.trainer.withdrawing or last in left:
            self.trainer.target += 1  # nobody need ever serve that one
        if not self.world.run(self.world.now + CONVERGE_S, self._at_rest) and not self.world.violations:
            self.world.violated(f"not at rest {CONVERGE_S:g} s after the faults: {self._unrest()}")

    def _at_rest(self) -> bool:
        version = self.trainer.newest
        if version is None or version.number < self.trainer.target or self.hub.state.rounds:
            return False
        newest = self.hub.state.newest.get(MODEL)
        if newest is None or newest.version != version:
            return False
        ranks = [r for e in self.engines for r in e.ranks]
        return all(self._serves(r, version) for r in ranks) and self._concluded(version)

    def _serves(self, rank: EngineRank, version: Version) -> bool:
        memory = rank.memory(rank.state.serving)
        return (
            rank.alive
            and rank.state.installed == version
            and memory is not None
            and memory.serving == version
            and self.hub.state.installed.get(rank.lease.key) == version
        )

    def _concluded(self, version: Version) -> bool:
        """Every publish of this life has an outcome with a name."""
        for rank in self.trainer.ranks:
            for published, ledger in rank.tickets.items():
                if open_ranks(ledger):
                    return False
                conclude(published, ledger, {})
        return version in self.trainer.ranks[0].tickets

    def _unrest(self) -> str:
        installed = {r.name: str(r.state.installed) for e in self.engines for r in e.ranks}
        newest = self.hub.state.newest.get(MODEL)
        open_tickets = {
            f"{rank.name} {v}": open_ranks(ledger)
            for rank in self.trainer.ranks
            for v, ledger in rank.tickets.items()
            if open_ranks(ledger)
        }
        return (
            f"the trainer's last is {self.trainer.newest} (target {self.trainer.target}), the hub's newest "
            f"{newest.version if newest else None}, installed {installed}, "
            f"rounds {list(self.hub.state.rounds)}, "
            f"open tickets {open_tickets}"
        )
