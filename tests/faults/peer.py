"""What the child processes of the fault tests share: lines of JSON, places to stop at, the proxy's door.

A child obeys JSON lines on stdin, answers JSON lines on stdout and ends when stdin ends. Every connection for
weights goes through the proxy: `use_door` puts it between ``wire.dial`` and the network, in the child alone.
"""

from __future__ import annotations

import collections
import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

HOLD_S = 120.0
_said = threading.Lock()


def say(**message: Any) -> None:
    """One line to the test."""
    with _said:
        print(json.dumps(message), flush=True)


class Holds:
    """Places where a child stops when the test asked for it: it says so and waits to be let go."""

    def __init__(self) -> None:
        self._armed = ""
        self._go = threading.Event()

    def obey(self, command: dict[str, Any]) -> bool:
        """{"hold": PLACE} arms one, {"go": 1} lets go; whether it was one of them."""
        if "hold" in command:
            self._go.clear()
            self._armed = command["hold"]
            say(armed=self._armed)
        elif "go" in command:
            self._armed = ""
            self._go.set()
        else:
            return False
        return True

    def reach(self, place: str) -> None:
        """Stop here if this place is armed, at most HOLD_S."""
        if self._armed == place:
            self._armed = ""
            say(at=place)
            self._go.wait(HOLD_S)


def listen(handle: Callable[[dict[str, Any]], None]) -> threading.Thread:
    """Read commands in a thread; when the test goes away, so does this process."""

    def read() -> None:
        for line in sys.stdin:
            handle(json.loads(line))
        os._exit(0)

    thread = threading.Thread(target=read, name="commands", daemon=True)
    thread.start()
    return thread


def use_door(door: str, name: str, direct: str = "") -> None:
    """Have every connection for weights go through the proxy, as one of ``name``.

    Addresses that start with ``direct``, where that is given, are dialled as they are.
    """
    from jaxrl_sync.transfer import wire
    from jaxrl_sync.transfer.errors import DeadlineError, PeerLost
    from tests.faults.proxy_client import dial
    from tests.faults.rules import Edge

    plain = wire.dial

    def through(address: str, timeout_s: float) -> Any:
        if direct and address.startswith(direct):
            return plain(address, timeout_s)
        try:
            return dial(door, Edge(name, address, "data"), timeout_s)
        except TimeoutError as error:
            raise DeadlineError(f"connecting to {address} took more than {timeout_s:g} s") from error
        except OSError as error:
            raise PeerLost(f"can't connect to {address}: {error}") from error

    wire.dial = through


def join_world(options: dict[str, Any]) -> None:
    """Become one process of a JAX world, if the options name one."""
    if "coordinator" in options:
        import jax

        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options["coordinator"], options["size"], options["rank"])


def held() -> dict[str, int]:
    """What this process holds: descriptors by kind, threads, mapped segments of shared memory."""
    found: collections.Counter[str] = collections.Counter()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except OSError:
            continue
        found[target.partition(":")[0] if ":" in target else "file"] += 1
    with open("/proc/self/maps", encoding="utf8") as maps:
        names = {line.split(None, 5)[5].strip() for line in maps if "/dev/shm/jaxrl_sync-" in line}
    return {**found, "segments": len(names), "threads": threading.active_count()}


class Pauses:
    """The longest time between two steps of a loop since the last look."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last = time.monotonic()
        self._longest = 0.0
        self.steps = 0

    def step(self) -> None:
        """A step was made."""
        with self._lock:
            now = time.monotonic()
            self._longest = max(self._longest, now - self._last)
            self._last = now
            self.steps += 1

    def look(self) -> float:
        """The longest pause since the last look, one that goes on included."""
        with self._lock:
            longest = max(self._longest, time.monotonic() - self._last)
            self._longest = 0.0
            return longest


def probe(options: dict[str, Any]) -> None:
    """Watches from the switch: the hub's state, and how long this machine lets nobody run."""
    from jaxrl_sync.transfer.errors import TransferError
    from jaxrl_sync.transfer.hub.client import HubClient

    pauses = Pauses()
    client = HubClient(options["hub"], options["token"], timeout_s=30.0)

    def handle(command: dict[str, Any]) -> None:
        if "status" in command:
            try:
                members = [vars(m) for m in client.members()]
                say(status={**client.status(), "members": members})
            except TransferError as error:
                say(status=None, error=str(error))
        elif "pauses" in command:
            say(pauses=pauses.look(), steps=pauses.steps)

    listen(handle)
    say(ready=os.getpid())
    while True:
        time.sleep(0.02)
        pauses.step()


def hub(options: dict[str, Any]) -> None:
    """The hub, on a port of its own choice or a given one."""
    from jaxrl_sync.transfer.hub.server import run_hub

    def handle(command: dict[str, Any]) -> None:
        if "held" in command:
            say(held=held())

    listen(handle)
    announce = lambda url: say(ready=os.getpid(), url=url)  # noqa: E731
    run_hub(options["host"], options["port"], options["token"], announce=announce, ttl_s=options["ttl_s"])


def main() -> None:
    """``python -m tests.faults.peer ROLE JSON``."""
    import importlib

    role, options = sys.argv[1], json.loads(sys.argv[2])
    if role in ("hub", "probe"):
        {"hub": hub, "probe": probe}[role](options)
        return
    if "door" in options:
        use_door(options["door"], options["host_name"])
    importlib.import_module(f"tests.faults.{role}_peer").run(options)


if __name__ == "__main__":
    main()
