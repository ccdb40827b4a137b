"""What one process of a run knows about itself: role, rank, files, how to reach the hub, whether to stop.

The command line makes a ``ProcessContext`` and hands it to the role's ``run``. Nothing here imports jax.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

from jaxrl_sync.config.sections import RunConfig
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer.tls import with_ca


class PeerError(UserError, RuntimeError):
    """A peer that a process depends on died, or a deadline passed while waiting for it."""

    exit_code = 4


class Timeline:
    """Rows ``{"t0", "t1", "kind", "step"?, "version"?}`` appended to one JSON-lines file; thread-safe.

    Owns the file. A row is written whole and flushed, so a reader of an unfinished run sees whole lines.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf8", buffering=1)
        self._lock = threading.Lock()

    def record(
        self,
        kind: str,
        t0: float,
        t1: float,
        *,
        step: int | None = None,
        version: int | None = None,
        **more: Any,
    ) -> None:
        """One span from ``t0`` to ``t1`` (``time.time()`` seconds)."""
        row = {"t0": t0, "t1": t1, "kind": kind, "step": step, "version": version, **more}
        line = json.dumps({k: v for k, v in row.items() if v is not None})
        with self._lock:
            self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclasses.dataclass(frozen=True)
class ProcessContext:
    """One process of a run: ``rank`` of the ``world_size`` processes of one JAX world."""

    role: str
    name: str
    config: RunConfig
    run_dir: Path
    token_file: Path
    hub_url: str | None = None
    rank: int = 0
    world_size: int = 1
    replica: int = 0
    coordinator: str | None = None
    port: int | None = None
    """Where to listen; None takes the config's."""
    resume: bool = False
    stop: threading.Event = dataclasses.field(default_factory=threading.Event)
    """Set by SIGTERM and SIGINT: drain, write what must be kept, return."""

    def wait_hub(self, timeout_s: float) -> str:
        """The hub's URL: as given, or from ``RUN_DIR/proc/hub.json``; blocks up to ``timeout_s`` for it."""
        if self.hub_url is not None:
            return with_ca(self.hub_url, self.config.hub.tls_ca)
        path, deadline = self.run_dir / "proc" / "hub.json", time.monotonic() + timeout_s
        while time.monotonic() < deadline and not self.stop.is_set():
            if path.exists():
                return str(json.loads(path.read_text(encoding="utf8"))["url"])
            time.sleep(0.05)
        if self.stop.is_set():
            raise PeerError(f"{self.name}: told to stop while it looked for the hub")
        raise PeerError(f"{self.name}: no hub within {timeout_s:g} s: {path} did not appear")

    def announce(self, url: str | None = None) -> None:
        """Write ``RUN_DIR/proc/<name>.json`` atomically: this process is up."""
        row = {"name": self.name, "role": self.role, "pid": os.getpid()}
        if url is not None:
            row["url"] = url
        write_json(self.run_dir / "proc" / f"{self.name}.json", row)

    def open_timeline(self) -> Timeline:
        """The timeline of this process; the caller closes it."""
        return Timeline(self.run_dir / "timeline" / f"{self.name}.jsonl")


def write_json(path: Path, data: Any) -> None:
    """Write ``data`` to ``path`` atomically (a reader sees the old file or the new one)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    scratch = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    scratch.write_text(json.dumps(data), encoding="utf8")
    scratch.replace(path)
