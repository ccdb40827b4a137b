"""The hub's trace becomes rows and spans: each once, over restarts of the hub, and trouble ends no run."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from typing import Any

from jaxrl_sync.orchestrator.round_log import RoundLog
from jaxrl_sync.transfer.errors import PeerLost

V3 = {"lineage": "a", "number": 3}
ROUND = {
    "kind": "round",
    "version": V3,
    "engine": "e",
    "source": "publisher trainer",
    "state": "committed",
    "opened": 1.0,
    "begun": 2.0,
    "ended": 4.0,
}


@dataclasses.dataclass
class Rows:
    rows: list[dict[str, Any]]
    seq: int
    epoch: str


@dataclasses.dataclass
class Hub:
    """A trace that answers from a script; a life of it is its rows and its epoch."""

    epoch: str = "one"
    rows: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    fail: int = 0
    asked: list[int] = dataclasses.field(default_factory=list)

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append({**row, "seq": len(self.rows) + 1, "t": 9.0})

    def ask(self, after: int, timeout_s: float) -> Rows:
        self.asked.append(after)
        if self.fail:
            self.fail -= 1
            raise PeerLost("the hub is away")
        return Rows([r for r in self.rows if r["seq"] > after], len(self.rows), self.epoch)


def follow(hub: Hub, *acts: Callable[[], None]) -> tuple[list[dict[str, Any]], list[tuple[Any, ...]]]:
    """Rows and spans of a log that is drained once after each act."""
    rows: list[Any] = []
    spans: list[tuple[Any, ...]] = []
    log = RoundLog(hub.ask, rows.append, lambda *place, **more: spans.append((*place, more)))

    async def run() -> None:
        for act in acts:
            act()
            await log.drain()

    asyncio.run(run())
    return rows, spans


def test_rows_come_once_with_flat_versions_and_rounds_are_spans() -> None:
    hub = Hub()
    edge = {"kind": "edge", "version": V3, "engine": "e", "seconds_wire": 0.5}
    never = {**ROUND, "begun": None, "state": "superseded"}
    rows, spans = follow(hub, lambda: hub.add(ROUND), lambda: hub.add(edge), lambda: hub.add(never))
    assert [r["kind"] for r in rows] == ["round", "edge", "round"]
    assert rows[1] == {
        "kind": "edge",
        "t": 9.0,
        "step": 3,
        "version": 3,
        "lineage": "a",
        "engine": "e",
        "seconds_wire": 0.5,
    }
    names = {"engine": "e", "source": "publisher trainer", "state": "committed", "opened": 1.0}
    assert spans == [("round", 2.0, 4.0, {"version": 3, **names})]
    assert hub.asked == [0, 1, 2]


def test_a_restarted_hub_is_followed_from_its_first_row() -> None:
    hub = Hub()

    def restart() -> None:
        hub.epoch, hub.rows = "two", []
        hub.add({**ROUND, "engine": "f"})
        hub.add({**ROUND, "engine": "g"})
        hub.add({**ROUND, "engine": "h"})

    rows, _ = follow(hub, lambda: hub.add(ROUND), lambda: hub.add(ROUND), restart, lambda: None)
    assert [r["engine"] for r in rows] == ["e", "e", "f", "g", "h"]


def test_a_hub_that_is_away_ends_nothing() -> None:
    hub = Hub(fail=1)
    rows, _ = follow(hub, lambda: hub.add(ROUND), lambda: None)
    assert len(rows) == 1
