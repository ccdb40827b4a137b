"""How payloads are chosen by config; `jaxrl_sync.transfer.payload.seen` chooses for ``auto``."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Literal

from jaxrl_sync.transfer.codec.rules import CodingRules

Payload = Literal["full", "sparse", "bitmap", "auto"]
Compare = Literal["auto", "host", "device"]
Form = Literal["host", "device"]

COMPARES = ("auto", "host", "device")
KINDS = ("full", "sparse", "bitmap", "auto")
FRAME = "frame"
"""The payload kind, beside ``full``, that both ends of a link can know."""

LEAST_ROOM_BYTES = 1 << 20
"""Changes and frames of so many bytes are kept however small the edge is."""

MEMORY_TRANSPORTS = ("shm",)
"""Where a full copy runs at the speed of memory: comparing reads as much as copying does."""


def sender_room_bytes(nbytes: int) -> int:
    """So much may the changes take that a sender keeps of an edge of ``nbytes``, and so much its frames."""
    return max(nbytes // 2, LEAST_ROOM_BYTES)


def receiver_room_bytes(nbytes: int) -> int:
    """So much may the changes take that a receiver keeps of an edge of ``nbytes``, and a relay's frames."""
    return max(nbytes // 4, LEAST_ROOM_BYTES)


@dataclasses.dataclass(frozen=True)
class PayloadSettings:
    """``kind`` of payload, codings that may be used, versions between anchors (0: only where one is needed).

    ``history`` is the number of versions whose changes are kept for receivers that skip some. ``compare``
    says where a publisher finds out what changed: on the devices that hold its exports, or on the host.
    """

    kind: Payload = "full"
    rules: CodingRules = CodingRules()
    anchor_every: int = 0
    history: int = 8
    compare: Compare = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"payload={self.kind!r}, expected one of {', '.join(KINDS)}")
        if self.compare not in COMPARES:
            raise ValueError(f"compare={self.compare!r}, expected one of {', '.join(COMPARES)}")
        if self.anchor_every < 0 or self.history < 1:
            raise ValueError(
                f"anchor_every={self.anchor_every}, history={self.history}, expected at least 0 and 1"
            )

    @property
    def coding_rules(self) -> CodingRules:
        """The rules with what the kind itself fixes."""
        if self.kind == "bitmap":
            return dataclasses.replace(self.rules, positions="bitmap", whole=False)
        return self.rules

    def compare_on(self, platforms: Collection[str]) -> tuple[Form, str]:
        """Where to compare exports on devices of these platforms, and why."""
        if self.kind == "full":
            return "host", "everything is sent, nothing is compared"
        if self.compare != "auto":
            return self.compare, "as configured"
        others = sorted(set(platforms) - {"cpu"})
        if others:
            return "device", f"reading all shards from {', '.join(others)} would cost more"
        return "host", "the exports lie in host memory, one pass packs and compares them"

    def frames_over(self, transport: str) -> bool:
        """Whether frames may ever be sent over this transport: then a baseline is kept for it."""
        return self.kind != "full" and not (self.kind == "auto" and transport in MEMORY_TRANSPORTS)
