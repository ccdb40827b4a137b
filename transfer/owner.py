"""What the sender's end of a link needs of the process that it serves for: a publisher, or a relay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from jaxrl_sync.transfer.config import PublisherConfig
from jaxrl_sync.transfer.outcome import RankKey, RankOutcome
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.passing import Passed, Wish
from jaxrl_sync.transfer.payload.chains import Chains
from jaxrl_sync.transfer.payload.sections import Digests
from jaxrl_sync.transfer.transports.pinned import Pinned
from jaxrl_sync.transfer.version import Version

if TYPE_CHECKING:
    from jaxrl_sync.transfer.outbound import Outbound


class Reading:
    """The shards of one version for one reader: they don't change before ``close()``.

    A reading of a version that is still arriving has gates: ``wait`` before tensors are read, ``confirm``
    before their sums are told.
    """

    partial = False
    """Whether the version was still arriving when the reading began."""

    def __init__(self, shards: Pinned, on_close: Callable[[], None] | None = None) -> None:
        self.shards = shards
        self._on_close = on_close

    def wait(self, paths: Sequence[str], deadline: float) -> None:
        """Block until these tensors have arrived. PeerLost when they won't, DeadlineError."""

    def confirm(self, deadline: float) -> None:
        """Block until this process has verified the version itself. PeerLost when it isn't, DeadlineError."""

    def frames(self, wish: Wish, deadline: float) -> list[Passed] | None:
        """The frames by which this process got the version, where they fulfil a wish; blocks until it knows.

        DeadlineError.
        """
        return None

    @property
    def digests(self) -> Digests:
        """The sums of those frames' edges, after `confirm`."""
        return {}

    def close(self) -> None:
        """The reader is through. Idempotent."""
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()


class Owner(Protocol):
    """A process that versions are read from; its methods are called by the threads of its links."""

    config: PublisherConfig
    rank: int
    run_id: str
    closing: bool
    chains: Chains

    def pairing(self, target: str, correspondence: str) -> Pairing:
        """The pairing of a subscriber's blobs. MismatchError, MappingError."""
        ...

    def read(self, version: Version, pairing: Pairing, deadline: float) -> Reading | str:
        """The shards to send for ``version``, or in words why there are none. The caller closes it."""
        ...

    def since_published(self, version: Version) -> float:
        """Seconds since this process has had ``version`` to give."""
        ...

    def count_sent(self, nbytes: int, wire_s: float, frame: bool = False) -> None:
        """One edge was sent, by a frame or in full."""

    def installed(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A rank serves ``version``."""

    def gave_up(self, key: RankKey, version: Version, result: RankOutcome) -> None:
        """A rank couldn't take ``version``."""

    def link_opened(self, link: Outbound, pairing: Pairing) -> None:
        """A link has a plan."""

    def link_ended(self, link: Outbound, reason: str) -> None:
        """A link is gone."""
