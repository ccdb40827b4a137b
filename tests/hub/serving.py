"""The sender's end of links in the simulation: what a publisher and a relay have in common.

The counterpart of ``outbound.Outbound`` and of ``owner.Owner``, which both sides of it fulfil.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.outcome import RankKey
from jaxrl_sync.transfer.version import Version

from .shells import Limits, receive
from .weights import Word
from .world import Network, Node, Pipe, Steps, World

PIECES = 4
WORD_S = 0.04


class Reading:
    """The words of one version for one reader. One that is still arriving has gates."""

    partial = False

    def word(self, position: int) -> Word:
        """What lies there now."""
        raise AssertionError(f"nothing lies at {position}")

    def wait(self, position: int, deadline: float) -> Steps:
        """Until the word has arrived. PeerLost when it won't, DeadlineError."""
        yield from ()

    def confirm(self, deadline: float) -> Steps:
        """Until this process has verified the version itself. PeerLost, DeadlineError."""
        yield from ()

    def close(self) -> None:
        """The reader is through."""


class Server(Node):
    """A process that versions are read from."""

    def __init__(self, world: World, network: Network, name: str, limits: Limits) -> None:
        super().__init__(world, name)
        self.network, self.limits = network, limits
        self.links: dict[int, tuple[RankKey, Pipe]] = {}
        self.stall_s = 0.0

    # What differs.

    def holds(self) -> list[int]:
        """The positions that this process has of every version."""
        raise AssertionError(f"{self.name} holds nothing")

    def read(self, version: Version, deadline: float) -> Generator[Any, Any, Reading | str]:
        """The words of a version, or in words why there are none."""
        raise AssertionError(f"{self.name} serves nothing")

    def frame_base(self, base: Version | None, version: Version) -> dict[int, Word] | None:
        """What a reader that serves ``base`` has; None where only everything will do."""
        return None

    def on_installed(self, key: RankKey, version: Version) -> None:
        """A rank serves a version."""

    def on_gave_up(self, key: RankKey, version: Version, reason: str) -> None:
        """A rank couldn't take a version."""

    def on_link_ended(self, key: RankKey, reason: str) -> None:
        """A link is gone."""

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
                        self.on_installed(key, message["version"])
                    case "gave_up":
                        self.on_gave_up(key, message["version"], message["reason"])
        except TransferError as error:
            reason = f"{type(error).__name__}: {error}"
        pipe.close(self.name)
        del self.links[id(pipe)]
        self.note("link to %s.%s ended: %s", *key, reason)
        self.on_link_ended(key, reason)

    def _serve(self, pipe: Pipe, mode: str, ready: dict[str, Any]) -> Steps:
        """Write one version, as Outbound._serve; an error ends the link, and says why where it can."""
        about = {"round": ready["round"]}
        deadline = self.clock() + min(ready["timeout_s"], self.limits.timeout_s)
        reading = yield from self.read(ready["version"], deadline)
        if isinstance(reading, str):
            pipe.send(self.name, {"kind": "refused", "reason": reading, **about})
            return
        try:
            yield from self._send(pipe, mode, ready, reading, deadline)
        except TransferError as error:
            if not pipe.ends[self.name].eof and not pipe.ends[self.name].closed:
                pipe.send(self.name, {"kind": "failed", "reason": str(error), **about})
            raise
        finally:
            reading.close()

    def _send(self, pipe: Pipe, mode: str, ready: dict[str, Any], reading: Reading, deadline: float) -> Steps:
        about, version = {"round": ready["round"]}, ready["version"]
        mine = [i for i in self.holds() if i in ready["memory"].words]
        old = None if reading.partial else self.frame_base(ready["base"], version)
        pipe.send(self.name, {"kind": "begin", "payload": "full" if old is None else "frame", **about})
        if old is not None:
            yield WORD_S
            changed = {i: reading.word(i) for i in mine if reading.word(i) != old[i]}
            pipe.send(self.name, {"kind": "frame", "base": ready["base"], "changed": changed, **about})
        else:
            wanted = [i for i in mine if i not in ready["have"]]
            yield from self._write(pipe, mode, ready["memory"], wanted, reading, deadline, about)
        pipe.send(self.name, {"kind": "done", "version": version, **about})
        yield from reading.confirm(deadline)
        yield WORD_S
        pipe.send(self.name, {"kind": "sums", "words": {i: reading.word(i) for i in mine}, **about})

    def _write(
        self,
        pipe: Pipe,
        mode: str,
        memory: Any,
        wanted: list[int],
        reading: Reading,
        deadline: float,
        about: dict[str, Any],
    ) -> Steps:
        """Word by word; the deadline is looked at between pieces only."""
        piece = max(1, len(wanted) // PIECES)
        draw, me = self.world.stream(f"{self.name} writes"), self.name
        put: dict[str, Callable[[int, Word], object]] = {
            "shm": lambda i, word: memory.write(i, word, me),
            "verbs": lambda i, word: pipe.send(me, {"place": memory, "at": i, "word": word}),
            "tcp": lambda i, word: pipe.send(me, {"kind": "chunk", "at": i, "word": word, **about}),
        }
        for number, position in enumerate(wanted):
            if number % piece == 0 and self.clock() > deadline:
                raise DeadlineError("the round ended before all was written")
            if number == len(wanted) // 2:
                self.world.moment("writing", self)
            yield from reading.wait(position, deadline)
            yield WORD_S * (0.5 + draw.random()) * self.network.weather.slow
            if self.stall_s:  # this thread alone: a page that is fetched, a core that others have
                stall_s, self.stall_s = self.stall_s, 0.0
                yield stall_s
            put[mode](position, reading.word(position))
            if mode == "verbs":  # the completion of the write
                while not pipe.quiet(me):
                    if self.clock() > deadline:
                        raise DeadlineError("writes were not completed in time")
                    yield WORD_S
            if mode != "tcp":
                pipe.send(me, {"kind": "part", "at": position, **about})
