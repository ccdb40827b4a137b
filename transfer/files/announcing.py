"""Tells the hub of versions that exist in a channel, where no other transport announces them."""

from __future__ import annotations

import os
from pathlib import Path

from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.hub.refused import HubRefused
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.version import Version


class Announcer:
    """One trainer process in the hub's directory, as a publisher without a data plane. ``close()``."""

    def __init__(
        self,
        hub_url: str,
        token_file: str | Path,
        *,
        model: str,
        nbytes: int,
        rank: int,
        size: int,
        ttl_s: float,
        timeout_s: float,
        name: str = "trainer",
    ) -> None:
        """Register with the hub; PeerLost without one, AuthError."""
        self._model, self._nbytes = model, nbytes
        self._last: Version | None = None
        self._hub = HubClient(hub_url, token_file, timeout_s)
        info = {"model": model, "pid": os.getpid()}
        try:
            self._lease = self._hub.register(
                "publisher", name, rank, size, info, ttl_s, on_rejoin=self._again
            )
        except BaseException:
            self._hub.close()
            raise

    def announce(self, version: Version) -> None:
        """The version exists: whoever asks the hub for the newest is told. Blocks; errors of HubClient."""
        self._last = version
        self._tell(version)

    def _tell(self, version: Version) -> None:
        body = {"model": self._model, "version": version_json(version), "bytes": self._nbytes}
        self._lease.call("/v1/event/announce", body)

    def _again(self) -> None:
        """A restarted hub knows nothing."""
        if self._last is None:
            return
        try:
            self._tell(self._last)
        except HubRefused as error:
            if error.code != "regress":  # else a later one was announced meanwhile
                raise

    def close(self) -> None:
        """Leave the hub. Idempotent."""
        self._hub.close()

    def __enter__(self) -> Announcer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
