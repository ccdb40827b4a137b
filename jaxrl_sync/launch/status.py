"""What a run is doing now, from the files of its directory and, where it answers, from its hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxrl_sync.launch.rundir import RunDirError
from jaxrl_sync.launch.supervisor import read_json
from jaxrl_sync.sharding.errors import UserError


def run_status(run_dir: Path) -> dict[str, Any]:
    """Processes (alive or not), progress, summary and the hub's own status of the run in ``run_dir``."""
    if not (run_dir / "config.toml").exists():
        raise RunDirError(f"{run_dir} is not a run directory: it has no config.toml")
    processes = {}
    for path in sorted((run_dir / "proc").glob("*.json")):
        row = read_json(path) or {}
        processes[path.stem] = {**row, "alive": Path(f"/proc/{row.get('pid')}").exists()}
    return {
        "run_dir": str(run_dir),
        "processes": processes,
        "progress": read_json(run_dir / "progress.json"),
        "summary": read_json(run_dir / "summary.json"),
        "hub": _hub_status(run_dir, processes.get("hub", {})),
    }


def _hub_status(run_dir: Path, hub: dict[str, Any]) -> dict[str, Any] | str:
    if not hub.get("alive") or "url" not in hub:
        return "not running"
    from jaxrl_sync.transfer.hub.client import HubClient

    try:
        with HubClient(hub["url"], run_dir / "token") as client:
            return client.status()
    except UserError as error:
        return f"does not answer: {error}"
