"""A subscriber rank's background threads: one watches the hub for publishers and offers, one links again, one
reports."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, TransferError
from jaxrl_sync.transfer.hub.client import POLL_S, Lease, Member
from jaxrl_sync.transfer.links import Links, read_watch
from jaxrl_sync.transfer.receiving import Offer

RETRY_S = 0.5

logger = logging.getLogger("jaxrl_sync.transfer")


class Watching:
    """Owns the threads. ``on_offer(offer)`` is called by the watching one, ``on_change()`` by two of them."""

    def __init__(
        self,
        lease: Lease,
        links: Links,
        on_offer: Callable[[Offer | None], None],
        on_change: Callable[[], None],
        begin_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        """``begin_s``: the deadline of rounds that the hub begins with the offer, 0 where it doesn't."""
        self._lease = lease
        self._links = links
        self._on_offer = on_offer
        self._on_change = on_change
        self._begin_s = begin_s
        self._closed = threading.Event()
        self._unlinked = threading.Event()
        self._reports: queue.SimpleQueue[tuple[Callable[[], object], bool] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._watch, name="subscriber-watch", daemon=True),
            threading.Thread(target=self._mend, name="subscriber-link", daemon=True),
            threading.Thread(target=self._report, name="subscriber-report", daemon=True),
        ]

    def start(self) -> None:
        """Start all threads."""
        for thread in self._threads:
            thread.start()

    def report(self, call: Callable[[], object], insist: bool = True) -> None:
        """Have ``call`` made in the background, in order; what it raises is logged.

        The hub may wait for a report for ever: with ``insist`` one that doesn't reach it is made again, until
        it does or the lease is lost. So ``call`` may come twice to the hub.
        """
        self._reports.put((call, insist))

    def can_take(self, offer: Offer) -> bool:
        """Whether the offer can be begun; where a link is missing, it is opened meanwhile. Doesn't block."""
        takable = self._links.can_take(offer)
        if not takable:
            self._unlinked.set()
        return takable

    def _mend(self) -> None:
        """A round may close a link at its end, when the watch hears nothing new from the hub for POLL_S."""
        while not self._closed.is_set():
            self._unlinked.wait()
            self._unlinked.clear()
            if not self._closed.is_set():
                self._links.mend()
                self._on_change()
                self._closed.wait(RETRY_S)

    def _watch(self) -> None:
        known: dict[str, Any] = {"round": None, "publishers": None}
        publishers: list[Member] = []
        while not self._closed.is_set():
            try:
                whole = self._links.whole
                limit_s = POLL_S if whole else RETRY_S
                limits = {"timeout_s": limit_s, "begin_s": self._begin_s() if whole else 0.0}
                seen = read_watch(self._lease.call("/v1/watch", {**known, **limits}, limit_s))
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
            self._on_change()
            if seen is not None:
                self._on_offer(seen[1])
        self._on_change()

    def _report(self) -> None:
        while (report := self._reports.get()) is not None:
            call, insist = report
            while not self._arrives(call) and insist and not self._lease.lost.is_set():
                if self._closed.wait(RETRY_S):
                    break

    def _arrives(self, call: Callable[[], object]) -> bool:
        """Make a report; False where the hub couldn't be reached."""
        try:
            call()
        except (PeerLost, DeadlineError) as error:
            if not self._closed.is_set():
                logger.warning("reporting to the hub: %s", error)
            return False
        except TransferError as error:
            if not self._closed.is_set():
                logger.warning("reporting to the hub: %s", error)
        except Exception:  # the reports after this one must be made all the same
            logger.exception("a report failed")
        return True

    def stop(self) -> None:
        """Tell the threads to end; `join` waits for them."""
        self._closed.set()
        self._unlinked.set()
        self._reports.put(None)

    def join(self, timeout_s: float) -> None:
        """Wait for all threads, unless it is one of them that asks."""
        for thread in self._threads:
            if thread.ident is not None and thread is not threading.current_thread():
                thread.join(timeout_s)
