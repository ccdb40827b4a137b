"""A relay: one rank of an engine serves the versions in its slots to other engines, as a publisher would.

Readers come over the same link protocol. Their plan leads from the engine's own target layout by the
identity, so replicas on other meshes are served too. A version that is still arriving is handed on part by
part; its sums are told only when this rank has verified it.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable

from jaxrl_sync.transfer.config import PublisherConfig, SubscriberConfig
from jaxrl_sync.transfer.holding import Holding
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.listening import Listening
from jaxrl_sync.transfer.outbound import Outbound
from jaxrl_sync.transfer.outcome import RankKey, RankOutcome
from jaxrl_sync.transfer.owner import Reading
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.pairings import Pairings
from jaxrl_sync.transfer.payload.chains import Chains
from jaxrl_sync.transfer.slots import Target
from jaxrl_sync.transfer.version import Version

LEAVE_S = 5.0
"""How long an engine that leaves waits for those who are still reading from it."""

ROLE = "relay"

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass
class RelayStats:
    """Counters since the start: edges sent to other engines, their bytes and seconds."""

    relayed: int = 0
    relayed_bytes: int = 0
    relay_wire_s: float = 0.0


class Relay:
    """Owns the listening socket, the links of readers and the lease as a source: ``close()``."""

    def __init__(
        self,
        hub: HubClient,
        holding: Holding,
        target: Target,
        config: SubscriberConfig,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Listen and register with the hub as a source. ResourceError when the port is taken, PeerLost."""
        self.config = PublisherConfig(
            model=config.model,
            transport=config.transport,
            host=config.host,
            threads=config.threads,
            verify=config.verify,
            chunk_bytes=config.chunk_bytes,
            timeout_s=config.timeout_s,
            handshake_timeout_s=config.handshake_timeout_s,
            hub_timeout_s=config.hub_timeout_s,
            ttl_s=config.ttl_s,
            verbs=config.verbs,
            payload=config.payload,
        )
        self.rank = config.rank
        self.run_id = hub.run_id
        self.closing = False
        self.chains = Chains(self.config.payload, config.threads)
        self._hub = hub
        self._holding = holding
        self._layout = target.layout
        self._lock = threading.Lock()
        self._stats = RelayStats()
        self._pairings = Pairings(hub, target.layout, config.size, None, config.handshake_timeout_s)
        self._listening = Listening(self, hub.token, ROLE)
        info = {
            "model": config.model,
            "address": self._listening.address(hub.url),
            "source": hub.put_blob(target.layout.to_bytes()),
            "source_digest": target.layout.digest,
            "site": config.site,
            "pid": os.getpid(),
        }
        who = ROLE, config.engine, config.rank, config.size
        try:
            self._lease = hub.register(
                *who, info, config.ttl_s, on_lost=on_lost, on_rejoin=lambda: self._rejoin()
            )
        except BaseException:
            self._listening.close()
            raise
        self._listening.start()

    def _rejoin(self) -> None:
        self._hub.put_blob(self._layout.to_bytes())

    def tell_conversion(self, digest: str) -> None:
        """By which conversion the versions here came: readers that want another one refuse them."""
        self._lease.update(conversion=digest)

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see RelayStats."""
        with self._lock:
            return dataclasses.asdict(self._stats)

    # What links ask (`owner.Owner`).

    def pairing(self, target: str, correspondence: str) -> Pairing:
        """The pairing of a reader's blobs. MismatchError, MappingError."""
        return self._pairings.get(target, correspondence)

    def read(self, version: Version, pairing: Pairing, deadline: float) -> Reading | str:
        """The slot that holds ``version``, wholly or in part so far, or why there is none."""
        return self._holding.read(version, deadline)

    def follow(self, version: Version) -> None:
        """Prepare for frames that start from ``version``, which is verified here; blocks for a comparison."""
        if self.chains.settings.kind == "full" or self.closing:
            return
        reading = self._holding.read(version, time.monotonic())
        if isinstance(reading, str):
            return
        try:
            self.chains.follow(version, reading.shards)
        finally:
            reading.close()

    def since_published(self, version: Version) -> float:
        """Seconds since ``version`` began to arrive here."""
        return self._holding.since(version)

    def count_sent(self, nbytes: int, wire_s: float, frame: bool = False) -> None:
        """Note one edge that was sent."""
        with self._lock:
            self._stats.relayed += 1
            self._stats.relayed_bytes += nbytes
            self._stats.relay_wire_s += wire_s

    def installed(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A reader serves ``version``: the hub and the publisher are told by itself."""

    def gave_up(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A reader couldn't take ``version``."""
        logger.info("%s.%d gave up %s: %s", *key, version, result.detail)

    def link_opened(self, link: Outbound, pairing: Pairing) -> None:
        """A reader has a plan; nothing is exported for it."""

    def link_ended(self, link: Outbound, reason: str) -> None:
        """A reader is gone."""
        self.chains.close(link.link)
        self._listening.forget(link)
        if not self.closing:
            logger.info("the link to %s.%d ended: %s", *link.key, reason)

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Refuse new readers, wait for those that are there, leave the directory. Idempotent."""
        with self._lock:
            if self.closing:
                return
        if not self._holding.drain(drain_s):
            logger.warning("engines still read from this one after %g s: it leaves", drain_s)
        self.closing = True
        self._lease.close()
        self._listening.close()
