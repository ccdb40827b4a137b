"""What every process has around the product's machines: calls to the hub, a lease; and the hub itself.

These are the simulated counterparts of ``hub.server``, ``hub.client.HubClient`` and ``hub.client.Lease``:
the same calls in the same order with the same retries, without sockets and threads.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, TransferError
from jaxrl_sync.transfer.hub import machine
from jaxrl_sync.transfer.hub.client import POLL_S, HubRefused
from jaxrl_sync.transfer.hub.state import HubState, MemberKey
from jaxrl_sync.transfer.version import Version

from .world import Network, Node, Pipe, Signal, Steps, World

Ask = Callable[[HubState], Any]
RETRY_S = (0.02, 0.05, 0.1, 0.2, 0.5)
CONNECT_S = 10.0
READ_S = 15.0
TICK_S = 0.5
MODEL = "policy"


@dataclasses.dataclass(frozen=True)
class Limits:
    """The deadlines of all processes, short enough that schedules reach them."""

    ttl_s: float = 6.0
    timeout_s: float = 12.0
    hub_timeout_s: float = 30.0
    handshake_s: float = 5.0


class HubNode(Node):
    """The hub: applies events to the machine, answers long polls after each change; a restart forgets all."""

    def __init__(self, world: World, network: Network, watch: Callable[[HubNode, HubState], None]) -> None:
        super().__init__(world, "hub")
        self.network = network
        self.state = HubState("none")
        self._watch = watch
        self._polls: list[tuple[Ask, Callable[[Any], None], Callable[[], None]]] = []

    def boot(self) -> None:
        """A new process with an empty directory and an epoch of its own."""
        self.start()
        self.state = HubState(f"hub{self.life:05d}")
        self._polls = []
        self.note("started, epoch %s", self.state.epoch)
        self.spawn(self._tick())

    def _tick(self) -> Steps:
        while True:
            yield TICK_S
            self.apply(machine.Tick())

    def apply(self, event: machine.Event) -> Any:
        """As ``server.Hub.apply``."""
        before = self.state
        self.state, outcome = machine.step(before, event, self.clock())
        for line in outcome.log if isinstance(outcome, machine.Done) else ():
            self.note("%s", line)
        if self.state is not before:
            self._watch(self, before)
            if not isinstance(event, machine.Heartbeat) or self.state.rounds != before.rounds:
                self._answer_polls()
        return outcome if isinstance(outcome, machine.Refused) else outcome.reply

    def kill(self) -> None:
        """Who waits for an answer sees its connection end."""
        super().kill()
        for _, _, reset in self._polls:
            self.world.at(0.01, reset)

    def poll(
        self,
        ask: Ask,
        timeout_s: float,
        answer: Callable[[Any], None],
        reset: Callable[[], None],
        empty: Any,
    ) -> None:
        """Answer now, after a change, or when the time is up."""
        found = ask(self.state)
        if found is not None or timeout_s <= 0:
            answer(empty if found is None else found)
            return
        entry = (ask, answer, reset)
        self._polls.append(entry)
        life = self.life

        def over() -> None:
            if self.life == life and self.alive and entry in self._polls:
                self._polls.remove(entry)
                answer(empty)

        self.world.at(timeout_s, over)

    def _answer_polls(self) -> None:
        for entry in list(self._polls):
            found = entry[0](self.state)
            if found is not None:
                self._polls.remove(entry)
                entry[1](found)


class Client:
    """Calls from one process to the hub, as HubClient makes them; leases are woken by a new epoch."""

    def __init__(self, node: Node, hub: HubNode, network: Network, limits: Limits) -> None:
        self.node, self.hub, self.network, self.limits = node, hub, network, limits
        self.epoch = ""
        self.on_epoch: list[Callable[[], None]] = []

    def call(
        self,
        event: machine.Event | None,
        ask: Ask | None = None,
        poll_s: float = 0.0,
        within_s: float = math.inf,
        empty: Any = None,
        then: Callable[[Any], Any] = lambda result: result,
    ) -> Generator[Any, Any, Any]:
        """One call, retried while the hub doesn't answer. PeerLost, HubRefused."""
        patience_s = min(self.limits.hub_timeout_s, within_s)
        start = self.node.clock()
        deadline = start + patience_s
        attempt = 0
        while True:
            left_s = max(0.1, start + within_s - self.node.clock())
            answer = yield from self._request(event, ask, poll_s, left_s, empty, then)
            if answer is not None:
                epoch, result = answer
                self._saw(epoch)
                if isinstance(result, machine.Refused):
                    raise HubRefused(result.code, result.message)
                return result
            if self.node.clock() > deadline:
                raise PeerLost(f"hub didn't answer for {patience_s:g} s")
            yield RETRY_S[min(attempt, len(RETRY_S) - 1)]
            attempt += 1

    def _saw(self, epoch: str) -> None:
        if epoch != self.epoch:
            first, self.epoch = not self.epoch, epoch
            if not first:
                for wake in self.on_epoch:
                    wake()

    def _request(
        self,
        event: machine.Event | None,
        ask: Ask | None,
        poll_s: float,
        within_s: float,
        empty: Any,
        then: Callable[[Any], Any],
    ) -> Generator[Any, Any, Any]:
        """One attempt: (epoch, result), None if it failed. ``then``: what the hub does before it answers."""
        world, name, hub, weather = self.node.world, self.node.name, self.hub, self.network.weather
        arrived, box = Signal(), []

        def back(epoch: str, result: Any) -> None:
            if not weather.cut("hub", name) and not self.network.chance("hub", name, "loss", weather.loss):
                world.at(self.network.delay("hub", name), lambda: take((epoch, result)))

        def take(answer: Any) -> None:
            box.append(answer)
            arrived.fire()

        def answer(epoch: str, result: Any) -> None:
            if hub.alive and hub.state.epoch == epoch:
                back(epoch, then(result))

        def deliver() -> None:
            if weather.cut(name, "hub"):
                return
            if not hub.alive:
                world.at(self.network.delay("hub", name), lambda: take(None))  # connection refused
                return
            epoch = hub.state.epoch
            if event is not None:
                back(epoch, hub.apply(event))
            elif ask is not None:
                hub.poll(
                    ask, poll_s, lambda r: world.at(0.0, lambda: answer(epoch, r)), lambda: take(None), empty
                )

        if not self.network.chance(name, "hub", "loss", weather.loss):
            delay = self.network.delay(name, "hub")
            world.at(delay, deliver)
            if event is not None and self.network.chance(name, "hub", "twice", weather.duplicates):
                late = world.stream(f"{name}/late").uniform(0.0, 12.0)
                world.at(delay + late, lambda: hub.apply(event) if hub.alive else None)
        limit_s = min(CONNECT_S if weather.cut(name, "hub") else poll_s + READ_S, within_s)
        deadline = self.node.clock() + limit_s
        while not box:
            left = deadline - self.node.clock()
            if left <= 0:
                return None
            yield arrived, left
        return box[0]


class LeaseOf:
    """A registration and its heartbeats, as hub.client.Lease. ``on_lost`` ends the process."""

    def __init__(
        self,
        client: Client,
        key: MemberKey,
        size: int,
        info: dict[str, Any],
        installed: Callable[[], Version | None],
        on_lost: Callable[[str], None],
        on_rejoin: Callable[[], Steps] | None = None,
    ) -> None:
        self.client, self.key, self.size, self.info = client, key, size, info
        node = client.node
        self.incarnation = f"{node.name}#{node.life}"  # of another key than other leases of this process
        self.lost = ""
        self._installed, self._on_lost, self._on_rejoin = installed, on_lost, on_rejoin
        self._sequence = 0
        self._wake = Signal()
        self._untold = False
        client.on_epoch.append(self._wake.fire)

    def start(self) -> Steps:
        """Register; the heartbeats go on by themselves. PeerLost without a hub."""
        self.client.node.world.moment("registered", self.client.node)
        yield from self.register()
        self.client.node.spawn(self._beat())

    def register(self, within_s: float = math.inf) -> Steps:
        """Tell the hub who this is and what it serves."""
        self._sequence += 1
        event = machine.Register(
            self.key,
            self.size,
            self.incarnation,
            dict(self.info),
            self.client.limits.ttl_s,
            self._installed(),
            self._sequence,
        )
        yield from self.client.call(event, within_s=within_s)

    def _rejoin(self) -> Steps:
        yield from self.register()
        yield from self._tell_again()

    def _tell_again(self) -> Steps:
        self._untold = False
        if self._on_rejoin is not None:
            yield from self._on_rejoin()

    def call(self, event: machine.Event, within_s: float = math.inf) -> Generator[Any, Any, Any]:
        """An event of this member, registered again where the hub forgot it; ends ``within_s``."""
        node = self.client.node
        deadline = node.clock() + within_s
        try:
            return (yield from self.client.call(event, within_s=within_s))
        except HubRefused as error:
            if error.code != "unknown_member":
                raise
        if math.isinf(within_s):
            yield from self._rejoin()
        else:
            yield from self.register(max(0.0, deadline - node.clock()))
            self._untold = True
            self._wake.fire()
        return (yield from self.client.call(event, within_s=max(0.0, deadline - node.clock())))

    def ask(
        self,
        ask: Ask,
        poll_s: float,
        within_s: float = math.inf,
        empty: Any = None,
        then: Callable[[Any], Any] = lambda result: result,
    ) -> Any:
        """A query of this member, registered again where the hub forgot it."""
        try:
            return (yield from self.client.call(None, ask, poll_s, within_s, empty, then))
        except HubRefused as error:
            if error.code != "unknown_member":
                raise
        yield from self._rejoin()
        return (yield from self.client.call(None, ask, poll_s, within_s, empty, then))

    def _beat(self) -> Steps:
        while not self.lost:
            yield self._wake, self.client.limits.ttl_s / 3
            try:
                if self._untold:
                    yield from self._tell_again()
                yield from self.client.call(machine.Heartbeat(self.key, self.incarnation))
            except HubRefused as error:
                if error.code != "unknown_member":
                    self._lose(str(error))
                    return
                try:
                    yield from self._rejoin()
                except TransferError as worse:
                    self._lose(str(worse))
            except TransferError as error:
                self._lose(str(error))

    def _lose(self, reason: str) -> None:
        self.lost = reason
        self.client.node.note("lease lost: %s", reason)
        self._on_lost(reason)


def receive(pipe: Pipe, node: Node, deadline: float) -> Generator[Any, Any, dict[str, Any]]:
    """The next message of a connection, as wire.Connection.recv. PeerLost, DeadlineError."""
    end = pipe.ends[node.name]
    while True:
        if end.inbox:
            return end.inbox.pop(0)
        if end.closed or end.eof:
            raise PeerLost(f"the connection to {pipe.other(node.name)} is gone")
        left = deadline - node.clock()
        if left <= 0:
            raise DeadlineError(f"nothing from {pipe.other(node.name)} in time")
        yield end.arrived, left


__all__ = ["MODEL", "POLL_S", "Client", "HubNode", "LeaseOf", "Limits", "receive"]
