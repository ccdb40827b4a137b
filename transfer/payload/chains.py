"""All chains of a publisher process: one per plan, receiving process and transport, while a link uses it."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from typing import Literal

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer.payload.chain import Chain, Encoded
from jaxrl_sync.transfer.payload.sections import Digests
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.transports.base import Shards
from jaxrl_sync.transfer.version import Version

_Key = tuple[str, int, str]
Kind = Literal["full", "frame"]


class Chains:
    """Hands out chains to links. Thread-safe."""

    def __init__(self, settings: PayloadSettings, threads: int) -> None:
        self.settings = settings
        self._threads = threads
        self._lock = threading.Lock()
        self._chains: dict[_Key, Chain] = {}
        self._users: dict[str, _Key] = {}

    def open(self, link: str, plan: str, edge: Edge, transport: str) -> Use | None:
        """A link's use of the chain of its edge; None where frames are never sent over this transport."""
        if not self.settings.frames_over(transport) or not edge.copies:
            return None
        key = plan, edge.target_process, transport
        with self._lock:
            if key not in self._chains:
                self._chains[key] = Chain(plan, edge, self.settings, self._threads)
            self._users[link] = key
            return Use(self._chains[key], link, self.settings)

    def follow(self, version: Version, sources: Shards) -> None:
        """``version`` is here: whoever had it from elsewhere can be sent what changes after it."""
        with self._lock:
            chains = list(self._chains.values())
        for chain in chains:
            chain.follow(version, sources)

    def ahead(self, links: Iterable[str], version: Version, sources: Shards) -> None:
        """Make the frames of ``version`` that these links will ask for, before they do."""
        with self._lock:
            keys = {self._users[link] for link in links if link in self._users}
            chains = [self._chains[key] for key in keys]
        for chain in chains:
            if self.settings.kind != "auto" or chain.seen.frame_pays(version):
                chain.ahead(version, sources)

    def close(self, link: str) -> None:
        """The link is gone; the last one that uses a chain takes its baseline with it."""
        with self._lock:
            key = self._users.pop(link, None)
            if key is None:
                return
            chain, last = self._chains[key], key not in self._users.values()
            if last:
                del self._chains[key]
        if last:
            chain.close()
        else:
            chain.leave(link)

    def stats(self) -> dict[str, float]:
        """Bytes of all baselines and steps, frames encoded."""
        with self._lock:
            chains = list(self._chains.values())
        return {
            "baseline_bytes": sum(c.baseline_bytes for c in chains),
            "step_bytes": sum(c.step_bytes for c in chains),
            "frames_encoded": sum(c.encoded for c in chains),
        }


class Use:
    """One link's use of a chain: when to send an anchor. Used by the link's thread."""

    def __init__(self, chain: Chain, link: str, settings: PayloadSettings) -> None:
        self.chain = chain
        self._link = link
        self._settings = settings
        self._since_anchor = 0
        self._going: tuple[Version | None, Kind | None] = None, None
        self._before: tuple[Version | None, Kind | None] = None, None
        self._timed = False

    def may_follow(self, base: Version | None, version: Version) -> bool:
        """Whether a frame from ``base`` is likely to be sent for ``version`` once all of it is here."""
        worth = self._settings.kind != "auto" or self.chain.seen.frame_pays(version)
        known = base is not None and version.follows(base) and self.chain.knows(base)
        return known and worth and not self.anchor_due

    def frame(self, base: Version | None, version: Version, sources: Shards) -> Encoded | None:
        """What to send for ``version`` to a receiver that holds ``base``; None: everything."""
        settings = self._settings
        if self.anchor_due:
            return None
        if base is None or (settings.kind == "auto" and not self.chain.seen.frame_pays(version)):
            return None
        return self.chain.frame(base, version, sources)

    def sent_full(
        self, version: Version, sources: Shards, nbytes: int, wire_s: float, digests: Digests | None = None
    ) -> None:
        """An anchor is out: the next version may be a frame on it. ``digests`` where they were counted."""
        self._since_anchor = 0
        self.chain.seen.sent(nbytes, wire_s)
        self._goes(version, "full" if nbytes == self.chain.edge.total_bytes else None)
        if self._settings.kind != "auto" or self.chain.seen.base_wanted:
            self.chain.anchor(version, sources, digests)

    def sent_frame(self, version: Version, encoded: Encoded, wire_s: float) -> None:
        """A frame is out."""
        self._since_anchor += 1
        self.chain.seen.sent(len(encoded.data), wire_s)
        self._goes(version, "frame")

    def handed_on(self, version: Version) -> None:
        """A frame is out that somebody else made: what its round costs says nothing of those made here."""
        self._since_anchor += 1
        self._goes(version, None)

    def _goes(self, version: Version, kind: Kind | None) -> None:
        self._before, self._going = self._going, (version, kind)

    @property
    def anchor_due(self) -> bool:
        """Whether as many frames as there may be have followed one another."""
        return 0 < self._settings.anchor_every <= self._since_anchor

    def confirmed(self, version: Version, nbytes: int = 0, times: Mapping[str, float] | None = None) -> None:
        """The receiver serves ``version``. Of that it took in ``nbytes`` from here in ``arrive_s`` of
        ``times``, and its round took ``round_s`` in all, as far as they are known."""
        seen, (sent, kind), (_, before) = self.chain.seen, self._going, self._before
        arrive_s, round_s = ((times or {}).get(k, 0.0) for k in ("arrive_s", "round_s"))
        if arrive_s > 0:
            seen.arrived(nbytes, arrive_s)
        if round_s > 0 and sent == version and kind == "full":
            seen.full(round_s, first=not self._timed)
            self._timed = True
        elif round_s > 0 and sent == version and kind == "frame":
            seen.frame(round_s, after_full=before != "frame")
        self.chain.confirm(self._link, version)
