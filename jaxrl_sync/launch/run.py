"""``jaxrl-sync run``: from a config file to a run directory, a token, a supervised run and its last words."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from jaxrl_sync.config import RunConfig, load, parse_overrides, render, save
from jaxrl_sync.config.file_channel import channel_path
from jaxrl_sync.launch.certificates import server_tls
from jaxrl_sync.launch.commands import workers
from jaxrl_sync.launch.preflight import check_channel, check_ports, check_rooms, check_task
from jaxrl_sync.launch.rundir import create, locked
from jaxrl_sync.launch.summary import describe_summary
from jaxrl_sync.launch.supervisor import INTERRUPTED, Outcome, Supervisor, read_json
from jaxrl_sync.launch.view import open_view
from jaxrl_sync.launch.worker import ERROR_PREFIX


def run(
    config_path: str,
    overrides: Sequence[str],
    *,
    run_dir: str | None = None,
    resume: bool = False,
    dry: bool = False,
) -> int:
    """Run the config with dotted ``overrides``; ``dry`` only prints it, resolved. Returns the exit code."""
    config = load(config_path, parse_overrides(overrides))
    check_rooms(config)
    check_task(config)
    if dry:
        print(render(config), end="")
        return 0
    check_ports(config)
    path = create(config.run.root, config.run.name, run_dir, resume=resume)
    print(f"run directory: {path}", flush=True)
    with locked(path):
        outcome = _supervise(config, path, resume)
    summary = read_json(path / "summary.json")
    if outcome.code == 0 and summary is not None:
        print("\n".join(describe_summary(summary)))
    if outcome.code:
        print(ERROR_PREFIX + outcome.cause, file=sys.stderr)
    if (path / "config.toml").exists():  # else somebody deleted the run
        print(f"draw it: jaxrl-sync report {path}")
        saved = any(found.name.isdigit() for found in path.glob("checkpoints/*"))
        if outcome.code == INTERRUPTED and saved:
            print(f"go on with it: jaxrl-sync run {path}/config.toml --run-dir {path} --resume")
    return outcome.code


def _supervise(config: RunConfig, path: Path, resume: bool) -> Outcome:
    from jaxrl_sync.transfer.auth import create_token, load_token, run_id_of

    keep_token = needs_token(config, path)
    forget_attempt(path, keep_token)
    save(config, path / "config.toml")
    token = load_token(path / "token") if keep_token else create_token(path / "token")
    check_channel(config, path, token)
    server_tls(config, path)
    view = open_view(path)
    try:
        specs = workers(config, path, os.environ, resume=resume)
        return Supervisor(config.run, path, specs, view, f"jaxrl_sync-{run_id_of(token)}-").run()
    finally:
        view.close()


def needs_token(config: RunConfig, path: Path) -> bool:
    """Whether an earlier attempt's token must stay: it sealed the file channel that this one goes on with."""
    channel = channel_path(config, path)
    sealed = channel is not None and config.sync.file.sealed and (channel / "CHANNEL").exists()
    return sealed and (path / "token").exists()


def forget_attempt(path: Path, keep_token: bool = False) -> None:
    """Remove what an earlier attempt left that would be taken for this one's: token, addresses, progress."""
    for name in ("progress.json", "summary.json", *(() if keep_token else ("token",))):
        (path / name).unlink(missing_ok=True)
    shutil.rmtree(path / "proc", ignore_errors=True)
