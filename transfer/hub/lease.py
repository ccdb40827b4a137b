"""A lease: one registration with the hub, kept alive by a thread of its own."""

from __future__ import annotations

import contextlib
import logging
import math
import secrets
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import httpx

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.hub.refused import HubRefused
from jaxrl_sync.transfer.hub.state import MemberKey, version_json
from jaxrl_sync.transfer.version import Version

if TYPE_CHECKING:
    from jaxrl_sync.transfer.hub.client import HubClient

logger = logging.getLogger("jaxrl_sync.transfer")


class Lease:
    """A registration kept alive by its own thread, which neither compilation nor an event loop delays.

    ``lost`` is set when it is lost for good, and ``reason`` then says why.
    """

    def __init__(
        self,
        client: HubClient,
        key: MemberKey,
        size: int,
        info: dict[str, Any],
        ttl_s: float,
        on_lost: Callable[[str], None] | None,
        on_rejoin: Callable[[], None] | None,
        installed: Callable[[], Version | None] | None,
    ) -> None:
        self.client = client
        self.key = key
        self.size = size
        self.incarnation = secrets.token_hex(8)
        self.lost = threading.Event()
        self.reason = ""
        self._info = dict(info)
        self._ttl_s = ttl_s
        self._on_lost = on_lost
        self._on_rejoin = on_rejoin
        self._installed = installed
        self._wake = threading.Event()
        self._untold = threading.Event()
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._epoch = ""
        self._sequence = 0
        self._thread = threading.Thread(target=self._run, name=f"lease-{key}", daemon=True)

    @property
    def identity(self) -> dict[str, Any]:
        """The fields by which the hub knows this member."""
        role, name, rank = self.key
        return {"role": role, "name": name, "rank": rank, "incarnation": self.incarnation}

    def start(self) -> None:
        """Register (blocking) and start the heartbeats."""
        self._register()
        self._thread.start()

    def update(self, **info: Any) -> None:
        """Change what this member tells about itself."""
        with self._lock:
            self._info.update(info)
        self._register()

    def call(
        self,
        path: str,
        body: dict[str, Any],
        timeout_s: float | None = None,
        within_s: float = math.inf,
    ) -> dict[str, Any]:
        """A call as this member, registered again where the hub forgot it. Errors of HubClient.call.

        All of it ends ``within_s``; what else a restarted hub must be told is left to the lease's thread.
        """
        message = {**self.identity, **body}
        deadline = time.monotonic() + within_s
        try:
            return self.client.call(path, message, timeout_s, self._closed, within_s)
        except HubRefused as error:
            if error.code != "unknown_member" or self._closed.is_set():
                raise
        if math.isinf(within_s):
            self._rejoin()
        else:
            self._register(max(0.0, deadline - time.monotonic()))
        return self.client.call(path, message, timeout_s, self._closed, max(0.0, deadline - time.monotonic()))

    def _register(self, within_s: float = math.inf) -> None:
        with self._lock:  # threads may overtake each other on the way to the hub: it goes by the number
            self._sequence += 1
            body = {**self.identity, "size": self.size, "info": dict(self._info), "ttl_s": self._ttl_s}
            body["sequence"] = self._sequence
            if self._installed is not None:
                body["installed"] = version_json(self._installed())
        self._heard(self.client.call("/v1/event/register", body, within_s=within_s))

    def _heard(self, answer: dict[str, Any]) -> None:
        """A hub that restarted, or had forgotten us, must be told again, whichever call shows it."""
        if self._epoch and (answer.get("joined") or answer["epoch"] != self._epoch):
            self._untold.set()
            self.wake()
        self._epoch = answer["epoch"]

    def _rejoin(self) -> None:
        self._register()
        self._tell_again()

    def _tell_again(self) -> None:
        self._untold.clear()
        self.client._pin_again(self)
        if self._on_rejoin is not None and not self._closed.is_set():
            self._on_rejoin()

    def wake(self) -> None:
        """Heartbeat now."""
        self._wake.set()

    def _run(self) -> None:
        while not self._closed.is_set():
            self._wake.wait(self._ttl_s / 3)
            self._wake.clear()
            if self._closed.is_set():
                return
            try:
                if self._untold.is_set():
                    self._tell_again()
                self._beat()
            except TransferError as error:
                if not self._closed.is_set():
                    self._lose(str(error))
                return
            except Exception as error:  # of `on_rejoin`: without this thread the lease would end in silence
                logger.exception("the lease of %s can't be kept", self.key)
                self._lose(f"{type(error).__name__}: {error}")
                return

    def _beat(self) -> None:
        try:
            answer = self.client.call("/v1/event/heartbeat", self.identity, until=self._closed)
        except HubRefused as error:
            if error.code != "unknown_member":
                raise
            self._rejoin()
            return
        self._heard(answer)

    def _lose(self, reason: str) -> None:
        self.reason = f"lease of {self.key} lost: {reason}"
        logger.error("%s", self.reason)
        self.lost.set()
        if self._on_lost is not None:
            self._on_lost(self.reason)

    def close(self) -> None:
        """Leave the directory (best effort, once) and end the thread. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        with contextlib.suppress(ValueError):
            self.client._leases.remove(self)
        if not self.lost.is_set():
            with contextlib.suppress(httpx.HTTPError, RuntimeError):
                self.client._http.post("/v1/event/leave", json=self.identity, timeout=2.0)
        if threading.current_thread() is not self._thread and self._thread.ident is not None:
            self._thread.join(timeout=5.0)

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
