"""A hub for programs that start themselves: a folder is all that trainer and engines must agree on.

``LocalHub`` serves from a thread of the process that makes it, usually the trainer, and writes where it is
into the folder, beside the run token; ``find_hub`` reads that. A machine without the folder needs the URL and
a copy of the token file. A folder has one hub at a time.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import DeadlineError, ResourceError
from jaxrl_sync.transfer.hub.server import run_hub
from jaxrl_sync.transfer.process_lock import ProcessLock, boot, is_let_go

ADDRESS_FILE, TOKEN_FILE, LOCK_FILE = "hub.json", "token", "hub.lock"
START_S = 30.0
STOP_S = 10.0
LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class HubAddress:
    """What publishers and subscribers need: ``Publisher(hub.url, ..., token_file=hub.token_file)``."""

    url: str
    token_file: Path


def _whose(place: Path) -> str:
    """Whose a served folder is, in words, as far as it says."""
    with contextlib.suppress(ResourceError, ValueError, KeyError, TypeError):
        found = _address_in(place / ADDRESS_FILE)
        if found is not None:
            return f": pid {int(found['pid'])} serves it at {found['url']}"
    return ", of another process"


class LocalHub:
    """A hub in a thread of this process, with a new run token in ``folder``. Owns the thread: ``close()``.

    ``url`` and ``token_file`` are those of ``HubAddress``.
    """

    def __init__(
        self, folder: str | Path, *, host: str = "127.0.0.1", port: int = 0, ttl_s: float = 10.0
    ) -> None:
        """Returns when the hub answers and the folder says where. ``folder`` is made if need be.

        ResourceError when the port is taken, the folder can't be written or has a hub that lives, whose files
        stay; DeadlineError after 30 s.
        """
        place = Path(folder)
        self.token_file = place / TOKEN_FILE
        self._address, self._told = place / ADDRESS_FILE, ""
        try:
            place.mkdir(parents=True, exist_ok=True)
            lock = ProcessLock.take(place, LOCK_FILE)
        except OSError as error:
            raise ResourceError(f"can't write the folder {place}: {error.strerror or error}") from error
        if lock is None:
            raise ResourceError(f"{place} has a hub already{_whose(place)}")
        self._lock = lock
        try:
            for old in (self._address, self.token_file):  # of an earlier run: nobody may find it any more
                old.unlink(missing_ok=True)
            auth.create_token(self.token_file)
        except BaseException as error:
            self._lock.close()
            if not isinstance(error, OSError):
                raise
            raise ResourceError(f"can't write the folder {place}: {error.strerror or error}") from error
        self._stop = threading.Event()
        started: queue.SimpleQueue[str | BaseException] = queue.SimpleQueue()

        def serve() -> None:
            try:
                run_hub(host, port, self.token_file, stop=self._stop, announce=started.put, ttl_s=ttl_s)
            except BaseException as error:
                started.put(error)

        self._thread = threading.Thread(target=serve, name="local-hub", daemon=True)
        self._thread.start()
        try:
            self.url = self._started(started, f"{host}:{port}")
            self._tell()
        except BaseException:
            self.close()  # nobody else could
            raise

    @staticmethod
    def _started(started: queue.SimpleQueue[str | BaseException], where: str) -> str:
        try:
            found = started.get(timeout=START_S)
        except queue.Empty:
            raise DeadlineError(f"the hub on {where} did not answer within {START_S:g} s") from None
        if isinstance(found, BaseException):
            raise found
        return found

    def _tell(self) -> None:
        """Write where the hub is; the file appears whole."""
        partial = self._address.with_suffix(".new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._told = json.dumps({"url": self.url, "pid": os.getpid(), "boot": boot()})
        try:
            partial.unlink(missing_ok=True)
            with os.fdopen(os.open(partial, flags, 0o600), "w", encoding="utf8") as file:
                file.write(self._told)
            partial.replace(self._address)
        except OSError as error:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)
            raise ResourceError(f"can't write {self._address}: {error.strerror or error}") from error

    def close(self) -> None:
        """Stop serving; engines keep the weights that they have. Idempotent."""
        with contextlib.suppress(OSError, ResourceError):
            if self._told and _read_own(self._address) == self._told:  # else it is the next hub's
                self._address.unlink(missing_ok=True)
        self._stop.set()
        self._thread.join(STOP_S)
        self._lock.close()

    def __enter__(self) -> LocalHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_hub(folder: str | Path, timeout_s: float = 60.0) -> HubAddress:
    """The hub that a ``LocalHub`` serves for ``folder``; waits up to ``timeout_s`` for it to come up.

    What a hub left that was killed, on this machine, is no address: the next one is waited for.
    DeadlineError names the file that did not appear; ResourceError when it isn't what a LocalHub of this user
    writes: who comes gives the hub the run token.
    """
    file, deadline = Path(folder) / ADDRESS_FILE, time.monotonic() + timeout_s
    while (found := _address_in(file)) is None or _is_deserted(file.parent, found):
        if time.monotonic() > deadline:
            left = "" if found is None else "; what is there is of a hub that has died"
            raise DeadlineError(f"no hub wrote {file} within {timeout_s:g} s{left}")
        time.sleep(LOOK_S)
    return HubAddress(str(found["url"]), Path(folder) / TOKEN_FILE)


def _is_deserted(folder: Path, address: dict[str, Any]) -> bool:
    """Whether nobody serves a folder any more; False where nobody can tell (other machines, no locks)."""
    here = boot()
    return here is not None and address.get("boot") == here and is_let_go(folder, LOCK_FILE)


def _address_in(file: Path) -> dict[str, Any] | None:
    """What a hub wrote, None where there is nothing (yet)."""
    text = _read_own(file)
    if text is None:
        return None
    try:
        found: dict[str, Any] = json.loads(text)
        found["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(f'{file}: expected {{"url": ...}} of a LocalHub, found other text') from error
    return found


def _read_own(file: Path) -> str | None:
    """A small file of this user that nobody else could have written; None where there is none (any more)."""
    try:
        fd = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ResourceError(f"can't read {file}: {error.strerror}") from error
    with os.fdopen(fd, encoding="utf8") as opened:
        info = os.fstat(fd)
        mine = info.st_uid in (os.geteuid(), 0)
        if not stat.S_ISREG(info.st_mode) or info.st_mode & 0o022 or not mine:
            found = f"{stat.filemode(info.st_mode)} of uid {info.st_uid}"
            raise ResourceError(f"{file} is {found}, expected a file that only uid {os.geteuid()} writes")
        return opened.read(1 << 16)
