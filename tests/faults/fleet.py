"""A fleet that stays up from case to case: hub, a trainer world of two processes, replicas of several meshes.

Every process of the fleet reaches the others through the fault proxy alone, under its own name: control
connections through a listener of its own, data connections through the door. Only what was killed is started
again; a trainer world that lost a rank is started again as a whole, with another lineage.
"""

from __future__ import annotations

import contextlib
import dataclasses
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.clean import remove_leftovers
from tests.faults.cases import HALF_BYTES
from tests.faults.child import Child, Message
from tests.faults.model import Boxes, Expected
from tests.faults.network import Network
from tests.faults.rules import Edge
from tests.ports import free_port

TTL_S, ROUND_S = 3.0, 8.0
START_S = 120.0
"""A process that starts on a busy machine imports jax, compiles and joins its world."""

SETTLE_S = 90.0
RANKS = 2


@dataclasses.dataclass(frozen=True)
class Replica:
    """An engine: ``tp`` devices over ``processes``; ``host`` is where it runs (its own by default).

    With ``relay`` it serves others. ``site`` is what it says of its place. ``connections``: lanes per edge.
    ``slots``: with one, versions land where it serves.
    """

    name: str
    tp: int
    processes: int = 1
    host: str = ""
    site: str = ""
    relay: bool = False
    connections: int = 2
    slots: int = 2

    @property
    def ranks(self) -> list[str]:
        """Names of its processes."""
        return [f"{self.name}.{rank}" for rank in range(self.processes)]


REPLICAS = (
    Replica("one", tp=1),
    Replica("two", tp=2),
    Replica("pair", tp=2, processes=2),
    Replica("local", tp=4, host="trainer"),
    Replica("relay", tp=2, site="far", relay=True),
    Replica("leaf", tp=1, site="far"),
)


@dataclasses.dataclass(frozen=True)
class Trained:
    """What the trainer publishes: one element in ``every`` changes; ``half_bytes`` are about half of what the
    smallest replica then receives of a version."""

    payload: str = "full"
    every: int = 1
    half_bytes: int = HALF_BYTES


class Fleet:
    """Owns every process: ``close()``. Names: hub, trainer.0, trainer.1, REPLICA.RANK, probe."""

    def __init__(
        self,
        network: Network,
        folder: Path,
        replicas: tuple[Replica, ...] = REPLICAS,
        publisher: dict[str, Any] | None = None,
        trained: Trained = Trained(),
        ttl_s: float = TTL_S,
        round_s: float = ROUND_S,
    ) -> None:
        """Start everything and wait until it is up. ``publisher``: more settings of PublisherConfig."""
        self.network, self.folder = network, folder
        self._ttl_s, self._round_s = ttl_s, round_s
        self.replicas = {r.name: r for r in replicas}
        self.trained, self.expected = trained, Expected(trained.every)
        self.children: dict[str, Child] = {}
        self.lineage, self.number = "a", -1
        self.publisher = publisher or {}
        self.base: dict[str, tuple[int, dict[str, int]]] = {}
        self._token = folder / "token"
        auth.create_token(self._token)
        self.run_id = auth.run_id_of(auth.load_token(self._token))
        self._control: dict[str, str] = {}
        self._door = network.proxy.listen()
        for name in ("hub", "trainer", *(r.host or r.name for r in replicas)):
            if name not in network.hosts:
                network.host(name)
        self._hub_port = 7070 if network.real else free_port()
        self.hub_address = f"{network.hosts['hub'].address}:{self._hub_port}"
        try:
            self._start_all()
        except BaseException:
            self.close()
            raise

    def _start_all(self) -> None:
        self.start_hub()
        address = {"hub": f"http://{self.hub_address}", "token": str(self._token)}
        self.children["probe"] = Child(
            "probe", "probe", self.network.switch, self.folder / "probe.log", **address
        )
        self.start_trainers()
        for name in self.replicas:
            self.start_replica(name)
        for child in self.children.values():
            child.wait("ready", START_S)
        for name, replica in self.replicas.items():
            assert self.expected.covers(replica.tp, [self.boxes(r) for r in replica.ranks]), name

    # Starting and striking.

    def _url(self, name: str) -> str:
        """Where the process of this name finds the hub: a listener of the proxy of its own."""
        if name not in self._control:
            self._control[name] = self.network.proxy.listen(Edge(name, self.hub_address, "control"))
        return f"http://{self._control[name]}"

    def _child(self, name: str, role: str, host: str, devices: int, **options: Any) -> None:
        common = {
            "hub": self._url(name),
            "token": str(self._token),
            "door": self._door,
            "host": self.network.hosts[host].address,
            "host_name": name,
            "ttl_s": self._ttl_s,
            "timeout_s": self._round_s,
        }
        place, log = self.network.hosts[host], self.folder / f"{name}.log"
        self.children[name] = Child(name, role, place, log, devices, **{**common, **options})

    def start_hub(self) -> None:
        """Start the hub and wait until it answers."""
        host = self.network.hosts["hub"]
        options = {"host": host.address, "port": self._hub_port, "token": str(self._token), "ttl_s": TTL_S}
        self.children["hub"] = Child("hub", "hub", host, self.folder / "hub.log", **options)
        self.children["hub"].wait("ready", START_S)

    def start_trainers(self) -> None:
        """Start the trainer's world."""
        world = {"coordinator": f"{self.network.hosts['trainer'].address}:{free_port()}", "size": RANKS}
        for rank in range(RANKS):
            options = {"rank": rank, "lineage": self.lineage, "publisher": self.publisher, **world}
            options |= {"payload": self.trained.payload, "every": self.trained.every}
            self._child(f"trainer.{rank}", "trainer", "trainer", 2, transport="auto", **options)

    def start_replica(self, name: str) -> None:
        """Start every process of a replica."""
        replica = self.replicas[name]
        host = replica.host or name
        world = {}
        if replica.processes > 1:
            world = {"coordinator": f"{self.network.hosts[host].address}:{free_port()}"}
        for rank, process in enumerate(replica.ranks):
            options = {"rank": rank, "size": replica.processes, "tp": replica.tp, **world}
            own = {"site": replica.site, "relay": replica.relay, "connections": replica.connections}
            own |= {"slots": replica.slots}
            own |= {"host": self.network.hosts[host].address, "chunk_bytes": 64 << 10}
            options |= {"engine": name, "subscriber": own}
            transport = "auto" if self.network.real or replica.host else "tcp"
            devices = replica.tp // replica.processes
            self._child(process, "engine", host, devices, transport=transport, **options)

    def start_readers(self, names: list[str], **subscriber: Any) -> Child:
        """Simulated readers, all of them in one process on a host ``readers``; waits until they are known."""
        if "readers" not in self.network.hosts:
            self.network.host("readers")
        if "readers" in self.children:
            self.children["readers"].close()
        self._child("readers", "readers", "readers", 1, readers=names, subscriber=subscriber)
        self.children["readers"].wait("ready", START_S)
        return self.children["readers"]

    def restart(self, name: str) -> None:
        """After a death: the process again, and with it the world that it was part of."""
        role = name.partition(".")[0]
        if role == "hub":
            self.children["hub"].close()
            self.start_hub()
            return
        world = [f"trainer.{r}" for r in range(RANKS)] if role == "trainer" else self.replicas[role].ranks
        for other in world:
            self.children[other].close()
        if role == "trainer":
            self.lineage = chr(ord(self.lineage) + 1)
            self.start_trainers()
        else:
            self.start_replica(role)
        for other in world:
            self.children[other].wait("ready", START_S)

    def engines(self) -> list[str]:
        """Names of all engine processes."""
        return [rank for replica in self.replicas.values() for rank in replica.ranks]

    def trainers(self) -> list[Child]:
        """The trainer's processes."""
        return [self.children[f"trainer.{rank}"] for rank in range(RANKS)]

    def boxes(self, rank: str) -> Boxes:
        """What an engine process says that it holds."""
        found = self.children[rank].wait("boxes", START_S)["boxes"]
        return {p: [tuple((a, b) for a, b in box) for box in boxes] for p, boxes in found.items()}

    # Versions.

    @property
    def version(self) -> str:
        """What was published last."""
        return f"{self.lineage}:{self.number}"

    def publish(self, wait: bool = True) -> int:
        """Publish the next number from every rank of the trainer."""
        self.number += 1
        places = [(child, child.tell(publish=self.number)) for child in self.trainers()]
        for child, since in places if wait else ():
            answer = child.wait("published", SETTLE_S, since, lambda m: m["published"] == self.number)
            assert not answer["error"], answer
        return self.number

    def outcome(self, number: int, rank: int = 0, timeout_s: float = 3 * ROUND_S) -> Message:
        """What one rank of the trainer says became of a version."""
        child = self.children[f"trainer.{rank}"]
        since = child.tell(outcome=number, timeout_s=timeout_s)
        return child.wait("outcome", timeout_s + 10, since, lambda m: m["outcome"] == number)

    def check_bits(self, rank: str, message: Message) -> None:
        """An engine's words about a version against what the version is."""
        lineage, _, number = (message.get("installed") or message["now"]).partition(":")
        replica = self.replicas[rank.partition(".")[0]]
        wanted = self.expected.digest(lineage, int(number), replica.tp, self.boxes(rank))
        assert message["digest"] == wanted, f"{rank} serves other bits than {lineage}:{number}: {message}"

    def settle(self, timeout_s: float = SETTLE_S) -> dict[str, Message]:
        """Wait until every engine serves what was published last; every version on the way is checked too."""
        found: dict[str, Message] = {}
        for rank in self.engines():
            child = self.children[rank]
            installs = lambda m: "digest" in m and m.get("installed") == self.version  # noqa: E731
            found[rank] = child.wait("installed", timeout_s, 0, installs)
        for rank in self.engines():
            for message in self.children[rank].said:
                if "digest" in message and "installed" in message:
                    self.check_bits(rank, message)
            since = self.children[rank].tell(digest=1)
            now = self.children[rank].wait("now", 30.0, since)  # what it says of a swap has a digest too
            assert now["now"] == self.version, f"{rank} serves {now['now']}, expected {self.version}"
            self.check_bits(rank, now)
        return found

    # What the hub and the machine say.

    def status(self, timeout_s: float = 90.0) -> dict[str, Any]:
        """The hub's state."""
        answer = self.children["probe"].ask(timeout_s, status=1)
        assert answer["status"] is not None, answer
        found: dict[str, Any] = answer["status"]
        return found

    def address(self, name: str) -> str:
        """Where a publisher's or relay's process listens, as the hub tells it: trainer.0, ENGINE.RANK."""
        world, _, rank = name.partition(".")
        role = "publisher" if world == "trainer" else "relay"
        for member in self.status()["members"]:
            if (member["role"], member["name"], member["rank"]) == (role, world, int(rank)):
                return str(member["info"]["address"])
        raise AssertionError(f"the hub knows no {role} {name}")

    def received(self) -> dict[str, int]:
        """Bytes that the proxy delivered to each process over data connections so far."""
        found = {name: 0 for name in (*self.engines(), "trainer.0", "trainer.1")}
        for edge, (_, down) in self.network.proxy.counts().items():
            if edge.kind == "data":
                found[edge.source] = found.get(edge.source, 0) + down
        return found

    @contextlib.contextmanager
    def standing(self, name: str) -> Iterator[None]:
        """A process stands still for the length of a block."""
        self.children[name].signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.children[name].signal(signal.SIGCONT)

    def close(self) -> None:
        """Kill everything. Idempotent."""
        for child in self.children.values():
            child.close()
        remove_leftovers(self.run_id)
