"""The supervisor of a run: starts its workers, watches them, repairs what can be repaired, ends the rest.

One loop, no threads. The death of the trainer or of the orchestrator ends the run with a named cause; an
engine replica and the hub (whose state is soft) are started again, a stated number of times. Whatever
happens, no process, no shared-memory segment and no socket file is left: the guard sweeps when the supervisor
has ended, killed or not.
"""

from __future__ import annotations

import dataclasses
import json
import math
import signal
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any, Protocol

from jaxrl_sync.config.sections import RunSection
from jaxrl_sync.launch import sweep
from jaxrl_sync.launch.environment import RUN_MARK
from jaxrl_sync.launch.guard import Guard
from jaxrl_sync.launch.watchdog import StopWatch, Watchdog
from jaxrl_sync.launch.worker import ECHO_S, Exit, Worker, WorkerSpec

POLL_S = 0.1
SETTLE_S = 1.0
"""After the orchestrator failed: time for the death that it may be reacting to to become visible."""
INTERRUPTED, PEER_DIED, MISSING = 130, 4, 3


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended: its exit code and, unless it is 0, the cause in one line."""

    code: int
    cause: str = ""


class RunView(Protocol):
    """Where the supervisor shows what goes on."""

    def update(self, progress: dict[str, Any] | None) -> None: ...

    def note(self, text: str) -> None: ...


class RunEnded(Exception):
    """Raised inside the loop to end the run with an outcome."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.cause)
        self.outcome = outcome


class Supervisor:
    """Owns all processes of one run. ``run`` blocks until the run has ended and everything is cleaned up."""

    def __init__(
        self,
        settings: RunSection,
        run_dir: Path,
        specs: Sequence[WorkerSpec],
        view: RunView,
        shm_prefix: str,
    ) -> None:
        self._settings = settings
        self._run_dir = run_dir
        self._events = run_dir / "events.jsonl"
        self._workers = [Worker(spec, run_dir) for spec in specs]
        self._view = view
        self._shm_prefix = shm_prefix
        self._interrupts = self._patience = 0
        self._overdue: set[str] = set()
        """Workers that were killed because they had not ended in time."""
        self._hub_port: int | None = None
        self._stopwatch = StopWatch(settings.stopped_timeout_s)

    def run(self) -> Outcome:
        """Start, supervise, stop; returns how the run ended."""
        mark = (RUN_MARK, str(self._run_dir))
        guard = Guard(self._run_dir, mark, self._shm_prefix)
        try:
            with self._catching_signals():
                return self._supervise()
        finally:
            for worker in self._workers:
                worker.kill()
            sweep.kill_marked(*mark, deadline_s=self._settings.grace_s)
            guard.close()

    def _supervise(self) -> Outcome:
        try:
            self._start_all()
            watchdog = Watchdog(
                time.monotonic(), self._settings.start_timeout_s, self._settings.stuck_timeout_s
            )
            while True:
                self._look_once(watchdog)
                time.sleep(POLL_S)
        except RunEnded as end:
            return self._drain(end.outcome)

    def _start_all(self) -> None:
        """The hub first: everybody else looks for its address."""
        for worker in self._of("hub"):
            worker.start()
            self._event("start", worker.name)
            while worker.silent():
                self._check_interrupt()
                self._check_silent(worker)
                end = worker.first_exit()
                if end is not None:
                    raise RunEnded(Outcome(_exit_code(end), end.cause))
                time.sleep(POLL_S)
        for worker in self._others("hub"):
            worker.start()
            self._event("start", worker.name)

    def _look_once(self, watchdog: Watchdog) -> None:
        self._check_interrupt()
        self._check_run_dir()
        self._check_stopped()
        for worker in self._others("orchestrator"):
            self._check_worker(worker)
        for worker in self._of("orchestrator"):
            self._check_orchestrator(worker)
        progress = read_json(self._run_dir / "progress.json")
        now = time.monotonic()
        watchdog.observe(now, progress)
        stuck = watchdog.stuck(now)
        if stuck is not None:
            raise RunEnded(Outcome(PEER_DIED, stuck))
        self._view.update(progress)

    def _check_interrupt(self) -> None:
        if self._interrupts:
            raise RunEnded(Outcome(INTERRUPTED, "interrupted"))

    def _check_run_dir(self) -> None:
        """Whoever deleted the directory took the results with it: going on would be in vain."""
        if not self._events.exists():
            raise RunEnded(
                Outcome(MISSING, f"run directory {self._run_dir} was deleted or emptied in mid-run")
            )

    def _check_stopped(self) -> None:
        """SIGKILL what stays stopped (a stopped rank hangs its world silently); its death is seen next."""
        pids = {pid: (w, name) for w in self._workers for name, pid in w.pids.items()}
        stopped = {pid: sweep.is_stopped(pid) for pid in pids}
        for pid in self._stopwatch.overdue(time.monotonic(), stopped):
            worker, name = pids[pid]
            self._event("stopped", name, f"stopped for more than {self._settings.stopped_timeout_s:g} s")
            worker.kill()

    def _check_worker(self, worker: Worker) -> None:
        self._check_silent(worker)
        end = worker.first_exit()
        if end is None or (worker.spec.role == "trainer" and end.code == 0):
            return
        self._event("exit", end.process, end.cause)
        worker.kill()
        self._restart_or_end(worker, end)

    def _restart_or_end(self, worker: Worker, end: Exit) -> None:
        allowed = {"engine": self._settings.engine_restarts, "hub": self._settings.hub_restarts}
        limit = allowed.get(worker.spec.role, 0)
        hopeless = end.code in (2, 3)
        if worker.spec.role not in allowed or hopeless:
            raise RunEnded(Outcome(_exit_code(end), end.cause))
        if worker.starts > limit:
            raise RunEnded(Outcome(PEER_DIED, f"{end.cause} (after {limit} restarts)"))
        port = self._hub_port if worker.spec.role == "hub" else None
        worker.start(*(("--port", str(port)) if port else ()))
        self._event("restart", worker.name, f"{end.cause}; restarted ({worker.starts - 1} of {limit})")

    def _check_silent(self, worker: Worker) -> None:
        age = time.monotonic() - worker.started_at
        if age <= self._settings.start_timeout_s:
            self._note_hub_port(worker)
            return
        silent = worker.silent()
        if silent:
            log = worker.log_path(silent[0])
            cause = (
                f"{silent[0]} did not come up within {self._settings.start_timeout_s:g} s; its log is {log}"
            )
            raise RunEnded(Outcome(PEER_DIED, cause))

    def _check_orchestrator(self, worker: Worker) -> None:
        end = worker.first_exit()
        if end is None:
            return
        if end.code == 0:
            raise RunEnded(Outcome(0))
        self._event("exit", end.process, end.cause)
        deadline = time.monotonic() + SETTLE_S
        while time.monotonic() < deadline and end.code != 2:
            for other in self._others("orchestrator"):
                self._check_root_cause(other)
            time.sleep(POLL_S)
        raise RunEnded(Outcome(_exit_code(end), end.cause))

    def _check_root_cause(self, worker: Worker) -> None:
        end = worker.first_exit()
        if end is not None and end.code != 0:
            raise RunEnded(Outcome(_exit_code(end), end.cause))

    def _drain(self, outcome: Outcome) -> Outcome:
        """SIGTERM, then SIGKILL after the grace time; the orchestrator first unless the run has failed.

        A further interrupt at any stage ends the waiting of this and of all later stages. Returns how the run
        ended: not well if the trainer, whose last checkpoint comes now, ended badly.
        """
        self._patience = self._interrupts
        if outcome.code not in (0, INTERRUPTED):
            self._stop(self._workers)
            return outcome
        self._stop(self._of("orchestrator"))
        self._stop([w for w in self._workers if w.spec.role not in ("orchestrator", "hub")])
        self._stop(self._of("hub"))
        return self._with_trainer(outcome)

    def _with_trainer(self, outcome: Outcome) -> Outcome:
        for worker in self._of("trainer"):
            end = worker.first_exit()
            if end is None or end.code in (0, -signal.SIGTERM) or self._interrupts > self._patience:
                continue  # it ended well, had not begun, or nobody wanted to wait for it
            cause = end.cause
            if worker.name in self._overdue:
                cause = (
                    f"{end.process} still ran {self._settings.grace_s:g} s after SIGTERM and was killed: its "
                    "last checkpoint may be missing (run.grace_s)"
                )
            if outcome.code:
                return Outcome(outcome.code, f"{outcome.cause}; {cause}")
            return Outcome(_exit_code(end), cause)
        return outcome

    def _stop(self, workers: Sequence[Worker]) -> None:
        for worker in workers:
            worker.terminate()
        deadline = time.monotonic() + self._settings.grace_s
        while time.monotonic() < deadline and self._interrupts == self._patience:
            if all(worker.done() for worker in workers):
                return
            self._view.update(read_json(self._run_dir / "progress.json"))
            time.sleep(POLL_S / 2)
        for worker in workers:
            if not worker.done():
                hurried = self._interrupts > self._patience
                why = (
                    "interrupted again"
                    if hurried
                    else f"still alive {self._settings.grace_s:g} s after SIGTERM"
                )
                self._event("kill", worker.name, why)
                self._overdue.add(worker.name)
            worker.kill()

    def _of(self, role: str) -> list[Worker]:
        return [w for w in self._workers if w.spec.role == role]

    def _others(self, role: str) -> list[Worker]:
        return [w for w in self._workers if w.spec.role != role]

    def _note_hub_port(self, worker: Worker) -> None:
        """A restarted hub must answer where the first one did."""
        if worker.spec.role == "hub" and self._hub_port is None:
            url = (read_json(self._run_dir / "proc" / "hub.json") or {}).get("url", "")
            self._hub_port = urllib.parse.urlsplit(str(url)).port

    def _event(self, event: str, process: str, detail: str = "") -> None:
        row = {"t": time.time(), "event": event, "process": process, "detail": detail}
        with suppress(FileNotFoundError), self._events.open("a", encoding="utf8") as file:
            file.write(json.dumps(row) + "\n")
        if event not in ("start", "exit"):
            self._view.note(f"{process}: {detail}")

    @contextmanager
    def _catching_signals(self) -> Iterator[None]:
        heard_at = -math.inf

        def count(number: int, frame: FrameType | None) -> None:
            nonlocal heard_at
            if time.monotonic() - heard_at > ECHO_S:
                self._interrupts, heard_at = self._interrupts + 1, time.monotonic()

        numbers = [signal.SIGINT, signal.SIGTERM]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup stays what it is
            numbers.append(signal.SIGHUP)
        before = {number: signal.signal(number, count) for number in numbers}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _exit_code(end: Exit) -> int:
    """The run's exit code for a process's: documented ones are passed on, signals and others are a death."""
    return end.code if end.code in (1, 2, 3, 4) else PEER_DIED


def read_json(path: Path) -> dict[str, Any] | None:
    """The JSON object in ``path``; None when it isn't there or isn't one."""
    try:
        data = json.loads(path.read_text(encoding="utf8"))
    except (FileNotFoundError, ValueError):  # no JSON, or no text at all
        return None
    return data if isinstance(data, dict) else None
