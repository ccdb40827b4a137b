"""``jaxrl-sync status``: what a run, or the fleet of one hub, is doing now; once or again and again."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from jaxrl_sync.launch.fleet import fleet_text, merge_edges, shown
from jaxrl_sync.launch.rundir import RunDirError
from jaxrl_sync.launch.supervisor import read_json
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer.errors import PeerLost, ProtocolError
from jaxrl_sync.transfer.hub.client import HubClient

ANSWER_S = 5.0
CLEAR = "\x1b[H\x1b[2J"

Row = Mapping[str, Any]


class Looker:
    """Looks at one run or hub again and again, over one connection. ``close()`` or ``with``."""

    def __init__(self, run_dir: Path | None, hub_url: str | None, token_file: Path | None) -> None:
        """A run directory, or a hub with its token file. RunDirError for a directory that is no run's."""
        if run_dir is not None and not (run_dir / "config.toml").exists():
            raise RunDirError(f"{run_dir} is not a run directory: it has no config.toml")
        self._run_dir, self._hub_url, self._token_file = run_dir, hub_url, token_file
        self._client: HubClient | None = None
        self._place = ("", "")
        self._seen = (0, "")
        self._edges: list[Row] = []

    def look(self) -> dict[str, Any]:
        """Processes (alive or not), progress and summary of the run directory, the hub's status, edges."""
        found: dict[str, Any] = {}
        if self._run_dir is not None:
            found = _files(self._run_dir)
        found["hub"] = self._ask_hub(found.get("processes", {}).get("hub", {}))
        found["edges"] = list(self._edges)
        return found

    def _ask_hub(self, process: Row) -> dict[str, Any] | str:
        url = self._hub_url or (process.get("url") if process.get("alive") else None)
        if url is None:
            return "not running"
        try:
            client = self._connect(str(url))
            status = client.status()
            with contextlib.suppress(ProtocolError):  # an older hub has no trace
                self._follow(client)
            return status
        except UserError as error:
            if self._run_dir is None:
                raise
            return f"does not answer: {error}"

    def _connect(self, url: str) -> HubClient:
        token_file = str(self._token_file or Path(self._run_dir or ".") / "token")
        if self._client is None or self._place != (url, token_file):
            self.close()
            self._client, self._place = HubClient(url, token_file, ANSWER_S), (url, token_file)
        return self._client

    def _follow(self, client: HubClient) -> None:
        """Take the edge rows since the last look; from the start again after the hub has restarted."""
        after, epoch = self._seen
        new = client.trace(after)
        if epoch and new.epoch != epoch:
            new = client.trace(0)
        self._seen = new.seq, new.epoch
        self._edges = merge_edges(self._edges, new.rows)

    def preflight(self, model: str) -> dict[str, Any]:
        """What ``HubClient.preflight`` says. PeerLost without a hub, or as the call."""
        process = _files(self._run_dir)["processes"].get("hub", {}) if self._run_dir is not None else {}
        url = self._hub_url or (process.get("url") if process.get("alive") else None)
        if url is None:
            raise PeerLost(f"no hub of {self._run_dir} is running: nobody can compare its members")
        return self._connect(str(url)).preflight(model)

    def close(self) -> None:
        """Close the connection. Idempotent."""
        if self._client is not None:
            self._client.close()
            self._client = None

    def __enter__(self) -> Looker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def show(looker: Looker, *, as_json: bool, watch_s: float | None, out: TextIO | None = None) -> None:
    """Print one look, or one every ``watch_s`` seconds until interrupted (JSON: one line each)."""
    to = sys.stdout if out is None else out
    for _ in _beats(watch_s):
        found = looker.look()
        if as_json:
            text = json.dumps(found, indent=None if watch_s else 2)
        else:
            text = (CLEAR if watch_s and to.isatty() else "") + describe(found)
        print(text, file=to, flush=True)


def show_preflight(looker: Looker, model: str, *, as_json: bool, out: TextIO | None = None) -> int:
    """Print how the members of a model differ, by name, and who has yet to tell; 0 when all fit, else 1.

    PeerLost when no hub answers.
    """
    answer = looker.preflight(model)
    text = json.dumps(answer, indent=2) if as_json else "\n".join(_preflight_lines(answer))
    print(text, file=sys.stdout if out is None else out, flush=True)
    return 0 if answer["ok"] else 1


def _preflight_lines(answer: Row) -> Iterator[str]:
    for row in answer["differences"]:
        yield shown(f"{row['who']}: {row['what']} is {row['found']}, expected {row['expected']}")
    for who in answer["unknown"]:
        yield shown(f"{who}: hasn't planned with a trainer yet")
    if answer["ok"]:
        names = [*answer["publishers"], *answer["engines"]]
        yield shown(f"all fit: {', '.join(names)}")


def _beats(watch_s: float | None) -> Iterator[None]:
    yield
    if watch_s is not None:
        with contextlib.suppress(KeyboardInterrupt):
            while True:
                time.sleep(watch_s)
                yield


def describe(found: Row) -> str:
    """One look as text."""
    parts = [_run_line(found)] if "run_dir" in found else []
    hub = found["hub"]
    if isinstance(hub, str):
        parts.append(f"hub: {hub}")
    else:
        edges: Sequence[Row] = found.get("edges", ())
        parts.append(fleet_text(hub, edges) or "hub: nobody is registered")
    return "\n\n".join(parts)


def _run_line(found: Row) -> str:
    progress, processes = found.get("progress") or {}, found.get("processes", {})
    alive = [name for name, row in processes.items() if row.get("alive")]
    dead = [name for name in processes if name not in alive]
    phase, summary = progress.get("phase", "starting"), found.get("summary")
    state = "finished" if summary and summary.get("cause", "done") == "done" else phase
    step = f", step {progress['step']} of {progress['steps']}" if "step" in progress else ""
    gone = f"; not alive: {', '.join(dead)}" if dead else ""
    return f"{found['run_dir']}: {state}{step}; alive: {', '.join(alive) or 'nobody'}{gone}"


def _files(run_dir: Path) -> dict[str, Any]:
    processes = {}
    for path in sorted((run_dir / "proc").glob("*.json")):
        row = read_json(path) or {}
        processes[path.stem] = {**row, "alive": Path(f"/proc/{row.get('pid')}").exists()}
    return {
        "run_dir": str(run_dir),
        "processes": processes,
        "progress": read_json(run_dir / "progress.json"),
        "summary": read_json(run_dir / "summary.json"),
    }
