"""Runs one case of the matrix on a fleet, and checks after it everything that must hold again."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

from tests.faults.cases import Broken, Strike, phase_pattern
from tests.faults.child import Message
from tests.faults.fleet import RANKS, ROUND_S, SETTLE_S, TTL_S, Fleet
from tests.faults.rules import Edge, Rule

STOPPED_S = TTL_S + 1.5
"""A process stands for longer than its lease."""

PAUSE_S, PAUSE_FACTOR = 2.0, 5.0
"""Generation of those who are not struck pauses at most this much longer than so many times what the machine
itself keeps a bare loop from running in the same time: an engine has more threads that wait for a core."""

REACH_S = 60.0
SLOTS, LANES = 2, 2


def run_strike(fleet: Fleet, case: Strike, counted: Callable[[Fleet], None] | None = None) -> Message | None:
    """Hold the phase, strike, let go, heal. What became of the version under way, if its publisher knows."""
    _look_at_pauses(fleet)
    idle = case.phase == "idle"
    with _held(fleet, case) as reached:
        number = fleet.number if idle else fleet.publish(wait=False)
        reached()
        if case.how == "kill":
            fleet.children[case.victim].signal(signal.SIGKILL)
        else:
            fleet.children[case.victim].signal(signal.SIGSTOP)
    if case.how == "stop":
        if not idle and case.role not in ("hub", "trainer"):
            _others_reach(fleet, case.role, number)
        time.sleep(STOPPED_S)
        fleet.children[case.victim].signal(signal.SIGCONT)
        if not idle and case.role == "trainer":
            _others_reach(fleet, case.role, number)  # before a later version takes its place
    else:
        fleet.restart(case.victim)
    if not idle and (case.role == "hub" or (case.how == "kill" and case.role != "trainer")):
        _others_reach(fleet, case.role, number)  # rounds that a later version ends are aborted, rightly
    fleet.publish()
    settled(fleet)
    (counted or check_counted)(fleet)
    excused = {case.role} | ({case.filling.partition(".")[0]} if case.phase == "swap" else set())
    check_pauses(fleet, excused)
    if idle or (case.how == "kill" and case.role == "trainer"):
        return None
    return fleet.outcome(number)


def run_broken(fleet: Fleet, case: Broken) -> Message:
    """Break connections around a publish, mend them, publish once more; what became of the first version."""
    _look_at_pauses(fleet)
    place = case.source.partition(".")[0]
    with contextlib.ExitStack() as stack:
        if case.action == "unplug":
            half = _half(fleet, case.source)
            reached = stack.enter_context(_stalled(fleet, half)) if case.when == "move" else None
            if reached is None:
                stack.enter_context(fleet.network.unplugged(place))
            number = fleet.publish()
            if reached is not None:
                reached()
                stack.enter_context(fleet.network.unplugged(place))
                fleet.network.proxy.clear()
        else:
            rule = stack.enter_context(fleet.network.proxy.broken(case.rule(fleet.trained.half_bytes)))
            number = fleet.publish(wait=place != "trainer")
            if case.when != "idle":
                assert fleet.network.proxy.fired(rule, REACH_S), f"{case.name}: nothing was broken"
        if place != "trainer" and case.source != "*":
            _others_reach(fleet, place, number)
        time.sleep(case.seconds)
    settled(fleet)
    check_counted(fleet)
    check_pauses(fleet, set())
    return fleet.outcome(number)


def _half(fleet: Fleet, source: str) -> Rule:
    return Rule("stall", source=source, kind="data", up=False, after_bytes=fleet.trained.half_bytes)


@contextlib.contextmanager
def _held(fleet: Fleet, case: Strike) -> Iterator[Callable[[], object]]:
    """Hold a phase for the length of the block, which gets a call that waits until it is reached."""
    phase, filling = case.phase, case.filling
    publisher = case.victim if case.role == "trainer" else "trainer.0"
    if phase == "idle":
        yield lambda: None
    elif phase in ("export", "prepared", "swap"):
        name = publisher if phase == "export" else filling
        child = fleet.children[name]
        since = child.tell(hold=phase)
        child.wait("armed", REACH_S, since)
        yield lambda: child.wait("at", REACH_S, since)
        if child.alive:
            child.tell(go=1)
    else:
        source, kind, pattern = filling, "control", phase
        if phase == "announce":
            source = publisher
        elif phase in ("move", "verify"):
            kind, pattern = "data", "written" if phase == "move" else "verify"
        if phase == "move" and filling != "local.0":
            rule = _half(fleet, source)
        else:
            up, words = kind == "control", phase_pattern(pattern)
            rule = Rule("stall", source=source, kind=kind, up=up, down=not up, pattern=words)
        with contextlib.ExitStack() as stack:
            begun = stack.enter_context(behind(fleet, filling, "relay.0")) if filling == "leaf.0" else None
            reached = stack.enter_context(_stalled(fleet, rule))
            yield lambda: (begun() if begun is not None else None, reached())


@contextlib.contextmanager
def behind(fleet: Fleet, reader: str, relay: str) -> Iterator[Callable[[], object]]:
    """Have the reader of a relay begin after the relay has: who begins first at a site reads from outside.

    The block gets a call that waits until the hub has answered the relay, and then lets the reader: of two
    words that are both under way, the hub may see either one first.
    """
    proxy = fleet.network.proxy
    ahead = Rule("watch", source=relay, kind="control", up=False, pattern=phase_pattern("begun"))
    wait = Rule("stall", source=reader, kind="control", down=False, pattern=phase_pattern("begin"))
    with proxy.broken(ahead) as first, proxy.broken(wait) as second:

        def begun() -> None:
            assert proxy.fired(first, REACH_S) and proxy.fired(second, REACH_S)
            proxy.clear(second)

        yield begun


@contextlib.contextmanager
def _stalled(fleet: Fleet, rule: Rule) -> Iterator[Callable[[], object]]:
    with fleet.network.proxy.broken(rule) as number:

        def reached() -> None:
            assert fleet.network.proxy.fired(number, REACH_S), f"never reached: {rule}"

        yield reached


def _others_reach(fleet: Fleet, struck: str, number: int) -> None:
    """Whoever isn't struck gets the version while somebody is."""
    wanted = f"{fleet.lineage}:{number}"
    for replica in fleet.replicas.values():
        for rank in replica.ranks if replica.name != struck else ():
            fleet.children[rank].wait("installed", SETTLE_S, 0, lambda m: m["installed"] == wanted)


# What must hold after every case.


def settled(fleet: Fleet) -> dict[str, Message]:
    """Every engine serves the last version bit for bit, over the transport that its edge must have."""
    found = fleet.settle()
    for rank, message in found.items():
        wanted = "shm" if fleet.replicas[rank.partition(".")[0]].host == "trainer" else "tcp"
        assert message["transport"] == wanted, f"{rank}: {message['transport']}, expected {wanted}"
    return found


Counted = tuple[dict[str, Message], dict[str, int]]


def count_one(fleet: Fleet, publish: Callable[[], object], tries: int = 3) -> Counted:
    """One more version: what each engine says of it, and the bytes that came to each.

    One that an engine had to begin anew, as a slow machine may need more than a round's time for it, comes in
    pieces that nobody counts, and one over a link that was just opened anew, as a lease may run out there,
    comes in full: then the next one is taken, and the last of ``tries`` as it comes.
    """
    while True:
        since = {rank: len(fleet.children[rank].said) for rank in fleet.engines()}
        before, opened = fleet.received(), _links_to_trainer(fleet)
        publish()
        found, after = settled(fleet), fleet.received()
        again = any("error" in m for rank, at in since.items() for m in fleet.children[rank].said[at:])
        again = again or _links_to_trainer(fleet) != opened
        tries -= 1
        if not (again and tries):
            return found, {rank: after[rank] - before.get(rank, 0) for rank in after}


def _links_to_trainer(fleet: Fleet) -> dict[Edge, int]:
    """How many connections for weights were opened so far to each of the trainer's processes."""
    addresses = {fleet.address(f"trainer.{rank}") for rank in range(RANKS)}
    return {e: n for e, n in fleet.network.proxy.opened().items() if e.target in addresses}


def check_counted(fleet: Fleet) -> None:
    """One more version: the proxy counts at least its bytes on every tcp edge, and hardly any beside shm."""
    found, came = count_one(fleet, fleet.publish)
    for rank, message in found.items():
        moved = came[rank]
        if message["transport"] == "tcp":
            assert message["nbytes"] <= moved <= 1.1 * message["nbytes"] + 20_000, (rank, moved, message)
        else:
            assert moved < 20_000, (rank, moved, message)


def _look_at_pauses(fleet: Fleet) -> None:
    for name in (*fleet.engines(), "probe"):
        fleet.children[name].ask(pauses=1)


def check_pauses(fleet: Fleet, excused: set[str]) -> None:
    """Nobody else's generation stood still, and no read of serving weights ever saw them change."""
    machine_s = fleet.children["probe"].ask(pauses=1)["pauses"]
    limit_s = PAUSE_S + PAUSE_FACTOR * machine_s
    for rank in fleet.engines():
        answer = fleet.children[rank].ask(pauses=1)
        assert answer["torn"] == 0, f"{rank} read weights that changed under it"
        if rank.partition(".")[0] not in excused:
            assert answer["pauses"] <= limit_s, f"{rank} stood for {answer['pauses']:.2f} s > {limit_s:.2f} s"


def check_leaks(fleet: Fleet) -> None:
    """Descriptors, threads, segments, connections, processes are what they were; no round is open."""
    end = time.monotonic() + 2 * ROUND_S
    while (excess := _excess(fleet)) and time.monotonic() < end:
        time.sleep(0.3)
    assert not excess, excess


SLACK = {"socket": 16, "threads": 16, "anon_inode": 1, "segments": SLOTS, "file": SLOTS}
"""What may come once after the first look: pools fill as they are used, links to relays open when a round
names one. A leak grows from case to case."""

HUB_SOCKETS = 32
"""The hub keeps what its clients' pools left idle for a minute."""


def _excess(fleet: Fleet) -> list[str]:
    found = []
    for name, child in fleet.children.items():
        if name == "probe":
            continue
        now = child.ask(held=1)["held"]
        base = fleet.base.setdefault(name, (child.process.pid, now))
        if base[0] != child.process.pid:
            base = fleet.base[name] = (child.process.pid, now)
        for kind, count in now.items():
            slack = HUB_SOCKETS if (name, kind) == ("hub", "socket") else SLACK.get(kind, 0)
            if count > base[1].get(kind, 0) + slack:
                found.append(f"{name} holds {count} of {kind}, had {base[1].get(kind, 0)}")
    rounds = fleet.status()["rounds"]
    return found + _strangers(fleet) + _connections(fleet) + [f"open round {r}" for r in rounds]


def _strangers(fleet: Fleet) -> list[str]:
    """Processes and segments on a host that no child of ours accounts for."""
    found = []
    for host in fleet.network.hosts.values():
        ours = {c.process.pid for c in fleet.children.values() if c.place is host}
        if host.space is not None:
            extra = set(host.processes()) - ours - {host.space.pid}
            found += [f"process {pid} on {host.name}" for pid in extra]
        names = host.segments(f"jaxrl_sync-{fleet.run_id}-")
        makers = Counter(int(name.rsplit("-", 2)[1].partition("_")[2]) for name in names)
        if host.space is None and host.name not in ("trainer",):
            continue
        found += [f"{n} segments of {pid} on {host.name}" for pid, n in makers.items() if n > SLOTS]
        found += [f"segments of the dead {pid} on {host.name}" for pid in makers if pid not in ours]
    return found


def _connections(fleet: Fleet) -> list[str]:
    """Links to the trainer: one per edge, and the lanes where it is tcp."""
    addresses = {fleet.address(f"trainer.{rank}") for rank in range(RANKS)}
    edges = Counter(e for e in fleet.network.proxy.connections() if e.kind == "data")
    found = []
    for edge, count in edges.items():
        replica = fleet.replicas.get(edge.source.partition(".")[0])
        allowed = 1 if replica is not None and replica.host == "trainer" else 1 + LANES
        if edge.target in addresses and count > allowed:
            found.append(f"{count} connections of {edge.source} to {edge.target}, expected {allowed}")
    return found
