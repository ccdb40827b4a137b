"""A hub for programs that start themselves: a folder is all that trainer and engines must agree on.

``LocalHub`` serves from a thread of the process that makes it, usually the trainer, and writes where it is
into the folder, beside the run token; ``find_hub`` reads that. A machine without the folder needs the URL and
a copy of the token file.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import queue
import threading
import time
from pathlib import Path

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import DeadlineError, ResourceError
from jaxrl_sync.transfer.hub.server import run_hub

ADDRESS_FILE, TOKEN_FILE = "hub.json", "token"
START_S = 30.0
STOP_S = 10.0
LOOK_S = 0.05


@dataclasses.dataclass(frozen=True)
class HubAddress:
    """What publishers and subscribers need: ``Publisher(hub.url, ..., token_file=hub.token_file)``."""

    url: str
    token_file: Path


class LocalHub:
    """A hub in a thread of this process, with a new run token in ``folder``. Owns the thread: ``close()``.

    ``url`` and ``token_file`` are those of ``HubAddress``.
    """

    def __init__(
        self, folder: str | Path, *, host: str = "127.0.0.1", port: int = 0, ttl_s: float = 10.0
    ) -> None:
        """Returns when the hub answers. ``folder`` is made if need be; ResourceError when the port is taken,
        DeadlineError after 30 s."""
        place = Path(folder)
        place.mkdir(parents=True, exist_ok=True)
        self.token_file = place / TOKEN_FILE
        self._address = place / ADDRESS_FILE
        for old in (self._address, self.token_file):  # of an earlier run: nobody may find it any more
            old.unlink(missing_ok=True)
        auth.create_token(self.token_file)
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
            found = started.get(timeout=START_S)
        except queue.Empty:
            self._stop.set()
            raise DeadlineError(f"the hub on {host}:{port} did not answer within {START_S:g} s") from None
        if isinstance(found, BaseException):
            raise found
        self.url = found
        partial = self._address.with_suffix(".new")
        partial.write_text(json.dumps({"url": self.url, "pid": os.getpid()}), encoding="utf8")
        partial.replace(self._address)

    def close(self) -> None:
        """Stop serving; engines keep the weights that they have. Idempotent."""
        with contextlib.suppress(OSError):
            self._address.unlink(missing_ok=True)
        self._stop.set()
        self._thread.join(STOP_S)

    def __enter__(self) -> LocalHub:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def find_hub(folder: str | Path, timeout_s: float = 60.0) -> HubAddress:
    """The hub that a ``LocalHub`` serves for ``folder``; waits up to ``timeout_s`` for it to come up.

    DeadlineError names the file that did not appear; ResourceError when it isn't what a LocalHub writes.
    """
    file, deadline = Path(folder) / ADDRESS_FILE, time.monotonic() + timeout_s
    while not file.exists():
        if time.monotonic() > deadline:
            raise DeadlineError(f"no hub wrote {file} within {timeout_s:g} s")
        time.sleep(LOOK_S)
    try:
        url = json.loads(file.read_text(encoding="utf8"))["url"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResourceError(f'{file}: expected {{"url": ...}} of a LocalHub, found other text') from error
    return HubAddress(str(url), Path(folder) / TOKEN_FILE)
