"""The subscriber: one rank of an engine takes versions into its slots and swaps them in.

One Subscriber per engine process. A thread watches the hub for publishers and offers, another reports; the
engine's own thread polls, prepares and swaps. The decisions are those of ``transfer.receiving``.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import agreement, receiving
from jaxrl_sync.transfer.agreement import HUB_GRACE_S as HUB_GRACE_S
from jaxrl_sync.transfer.brought import prepared_by, with_fill, written
from jaxrl_sync.transfer.clean import remove_stale
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import MismatchError, PeerLost, ResourceError, TransferError
from jaxrl_sync.transfer.holding import Holding
from jaxrl_sync.transfer.hub.client import HubClient, HubRefused, Member
from jaxrl_sync.transfer.hub.state import version_json
from jaxrl_sync.transfer.inbound import Inbound, take_all
from jaxrl_sync.transfer.links import SWAP_TELL_S, Links, read_offer
from jaxrl_sync.transfer.receiving import Offer, ReceiverState, SubscriberStats
from jaxrl_sync.transfer.receiving import Prepared as Prepared
from jaxrl_sync.transfer.registration import subscriber_info
from jaxrl_sync.transfer.relay import LEAVE_S, ROLE, Relay
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.taking import Gone, Taking
from jaxrl_sync.transfer.update import Update as Update
from jaxrl_sync.transfer.version import Version
from jaxrl_sync.transfer.watching import Watching

BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0)

logger = logging.getLogger("jaxrl_sync.transfer")


class Subscriber:
    """Receives the versions of one engine rank. Owns slots, sockets, threads: ``close()`` or ``with``.

    With ``config.relay`` it serves what it holds to other engines as well. Arrays that ``swap`` returned stay
    valid after ``close``; their memory goes with them.
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
        self._report: Prepared | None = None
        self._reading: list[Inbound] = []
        self._renewed = False
        self._retry_at = 0.0
        self._failures = 0
        self._closed = threading.Event()
        self._relay: Relay | None = None
        self._pool = concurrent.futures.ThreadPoolExecutor(8, "edge")
        self._hub = HubClient(hub_url, token_file, self.config.hub_timeout_s)
        try:
            run_id = self._hub.run_id
            remove_stale(run_id)  # what a killed predecessor left takes the room that we need
            self._holding = Holding(self._target, self.config, run_id)
            self._holding.allocate()
            self._links = Links(self._hub, self._target, convert, self.config, self._slots)
            if self.config.relay:
                self._relay = Relay(self._hub, self._holding, self._target, self.config, on_lost)
                self._links.on_conversion = self._relay.tell_conversion
            self._lease = self._hub.register(
                "subscriber",
                self.config.engine,
                self.config.rank,
                self.config.size,
                subscriber_info(self.config, self.config.slots * self._target.slot.total_bytes),
                self.config.ttl_s,
                on_lost=on_lost,
                on_rejoin=self._links.rejoin,
                installed=lambda: self._state.told,
            )
            self._links.lease = self._lease
            self._links.serving = lambda: self._state.told
        except BaseException:
            self._free()
            raise
        self._watching = Watching(self._lease, self._links, self._see, self._wake, self._begin_s)
        self._watching.start()

    # What the engine calls.

    @property
    def installed(self) -> Version | None:
        """The version that serves, None before the first swap."""
        return self._state.installed

    @property
    def in_place(self) -> bool:
        """Whether preparing the next version overwrites the memory that serves."""
        return self.config.slots == 1 and self._state.serving is not None

    @property
    def poisoned(self) -> bool:
        """Whether the serving memory holds no whole version: the engine must refuse to serve until a swap."""
        return self._state.poisoned

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
        if offer is None or time.monotonic() < self._retry_at or not self._watching.can_take(offer):
            return None
        return offer

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransferError("the subscriber is closed")

    def rollback(self) -> Any:
        """Have the version serve again that served before, and return its tree: its exact bits.

        The version that served is not taken again; the next one is. Call it as ``Update.swap``, on every
        rank of the engine. TransferError where that version's slot was reused.
        """
        with self._changed:
            self._check_open()
            before = self._state.filling
            self._state = receiving.rollback(self._state)
            serving, version = self._state.serving, self._state.installed
            self._stats.rollbacks += 1
        assert serving is not None
        if before is not None and self._state.filling is None:
            self._tell_failed(before.offer, f"rolled back to {version}")
        logger.warning("rolled back to version %s", version)
        self._watching.report(lambda: self._lease.update())
        return self._slots[serving].tree()

    def adopt(self, tree: Any, version: Version) -> Any:
        """Serve weights that the engine has already, as ``version``; returns their tree in a slot.

        For an engine that comes back with what it had. The tree has the target's paths, shapes, dtypes and
        shardings. Before any other version is installed; MismatchError names what doesn't fit.
        """
        self._check_open()
        with self._changed:
            receiving.adopt(self._state, version)  # refused before anything is written
        slot = self._slots[0]
        slot.copy_in(tree)
        self._holding.adopt(0, version)
        self._links.holds(None, slot, version)
        with self._changed:  # an offer may have come meanwhile
            self._state = receiving.adopt(self._state, version)
        self._lease.update()
        return slot.tree()

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see SubscriberStats and, of a relay, RelayStats."""
        with self._changed:
            counters = dataclasses.asdict(self._stats)
        return {**counters, **(self._relay.stats() if self._relay is not None else {})}

    def want(self, version: Version | None) -> None:
        """Ask for ``version`` (one that is pinned, for evaluation) instead of the newest; None: the newest.

        Where nobody holds it, nothing is offered. All ranks of an engine ask for the same.
        """
        self._lease.update(want=version_json(version))

    def request_anchor(self) -> None:
        """Take the next version in full, whatever payload the publisher prefers."""
        self._links.request_anchor()

    def close(self, drain_s: float = LEAVE_S) -> None:
        """Leave the hub, close every link, free slots that nobody looks at. Idempotent.

        A relay first refuses new readers and waits for those it has, ``drain_s`` at most.
        """
        if self._closed.is_set():
            return
        if self._relay is not None:
            self._relay.close(drain_s)
        self._closed.set()
        self._watching.stop()
        self._lease.close()
        self._wake()
        self._links.close()
        self._free()
        self._watching.join(3.0)

    def _free(self) -> None:
        if self._relay is not None:
            self._relay.close(0.0)
        self._hub.close()
        self._pool.shutdown(wait=False, cancel_futures=True)
        if (holding := getattr(self, "_holding", None)) is not None:
            holding.close()

    def __enter__(self) -> Subscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _slots(self) -> list[Slot]:
        return self._holding.slots

    # What the watching thread says.

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _see(self, offer: Offer | None) -> None:
        with self._changed:
            self._state = receiving.see(self._state, offer)
            unwanted = offer is not None and offer.begun and not receiving.is_taken(self._state, offer)
            self._changed.notify_all()
        if offer is not None and unwanted:
            self._tell_failed(offer, "it isn't taken here")
        if offer is not None and self.config.size == 1 and offer.version == self._state.told:
            self._watching.report(lambda: self._advance(offer, "installed"))  # the hub had forgotten it

    def _begin_s(self) -> float:
        """The deadline of rounds that may begin with their offer, 0 where this rank may not want it."""
        sure = self.config.eager and self.config.slots > 1 and not self._state.rejected
        return self.config.timeout_s if sure else 0.0

    def _advance(
        self,
        offer: Offer,
        to: str,
        timeout_s: float | None = None,
        deadline: float = math.inf,
        report: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        body = {"round": offer.round, "to": to, "timeout_s": timeout_s or self.config.timeout_s}
        if report is not None:
            body["report"] = report
        within_s = max(0.0, deadline - time.monotonic()) + HUB_GRACE_S
        return self._lease.call("/v1/event/advance", body, within_s=within_s)

    # The engine's thread: prepare and swap.

    def take(self, offer: Offer, timeout_s: float | None) -> tuple[Offer, Prepared]:
        """See ``Update.prepare``."""
        start = time.monotonic()
        limit_s = self.config.timeout_s if timeout_s is None else timeout_s
        deadline = start + limit_s
        self._check_open()
        self._make_room()
        while True:
            try:
                offer, relays = self._begin_round(offer, limit_s, deadline)
            except HubRefused as error:
                if error.code not in ("round_over", "unknown_round"):
                    raise
                if (other := self._other(offer, deadline, error)) is None:
                    raise
                offer = other
                continue
            try:
                with self._changed:
                    self._state = receiving.begin(self._state, offer, self._holding.busy)
                    filling = self._state.filling
                assert filling is not None
                report = self._fill(offer, relays, filling.slot, deadline)
                self._wait_group(offer, deadline)
            except Gone as error:
                logger.warning("%s; waiting up to %.1f s for another", error, deadline - time.monotonic())
                self._give_up(offer, error)
                if (other := self._other(offer, deadline, error)) is None:
                    raise
                offer = other
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
        report = dataclasses.replace(report, prepare_s=time.monotonic() - start)
        with self._changed:
            self._state = receiving.prepared(self._state)
            self._failures = 0
            self._report = report
            self._stats.count(report)
        return offer, report

    def _begin_round(self, offer: Offer, limit_s: float, deadline: float) -> tuple[Offer, list[Member]]:
        """Tell the hub, unless it knows; the source that its answer names is the one that counts."""
        if offer.begun and offer == self._state.offer:
            return dataclasses.replace(offer, begun=False), list(offer.relays)
        answer = self._advance(offer, "begun", limit_s, deadline)
        return read_offer(answer["offer"]) if answer.get("offer") else (offer, [])

    def _make_room(self) -> None:
        """Replace the slots that found no room when their round failed; the serving one isn't touched."""
        try:
            self._replace_quarantined()
        except ResourceError as full:
            with self._changed:
                self._retry_at = time.monotonic() + BACKOFF_S[-1]
            raise TransferError(f"no slot to prepare in: {full}") from full

    def _replace_quarantined(self) -> None:
        with self._changed:
            quarantined = sorted(self._state.quarantined)
        for index in quarantined:
            kept = self._holding.replace(index)
            with self._changed:
                self._stats.quarantined += 1
                self._state = receiving.released(self._state, index, kept)

    def _other(self, offer: Offer, deadline: float, cause: TransferError) -> Offer | None:
        """The offer that took the place of ``offer``, which ended by ``cause``; None when none comes in time.

        Of a version that its publisher no longer has, no new round will do.
        """
        useless = offer.version if isinstance(cause, Gone) and offer.role == "publisher" else None
        with self._changed:
            while True:
                found = receiving.wanted(self._state)
                fresh = found is not None and found.round != offer.round and found.version != useless
                left = deadline - time.monotonic()
                if left <= 0 or self._closed.is_set():
                    return None  # an offer that is there now comes too late for this call
                if found is not None and fresh and self._watching.can_take(found):
                    return found
                self._changed.wait(min(left, 1.0))

    def _fill(self, offer: Offer, relays: list[Member], index: int | None, deadline: float) -> Prepared:
        """Take every edge into slot ``index`` and check it; ``prepare_s`` is left for the caller."""
        self._reading, self._renewed = [], False
        if index is None:
            return Prepared(offer.version, 0, 0.0, 0.0, 0.0, "none")
        have = self._holding.prefix(index, offer.version)
        self._links.reach(offer, relays)
        self._reading = links = self._links.of(offer)
        for link in links:
            link.touched = False
        if not all(link.resumes for link in links):
            have = frozenset()
        old = self._slots[index]
        try:
            have = self._holding.begin(index, offer.version, self._links.edges_of(offer), have)
        except ResourceError as full:
            raise TransferError(f"no slot to prepare in: {full}") from full
        finally:
            self._renewed = old.closed  # what it held is gone
        start, slot = time.monotonic(), self._slots[index]
        settled, constants = slot.unsettle(), slot.constants_of
        self._links.write_constants(offer, slot)
        self._links.forget_slots({s.generation for s in self._slots})
        was, origin = self._links.begins(offer, slot), self._links.origin(offer)
        with self._changed:
            serving = None if self._state.serving is None else self._slots[self._state.serving]
        segments, progress = [s.memory.name for s in self._slots], self._holding.progress(index)
        passing = self._holding.passing(index)
        taking = Taking(offer, slot, serving, segments, have, progress, deadline, passing, was, origin)
        try:
            take_all(self._pool, links, taking)
            wire_s = time.monotonic() - start
            for link in links:
                link.verify(taking)
        finally:
            for link in links:
                link.end()
        self._holding.verified(index)
        self._links.holds(offer, slot, offer.version)
        known = settled and slot.constants_of == constants
        verify_s, fill_start = time.monotonic() - start - wire_s, time.monotonic()
        filled = slot.fill_devices(written([link.brought for link in links]) if known else None)
        report = prepared_by(offer, links, wire_s, verify_s)
        return report if slot.aliased else with_fill(report, filled, time.monotonic() - fill_start)

    def _wait_group(self, offer: Offer, deadline: float) -> None:
        """With several ranks: all of them hold the version, or none takes it."""
        if self.config.size == 1:
            if offer.role == ROLE:  # its source may go on before we swap
                self._watching.report(lambda: self._advance(offer, "prepared"))
            return
        self._advance(offer, "prepared", deadline=deadline)
        agreement.wait_prepared(self._hub, offer, self.config.engine, deadline)

    def _give_up(self, offer: Offer, error: BaseException) -> None:
        """End the round on our side. A sender that didn't confirm is cut off, its slot gets new memory."""
        touched = self._renewed or any(link.touched for link in self._reading)
        unconfirmed = self._links.cut_unconfirmed(self._reading)
        with self._changed:
            filling = self._state.filling
        kept = False
        if filling is not None and filling.slot is not None:
            keep = not isinstance(error, MismatchError)
            kept = self._holding.give_up(filling.slot, offer.version, keep)
        with self._changed:
            doubt = touched or unconfirmed or self.config.size > 1  # of other ranks nothing is known here
            self._state = receiving.fail(self._state, unconfirmed, doubt, kept)
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

        self._watching.report(report)

    def discard(self, offer: Offer, reason: str) -> None:
        """See ``Update.discard``."""
        with self._changed:
            filling = self._state.filling
            if filling is None or filling.offer != offer or filling.phase != "prepared":
                return
            self._state = receiving.drop(self._state)
        self._tell_failed(offer, reason)

    def dropped(self, offer: Offer, report: Prepared) -> None:
        """Nobody can swap in any more what was prepared. Called while objects are freed: only queues."""

        def give_up() -> None:
            if self._report is report:  # nothing was prepared since
                self.discard(offer, "its update was dropped")

        self._watching.report(give_up, insist=False)

    def install(self, offer: Offer) -> Any:
        """See ``Update.swap``."""
        start = time.monotonic()
        with self._changed:
            self._check_open()
            self._state = receiving.swap(self._state, offer)
            serving, report = self._state.serving, self._report
            self._stats.installed += 1
        assert serving is not None
        tree = self._slots[serving].tree()
        seconds = {**(report.seconds if report is not None else {}), "swap": time.monotonic() - start}
        seconds.pop("wire", None)  # the sender's own count
        message = {"kind": "installed", "round": offer.round, "version": version_json(offer.version)}
        for link in self._links.all:
            link.tell({**message, "seconds": seconds, "times": link.times(offer)}, SWAP_TELL_S)
        edges = list(report.edges) if report is not None else []
        told = {"edges": edges, "seconds": {"swap": seconds["swap"]}}
        self._watching.report(lambda: self._advance(offer, "installed", report=told))
        if self._relay is not None:
            self._watching.report(functools.partial(self._relay.follow, offer.version), insist=False)
        return tree
