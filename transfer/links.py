"""All links of one subscriber rank: who serves versions, what the plan with it is, and one link per edge.

Links to publishers are kept open; one to a relay is opened when a round names it and kept for the next.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jaxrl_sync.sharding import CopyTable, Layout, UserError, trace
from jaxrl_sync.sharding.rank_plan import RankPlan
from jaxrl_sync.transfer.config import SubscriberConfig
from jaxrl_sync.transfer.errors import DeadlineError, MismatchError, PeerLost, ProtocolError, TransferError
from jaxrl_sync.transfer.hub.client import HubClient, Lease, Member
from jaxrl_sync.transfer.hub.state import version_json, version_of
from jaxrl_sync.transfer.inbound import Inbound, Opening
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.passing import Origin
from jaxrl_sync.transfer.payload.shadow import Shadow
from jaxrl_sync.transfer.receiving import Offer
from jaxrl_sync.transfer.registration import edges_info
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.verbs.errors import PortDown
from jaxrl_sync.transfer.version import Version

PUBLISHER = "publisher"
SWAP_TELL_S = 0.5  # the report is small: a socket that doesn't take it at once belongs to a stuck peer
KEPT_WORLDS = 4
"""So many relays keep their links when no round reads from them."""

World = tuple[str, str]
"""Role and name of who serves."""

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True, eq=False)
class Way:
    """How one source layout comes to this rank: its share of the plan, and shadows by source process."""

    pairing: Pairing
    plan: RankPlan
    blobs: tuple[str, str]
    shadows: dict[int, Shadow]


class Links:
    """Owns the links; ``close()`` ends them. Two threads update in turns, another looks up, reaches, takes.

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
        self.conversion = ""
        """Digest of how the trainer's tree becomes this engine's; "" before that is known."""
        self.on_conversion: Callable[[str], None] = lambda _: None
        self._closed = False
        self._updating = threading.Lock()
        self.publishers: list[Member] = []
        self._failed_for: tuple[str, ...] = ()
        self._hub = hub
        self.lease: Lease | None = None
        self.serving: Callable[[], Version | None] = lambda: None
        self._target = target
        self._convert = convert
        self._config = config
        self._slots = slots
        self._paths = sorted(target.layout)
        self._links: dict[tuple[str, str, int], Inbound] = {}
        self._ways: dict[tuple[str, str], Way] = {}  # by role and source digest
        self._way_of: dict[World, Way] = {}
        self._contents: dict[int, Version] = {}  # whole versions by generation of their slots

    @property
    def all(self) -> list[Inbound]:
        """Every link that isn't closed."""
        return [link for link in list(self._links.values()) if not link.closed]

    @property
    def whole(self) -> bool:
        """Whether each publisher that we know has all its links, each alive."""
        worlds = {(PUBLISHER, p.name) for p in self.publishers}
        return bool(worlds) and all(self._complete(w, lambda link: link.alive) for w in worlds)

    def _complete(self, world: World, good: Callable[[Inbound], bool]) -> bool:
        way = self._way_of.get(world)
        if way is None:
            return False
        links = [self._links.get((*world, e.source_process)) for e in way.plan.edges]
        return all(link is not None and good(link) for link in links)

    def can_take(self, offer: Offer) -> bool:
        """Whether the offer can be begun: a publisher must be linked, relays are reached afterwards."""
        return offer.role != PUBLISHER or self._complete(
            (offer.role, offer.world), lambda link: not link.closed
        )

    def of(self, offer: Offer) -> list[Inbound]:
        """The links that an offer comes over, one per edge. PeerLost when one is missing."""
        way, links = self._way(offer), []
        for edge in way.plan.edges:
            link = self._links.get((offer.role, offer.world, edge.source_process))
            if link is None or link.closed:
                raise PeerLost(f"no link to {offer.source}.{edge.source_process}, which has {offer.version}")
            links.append(link)
        return links

    def _way(self, offer: Offer) -> Way:
        way = self._way_of.get((offer.role, offer.world))
        if way is None:
            raise PeerLost(f"no link to {offer.source}, which has {offer.version}")
        return way

    def edges_of(self, offer: Offer) -> list[set[str]]:
        """The tensors that each edge of an offer brings a part of."""
        return [{c.target_path for c in e.copies if c.num_elements} for e in self._way(offer).plan.edges]

    def request_anchor(self) -> None:
        """Have the next version come in full over every link."""
        for shadow in self._shadows():
            shadow.doubt = True

    def _shadows(self) -> list[Shadow]:
        return [s for way in list(self._ways.values()) for s in list(way.shadows.values())]

    def forget_slots(self, live: set[int]) -> None:
        """Slots whose memory was given up hold nothing any more."""
        self._contents = {g: v for g, v in self._contents.items() if g in live}
        for shadow in self._shadows():
            shadow.forget(live)

    def origin(self, offer: Offer) -> Origin | None:
        """What a relay may hand on to this rank as the publisher made it; None where nothing.

        That is where this rank reads all of its share from the same rank of an engine, and knows one way from
        the publisher, every edge of it.
        """
        ways = [way for (role, _), way in list(self._ways.items()) if role == PUBLISHER]
        if offer.role == PUBLISHER or len(ways) != 1:
            return None
        way, rank = ways[0], self._config.rank
        whole = {e.source_process for e in way.plan.edges} == way.shadows.keys()
        equal = [e.source_process for e in self._way(offer).plan.edges] == [rank]
        return Origin(way.pairing.digest, dict(way.shadows)) if whole and equal else None

    def begins(self, offer: Offer, slot: Slot) -> Version | None:
        """A round fills ``slot``: what edges of other sources know of its content is void.

        Returns the whole version that it held.
        """
        mine = self._way(offer)
        was = self._contents.pop(slot.generation, None)
        for way in list(self._ways.values()):
            for shadow in list(way.shadows.values()) if way is not mine else []:
                shadow.spoiled(slot)
        return was

    def holds(self, offer: Offer | None, slot: Slot, version: Version) -> None:
        """``slot`` holds a verified version, which edges of other sources can start from too."""
        mine = self._way(offer) if offer is not None else None
        self._contents[slot.generation] = version
        for way in list(self._ways.values()):
            for shadow in list(way.shadows.values()) if way is not mine else []:
                shadow.holds(slot.generation, version)

    def cut_unconfirmed(self, reading: Sequence[Inbound]) -> bool:
        """Close every link whose sender may still write a slot of ours; whether there was one.

        ``reading``: the links of the round. A publisher that came back has taken their place meanwhile.
        """
        suspects = [link for link in {*list(self._links.values()), *reading} if link.unconfirmed]
        for link in suspects:
            link.cut()
        return bool(suspects)

    def write_constants(self, offer: Offer, slot: Slot) -> None:
        """Elements that the conversion fixes never travel: they are written once per slot and plan."""
        way = self._way(offer)
        if slot.constants_of == way.pairing.digest:
            return
        if way.plan.constants:
            values = {(-1, name): v for name, v in way.pairing.plan.constant_values.items()}
            CopyTable.direct(way.plan.constants).execute(values, slot.views)
        slot.constants_of = way.pairing.digest

    # Publishers: background threads.

    def update(self, publishers: list[Member]) -> None:
        """Pair with new publishers, close old links, open missing ones; errors are kept or retried."""
        with self._updating:
            self._update(publishers)

    def mend(self) -> None:
        """Open the links that are missing to the publishers that we know; errors as `update`."""
        with self._updating:
            self._update(self.publishers)

    def _update(self, publishers: list[Member]) -> None:
        self.publishers = publishers
        incarnations = tuple(p.incarnation for p in publishers)
        if self.failure is not None and self._failed_for == incarnations:
            return
        try:
            for publisher in publishers:
                self._use(PUBLISHER, publisher)
            self._close_links_of_gone(incarnations)
            layouts = {str(p.info.get("source_digest")) for p in publishers}
            for key in [k for k in list(self._ways) if k[0] == PUBLISHER and k[1] not in layouts]:
                if layouts:  # a publisher that comes back has most likely the same
                    self._drop(key)
            for publisher in publishers:
                self._link(PUBLISHER, publisher)
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

    def _close_links_of_gone(self, incarnations: tuple[str, ...]) -> None:
        for key, link in list(self._links.items()):
            if key[0] == PUBLISHER and link.incarnation not in incarnations and not link.busy:
                self._links.pop(key).close()

    def _use(self, role: str, member: Member) -> None:
        """Find the way from this member's layout; a new one is traced, and the hub told the result."""
        key, world = (role, str(member.info.get("source_digest"))), (role, member.name)
        if key in self._ways:
            self._way_of[world] = self._ways[key]
            return
        source = Layout.from_bytes(self._hub.get_blob(str(member.info.get("source"))))
        convert = self._convert if role == PUBLISHER else lambda tree: tree
        pairing = Pairing.of(self._target.layout, trace(convert, source, self._target.layout))
        blobs = self._put_blobs(pairing)
        plan = pairing.rank(self._config.rank, "target")
        if role == PUBLISHER:
            if self.lease is not None:
                about = {"plan": pairing.digest, "source_digest": key[1]}
                about |= edges_info(self._config, plan.edges)
                self.lease.update(target=blobs[0], correspondence=blobs[1], **about)
            self._come_by(pairing.correspondence.digest)
        self._ways[key] = self._way_of[world] = Way(pairing, plan, blobs, {})

    def _come_by(self, conversion: str) -> None:
        if conversion and conversion != self.conversion:
            self.conversion = conversion
            self.on_conversion(conversion)

    def _drop(self, key: tuple[str, str]) -> None:
        """Forget a way, and close its links; one in a round goes with its round."""
        way = self._ways.pop(key)
        for world in [w for w, x in list(self._way_of.items()) if x is way]:
            del self._way_of[world]
            for at, link in list(self._links.items()):
                if at[:2] == world and not link.busy:
                    self._links.pop(at).close()

    def _put_blobs(self, pairing: Pairing) -> tuple[str, str]:
        layout, correspondence = self._target.layout, pairing.correspondence
        return self._hub.put_blob(layout.to_bytes()), self._hub.put_blob(correspondence.to_bytes())

    def _link(self, role: str, member: Member) -> None:
        key, way = (role, member.name, member.rank), self._way_of[role, member.name]
        link = self._links.get(key)
        if link is not None and link.incarnation == member.incarnation and link.alive:
            return
        edge = next((e for e in way.plan.edges if e.source_process == member.rank), None)
        if edge is None:
            return
        if link is not None:
            link.close()
        shadow = way.shadows.get(member.rank)
        if shadow is None:
            recount = self._config.recount_every
            shadow = Shadow(way.pairing.digest, edge, self._target.slot, recount)
            for generation, version in list(self._contents.items()):
                shadow.holds(generation, version)
            way.shadows[member.rank] = shadow
        token, run_id, plan = self._hub.token, self._hub.run_id, way.pairing.digest
        opening = Opening(token, run_id, *way.blobs, plan, edge, shadow, self._paths)
        self._links[key] = Inbound(member, opening, self._config, self._slots)
        if self._closed:  # while it was being opened
            self._links[key].close()
            raise PeerLost("the subscriber is closed")
        if role == PUBLISHER and (served := self.serving()) is not None:
            self._links[key].tell(_serves(served), SWAP_TELL_S)  # it may have come here another way

    # Relays: the engine's thread, when its round names them.

    def reach(self, offer: Offer, relays: Sequence[Member]) -> None:
        """Link to every relay rank that the round reads from; nothing to do where they are linked.

        Errors of opening a link; MismatchError where the relay's versions come by another conversion.
        """
        for relay in relays:
            theirs = str(relay.info.get("conversion", ""))
            if theirs and self.conversion and theirs != self.conversion:
                raise MismatchError(
                    f"{offer.source} has versions by conversion {theirs}, expected {self.conversion}"
                )
            self._use(offer.role, relay)
            if not self.publishers:
                self._come_by(theirs)
        for relay in relays:
            self._link(offer.role, relay)
        if offer.role != PUBLISHER:
            self._forget_relays(offer)

    def _forget_relays(self, offer: Offer) -> None:
        """Close the links to relays that weren't read from for longest, and their ways."""
        mine = offer.role, offer.world
        self._way_of[mine] = self._way_of.pop(mine)  # the newest
        worlds = [w for w in list(self._way_of) if w[0] != PUBLISHER]
        for world in worlds[:-KEPT_WORLDS]:
            del self._way_of[world]
            for at in [k for k in list(self._links) if k[:2] == world]:
                self._links.pop(at).close()
        used = {id(way) for way in list(self._way_of.values())}
        for key in [k for k, way in list(self._ways.items()) if id(way) not in used and k[0] != PUBLISHER]:
            del self._ways[key]

    def rejoin(self) -> None:
        """A restarted hub knows nothing: give it our layouts again."""
        for way in list(self._ways.values()):
            self._put_blobs(way.pairing)

    def close(self) -> None:
        """Close every link, one that is being opened too. Idempotent."""
        self._closed = True
        for link in list(self._links.values()):
            link.close()


def _serves(version: Version) -> dict[str, Any]:
    """What a publisher is told on a new link: its outcome of that version doesn't stay open."""
    return {"kind": "installed", "round": "", "version": version_json(version), "seconds": {}}


def read_watch(seen: dict[str, Any]) -> tuple[list[Member], Offer | None] | None:
    """Publishers and offer in the hub's answer, None when nothing changed. ProtocolError if malformed."""
    if seen.get("unchanged"):
        return None
    try:
        publishers = [Member(**p) for p in seen["publishers"]]
        return publishers, read_offer(seen["offer"])[0] if seen["offer"] is not None else None
    except (KeyError, TypeError, ValueError) as error:
        raise ProtocolError(f"the hub answered {str(seen)[:200]}, expected publishers and offer") from error


def read_offer(row: Any) -> tuple[Offer, list[Member]]:
    """An offer and the relay ranks that it names. ProtocolError if malformed."""
    try:
        version = version_of(row["version"])
        if version is None:
            raise ValueError("an offer without a version")
        role = str(row.get("role", PUBLISHER))
        relays = [Member(**m) for m in row.get("relays") or []]
        begun = row.get("begun") is True
        offer = Offer(str(row["round"]), version, str(row["sources"]), role, begun, tuple(relays))
        return offer, relays
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ProtocolError(
            f"the hub offers {str(row)[:200]}, expected round, version and sources"
        ) from error
