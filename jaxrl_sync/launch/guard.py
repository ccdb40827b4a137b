"""The guard: a small process that outlives a killed supervisor just long enough to clean up after it.

It holds the reading end of a pipe whose only writer is the supervisor. End of file means that the supervisor
is gone, for whatever reason (kill -9 included); the guard then kills what still carries the run's mark,
removes the run's shared memory and sockets, notes what it did in ``logs/guard.log`` and exits.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from jaxrl_sync.launch import sweep

KILL_DEADLINE_S = 5.0


class Guard:
    """Owns the guard process and the writing end of its pipe."""

    def __init__(self, run_dir: Path, mark: tuple[str, str], shm_prefix: str) -> None:
        env = {k: v for k, v in os.environ.items() if k != mark[0]}
        argv = [sys.executable, "-P", "-m", "jaxrl_sync.launch.guard", str(run_dir), *mark, shm_prefix]
        (run_dir / "logs").mkdir(parents=True, exist_ok=True)
        with (run_dir / "logs" / "guard.log").open("ab") as log:
            self._process = subprocess.Popen(
                argv, env=env, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )

    @property
    def pid(self) -> int:
        """Process id of the guard."""
        return self._process.pid

    def close(self, timeout_s: float = 10.0) -> None:
        """Let the guard sweep and end; kill it if it does not within ``timeout_s``."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def main(argv: list[str]) -> int:
    """``RUN_DIR MARK_NAME MARK_VALUE SHM_PREFIX``: wait for end of file on stdin, then sweep."""
    run_dir, name, value, shm_prefix = argv
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    while os.read(0, 4096):
        continue
    killed = sweep.kill_marked(name, value, KILL_DEADLINE_S)
    shm = sweep.remove_shm(shm_prefix) if shm_prefix else []
    sockets = sweep.remove_sockets(Path(run_dir))
    if killed or shm or sockets:
        print(f"{time.strftime('%H:%M:%S')} killed {killed}, removed {shm + sockets}", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
