"""What a publisher and a subscriber can be told; every wait of theirs is bounded by a field here."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.transfer.hub.state import FanoutKind
from jaxrl_sync.transfer.payload.settings import PayloadSettings
from jaxrl_sync.transfer.verbs.settings import VerbsSettings

TransportName = Literal["auto", "shm", "verbs", "tcp"]


@dataclasses.dataclass(frozen=True)
class PublisherConfig:
    """Settings of one publisher process.

    ``host`` is where it listens for subscribers (loopback unless the network is trusted), ``threads`` packs
    one edge, ``placed_run_bytes`` is the shortest contiguous run of a slot that tcp reads straight into it,
    ``keep_versions`` counts the published versions whose export buffers stay for late joiners. ``payload``
    says what travels: everything, or frames of what changed.

    ``fanout`` says how copies spread over engines that relay: all from here (star), along a chain, or as a
    tree in which each serves ``fanout_degree``. ``site`` names the place that the trainer stands at. Copies
    in host memory of versions that somebody pinned take at most ``offload_limit_bytes`` (None: any).
    """

    model: str = "policy"
    transport: TransportName = "auto"
    host: str = "127.0.0.1"
    port: int = 0
    threads: int = 1
    keep_versions: int = 1
    verify: bool = True
    chunk_bytes: int = 1 << 20
    placed_run_bytes: int = 16 << 10
    timeout_s: float = 60.0
    handshake_timeout_s: float = 10.0
    hub_timeout_s: float = 60.0
    ttl_s: float = 10.0
    verbs: VerbsSettings = VerbsSettings()
    payload: PayloadSettings = PayloadSettings()
    fanout: FanoutKind = "star"
    fanout_degree: int = 2
    site: str = ""
    offload_limit_bytes: int | None = None

    def __post_init__(self) -> None:
        _check_common(self.transport, self.threads, self.timeout_s)
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions={self.keep_versions}, expected at least 1")
        if self.fanout not in ("star", "chain", "tree"):
            raise ValueError(f"fanout={self.fanout!r}, expected star, chain or tree")
        if not 1 <= self.fanout_degree <= 1024:
            raise ValueError(f"fanout_degree={self.fanout_degree}, expected 1 to 1024")
        if self.offload_limit_bytes is not None and self.offload_limit_bytes < 0:
            raise ValueError(f"offload_limit_bytes={self.offload_limit_bytes}, expected at least 0")
        if self.placed_run_bytes < 0:
            raise ValueError(f"placed_run_bytes={self.placed_run_bytes}, expected at least 0")
        if not 4096 <= self.chunk_bytes <= 64 << 20:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}, expected 4096 to 64 MiB")


@dataclasses.dataclass(frozen=True)
class SubscriberConfig:
    """Settings of one subscriber process: one rank of one engine.

    ``engine`` names the engine (all its ranks give the same name), ``rank`` of ``size`` its processes.
    ``slots`` whole versions have room in memory (serving and shadow; 1: the serving one is overwritten, see
    ``Update.in_place``). ``connections`` is the number of
    TCP connections to each publisher process when an edge goes over tcp. After ``recount_every`` frames the
    digests are counted over the whole slot again, between that they follow from what changed.

    ``site`` names the place that an engine stands at ("": the trainer's); engines of one site take from each
    other. A ``reliable`` engine counts as a holder of versions, one that may vanish doesn't. With ``relay``
    this rank serves what it holds to others, listening on ``host``, in chunks of ``chunk_bytes``; a slot that
    they read is waited for ``drain_s`` before it gets new memory. ``payload`` says what travels from it to
    them: frames of what changed need a copy of the newest version beside the slots.

    An ``eager`` engine takes whatever is offered at once: the hub begins the round with the offer, which
    saves a round trip. It must be waiting in ``poll``, for others may be sent to it. With one slot it isn't.
    """

    engine: str = "engine-0"
    rank: int = 0
    size: int = 1
    model: str = "policy"
    transport: TransportName = "auto"
    slots: int = 2
    connections: int = 2
    threads: int = 1
    verify: bool = True
    recount_every: int = 16
    timeout_s: float = 60.0
    handshake_timeout_s: float = 10.0
    hub_timeout_s: float = 60.0
    ttl_s: float = 10.0
    verbs: VerbsSettings = VerbsSettings()
    payload: PayloadSettings = PayloadSettings()
    site: str = ""
    reliable: bool = True
    relay: bool = False
    eager: bool = False
    host: str = "127.0.0.1"
    chunk_bytes: int = 1 << 20
    drain_s: float = 2.0

    def __post_init__(self) -> None:
        _check_common(self.transport, self.threads, self.timeout_s)
        if self.recount_every < 1:
            raise ValueError(f"recount_every={self.recount_every}, expected at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}, expected 0 to {self.size - 1}")
        if self.slots < 1:
            raise ValueError(f"slots={self.slots}, expected at least 1")
        if not 4096 <= self.chunk_bytes <= 64 << 20:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}, expected 4096 to 64 MiB")
        if self.drain_s < 0:
            raise ValueError(f"drain_s={self.drain_s}, expected at least 0")
        if not 1 <= self.connections <= 16:
            raise ValueError(f"connections={self.connections}, expected 1 to 16")


def _check_common(transport: str, threads: int, timeout_s: float) -> None:
    if transport not in ("auto", "shm", "verbs", "tcp"):
        raise ValueError(f"transport={transport!r}, expected auto, shm, verbs or tcp")
    if threads < 1:
        raise ValueError(f"threads={threads}, expected at least 1")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s}, expected more than 0")
