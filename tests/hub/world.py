"""A deterministic world in simulated time: one event queue, nodes with clocks of their own, tasks, a network.

A task is a generator on a node. It yields what it waits for: seconds on its node's clock, or ``(signal,
seconds)`` for a signal to be fired (then it is sent True) or the time to pass (False). A node can be killed
(its tasks end there and then), stopped for a while (its tasks go on later, as after SIGSTOP and SIGCONT), and
its clock can jump. Everything random comes from streams that are seeded by the world's seed and a name, so
that leaving one fault out changes nothing that has to do with another.
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import random
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_sync.transfer.errors import PeerLost

Wait = Any  # seconds, or (Signal, seconds)
Steps = Generator[Wait, Any, Any]
MOST_EVENTS, MOST_EVENTS_PER_S = 20_000, 1_000
"""More are no progress: the longest schedules take minutes of simulated time, 350 events a second."""


class Violation(AssertionError):
    """A property doesn't hold; the message has the log of what happened."""


class World:
    """Owns time and the queue of what happens next."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.now = 0.0
        self.nodes: dict[str, Node] = {}
        self.log: list[tuple[float, str, str, tuple[object, ...]]] = []
        self.violations: list[str] = []
        self.on_moment: Callable[[str, Node], None] = lambda name, node: None
        self.events = 0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()
        self._streams: dict[str, random.Random] = {}

    def stream(self, name: str) -> random.Random:
        """The random numbers of one thing, independent of all others'."""
        found = self._streams.get(name)
        if found is None:
            found = self._streams[name] = random.Random(f"{self.seed}/{name}")
        return found

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        """Call it so much later."""
        heapq.heappush(self._queue, (self.now + max(0.0, delay_s), next(self._count), call))

    def run(self, until: float, stop: Callable[[], bool] | None = None) -> bool:
        """Let things happen until then; True as soon as ``stop`` says so after one of them."""
        while self._queue and self._queue[0][0] <= until and not self.violations:
            self.now, _, call = heapq.heappop(self._queue)
            self.events += 1
            if self.events > MOST_EVENTS + MOST_EVENTS_PER_S * self.now:
                self.violated(f"{self.events} events in {self.now:.0f} s and no end")
            call()
            if stop is not None and stop():
                return True
        self.now = max(self.now, until)
        return False

    def note(self, who: str, text: str, *values: object) -> None:
        """One line of the log; formatted only when somebody reads it."""
        self.log.append((self.now, who, text, values))

    def moment(self, name: str, node: Node) -> None:
        """Something begins that a fault may wait for; ``node`` is where."""
        self.on_moment(name, node)

    def violated(self, text: str) -> None:
        """A property doesn't hold: the run ends here."""
        self.note("VIOLATION", "%s", text)
        self.violations.append(text)

    def story(self, last: int = 150) -> str:
        """The log in words."""
        lines = [f"{now:9.3f}  {who:<14} {text % values}" for now, who, text, values in self.log[-last:]]
        return "\n".join(lines)


class Signal:
    """What tasks wait for. Whoever waits looks again at what it wants after each firing."""

    def __init__(self) -> None:
        self._waiting: list[tuple[Task, int]] = []

    def wait(self, task: Task, turn: int) -> None:
        """Wake this task at the next firing, if it still waits in this turn."""
        self._waiting.append((task, turn))

    def fire(self) -> None:
        """Wake all who wait."""
        waiting, self._waiting = self._waiting, []
        for task, turn in waiting:
            task.node.world.at(0.0, lambda task=task, turn=turn: task.wake(turn, True))  # type: ignore[misc]


class Node:
    """A process: tasks, a clock, and a life number that a restart raises."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = False
        self.life = 0
        self.stopped_until = 0.0
        self.offset_s = 0.0
        self.on_death: list[Callable[[], None]] = []
        self.tasks: list[Task] = []
        world.nodes[name] = self

    def clock(self) -> float:
        """This node's monotonic clock; faults make it jump."""
        return self.world.now + self.offset_s

    def note(self, text: str, *values: object) -> None:
        """A line of the log by this node."""
        self.world.note(self.name, text, *values)

    def start(self) -> None:
        """A new process: nothing of the last one is left."""
        assert not self.alive
        self.alive, self.life = True, self.life + 1
        self.stopped_until, self.on_death = 0.0, []

    def kill(self) -> None:
        """As SIGKILL: no task goes on; what the operating system does then is in ``on_death``."""
        if not self.alive:
            return
        self.alive = False
        calls, self.on_death = self.on_death, []
        for call in calls:
            call()
        tasks, self.tasks = self.tasks, []
        for task in tasks:
            task.close()

    def spawn(self, steps: Steps) -> Task:
        """Run a task on this node."""
        task = Task(self, steps)
        self.tasks.append(task)
        self.world.at(0.0, lambda: task.wake(0, None))
        return task


class Task:
    """A generator that runs on a node until it ends or the node dies."""

    def __init__(self, node: Node, steps: Steps) -> None:
        self.node = node
        self.done = False
        self._steps = steps
        self._life = node.life
        self._turn = 0
        self._running = False

    def close(self) -> None:
        """It goes no further; a task that killed its own node ends at its next wait."""
        if not self._running:
            self.done = True
            self._steps.close()
            if self in self.node.tasks:
                self.node.tasks.remove(self)

    def wake(self, turn: int, value: Any) -> None:
        """Go on to the next wait, unless this waking is out of date."""
        node, world = self.node, self.node.world
        if self.done or turn != self._turn or not node.alive or node.life != self._life:
            return
        if node.stopped_until > world.now:
            world.at(min(0.5, node.stopped_until - world.now), lambda: self.wake(turn, value))
            return
        self._turn += 1
        self._running = True
        wait: Any = None
        try:
            wait = self._steps.send(value)
        except StopIteration:
            self.done = True
        self._running = False
        if self.done or not node.alive or node.life != self._life:
            self.close()
            return
        turn = self._turn
        if isinstance(wait, tuple):
            signal, seconds = wait
            signal.wait(self, turn)
        else:
            seconds = wait
        if seconds != float("inf"):
            world.at(max(seconds, 1e-6), lambda: self.wake(turn, False if isinstance(wait, tuple) else None))


@dataclasses.dataclass
class Weather:
    """How the network is now; faults change it for a while."""

    base_s: float = 0.002
    slow: float = 1.0
    loss: float = 0.0
    duplicates: float = 0.0
    cuts: dict[frozenset[str], int] = dataclasses.field(default_factory=dict)

    def cut(self, a: str, b: str) -> bool:
        """Whether nothing gets from a to b."""
        return bool(self.cuts) and frozenset((a, b)) in self.cuts

    def change(self, pairs: list[frozenset[str]], by: int) -> None:
        """Partitions may overlap: a pair is connected when the last one ends."""
        for pair in pairs:
            left = self.cuts.get(pair, 0) + by
            if left > 0:
                self.cuts[pair] = left
            else:
                self.cuts.pop(pair, None)


class Network:
    """Delays and losses between nodes."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.weather = Weather()
        self.pipes: list[Pipe] = []

    def delay(self, a: str, b: str) -> float:
        """Seconds that a message takes: usually little, sometimes much (so that messages overtake)."""
        draw = self.world.stream(f"{a}>{b}").random()
        return self.weather.base_s * self.weather.slow * (0.5 + draw + 40.0 * max(0.0, draw - 0.95))

    def chance(self, a: str, b: str, what: str, probability: float) -> bool:
        """Whether it happens to this message."""
        return probability > 0 and self.world.stream(f"{a}>{b}/{what}").random() < probability


class End:
    """One side of a connection: what arrived and wasn't read."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.life = node.life
        self.inbox: list[dict[str, Any]] = []
        self.arrived = Signal()
        self.closed = False
        self.eof = False
        self.flight: list[tuple[float, dict[str, Any] | None]] = []
        self.last_due = 0.0


class Pipe:
    """A connection as TCP gives it: in order, nothing twice, closed or reset at any time.

    While its ends are cut off from each other nothing arrives; what was sent arrives afterwards, unless an
    end gave up meanwhile. A dead process's system resets it, as soon as it can be reached.
    """

    KEEPALIVE_S = 20.0

    def __init__(self, network: Network, a: Node, b: Node) -> None:
        self.network = network
        self.ends = {a.name: End(a), b.name: End(b)}
        self.names = (a.name, b.name)
        self.black_hole: str = ""
        network.pipes.append(self)
        for node in (a, b):
            node.on_death.append(lambda node=node: self._died(node.name))  # type: ignore[misc]

    def other(self, name: str) -> str:
        """The node at the other end."""
        return self.names[1] if name == self.names[0] else self.names[0]

    def send(self, sender: str, message: dict[str, Any]) -> None:
        """Send from that end. PeerLost when it is known to be closed."""
        mine = self.ends[sender]
        if mine.closed or mine.eof:
            raise PeerLost(f"the connection to {self.other(sender)} is gone")
        self._deliver(sender, message, self.network.delay(sender, self.other(sender)))

    def quiet(self, sender: str) -> bool:
        """Whether all that was sent from that end has arrived. PeerLost when it is known to be closed."""
        mine = self.ends[sender]
        if mine.closed or mine.eof:
            raise PeerLost(f"the connection to {self.other(sender)} is gone")
        return not self.ends[self.other(sender)].flight

    def _deliver(self, sender: str, message: dict[str, Any] | None, delay_s: float) -> None:
        world, to = self.network.world, self.ends[self.other(sender)]
        to.last_due = max(world.now + delay_s, to.last_due)
        to.flight.append((to.last_due, message))
        world.at(to.last_due - world.now, lambda: self._arrive(sender))

    def _arrive(self, sender: str) -> None:
        """Hand over what is due, in order; what is cut off is sent again."""
        world, other = self.network.world, self.other(sender)
        to = self.ends[other]
        if to.closed or to.eof:
            to.flight.clear()
        if not to.flight or to.flight[0][0] > world.now:
            return
        if self.black_hole == sender or self.network.weather.cut(sender, other):
            world.at(0.25, lambda: self._arrive(sender))
            return
        while to.flight and to.flight[0][0] <= world.now:
            message = to.flight.pop(0)[1]
            if message is None:
                to.eof = True
            elif "place" in message:  # a remote write: no task of the receiver takes part
                message["place"].write(message["at"], message["word"], sender)
            else:
                to.inbox.append(message)
        to.arrived.fire()

    def close(self, name: str) -> None:
        """Close that end; the other one hears of it when it can."""
        mine = self.ends[name]
        if mine.closed:
            return
        mine.closed = True
        mine.arrived.fire()
        self._hear_of_end(name, self.KEEPALIVE_S)

    def reset(self) -> None:
        """Both ends learn that the connection is gone."""
        for end in self.ends.values():
            end.eof = True
            end.arrived.fire()

    def _died(self, name: str) -> None:
        self.ends[name].closed = True
        self._hear_of_end(name, self.KEEPALIVE_S)

    def _hear_of_end(self, name: str, patience_s: float) -> None:
        """The other end sees the end after what was sent before, or gives up by itself."""
        other = self.ends[self.other(name)]
        if other.eof or other.closed:
            self._forget()
            return
        if self.black_hole == name or self.network.weather.cut(name, self.other(name)):
            if patience_s > 0:
                self.network.world.at(1.0, lambda: self._hear_of_end(name, patience_s - 1.0))
                return
            other.eof = True
            other.arrived.fire()
        else:
            self._deliver(name, None, self.network.delay(name, self.other(name)))
        self._forget()

    def _forget(self) -> None:
        if self in self.network.pipes:
            self.network.pipes.remove(self)
