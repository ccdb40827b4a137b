"""What a publisher and a subscriber can be told; every wait of theirs is bounded by a field here."""

from __future__ import annotations

import dataclasses
from typing import Literal

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

    def __post_init__(self) -> None:
        _check_common(self.transport, self.threads, self.timeout_s)
        if self.keep_versions < 1:
            raise ValueError(f"keep_versions={self.keep_versions}, expected at least 1")
        if self.placed_run_bytes < 0:
            raise ValueError(f"placed_run_bytes={self.placed_run_bytes}, expected at least 0")
        if not 4096 <= self.chunk_bytes <= 64 << 20:
            raise ValueError(f"chunk_bytes={self.chunk_bytes}, expected 4096 to 64 MiB")


@dataclasses.dataclass(frozen=True)
class SubscriberConfig:
    """Settings of one subscriber process: one rank of one engine.

    ``engine`` names the engine (all its ranks give the same name), ``rank`` of ``size`` its processes.
    ``slots`` whole versions have room in memory (serving and shadow). ``connections`` is the number of
    TCP connections to each publisher process when an edge goes over tcp. After ``recount_every`` frames the
    digests are counted over the whole slot again, between that they follow from what changed.
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

    def __post_init__(self) -> None:
        _check_common(self.transport, self.threads, self.timeout_s)
        if self.recount_every < 1:
            raise ValueError(f"recount_every={self.recount_every}, expected at least 1")
        if not 0 <= self.rank < self.size:
            raise ValueError(f"rank={self.rank}, expected 0 to {self.size - 1}")
        if self.slots < 2:
            raise ValueError(f"slots={self.slots}, expected at least 2: one serves, one is filled")
        if not 1 <= self.connections <= 16:
            raise ValueError(f"connections={self.connections}, expected 1 to 16")


def _check_common(transport: str, threads: int, timeout_s: float) -> None:
    if transport not in ("auto", "shm", "verbs", "tcp"):
        raise ValueError(f"transport={transport!r}, expected auto, shm, verbs or tcp")
    if threads < 1:
        raise ValueError(f"threads={threads}, expected at least 1")
    if timeout_s <= 0:
        raise ValueError(f"timeout_s={timeout_s}, expected more than 0")
