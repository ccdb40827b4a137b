"""The publisher: makes a version's export buffers, announces it, and writes it to whoever is ready for it.

One Publisher per trainer process. ``publish`` blocks the training thread only for the export; everything else
happens in threads: one announces to the hub, one follows pins, one accepts links, and each link has one.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jaxrl_sync.sharding import Correspondence, Layout, SlotLayout
from jaxrl_sync.transfer.config import PublisherConfig
from jaxrl_sync.transfer.errors import (
    DeadlineError,
    PeerLost,
    TransferError,
)
from jaxrl_sync.transfer.exports import Held, Spare, begin_export, export_kind, snapshot
from jaxrl_sync.transfer.given import Given
from jaxrl_sync.transfer.hub.client import POLL_S, HubClient, HubRefused, Lease
from jaxrl_sync.transfer.hub.state import version_json, version_of
from jaxrl_sync.transfer.listening import Listening
from jaxrl_sync.transfer.outbound import Outbound
from jaxrl_sync.transfer.outcome import RankKey, RankOutcome, Ticket
from jaxrl_sync.transfer.owner import Reading
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.pairings import Pairings
from jaxrl_sync.transfer.payload.chains import Chains
from jaxrl_sync.transfer.payload.comparing import Comparing
from jaxrl_sync.transfer.registration import publisher_memory
from jaxrl_sync.transfer.retained import Retained
from jaxrl_sync.transfer.version import Version, expect_version

KEPT_TICKETS = 64
KINDS_LINGER = 16
"""So many versions are still exported for a kind of engine whose last link has ended."""
RETRY_S = 0.5
PIN_GRACE_TTLS = 2.0
"""So many leases long no pin is dropped after the hub has restarted: who pinned is telling it again."""

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
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self._stats = PublisherStats()
        self.chains = Chains(self.config.payload, self.config.threads)
        self._comparing = Comparing(self.config.payload, self.source.devices, self.config.threads)
        self._kinds: dict[str, Correspondence] = {}
        self._kind_of: dict[str, str] = {}
        self._unused: dict[str, int] = {}
        self._given = Given(self.source)
        self._retained = Retained(self.config.keep_versions, self.config.offload_limit_bytes)
        self._spare: Spare = {}
        self._told = 0
        self._telling = threading.Lock()
        self._tickets: list[Ticket] = []
        self._published_at: dict[Version, float] = {}
        self._last: Version | None = None
        self._rejoined_at = -math.inf
        self._finder = concurrent.futures.ThreadPoolExecutor(1, "publisher-find")
        self._encoder = concurrent.futures.ThreadPoolExecutor(1, "publisher-encode")
        self._pins_told: frozenset[Version] = frozenset()
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
        self._threads = [
            threading.Thread(target=self._announce_all, name="publisher-announce", daemon=True),
            threading.Thread(target=self._follow_pins, name="publisher-pins", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        self._listening.start()

    def _register(self, name: str, hub_url: str, on_lost: Callable[[str], None] | None) -> Lease:
        info = {
            "model": self.config.model,
            "address": self._listening.address(hub_url),
            "source": self._hub.put_blob(self.source.to_bytes()),
            "source_digest": self.source.digest,
            "site": self.config.site,
            **publisher_memory(self.config, self._export_bytes(), self._comparing.form),
            "pid": os.getpid(),
        }
        who = "publisher", name, self.rank, self.size
        ttl_s = self.config.ttl_s
        return self._hub.register(*who, info, ttl_s, on_lost=on_lost, on_rejoin=self._rejoin)

    def _export_bytes(self) -> int:
        """At most so much host memory do this process's exports take."""
        if self.rank not in self.source.devices.values():
            return 0
        count = self._comparing.host_exports(self.config.keep_versions)
        return SlotLayout.of(self.source, self.rank).total_bytes * count

    # What the training thread calls.

    def publish(self, tree: Any, version: Version) -> Ticket:
        """Publish a tree of arrays (or an iterator of (path, array); or `Marked`) as ``version``.

        Returns once its export buffers are computed: the caller may then donate the tree. Announcing and
        moving happen in the background. MismatchError when the tensors aren't what ``source`` says (missing,
        extra, twice, of another shape, dtype or sharding); TransferError when ``version`` doesn't come after
        the last one or the publisher is closed; RetentionFull when pinned versions leave no room and none was
        released within ``config.timeout_s``.
        """
        start = time.monotonic()
        self._check_version(version)
        tree = self._given.tree(self._comparing.tree(version, tree))
        self._retained.wait_room(version, self.config.timeout_s, lambda: not self.closing)
        kinds, spare = self._kinds_wanted(), self._take_spare()
        exports = {kind: begin_export(c, tree, spare.get(kind)) for kind, c in kinds.items()}
        comparing = self._comparing
        tree = None if kinds else snapshot(tree)
        held = Held(version, exports, tree, view=comparing.shards, reuse=not comparing.lazy)
        held.look_up()  # while the devices compute
        jax.block_until_ready(exports)
        export_s = time.monotonic() - start
        ranks = sorted({link.key for link in self._listening.links})
        with self._lock:
            ticket = Ticket(version, ranks, export_s)
            forgotten, self._tickets = _newest([*self._tickets, ticket])
            self._published_at[version] = start
            self._last = version
            self._stats.published += 1
            self._stats.export_s += export_s
        for old in forgotten:
            if not old.done:  # no engine will be asked about it any more
                old.supersede(version)
        self._give_spare(self._retained.add(held))
        self._announcing.put(ticket)
        with self._lock:
            self._stats.last_stall_s = time.monotonic() - start
            self._stats.stall_s += self._stats.last_stall_s
        return ticket

    def _kinds_wanted(self) -> dict[str, Correspondence]:
        """The kinds of export to make now; those that no link has used for long are forgotten."""
        with self._lock:
            used = set(self._kind_of.values())
            self._unused = {k: self._unused.get(k, 0) + 1 for k in self._kinds if k not in used}
            self._kinds = {k: c for k, c in self._kinds.items() if self._unused.get(k, 0) <= KINDS_LINGER}
            return dict(self._kinds)

    def _take_spare(self) -> Spare:
        with self._lock:
            spare, self._spare = self._spare, {}
        return spare

    def _give_spare(self, spare: Spare) -> None:
        with self._lock:
            self._spare = spare or self._spare
            held = set(self._retained.versions)
            self._published_at = {v: t for v, t in self._published_at.items() if v in held}

    def _check_version(self, version: Version) -> None:
        expect_version(version)
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
        counters["copied_bytes"] = self._retained.copied_bytes
        counters["refused"] = sum(self._listening.refused.values())
        return {**counters, **self.chains.stats(), **self._comparing.stats()}

    # The hub.

    def _announce_all(self) -> None:
        while (ticket := self._announcing.get()) is not None:
            try:
                looking = self._finder.submit(self._look_up, ticket.version)
                self._announce(ticket.version, ticket.export_s)
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
        """While the word spreads: find the shards that will be asked for, and begin with their frames."""
        held = self._retained.find(version)
        with self._lock:
            kinds = dict(self._kinds)
        for kind, correspondence in kinds.items():
            shards = held.shards(kind, correspondence) if held is not None else None
            if shards is not None and not self.closing:
                self._encoder.submit(self._encode_ahead, version, kind, correspondence)

    def _encode_ahead(self, version: Version, kind: str, correspondence: Correspondence) -> None:
        held = self._retained.find(version)  # only now: what waits for its turn keeps no buffers
        if held is None or version != self._last:
            return  # those who are late for it ask for the newest
        with self._lock:
            links = [link for link, of in self._kind_of.items() if of == kind]
        try:
            if (shards := held.shards(kind, correspondence)) is not None:
                self.chains.ahead(links, version, shards)
        except Exception:  # who asks for the frame is told why there is none
            logger.exception("no frame of version %s is made ahead", version)

    def _announce(self, version: Version, export_s: float = 0.0) -> None:
        body = {
            "seconds": {"export": export_s},
            "version": version_json(version),
            "bytes": self.source.total_bytes,
            "fanout": {"kind": self.config.fanout, "degree": self.config.fanout_degree},
        }
        self._tell("/v1/event/announce", body)

    def _tell(self, path: str, body: dict[str, Any]) -> None:
        """Tell the hub something along with everything that is held; numbered, as threads overtake others."""
        with self._telling:
            self._told += 1
            about = {"model": self.config.model, "held": self._retained.to_json(), "sequence": self._told}
        self._lease.call(path, {**about, **body})

    def _follow_pins(self) -> None:
        """Learn which versions are pinned, keep them, and say so."""
        known: list[Any] = []
        while not self.closing and not self._lease.lost.is_set():
            try:
                grace_s = self._grace_s
                body = {
                    "model": self.config.model,
                    "known": known,
                    "timeout_s": min(POLL_S, grace_s or POLL_S),
                }
                rows = self._lease.call("/v1/pinned", body, POLL_S)["pinned"]
                self._pinned({v for row in rows if (v := version_of(row)) is not None})
                known = rows  # last: of an answer that could not be followed the hub is asked again
                self._offload()
            except (TransferError, ValueError) as error:
                if not self.closing and not self._lease.lost.is_set():
                    logger.warning("following pins: %s", error)
                self._closed.wait(RETRY_S)
            except Exception:  # no memory for a copy: pins are followed all the same
                logger.exception("pinned versions can't be copied")
                self._closed.wait(RETRY_S)

    @property
    def _grace_s(self) -> float:
        """A hub that has restarted hears of pins again: for so long none is dropped."""
        return max(0.0, self._rejoined_at + PIN_GRACE_TTLS * self.config.ttl_s - time.monotonic())

    def _pinned(self, versions: set[Version]) -> None:
        """Other versions are pinned now: keep those; what nobody needs any more goes."""
        before = self._retained.pinned
        pinned = frozenset(versions | before if self._grace_s else versions)
        if pinned != before:
            self._give_spare(self._retained.pin(pinned))
        if pinned != self._pins_told:
            self._tell("/v1/event/hold", {})
            self._pins_told = pinned

    def _offload(self) -> None:
        """Copy pinned versions as far as there is room: a pin that ended may have made some."""
        if self._retained.uncopied:
            self._give_spare(self._retained.copy_pinned())
            self._tell("/v1/event/hold", {})

    def _rejoin(self) -> None:
        """A restarted hub knows nothing: tell it again what we have."""
        self._rejoined_at = time.monotonic()
        self._hub.put_blob(self.source.to_bytes())
        for version in self._retained.versions[-1:]:
            try:
                self._announce(version)
            except HubRefused as error:
                if not _regress(error):
                    raise
                logger.info("%s", error)  # a later one was announced meanwhile, or withdrawn since
                self._tell("/v1/event/hold", {})

    def unpublish(self, version: Version, timeout_s: float, force: bool = False) -> None:
        """Stop to serve ``version`` and give its buffers up, once nobody reads it here any more. Blocks.

        DeadlineError names who still reads it; TransferError when it is the last reliable copy of a version
        that is needed (the newest, or pinned) and not ``force``. A version that isn't held is none.
        """
        deadline = time.monotonic() + timeout_s
        about = {"model": self.config.model, "version": version_json(version), "force": force}
        while True:  # said again to a hub that has restarted meanwhile
            seen = self._lease.call("/v1/event/unpublish", about)
            if seen["last_reliable"] and not force:
                raise TransferError(f"version {version} is needed and has no other reliable copy: it stays")
            if seen["drained"]:
                break
            left = deadline - time.monotonic()
            if left <= 0:
                names = ", ".join(seen["readers"])
                raise DeadlineError(f"version {version} is still read by {names} after {timeout_s:g} s")
            left = min(left, POLL_S)
            self._lease.call("/v1/unpublished", {**about, "timeout_s": left}, left)
        self._give_spare(self._retained.drop(version))
        self._tell("/v1/event/hold", {})

    # What links ask.

    def pairing(self, target: str, correspondence: str) -> Pairing:
        """The pairing of a subscriber's blobs, planned the first time. MismatchError, MappingError."""
        return self._pairings.get(target, correspondence)

    def read(self, version: Version, pairing: Pairing, deadline: float) -> Reading | str:
        """The shards to send for ``version``, or in words why there are none."""
        held, newest = self._retained.find(version), self._last
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
        kind = export_kind(pairing.correspondence)
        with self._lock:
            self._kinds.setdefault(kind, pairing.correspondence)
            self._kind_of[link.link] = kind

    def link_ended(self, link: Outbound, reason: str) -> None:
        """A link is gone: what it still owed is failed; what it had received is unknown until it says."""
        self.chains.close(link.link)
        replaced = self._listening.forget(link)
        with self._lock:
            self._kind_of.pop(link.link, None)
            tickets = list(self._tickets)
        if not self.closing:
            logger.info("link to %s.%d ended: %s", *link.key, reason)
        if not replaced:
            for ticket in tickets:
                owed = ticket.version == link.unconfirmed
                ticket.settle_known(link.key, RankOutcome("unknown" if owed else "failed", reason))

    def close(self) -> None:
        """Leave the hub, end links and threads, free the buffers. Idempotent; blocks some seconds at most."""
        with self._lock:
            if self.closing:
                return
            self.closing = True
        self._closed.set()
        self._announcing.put(None)
        self._lease.close()
        self._listening.close()
        self._hub.close()
        for thread in self._threads:
            thread.join(5.0)
        for pool in (self._finder, self._encoder):
            pool.shutdown(wait=False, cancel_futures=True)
        self._retained.close()
        self._take_spare()

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


def _newest(tickets: list[Ticket]) -> tuple[list[Ticket], list[Ticket]]:
    """Those that are too many, and the newest."""
    return tickets[:-KEPT_TICKETS], tickets[-KEPT_TICKETS:]


def _regress(error: TransferError) -> bool:
    """Whether the hub refused a version because it knows a later one."""
    return isinstance(error, HubRefused) and error.code == "regress"
