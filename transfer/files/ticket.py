"""What became of a publish into a channel, and the ticket that waits for it."""

from __future__ import annotations

import dataclasses
import threading
from typing import Literal

from jaxrl_sync.transfer.errors import DeadlineError
from jaxrl_sync.transfer.version import Version

WriteState = Literal["committed", "superseded"]


@dataclasses.dataclass(frozen=True)
class FileOutcome:
    """What became of one publish. Bytes are those of all ranks (of this one, on ranks other than 0)."""

    version: Version
    state: WriteState
    anchor_bytes: int = 0
    delta_bytes: int = 0
    density: float = 1.0
    export_s: float = 0.0
    write_s: float = 0.0


class FileTicket:
    """A handle on one publish; any thread may wait on it."""

    def __init__(self, version: Version, export_s: float) -> None:
        self.version = version
        self.export_s = export_s
        self._changed = threading.Condition()
        self._outcome: FileOutcome | None = None
        self._error: Exception | None = None

    def settle(self, outcome: FileOutcome | Exception) -> None:
        """Note the end; the first one counts."""
        with self._changed:
            if self._outcome is None and self._error is None:
                if isinstance(outcome, FileOutcome):
                    self._outcome = dataclasses.replace(outcome, export_s=self.export_s)
                else:
                    self._error = outcome
            self._changed.notify_all()

    @property
    def done(self) -> bool:
        """Whether the end is known."""
        with self._changed:
            return self._outcome is not None or self._error is not None

    def wait(self, timeout_s: float) -> FileOutcome:
        """The outcome; what the writer met is raised. DeadlineError after ``timeout_s``."""
        with self._changed:
            self._changed.wait_for(lambda: self._outcome is not None or self._error is not None, timeout_s)
            if self._error is not None:
                raise self._error
            if self._outcome is None:
                raise DeadlineError(f"version {self.version} isn't written yet after {timeout_s:g} s")
            return self._outcome


@dataclasses.dataclass
class FileWriterStats:
    """Counters since the start; bytes are those that this process wrote."""

    published: int = 0
    committed: int = 0
    superseded: int = 0
    failed: int = 0
    anchors: int = 0
    anchor_bytes: int = 0
    delta_bytes: int = 0
    write_s: float = 0.0
    stall_s: float = 0.0
    baseline_bytes: int = 0
