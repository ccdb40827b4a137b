"""All links of one subscriber rank: who publishes, what the plan with it is, and one link per edge."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from jaxrl_sync.sharding import CopyTable, Layout, UserError, trace
from jaxrl_sync.sharding.rank_plan import RankPlan
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.hub.client import HubClient, Lease, Member
from jaxrl_sync.transfer.hub.state import version_of
from jaxrl_sync.transfer.inbound import Inbound, Opening
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.payload.shadow import Shadow
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.verbs.errors import PortDown

logger = logging.getLogger("jaxrl_sync.transfer")


class Links:
    """Owns the links; ``close()`` ends them. One thread updates, another looks up and takes versions.

    ``failure`` is what makes any transfer impossible (layouts or conversions that don't fit), until other
    publishers appear.
    """

    def __init__(
        self,
        hub: HubClient,
        target: Target,
        convert: Callable[[Any], Any],
        config: SubscriberConfig,
        slots: list[Slot],
    ) -> None:
        self.failure: UserError | None = None
        self._closed = False
        self.publishers: list[Member] = []
        self._failed_for: tuple[str, ...] = ()
        self._hub = hub
        self.lease: Lease | None = None
        self._target = target
        self._convert = convert
        self._config = config
        self._slots = slots
        self._links: dict[tuple[str, int], Inbound] = {}
        self._shadows: dict[int, Shadow] = {}  # by source process: worlds of one layout fill the same part
        self._pairing: Pairing | None = None
        self._plan = RankPlan(config.rank, "target", ())
        self._blobs = ("", "")
        self._source_digest = ""

    @property
    def all(self) -> list[Inbound]:
        """Every link that isn't closed."""
        return [link for link in list(self._links.values()) if not link.closed]

    @property
    def whole(self) -> bool:
        """Whether each publisher that we know has all its links, each alive."""
        worlds = {p.name for p in self.publishers}
        keys = [(w, e.source_process) for w in worlds for e in self._plan.edges]
        links = [self._links.get(k) for k in keys]
        return bool(worlds) and self._pairing is not None and all(x is not None and x.alive for x in links)

    def can_take(self, offer: Offer) -> bool:
        """Whether every edge of this rank has a link to the publisher of the offer."""
        if self._pairing is None:
            return False
        links = [self._links.get((offer.world, e.source_process)) for e in self._plan.edges]
        return all(link is not None and not link.closed for link in links)

    def of(self, offer: Offer) -> list[Inbound]:
        """The links that an offer comes over, one per edge. PeerLost when one is missing."""
        links = []
        for edge in self._plan.edges:
            link = self._links.get((offer.world, edge.source_process))
            if link is None or link.closed:
                raise PeerLost(f"no link to {offer.world}.{edge.source_process}, which has {offer.version}")
            links.append(link)
        return links

    def request_anchor(self) -> None:
        """Have the next version come in full over every link."""
        for shadow in list(self._shadows.values()):
            shadow.doubt = True

    @property
    def apply_s(self) -> float:
        """Seconds that the last round's frames took to decode and apply, 0 where it had none."""
        return max((link.brought.apply_s for link in self.all), default=0.0)

    def forget_slots(self, live: set[int]) -> None:
        """Slots whose memory was given up hold nothing any more."""
        for shadow in list(self._shadows.values()):
            shadow.forget(live)

    def cut_unconfirmed(self) -> bool:
        """Close every link whose sender may still write a slot of ours; whether there was one."""
        suspects = [link for link in list(self._links.values()) if link.unconfirmed]
        for link in suspects:
            link.cut()
        return bool(suspects)

    def write_constants(self, slot: Slot) -> None:
        """Elements that the conversion fixes never travel: they are written once per slot and plan."""
        pairing, plan = self._pairing, self._plan
        if pairing is None or slot.constants_of == pairing.digest:
            return
        if plan.constants:
            values = {(-1, name): v for name, v in pairing.plan.constant_values.items()}
            CopyTable.direct(plan.constants).execute(values, slot.views)
        slot.constants_of = pairing.digest

    def update(self, publishers: list[Member]) -> None:
        """Pair with new publishers, close old links, open missing ones; errors are kept or retried."""
        self.publishers = publishers
        incarnations = tuple(p.incarnation for p in publishers)
        if self.failure is not None and self._failed_for == incarnations:
            return
        try:
            for publisher in publishers:
                if self._pairing is None or publisher.info.get("source_digest") != self._source_digest:
                    self._pair(publisher)
            for key, link in list(self._links.items()):
                if link.incarnation not in incarnations and not link.busy:
                    self._links.pop(key).close()
            for publisher in publishers:
                self._link(publisher)
            self.failure = None
        except (PeerLost, DeadlineError) as error:
            logger.info("no link yet: %s", error)
        except UserError as error:
            passing = isinstance(error, TransferError) and not isinstance(error, MismatchError)
            if passing and (self._links or not isinstance(error, PortDown)):
                logger.info("no link yet: %s", error)
            else:
                logger.error("no transfer is possible: %s", error)
                self.failure, self._failed_for = error, incarnations
        except Exception as error:  # the conversion is the caller's code: poll must say what it raised
            logger.exception("no transfer is possible")
            self.failure = MismatchError(f"can't pair with the publisher: {type(error).__name__}: {error}")
            self._failed_for = incarnations

    def _pair(self, publisher: Member) -> None:
        """Trace the conversion from a source layout that is new to us, and tell the hub the result."""
        source = Layout.from_bytes(self._hub.get_blob(str(publisher.info.get("source"))))
        correspondence = trace(self._convert, source, self._target.layout)
        pairing = Pairing.of(self._target.layout, correspondence)
        blobs = self._put_blobs(pairing)
        if self.lease is not None:
            self.lease.update(target=blobs[0], correspondence=blobs[1])
        for link in self.all:
            if not link.busy:
                link.close()
        self._shadows = {}
        self._plan = pairing.rank(self._config.rank, "target")
        self._pairing, self._blobs = pairing, blobs
        self._source_digest = str(publisher.info.get("source_digest"))

    def _put_blobs(self, pairing: Pairing) -> tuple[str, str]:
        layout, correspondence = self._target.layout, pairing.correspondence
        return self._hub.put_blob(layout.to_bytes()), self._hub.put_blob(correspondence.to_bytes())

    def _link(self, publisher: Member) -> None:
        key = (publisher.name, publisher.rank)
        link = self._links.get(key)
        if link is not None and link.incarnation == publisher.incarnation and link.alive:
            return
        edge = next((e for e in self._plan.edges if e.source_process == publisher.rank), None)
        if edge is None or self._pairing is None:
            return
        if link is not None:
            link.close()
        shadow = self._shadows.get(publisher.rank)
        if shadow is None:
            recount = self._config.recount_every
            shadow = Shadow(self._pairing.digest, edge, self._target.slot, recount)
            self._shadows[publisher.rank] = shadow
        opening = Opening(self._hub.token, self._hub.run_id, *self._blobs, self._pairing.digest, edge, shadow)
        self._links[key] = Inbound(publisher, opening, self._config, self._slots)
        if self._closed:  # while it was being opened
            self._links[key].close()
            raise PeerLost("the subscriber is closed")

    def rejoin(self) -> None:
        """A restarted hub knows nothing: give it our layouts again."""
        if self._pairing is not None:
            self._put_blobs(self._pairing)

    def close(self) -> None:
        """Close every link, one that is being opened too. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.close()


def read_watch(seen: dict[str, Any]) -> tuple[list[Member], Offer | None] | None:
    """Publishers and offer in the hub's answer, None when nothing changed. ProtocolError if malformed."""
    if seen.get("unchanged"):
        return None
    try:
        publishers = [Member(**p) for p in seen["publishers"]]
        row = seen["offer"]
        if row is None:
            return publishers, None
        version = version_of(row["version"])
        if version is None:
            raise ValueError("an offer without a version")
        return publishers, Offer(str(row["round"]), version, str(row["sources"]))
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the hub answered {str(seen)[:200]}, expected publishers and offer") from error
