"""What happened in rounds: when each was opened, begun and ended, and what its ranks report of it.

Beside the state machine and without influence on it: lost at a restart, bounded, read by ``/v1/trace``,
``/metrics`` and ``jaxrl-sync status``.

Rows, each with its number ``seq`` and ``t`` (``time.time()`` seconds):

    publish   model, version, publisher, rank, seconds_export, bytes_export
    edge      model, version, round, engine, rank, source, transport, payload, coding, and a value of every
              phase as seconds_<phase> and bytes_<phase>, see ``PHASES``
    round     model, version, round, engine, source, state, repair, why, opened, begun, ended; committed ones
              also seconds_commit: from the announcement to the last rank's swap
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from jaxrl_sync.transfer.hub.state import HubState, MemberKey, Round, version_json

PHASES = ("export", "pack", "encode", "queue", "wire", "verify", "apply", "swap", "commit")
SIZED = ("export", "pack", "encode", "wire", "verify", "apply")
"""Phases that bytes pass through; waiting and an assignment have none."""
MAX_ROWS = 4096
MAX_EDGES = 256
MAX_VERSIONS = 256
MAX_VALUE = 1e15
TRANSPORTS = frozenset({"shm", "verbs", "tcp"})
PAYLOADS = frozenset({"full", "frame"})
OTHER = "other"
"""Totals are kept by the words that there are; whatever else a member says is counted under this one."""
_SHOWN = 80

Row = dict[str, Any]


@dataclasses.dataclass
class Total:
    """How often something took place, how long in all, how many bytes in all."""

    count: int = 0
    seconds: float = 0.0
    nbytes: int = 0

    def add(self, seconds: float, nbytes: float) -> None:
        """Once more."""
        self.count += 1
        self.seconds += seconds
        self.nbytes += int(nbytes)


@dataclasses.dataclass(frozen=True)
class _Published:
    """A version: the slowest rank's export, the bytes of its tree, when its last rank announced it."""

    export_s: float
    nbytes: float
    t: float


class Trace:
    """The last rows and totals since the start. Lives on the hub's event loop; not thread-safe."""

    def __init__(self) -> None:
        self.rows: collections.deque[Row] = collections.deque(maxlen=MAX_ROWS)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.phases: dict[tuple[str, str], Total] = {}
        self.payloads: dict[tuple[str, str], Total] = {}
        self.opened: dict[str, float] = {}
        self.begun: dict[str, float] = {}
        self.seq = 0
        self._published: dict[tuple[str, str, int], _Published] = {}
        self._told: dict[tuple[str, MemberKey], None] = {}

    def since(self, seq: int) -> list[Row]:
        """Rows with a higher number than ``seq``, oldest first."""
        if seq >= self.seq:
            return []
        return [row for row in self.rows if row["seq"] > seq]

    def see(self, before: HubState, after: HubState, t: float) -> None:
        """Note what an event changed: rounds that were opened, begun or ended."""
        if after.rounds is not before.rounds:
            for entry in after.rounds.values():
                self.opened.setdefault(entry.id, t)
                if entry.begun:
                    self.begun.setdefault(entry.id, t)
            if len(self.opened) > MAX_ROWS + len(after.rounds):  # many ended in one event
                self.opened = {k: v for k, v in self.opened.items() if k in after.rounds}
                self.begun = {k: v for k, v in self.begun.items() if k in after.rounds}
        if after.closed is not before.closed:
            for key, entry in after.closed.items():
                if key not in before.closed:
                    self._ended(after, entry, t)

    def published(self, key: MemberKey, model: str, version: Any, body: Mapping[str, Any], t: float) -> None:
        """A publisher rank announced a version and says what its export took."""
        seconds, nbytes = _value(_table(body.get("seconds")), "export"), _value(body, "bytes")
        tag = (model, version.lineage, version.number)
        known = self._published.pop(tag, None)
        if known is not None:
            last = t if seconds else known.t  # one that is told again, without an export, is no later
            self._published[tag] = _Published(max(seconds, known.export_s), max(nbytes, known.nbytes), last)
        else:
            self._published[tag] = _Published(seconds, nbytes, t)
        while len(self._published) > MAX_VERSIONS:
            del self._published[next(iter(self._published))]
        row = {"publisher": key.name, "rank": key.rank, "seconds_export": seconds, "bytes_export": nbytes}
        self._add("publish", {"model": model, "version": version_json(version), **row}, t)

    def reported(self, key: MemberKey, entry: Round, report: Any, t: float) -> None:
        """A rank installed a round's version and tells what every edge of it took.

        ``report`` comes from a process that has the token, and may still be nonsense: what isn't a number of
        sensible size counts as 0.
        """
        if (entry.id, key) in self._told:  # a repeated call
            return
        self._told[entry.id, key] = None
        while len(self._told) > MAX_ROWS:
            del self._told[next(iter(self._told))]
        table = _table(report)
        shared = _table(table.get("seconds"))
        edges = table.get("edges")
        published = self._of(entry)
        for edge in (edges if isinstance(edges, list) else [])[:MAX_EDGES]:
            told = _table(edge)
            seconds = {
                **shared,
                **_table(told.get("seconds")),
                "export": published.export_s if published else 0.0,
            }
            sizes = {**_table(told.get("bytes")), "export": published.nbytes if published else 0.0}
            row: Row = {
                "model": entry.model,
                "version": version_json(entry.version),
                "round": entry.id,
                "engine": key.name,
                "rank": key.rank,
                "source": _word(told, "source"),
                "transport": _word(told, "transport"),
                "payload": _word(told, "payload"),
                "coding": _word(told, "coding"),
            }
            row |= {f"seconds_{phase}": _value(seconds, phase) for phase in PHASES if phase != "commit"}
            row |= {f"bytes_{phase}": _value(sizes, phase) for phase in SIZED}
            row["seconds_commit"] = max(0.0, t - self._announced_at(entry, t))
            self._add("edge", row, t)
            self._count(row)

    def _of(self, entry: Round) -> _Published | None:
        return self._published.get((entry.model, entry.version.lineage, entry.version.number))

    def _announced_at(self, entry: Round, t: float) -> float:
        """When its version was announced by the last publisher rank, else when it was opened."""
        published = self._of(entry)
        return published.t if published is not None else self.opened.get(entry.id, t)

    def _ended(self, state: HubState, entry: Round, t: float) -> None:
        self.outcomes[entry.state] += 1
        opened, begun = self.opened.pop(entry.id, t), self.begun.pop(entry.id, None)
        row: Row = {
            "model": entry.model,
            "version": version_json(entry.version),
            "round": entry.id,
            "engine": entry.engine,
            "source": f"{entry.role} {entry.world}",
            "state": entry.state,
            "repair": entry.repair,
            "why": entry.reason[:300],
            "opened": opened,
            "begun": begun,
            "ended": t,
        }
        if entry.state == "committed":
            row["seconds_commit"] = max(0.0, t - self._announced_at(entry, t))
        self._add("round", row, t)

    def _count(self, row: Row) -> None:
        transport = row["transport"] if row["transport"] in TRANSPORTS else OTHER
        payload = row["payload"] if row["payload"] in PAYLOADS else OTHER
        for phase in PHASES:
            total = self.phases.setdefault((phase, transport), Total())
            total.add(row[f"seconds_{phase}"], row.get(f"bytes_{phase}", 0.0))
        self.payloads.setdefault((transport, payload), Total()).add(row["seconds_wire"], row["bytes_wire"])

    def _add(self, kind: str, row: Row, t: float) -> None:
        self.seq += 1
        self.rows.append({"seq": self.seq, "t": t, "kind": kind, **row})


def _table(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _value(table: Mapping[str, Any], name: str) -> float:
    value = table.get(name, 0.0)
    good = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value <= MAX_VALUE
    return float(value) if good else 0.0


def _word(table: Mapping[str, Any], name: str) -> str:
    value = table.get(name, "")
    return value[:_SHOWN] if isinstance(value, str) and value.isprintable() else ""
