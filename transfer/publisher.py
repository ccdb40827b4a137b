"""The publisher: makes a version's export buffers, announces it, and writes it to whoever is ready for it.

One Publisher per trainer process. ``publish`` blocks the training thread only for the export; everything else
happens in threads: one that announces to the hub, one that accepts links, one per link.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_sync.sharding import Correspondence, Layout
from jaxrl_sync.sharding.paths import nested
from jaxrl_sync.transfer.config import PublisherConfig
from jaxrl_sync.transfer.errors import (
    DeadlineError,
    PeerLost,
    TransferError,
)
from jaxrl_sync.transfer.exports import Exported, Held, export, export_kind, snapshot
from jaxrl_sync.transfer.hub.client import HubClient, HubRefused, Lease
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.listening import Listening
from jaxrl_sync.transfer.outbound import Outbound
from jaxrl_sync.transfer.outcome import RankKey, RankOutcome, Ticket
from jaxrl_sync.transfer.owner import Reading
from jaxrl_sync.transfer.pairing import Pairing, compare_layouts
from jaxrl_sync.transfer.pairings import Pairings
from jaxrl_sync.transfer.payload.chains import Chains
from jaxrl_sync.transfer.version import Version

KEPT_TICKETS = 64

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass
class PublisherStats:
    """Counters since the start. ``stall_s`` is the time that publish() blocked its caller."""

    published: int = 0
    export_s: float = 0.0
    stall_s: float = 0.0
    last_stall_s: float = 0.0
    wire_s: float = 0.0
    bytes_sent: int = 0
    sends: int = 0
    frames: int = 0
    links: int = 0


class Publisher:
    """Publishes the versions of one trainer process. Owns threads, sockets, buffers: ``close()``."""

    def __init__(
        self,
        hub_url: str,
        source: Any,
        *,
        token_file: str | Path,
        config: PublisherConfig | None = None,
        convert: Callable[[Any], Any] | None = None,
        name: str = "trainer",
        rank: int | None = None,
        size: int | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Register with the hub and listen for subscribers; blocks until the hub knows us.

        ``source`` is the trainer tree's Layout (or a tree that has one). ``convert``, when given, is
        traced here as well and a subscriber with another conversion is refused. ``rank`` and ``size``
        default to those of the JAX world. ``on_lost(reason)`` is called when the hub lease is lost for
        good. ResourceError when the port is taken, PeerLost without a hub, AuthError.
        """
        self.config = config or PublisherConfig()
        self.source = source if isinstance(source, Layout) else Layout.of(source)
        self.rank = jax.process_index() if rank is None else rank
        self.size = jax.process_count() if size is None else size
        self.closing = False
        self._lock = threading.Lock()
        self._stats = PublisherStats()
        self.chains = Chains(self.config.payload, self.config.threads)
        self._kinds: dict[str, Correspondence] = {}
        self._held: list[Held] = []
        self._spare: dict[str, Exported] = {}
        self._tickets: list[Ticket] = []
        self._published_at: dict[Version, float] = {}
        self._last: Version | None = None
        self._checked = False
        self._finder = concurrent.futures.ThreadPoolExecutor(1, "publisher-find")
        self._announcing: queue.SimpleQueue[Ticket | None] = queue.SimpleQueue()
        self._hub = HubClient(hub_url, token_file, self.config.hub_timeout_s)
        try:
            self.run_id = self._hub.run_id
        except BaseException:
            self._hub.close()
            raise
        limit_s = self.config.handshake_timeout_s
        self._pairings = Pairings(self._hub, self.source, self.size, convert, limit_s)
        try:
            self._listening = Listening(self, self._hub.token, "publisher")
        except BaseException:
            self._hub.close()
            raise
        try:
            self._lease = self._register(name, hub_url, on_lost)
        except BaseException:
            self._listening.close()
            self._hub.close()
            raise
        self._thread = threading.Thread(target=self._announce_all, name="publisher-announce", daemon=True)
        self._thread.start()
        self._listening.start()

    def _register(self, name: str, hub_url: str, on_lost: Callable[[str], None] | None) -> Lease:
        info = {
            "model": self.config.model,
            "address": self._listening.address(hub_url),
            "source": self._hub.put_blob(self.source.to_bytes()),
            "source_digest": self.source.digest,
            "pid": os.getpid(),
        }
        who = "publisher", name, self.rank, self.size
        ttl_s = self.config.ttl_s
        return self._hub.register(*who, info, ttl_s, on_lost=on_lost, on_rejoin=self._rejoin)

    # What the training thread calls.

    def publish(self, tree: Any, version: Version) -> Ticket:
        """Publish a tree of arrays (or an iterator of (path, array)) as ``version``.

        Returns once its export buffers are computed: the caller may then donate the tree. Announcing and
        moving happen in the background. MismatchError when the tree isn't what ``source`` says; TransferError
        when ``version`` doesn't come after the last one or the publisher is closed.
        """
        start = time.monotonic()
        self._check_version(version)
        if isinstance(tree, Iterator):
            tree = nested(dict(tree))
        if not self._checked:
            compare_layouts(self.source, Layout.of(tree), "the published tree")
            self._checked = True
        with self._lock:
            kinds = dict(self._kinds)
        spare, self._spare = self._spare, {}
        exports = {kind: export(c, tree, spare.get(kind)) for kind, c in kinds.items()}
        held = Held(version, exports, None if kinds else snapshot(tree))
        export_s = time.monotonic() - start
        ranks = sorted({link.key for link in self._listening.links})
        with self._lock:
            ticket = Ticket(version, ranks, export_s)
            all_held = [*self._held, held]
            self._held = all_held[-self.config.keep_versions :]
            self._tickets = [*self._tickets, ticket][-KEPT_TICKETS:]
            self._published_at = {h.version: self._published_at.get(h.version, start) for h in self._held}
            self._last = version
            self._stats.published += 1
            self._stats.export_s += export_s
        for old in all_held[: -self.config.keep_versions]:
            self._spare = old.retire()
        self._announcing.put(ticket)
        with self._lock:
            self._stats.last_stall_s = time.monotonic() - start
            self._stats.stall_s += self._stats.last_stall_s
        return ticket

    def _check_version(self, version: Version) -> None:
        if self.closing:
            raise TransferError("the publisher is closed")
        if self._lease.lost.is_set():
            raise PeerLost(self._lease.reason)
        last = self._last
        if last is not None and last.lineage == version.lineage and not version.follows(last):
            raise TransferError(f"version {version} doesn't come after {last}, which was published")

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see PublisherStats."""
        with self._lock:
            counters = {**dataclasses.asdict(self._stats), "links": len(self._listening.links)}
        return {**counters, **self.chains.stats()}

    # The hub.

    def _announce_all(self) -> None:
        while (ticket := self._announcing.get()) is not None:
            looking = self._finder.submit(self._look_up, ticket.version)
            try:
                self._announce(ticket.version)
                ticket.announced()
                looking.result()
            except TransferError as error:
                newest = self._last
                if _regress(error) and newest is not None and newest.follows(ticket.version):
                    ticket.supersede(newest)  # told to a restarted hub before this one's turn came
                    continue
                if not self.closing:
                    logger.error("version %s isn't announced: %s", ticket.version, error)
                ticket.fail(error)
            except Exception as error:  # of an export from the snapshot: later versions need this thread
                logger.exception("version %s is announced, its shards can't be found", ticket.version)
                ticket.fail(error)

    def _look_up(self, version: Version) -> None:
        """While the word spreads: find the shards that will be asked for."""
        with self._lock:
            held = next((h for h in self._held if h.version == version), None)
            kinds = dict(self._kinds)
        for kind, correspondence in kinds.items():
            if held is not None:
                held.shards(kind, correspondence)

    def _announce(self, version: Version) -> None:
        body = {
            "model": self.config.model,
            "version": version_json(version),
            "bytes": self.source.total_bytes,
        }
        self._lease.call("/v1/event/announce", body)

    def _rejoin(self) -> None:
        """A restarted hub knows nothing: tell it again what we have."""
        self._hub.put_blob(self.source.to_bytes())
        with self._lock:
            versions = [held.version for held in self._held]
        for version in versions:
            try:
                self._announce(version)
            except HubRefused as error:
                if not _regress(error):
                    raise
                logger.info("%s", error)  # a later one was announced meanwhile

    # What links ask.

    def pairing(self, target: str, correspondence: str) -> Pairing:
        """The pairing of a subscriber's blobs, planned the first time. MismatchError, MappingError."""
        return self._pairings.get(target, correspondence)

    def read(self, version: Version, pairing: Pairing, deadline: float) -> Reading | str:
        """The shards to send for ``version``, or in words why there are none."""
        with self._lock:
            held = next((h for h in self._held if h.version == version), None)
            newest = self._last
        shards = None
        if held is not None:
            shards = held.shards(export_kind(pairing.correspondence), pairing.correspondence)
        if held is None or held.retired:
            return f"version {version} was superseded, the newest here is {newest}"
        if shards is None:
            return f"version {version} was exported before this layout was known; the next one will do"
        return Reading(shards)

    def since_published(self, version: Version) -> float:
        """Seconds since ``publish`` was called for a version that is still held."""
        with self._lock:
            return time.monotonic() - self._published_at.get(version, time.monotonic())

    def count_sent(self, nbytes: int, wire_s: float, frame: bool = False) -> None:
        """Note one edge that was sent, by a frame or in full."""
        with self._lock:
            self._stats.sends += 1
            self._stats.frames += frame
            self._stats.bytes_sent += nbytes
            self._stats.wire_s += wire_s

    def installed(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A rank serves ``version``: its older ones are superseded."""
        with self._lock:
            tickets = list(self._tickets)
        for ticket in tickets:
            if ticket.version == version:
                ticket.settle(key, result)
            elif version.follows(ticket.version) or ticket.version.lineage != version.lineage:
                ticket.settle_known(key, RankOutcome("superseded", f"by {version}"))

    def gave_up(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A rank couldn't take ``version``."""
        with self._lock:
            tickets = [t for t in self._tickets if t.version == version]
        for ticket in tickets:
            ticket.settle_known(key, result)

    # Links.

    def link_opened(self, link: Outbound, pairing: Pairing) -> None:
        """A link has a plan: its kind of export is made with every later version."""
        with self._lock:
            self._kinds.setdefault(export_kind(pairing.correspondence), pairing.correspondence)

    def link_ended(self, link: Outbound, reason: str) -> None:
        """A link is gone: what it still owed is failed."""
        self.chains.close(link.link)
        replaced = self._listening.forget(link)
        with self._lock:
            tickets = list(self._tickets)
        if not self.closing:
            logger.info("link to %s.%d ended: %s", *link.key, reason)
        if not replaced:
            for ticket in tickets:
                ticket.settle_known(link.key, RankOutcome("failed", reason))

    def close(self) -> None:
        """Leave the hub, end links and threads, free the buffers. Idempotent; blocks some seconds at most."""
        with self._lock:
            if self.closing:
                return
            self.closing = True
        self._announcing.put(None)
        self._lease.close()
        self._listening.close()
        self._hub.close()
        self._thread.join(5.0)
        with self._lock:
            self._held = []
            self._spare = {}

    def drain(self, timeout_s: float) -> bool:
        """Wait until every connected engine has taken or lost the newest version; False when time ran out."""
        with self._lock:
            ticket = self._tickets[-1] if self._tickets else None
        if ticket is None:
            return True
        try:
            ticket.wait(timeout_s)
        except DeadlineError:
            return False
        return True

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _regress(error: TransferError) -> bool:
    """Whether the hub refused a version because it knows a later one."""
    return isinstance(error, HubRefused) and error.code == "regress"
