"""What became of a published version, per rank, per engine, as a whole; and the Ticket that waits for it."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Mapping
from typing import Literal

from jaxrl_sync.transfer.errors import DeadlineError
from jaxrl_sync.transfer.version import Version

RankState = Literal["pending", "installed", "superseded", "aborted", "failed", "unknown"]
State = Literal["committed", "partially_committed", "aborted", "failed", "unknown", "superseded"]
RankKey = tuple[str, int]


@dataclasses.dataclass(frozen=True)
class RankOutcome:
    """One rank of one engine: bytes that this process sent, seconds by phase (queue, wire, verify, swap).

    ``payload`` is full or frame; of a frame, ``coding`` names its codings, ``density`` the share of the
    edge's elements that changed, and ``compared`` where that was found out: host or device.
    """

    state: RankState = "pending"
    detail: str = ""
    transport: str = ""
    nbytes: int = 0
    seconds: Mapping[str, float] = dataclasses.field(default_factory=dict)
    payload: str = "full"
    coding: str = ""
    density: float = 1.0
    compared: str = ""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The end of one publish. Without any engine connected it is ``committed``: only announced.

    ``seconds`` has ``export`` (the training thread was blocked for that long), and the maxima over ranks of
    ``queue``, ``wire``, ``verify``, ``swap`` and ``commit`` (announce to the last acknowledgement).
    """

    version: Version
    state: State
    engines: dict[str, dict[int, RankOutcome]]
    nbytes: int
    seconds: dict[str, float]


Ledger = dict[RankKey, RankOutcome]


def settle(ledger: Ledger, key: RankKey, result: RankOutcome) -> Ledger:
    """The ledger with a rank's result. Installed is final; a failed rank may still come back and install.

    What is unknown (the rank had received everything when its link ended) is settled by any later word.
    """
    old = ledger.get(key)
    if old is not None and old.state == "installed":
        return ledger
    if old is not None and old.state not in ("pending", "unknown") and result.state != "installed":
        return ledger
    return {**ledger, key: result}


def open_ranks(ledger: Ledger) -> list[RankKey]:
    """Ranks that nothing is known of yet."""
    return sorted(k for k, r in ledger.items() if r.state == "pending")


def conclude(version: Version, ledger: Ledger, seconds: Mapping[str, float]) -> Outcome:
    """The outcome of a ledger without open ranks. An engine counts as installed when all its ranks are."""
    engines: dict[str, dict[int, RankOutcome]] = {}
    for (engine, rank), result in sorted(ledger.items()):
        engines.setdefault(engine, {})[rank] = result
    states = {r.state for r in ledger.values()}
    whole = [all(r.state == "installed" for r in ranks.values()) for ranks in engines.values()]
    state: State
    if all(whole):
        state = "committed"
    elif any(whole) or "installed" in states:
        state = "partially_committed"
    elif states == {"superseded"}:
        state = "superseded"
    elif "unknown" in states:
        state = "unknown"
    else:
        state = "failed" if "failed" in states else "aborted"
    total = dict(seconds)
    for result in ledger.values():
        for phase, value in result.seconds.items():
            total[phase] = max(total.get(phase, 0.0), value)
    return Outcome(version, state, engines, sum(r.nbytes for r in ledger.values()), total)


class Ticket:
    """A handle on one publish; any thread may wait on it."""

    def __init__(self, version: Version, ranks: list[RankKey], export_s: float) -> None:
        self.version = version
        self.export_s = export_s
        self._published = time.monotonic()
        self._commit_s = 0.0
        self._changed = threading.Condition()
        self._ledger: Ledger = {key: RankOutcome() for key in ranks}
        self._error: Exception | None = None
        self._announced = False
        self._superseded = False

    def settle(self, key: RankKey, result: RankOutcome) -> None:
        """Note a rank's result (a rank that wasn't connected at publish may join)."""
        with self._changed:
            self._ledger = settle(self._ledger, key, result)
            self._commit_s = time.monotonic() - self._published
            self._changed.notify_all()

    def settle_known(self, key: RankKey, result: RankOutcome) -> None:
        """The same for a rank that was connected at publish; of others there is nothing to say."""
        if key in self._ledger:
            self.settle(key, result)

    def supersede(self, newest: Version) -> None:
        """Nobody will be offered this version any more: ``newest`` took its place."""
        with self._changed:
            self._superseded = True
            for key in open_ranks(self._ledger):
                self._ledger = settle(self._ledger, key, RankOutcome("superseded", f"by {newest}"))
            self._changed.notify_all()

    def announced(self) -> None:
        """The hub knows the version."""
        with self._changed:
            self._announced = True
            self._changed.notify_all()

    def fail(self, error: Exception) -> None:
        """The version couldn't be announced; ``wait`` raises ``error``."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether every rank's result is known (without ranks: whether it is announced)."""
        with self._changed:
            return self._known()

    def _known(self) -> bool:
        known = self._announced or self._superseded or bool(self._ledger)
        return self._error is not None or (known and not open_ranks(self._ledger))

    def wait(self, timeout_s: float) -> Outcome:
        """The outcome, once every rank that was connected at publish has installed, skipped or lost it.

        Without any it is known once the version is announced.

        Blocks up to ``timeout_s``; DeadlineError then names the engines that are still open. An engine that
        takes versions only when told to keeps its rank open until then.
        """
        with self._changed:
            known = self._changed.wait_for(self._known, timeout_s)
            if self._error is not None:
                raise self._error
            if not known:
                names = ", ".join(f"{e}.{r}" for e, r in open_ranks(self._ledger)) or "the hub"
                raise DeadlineError(f"version {self.version} is still open after {timeout_s:g} s at {names}")
            seconds = {"export": self.export_s, "commit": self._commit_s}
            outcome = conclude(self.version, self._ledger, seconds)
            if self._superseded and not self._ledger:
                return dataclasses.replace(outcome, state="superseded")
            return outcome
