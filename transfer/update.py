"""An update: one version on its way into an engine rank, from the offer to the swap."""

from __future__ import annotations

from typing import Any, Protocol

from jaxrl_sync.transfer.receiving import Offer, Prepared
from jaxrl_sync.transfer.version import Version


class Takes(Protocol):
    """What an update needs of its subscriber."""

    @property
    def in_place(self) -> bool:
        """Whether to prepare overwrites what serves."""
        ...

    def take(self, offer: Offer, timeout_s: float | None) -> tuple[Offer, Prepared]:
        """Bring an offer, or the one that took its place, into a slot."""
        ...

    def install(self, offer: Offer) -> Any:
        """Have the prepared offer serve; its tree."""
        ...

    def discard(self, offer: Offer, reason: str) -> None:
        """Give a prepared offer up."""

    def dropped(self, offer: Offer, report: Prepared) -> None:
        """The same, where nobody holds the update any more: must not block, nor take a lock."""


class Update:
    """A version that this rank may take. Not thread-safe: one thread prepares and swaps.

    A prepared one that is dropped without ``swap`` or ``discard`` is given up: the hub offers an engine
    nothing else while it waits for a swap.
    """

    def __init__(self, subscriber: Takes, offer: Offer) -> None:
        self._subscriber = subscriber
        self._offer = offer
        self.report: Prepared | None = None

    @property
    def version(self) -> Version:
        """The version on offer; ``prepare`` may move on to a newer one that superseded it."""
        return self._offer.version

    @property
    def in_place(self) -> bool:
        """Whether ``prepare`` overwrites the serving memory: no step may run from its start to the swap."""
        return self._subscriber.in_place

    def prepare(self, timeout_s: float | None = None) -> Prepared:
        """Move the version into a free slot, check its digest; with several ranks, wait until all have.

        Blocks up to ``timeout_s`` (the config's by default; 5 s more where the hub is away); decoding may
        go on meanwhile, unless ``in_place``. After an error the serving version is untouched and ``poll``
        will offer again; in place the subscriber may be ``poisoned`` then. TransferError and its kinds.
        """
        if self.report is None:
            self._offer, self.report = self._subscriber.take(self._offer, timeout_s)
        return self.report

    def swap(self) -> Any:
        """Make the prepared version the serving one and return its tree of arrays (an assignment, no copy).

        Call it when the outputs of the last step are ready: the slot that served is overwritten by a later
        version. Reports to hub and publisher in the background.
        """
        return self._subscriber.install(self._offer)

    def discard(self, reason: str) -> None:
        """Give the version up; the hub then offers another (or the same) one."""
        self._subscriber.discard(self._offer, reason)

    def __del__(self) -> None:
        if self.report is not None:  # after a swap there is nothing to give up
            self._subscriber.dropped(self._offer, self.report)
