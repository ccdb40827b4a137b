"""The directory of a run: its name, its lock, what a resumed run may find in it."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxrl_sync.sharding.errors import UserError


class RunDirError(UserError):
    """A run directory that can't be used as asked."""

    exit_code = 2


def create(root: str, name: str, run_dir: str | None = None, *, resume: bool = False) -> Path:
    """The absolute path of the run directory, made where it is missing.

    Without ``run_dir`` a fresh ``<root>/<name>-<date>-<time>`` (a suffix keeps two runs of one second apart).
    An existing directory with content is refused unless ``resume``; with ``resume`` it must exist.
    """
    if run_dir is None:
        if resume:
            raise RunDirError("--resume needs --run-dir, the directory of the run to go on with")
        return _fresh(Path(root), name)
    path = Path(run_dir).absolute()
    if path.exists() and not path.is_dir():
        raise RunDirError(f"--run-dir {path} is a file; expected a directory")
    if resume and not path.is_dir():
        raise RunDirError(f"--resume: run directory {path} does not exist")
    if not resume and path.is_dir() and any(path.iterdir()):
        raise RunDirError(
            f"run directory {path} is not empty; add --resume to go on with it, or name another"
        )
    path.mkdir(parents=True, exist_ok=True)
    return path


def _fresh(root: Path, name: str) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    base = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    for suffix in ("", *(f"-{i}" for i in range(2, 100))):
        path = (root / f"{base}{suffix}").absolute()
        try:
            path.mkdir()
        except FileExistsError:
            continue
        return path
    raise RunDirError(f"no free run directory {root / base}-<n> with n below 100")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Hold the run directory's lock; refuse at once when another supervisor holds it."""
    fd = os.open(run_dir / ".lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise RunDirError(f"run directory {run_dir} is in use by another `jaxrl-sync run`") from None
        yield
    finally:
        os.close(fd)
