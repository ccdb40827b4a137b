"""Preflight of a run: the hub compares what trainer ranks and engines told it, and what differs ends the run.

A link refuses by itself what it can't carry; here every difference of the whole run is seen at once and by
name, memory too, as soon as the members are there. What a member hasn't told yet is waited for, and a
difference counts once it has lasted: who comes back tells one thing after the other.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from jaxrl_sync.orchestrator.errors import LoopError, PeerDiedError
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub.preflight import AT_MOST

LASTING_S = 3.0
"""Beyond a lease: a process that is gone is compared with who took its place until its lease has run out."""

_LOOK_S = 0.5
_ANSWER_S = 30.0
_PASSING = ("publishers", "ranks registered", "source layout that it planned with")
"""What is still to come when processes start at different times, or a trainer comes back on another mesh:
engines plan anew, which takes a while."""

logger = logging.getLogger("jaxrl_sync.orchestrator")


class PreflightError(LoopError):
    """Members of the run don't fit each other: names who, what, the value found and the expected."""

    def __init__(self, rows: list[Mapping[str, Any]]) -> None:
        super().__init__("preflight: " + "; ".join(map(line, rows)))
        if all(row["what"] == "memory" for row in rows):
            self.exit_code = 3  # a resource is missing


def line(row: Mapping[str, Any]) -> str:
    """One difference in words."""
    return f"{row['who']}: {row['what']} is {row['found']}, expected {row['expected']}"


class Fit:
    """Looks until ``engines`` engines and the trainer fit, at most ``limit_s``; who joins later is compared
    by its links alone. ``ask`` is ``HubClient.preflight``; ``ttl_s``: of leases; ``clock`` in seconds.

    ``state``: ``waiting``, ``fits``, ``incomplete`` (not all of them came in time), or ``none`` to compare.
    """

    def __init__(
        self,
        ask: Callable[[], Mapping[str, Any]],
        engines: int,
        *,
        limit_s: float,
        hub_timeout_s: float,
        ttl_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask, self._engines, self._clock = ask, engines, clock
        self._end = clock() + limit_s
        self._lasting_s = ttl_s + LASTING_S
        self._timeout_s = hub_timeout_s + _ANSWER_S
        self._since: float | None = None
        self.state = "waiting" if engines else "none"

    @property
    def settled(self) -> bool:
        """Whether there is nothing more to look for."""
        return self.state != "waiting"

    async def run(self) -> None:
        """Look until it is settled, then wait for ever. PreflightError."""
        while not self.settled:
            await self.look()
            await asyncio.sleep(_LOOK_S)
        await asyncio.Event().wait()

    async def look(self) -> None:
        """Ask the hub once, if it isn't settled. PreflightError; PeerDiedError when the hub stays away."""
        if self.settled:
            return
        try:
            answer = await in_thread(self._ask, timeout_s=self._timeout_s, what="the hub's preflight")
        except TransferError as error:
            raise PeerDiedError(f"the hub is gone: {error}") from error
        self.judge(answer)

    def judge(self, answer: Mapping[str, Any]) -> None:
        """Take an answer of the hub. PreflightError for differences that have lasted."""
        now = self._clock()
        found = answer["differences"]
        rows = [row for row in found if row["what"] not in (*_PASSING, AT_MOST)]
        if not rows:
            self._since = None
            here = len(answer["engines"])
            short = [line(row) for row in found if row["what"] == AT_MOST]
            if here >= self._engines and len(short) == len(found) and not answer["unknown"]:
                for text in short:
                    logger.warning("preflight: %s", text)
                logger.info("preflight: the trainer and %d engines fit", here)
                self.state = "fits"
            elif now > self._end:
                logger.warning("preflight: %d of %d engines told what they need", here, self._engines)
                self.state = "incomplete"
            return
        self._since = now if self._since is None else self._since
        if now - self._since >= self._lasting_s:
            raise PreflightError(rows)
