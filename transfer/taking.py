"""What a round asks of each link of a rank."""

from __future__ import annotations

import dataclasses
import functools

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.passing import Origin, Passing, Wish
from jaxrl_sync.transfer.progress import Progress
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.slots import Slot
from jaxrl_sync.transfer.version import Version


class Gone(TransferError):
    """The publisher no longer has the version that the round is about: take a newer one."""


@dataclasses.dataclass(frozen=True, eq=False)
class Taking:
    """One round on one rank: the slot to fill and the one that serves, what is in the slot already.

    ``segments`` are the names of all slots' memory. The slot held the whole version ``was``, by whichever way
    it came; ``origin`` is given where a relay may hand on what it got from the publisher, and ``passing`` is
    what those get who read here.
    """

    offer: Offer
    slot: Slot
    serving: Slot | None
    segments: list[str]
    have: frozenset[str]
    progress: Progress
    deadline: float
    passing: Passing
    was: Version | None = None
    origin: Origin | None = None

    @functools.cached_property
    def wish(self) -> Wish | None:
        """What a relay may hand on: frames on what serves here, where no interrupted round is resumed.

        One answer per round: an anchor that is asked for meanwhile doesn't change what the relay was told.
        """
        base = self.origin.base(self.serving) if self.origin is not None and not self.have else None
        return Wish(self.origin.plan, base) if self.origin is not None and base is not None else None
