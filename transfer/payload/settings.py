"""How payloads are chosen: by config, or from what full and sparse rounds of a link were seen to cost."""

from __future__ import annotations

import dataclasses
import math
import threading
from collections.abc import Collection
from typing import Literal

from jaxrl_sync.transfer.codec.rules import CodingRules
from jaxrl_sync.transfer.version import Version

Payload = Literal["full", "sparse", "bitmap", "auto"]
Compare = Literal["auto", "host", "device"]
Form = Literal["host", "device"]

COMPARES = ("auto", "host", "device")
KINDS = ("full", "sparse", "bitmap", "auto")
FRAME = "frame"
"""The payload kind, beside ``full``, that both ends of a link can know."""

RETRY = 16
"""Versions after which ``auto`` looks again at a payload that had lost."""

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


class Seen:
    """What rounds of one edge cost so far; every number is a running mean that forgets with 1/4 per round."""

    def __init__(self) -> None:
        self.rate_bytes_s = math.nan
        self.frame_s = math.nan
        self.full_s = math.nan
        self.apply_s = 0.0
        self._timed = False
        self._since = 0
        self._asked: Version | None = None
        self._answer = True
        self._lock = threading.Lock()

    def full(self, nbytes: int, wire_s: float) -> None:
        """A full round: its time, and the rate of the link."""
        self.full_s = _mean(self.full_s, wire_s)
        if nbytes >= 1 << 16 and not self._timed:
            self.rate_bytes_s = _mean(self.rate_bytes_s, nbytes / max(wire_s, 1e-6))

    def frame(self, nbytes: int, wire_s: float, coder_s: float) -> None:
        """A round with a frame: comparing, coding, the wire, and applying it at the other end."""
        self.frame_s = _mean(self.frame_s, wire_s + coder_s + self.apply_s)
        if nbytes >= 1 << 20 and not self._timed:
            self.rate_bytes_s = _mean(self.rate_bytes_s, nbytes / max(wire_s, 1e-6))

    def arrived(self, nbytes: int, seconds: float) -> None:
        """So long did they come in over there; the sender's time ends when buffers on the way have them."""
        if nbytes >= 1 << 16:
            known = self.rate_bytes_s if self._timed else math.nan
            self.rate_bytes_s, self._timed = _mean(known, nbytes / max(seconds, 1e-6)), True

    def applied(self, seconds: float) -> None:
        """What a receiver needed to decode and apply a frame."""
        self.apply_s = seconds if not self.apply_s else _mean(self.apply_s, seconds)

    @property
    def rate(self) -> float:
        """Bytes per second of the link; 1e9 before anything was measured."""
        return 1e9 if math.isnan(self.rate_bytes_s) else self.rate_bytes_s

    @property
    def base_wanted(self) -> bool:
        """Whether `frame_pays` will be true next time, so that a base is of use then."""
        if math.isnan(self.frame_s) or math.isnan(self.full_s):
            return True
        return self.frame_s < self.full_s or self._since + 1 >= RETRY

    def frame_pays(self, version: Version) -> bool:
        """Whether a frame should take less time than a full round; the loser is tried now and then.

        Links of equal replicas share this: whoever asks for one version gets one answer.
        """
        with self._lock:
            asked = self._asked
            if asked is None or (asked != version and not asked.follows(version)):
                self._asked, self._answer = version, self._decide()
            return self._answer

    def _decide(self) -> bool:
        if math.isnan(self.frame_s) or math.isnan(self.full_s):
            return True
        self._since += 1
        better = self.frame_s < self.full_s
        if self._since >= RETRY:
            self._since = 0
            return not better
        return better


def _mean(old: float, new: float) -> float:
    return new if math.isnan(old) else old + (new - old) / 4
