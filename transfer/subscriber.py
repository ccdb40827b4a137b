"""The subscriber: one rank of an engine takes versions into its slots and swaps them in.

One Subscriber per engine process. A thread watches the hub for publishers and offers, another reports; the
engine's own thread polls, prepares and swaps. The decisions are those of ``transfer.receiving``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import logging
import math
import queue
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import receiving
from jaxrl_sync.transfer.clean import remove_stale
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import (
    DeadlineError,
    PeerLost,
    ResourceError,
    TransferError,
)
from jaxrl_sync.transfer.hub.client import POLL_S, HubClient, HubRefused, Member
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.inbound import Gone, Inbound, prepared_by
from jaxrl_sync.transfer.links import Links, read_watch
from jaxrl_sync.transfer.memory import SHM_DIR, PrivateMemory, SharedMemory
from jaxrl_sync.transfer.receiving import Offer, ReceiverState, SubscriberStats
from jaxrl_sync.transfer.receiving import Prepared as Prepared
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.version import Version

RETRY_S = 0.5
HUB_GRACE_S = 5.0  # a hub that is slow, or starts again, may take so much longer than a round's deadline
SWAP_TELL_S = 0.5  # the report is small: a socket that doesn't take it at once belongs to a stuck peer
BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0)

logger = logging.getLogger("jaxrl_sync.transfer")


class Update:
    """A version that this rank may take. Not thread-safe: one thread prepares and swaps."""

    def __init__(self, subscriber: Subscriber, offer: Offer) -> None:
        self._subscriber = subscriber
        self._offer = offer
        self.report: Prepared | None = None

    @property
    def version(self) -> Version:
        """The version on offer; ``prepare`` may move on to a newer one that superseded it."""
        return self._offer.version

    def prepare(self, timeout_s: float | None = None) -> Prepared:
        """Move the version into a free slot, check its digest; with several ranks, wait until all have.

        Blocks up to ``timeout_s`` (the config's by default; 5 s more where the hub is away); decoding may
        go on meanwhile. After an error the serving version is untouched and ``poll`` will offer again.
        TransferError and its kinds.
        """
        if self.report is None:
            self._offer, self.report = self._subscriber._prepare(self._offer, timeout_s)
        return self.report

    def swap(self) -> Any:
        """Make the prepared version the serving one and return its tree of arrays (an assignment, no copy).

        Call it when the outputs of the last step are ready: the slot that served is overwritten by a later
        version. Reports to hub and publisher in the background.
        """
        return self._subscriber._swap(self._offer)

    def discard(self, reason: str) -> None:
        """Give the version up; the hub then offers another (or the same) one."""
        self._subscriber._discard(self._offer, reason)


class Subscriber:
    """Receives the versions of one engine rank. Owns slots, sockets, threads: ``close()`` or ``with``.

    Arrays that ``swap`` returned stay valid after ``close``; their memory goes with them.
    """

    def __init__(
        self,
        hub_url: str,
        target: Any,
        convert: Callable[[Any], Any],
        *,
        token_file: str | Path,
        config: SubscriberConfig | None = None,
        on_lost: Callable[[str], None] | None = None,
    ) -> None:
        """Allocate the slots, register with the hub and watch for versions; doesn't wait for the first.

        ``target`` is the engine's tree of ``jax.ShapeDtypeStruct`` with shardings; ``convert`` makes it from
        the trainer's tree and never travels. ResourceError when the slots don't fit, PeerLost without a hub,
        AuthError.
        """
        self.config = config or SubscriberConfig()
        self._target = Target.of(target, self.config.rank)
        self._state = ReceiverState(self.config.slots)
        self._changed = threading.Condition()
        self._stats = SubscriberStats()
        self._retry_at = 0.0
        self._failures = 0
        self._closed = threading.Event()
        self._reports: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._pool = concurrent.futures.ThreadPoolExecutor(8, "edge")
        self._hub = HubClient(hub_url, token_file, self.config.hub_timeout_s)
        self._slots: list[Slot] = []
        self._links = Links(self._hub, self._target, convert, self.config, self._slots)
        try:
            self._run_id = self._hub.run_id
            remove_stale(self._run_id)  # what a killed predecessor left takes the room that we need
            for _ in range(self.config.slots):
                self._slots.append(Slot(self._target, self._memory()))
            self._lease = self._hub.register(
                "subscriber",
                self.config.engine,
                self.config.rank,
                self.config.size,
                {"model": self.config.model},
                self.config.ttl_s,
                on_lost=on_lost,
                on_rejoin=self._links.rejoin,
                installed=lambda: self._state.installed,
            )
            self._links.lease = self._lease
        except BaseException:
            self._free()
            raise
        self._threads = [
            threading.Thread(target=self._watch, name="subscriber-watch", daemon=True),
            threading.Thread(target=self._report, name="subscriber-report", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    # What the engine calls.

    @property
    def installed(self) -> Version | None:
        """The version that serves, None before the first swap."""
        return self._state.installed

    def poll(self, timeout_s: float = 0.0) -> Update | None:
        """The update that may be taken now, or None; waits up to ``timeout_s``. Costs no call to the hub.

        Raises what makes any update impossible: a conversion or layout that doesn't fit, a lost lease.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while True:
                offer = self._takable()
                if offer is not None:
                    return Update(self, offer)
                left = deadline - time.monotonic()
                if left <= 0:
                    return None
                pause = self._retry_at - time.monotonic()
                self._changed.wait(min(left, pause) if pause > 0 else left)

    def _takable(self) -> Offer | None:
        if self._links.failure is not None:
            raise self._links.failure
        if self._lease.lost.is_set():
            raise PeerLost(self._lease.reason)
        self._check_open()
        offer = receiving.wanted(self._state)
        if offer is None or time.monotonic() < self._retry_at or not self._links.can_take(offer):
            return None
        return offer

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransferError("the subscriber is closed")

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see SubscriberStats."""
        with self._changed:
            return dataclasses.asdict(self._stats)

    def request_anchor(self) -> None:
        """Take the next version in full, whatever payload the publisher prefers."""
        self._links.request_anchor()

    def close(self) -> None:
        """Leave the hub, close every link, free slots that nobody looks at. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._reports.put(None)
        self._lease.close()
        with self._changed:
            self._changed.notify_all()
        self._links.close()
        self._free()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(3.0)

    def _free(self) -> None:
        self._hub.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._changed:  # after the last slot that _replace makes
            slots = list(self._slots)
        for slot in slots:
            slot.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # Slots.

    def _memory(self) -> SharedMemory | PrivateMemory:
        nbytes = self._target.slot.total_bytes
        wanted = self.config.transport
        if wanted in ("tcp", "verbs") or (wanted == "auto" and not SHM_DIR.is_dir()):
            return PrivateMemory(nbytes)
        return SharedMemory(self._run_id, nbytes)

    def _replace(self, index: int) -> None:
        """New memory for a quarantined slot: whoever still maps the old one writes into nothing."""
        self._slots[index].close()
        fresh = Slot(self._target, self._memory())
        with self._changed:
            if not self._closed.is_set():
                self._slots[index] = fresh
                self._stats.quarantined += 1
                self._state = receiving.released(self._state, index)
                return
        fresh.close()  # close() ran meanwhile and saw only the old one

    def _replace_quarantined(self) -> None:
        with self._changed:
            quarantined = sorted(self._state.quarantined)
        for index in quarantined:
            self._replace(index)

    # The watching thread: publishers, links, offers.

    def _watch(self) -> None:
        known: dict[str, Any] = {"round": None, "publishers": None}
        publishers: list[Member] = []
        while not self._closed.is_set():
            try:
                limit_s = POLL_S if self._links.whole else RETRY_S
                seen = read_watch(self._lease.call("/v1/watch", {**known, "timeout_s": limit_s}, limit_s))
            except TransferError as error:
                if self._closed.is_set() or self._lease.lost.is_set():
                    break
                logger.warning("watching the hub: %s", error)
                self._closed.wait(RETRY_S)
                known = {"round": None, "publishers": None}
                continue
            if seen is not None:
                publishers = seen[0]
                known = {
                    "round": seen[1].round if seen[1] else None,
                    "publishers": [p.incarnation for p in publishers],
                }
            self._links.update(publishers)
            with self._changed:
                self._changed.notify_all()
            if seen is not None:
                self._see(seen[1])
        with self._changed:
            self._changed.notify_all()

    def _see(self, offer: Offer | None) -> None:
        with self._changed:
            self._state = receiving.see(self._state, offer)
            self._changed.notify_all()
        if offer is not None and self.config.size == 1 and offer.version == self._state.installed:
            self._reports.put(lambda: self._advance(offer, "installed"))  # the hub had forgotten it

    # The reporting thread.

    def _report(self) -> None:
        while (report := self._reports.get()) is not None:
            try:
                report()
            except TransferError as error:
                if not self._closed.is_set():
                    logger.warning("reporting to the hub: %s", error)

    def _advance(
        self, offer: Offer, to: str, timeout_s: float | None = None, deadline: float = math.inf
    ) -> None:
        body = {"round": offer.round, "to": to, "timeout_s": timeout_s or self.config.timeout_s}
        within_s = max(0.0, deadline - time.monotonic()) + HUB_GRACE_S
        self._lease.call("/v1/event/advance", body, within_s=within_s)

    # The engine's thread: prepare and swap.

    def _prepare(self, offer: Offer, timeout_s: float | None) -> tuple[Offer, Prepared]:
        start = time.monotonic()
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        deadline = start + limit_s
        self._check_open()
        self._make_room()
        while True:
            try:
                self._advance(offer, "begun", limit_s, deadline)
            except HubRefused as error:
                if error.code not in ("round_over", "unknown_round"):
                    raise
                offer = self._other(offer, deadline, error)
                continue
            try:
                with self._changed:
                    self._state = receiving.begin(self._state, offer)
                    filling = self._state.filling
                assert filling is not None
                report = self._fill(offer, filling.slot, deadline)
                self._wait_group(offer, deadline)
            except Gone as error:
                logger.warning("%s; waiting up to %.1f s for another", error, deadline - time.monotonic())
                self._give_up(offer, error)
                offer = self._other(offer, deadline, error)
                continue
            except BaseException as error:
                with self._changed:
                    self._retry_at = time.monotonic() + BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
                    self._failures += 1
                self._give_up(offer, error)
                if self._closed.is_set() and not isinstance(error, TransferError):
                    raise TransferError(f"the subscriber was closed during {offer.version}") from error
                raise
            break
        prepare_s = time.monotonic() - start
        with self._changed:
            self._state = receiving.prepared(self._state)
            self._failures = 0
            self._stats.prepared += 1
            self._stats.frames += "frame" in report.payload
            self._stats.bytes_received += report.nbytes
            self._stats.wire_s += report.wire_s
            self._stats.verify_s += report.verify_s
            self._stats.prepare_s += prepare_s
        return offer, dataclasses.replace(report, version=offer.version, prepare_s=prepare_s)

    def _make_room(self) -> None:
        """Replace the slots that found no room when their round failed; the serving one isn't touched."""
        try:
            self._replace_quarantined()
        except ResourceError as full:
            with self._changed:
                self._retry_at = time.monotonic() + BACKOFF_S[-1]
            raise TransferError(f"no slot to prepare in: {full}") from full

    def _other(self, offer: Offer, deadline: float, cause: TransferError) -> Offer:
        """The offer that took the place of ``offer``; the cause when none comes in time.

        Of a version that its publisher no longer has, no new round will do.
        """
        useless = offer.version if isinstance(cause, Gone) else None
        with self._changed:
            while True:
                found = receiving.wanted(self._state)
                fresh = found is not None and found.round != offer.round and found.version != useless
                if found is not None and fresh and self._links.can_take(found):
                    return found
                left = deadline - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    raise cause
                self._changed.wait(min(left, 1.0))

    def _fill(self, offer: Offer, index: int | None, deadline: float) -> Prepared:
        """Take every edge into slot ``index`` and check it; ``prepare_s`` is left for the caller."""
        if index is None:
            return Prepared(offer.version, 0, 0.0, 0.0, 0.0, "none")
        start = time.monotonic()
        slot = self._slots[index]
        links = self._links.of(offer)
        self._links.write_constants(slot)
        self._links.forget_slots({s.generation for s in self._slots})
        try:
            self._take_all(links, offer, slot, deadline)
            wire_s = time.monotonic() - start
            for link in links:
                link.verify(offer, slot, deadline)
        finally:
            for link in links:
                link.end()
        slot.fill_devices()
        verify_s = time.monotonic() - start - wire_s
        return prepared_by(offer.version, links, wire_s, verify_s)

    def _take_all(self, links: list[Inbound], offer: Offer, slot: Slot, deadline: float) -> None:
        """All edges side by side; waits for every one of them, then raises the first error."""
        live = [s.memory.name for s in self._slots]
        with self._changed:
            serving = None if self._state.serving is None else self._slots[self._state.serving]
        takes = [self._pool.submit(link.take, offer, slot, serving, live, deadline) for link in links[1:]]
        try:
            if links:
                links[0].take(offer, slot, serving, live, deadline)
        finally:
            concurrent.futures.wait(takes)
        for take in takes:
            take.result()

    def _wait_group(self, offer: Offer, deadline: float) -> None:
        """With several ranks: all of them hold the version, or none takes it."""
        if self.config.size == 1:
            return
        self._advance(offer, "prepared", deadline=deadline)
        while (left := deadline - time.monotonic()) > 0:
            body = {"round": offer.round, "timeout_s": min(left, POLL_S)}
            status = self._hub.call("/v1/round", body, min(left, POLL_S), within_s=left + HUB_GRACE_S)
            if status["state"] not in ("open", "committed"):
                raise TransferError(f"version {offer.version} is {status['state']}: {status['reason']}")
            if status["prepared"]:
                return
        raise DeadlineError(
            f"other ranks of {self.config.engine} weren't prepared for {offer.version} in time"
        )

    def _give_up(self, offer: Offer, error: BaseException) -> None:
        """End the round on our side. A sender that didn't confirm is cut off, its slot gets new memory."""
        unconfirmed = self._links.cut_unconfirmed()
        with self._changed:
            self._state = receiving.fail(self._state, unconfirmed=unconfirmed)
            self._stats.failed += 1
        self._tell_failed(offer, f"{type(error).__name__}: {error}")
        try:
            if not self._closed.is_set():
                self._replace_quarantined()
        except ResourceError as full:  # the next prepare tries again, and says so if it still can't
            logger.warning("a quarantined slot isn't replaced yet: %s", full)

    def _tell_failed(self, offer: Offer, reason: str) -> None:
        message = {"kind": "gave_up", "version": version_json(offer.version), "reason": reason}

        def report() -> None:
            for link in self._links.all:
                link.tell(message, self.config.handshake_timeout_s)
            self._lease.call("/v1/event/fail", {"round": offer.round, "reason": reason})

        self._reports.put(report)

    def _discard(self, offer: Offer, reason: str) -> None:
        with self._changed:
            filling = self._state.filling
            if filling is None or filling.offer != offer:
                return
            self._state = receiving.drop(self._state)
        self._tell_failed(offer, reason)

    def _swap(self, offer: Offer) -> Any:
        start = time.monotonic()
        with self._changed:
            self._check_open()
            self._state = receiving.swap(self._state, offer)
            serving = self._state.serving
            self._stats.installed += 1
        assert serving is not None
        tree = self._slots[serving].tree()
        swap_s = time.monotonic() - start
        message = {
            "kind": "installed",
            "round": offer.round,
            "version": version_json(offer.version),
            "seconds": {"swap": swap_s, "apply": self._links.apply_s},
        }

        def report() -> None:
            self._advance(offer, "installed")

        for link in self._links.all:
            link.tell(message, SWAP_TELL_S)
        self._reports.put(report)
        return tree
