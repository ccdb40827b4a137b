"""RoundLog: follows the hub's trace and keeps it: rows of metrics.jsonl, and rounds in the timeline.

Rows of kind ``publish``, ``edge`` and ``round`` as `jaxrl_sync.transfer.hub.trace` describes them, with
``step`` and ``version`` as numbers and the ``lineage`` beside them. What is lost with a hub that is killed is
not replaced, and no trouble of the trace ends a run.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from jaxrl_sync.orchestrator.errors import LoopError
from jaxrl_sync.orchestrator.threads import in_thread
from jaxrl_sync.transfer.errors import TransferError

_POLL_S = 10.0
_AWAY_S = 120.0
_RETRY_S = 1.0
_LAST_S = 3.0

Row = Mapping[str, Any]


class Rows(Protocol):
    """`jaxrl_sync.transfer.hub.client.TraceRows`."""

    @property
    def rows(self) -> list[dict[str, Any]]: ...

    @property
    def seq(self) -> int: ...

    @property
    def epoch(self) -> str: ...


Ask = Callable[[int, float], Rows]
"""From the number of the last row that is known and the seconds to wait for another; blocking."""


class RoundLog:
    """Appends rows while ``run`` runs; ``drain`` takes what is left at the end."""

    def __init__(self, ask: Ask, append: Callable[[Row], None], record: Callable[..., None]) -> None:
        self._ask, self._append, self._record = ask, append, record
        self._after, self._epoch = 0, ""

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            try:
                await self._take(_POLL_S, _POLL_S + _AWAY_S)
            except (TransferError, LoopError):
                await asyncio.sleep(_RETRY_S)

    async def drain(self) -> None:
        """Once more, without waiting for rows."""
        with contextlib.suppress(TransferError, LoopError):
            await self._take(0.0, _LAST_S)

    async def _take(self, wait_s: float, timeout_s: float) -> None:
        after = self._after
        found = await in_thread(self._ask, after, wait_s, timeout_s=timeout_s, what="the hub's trace")
        if self._epoch and found.epoch != self._epoch:  # a restarted hub counts from 1
            self._after, self._epoch = 0, found.epoch
            return
        self._after, self._epoch = found.seq, found.epoch
        for row in found.rows:
            self._keep(row)

    def _keep(self, row: Row) -> None:
        version = row.get("version") or {}
        lineage, number = version.get("lineage"), version.get("number", 0)
        told = {k: v for k, v in row.items() if k not in ("seq", "version")}
        self._append({**told, "step": number, "version": number, "lineage": lineage})
        if row.get("kind") == "round" and row.get("begun") is not None:
            names = {k: row[k] for k in ("engine", "source", "state", "opened")}
            self._record("round", row["begun"], row["ended"], version=number, **names)
