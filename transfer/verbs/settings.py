"""What a user can say about verbs edges."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.transfer.verbs.devices import Choice

Placement = Literal["auto", "placed", "staged"]


@dataclasses.dataclass(frozen=True)
class VerbsSettings:
    """Settings of one side of verbs edges.

    An edge goes over ``rails`` ports (in the order of ``choice.include`` where that names them; both sides
    need as many), with ``queue_pairs`` on each. ``placement``: ``placed`` edges are written to their final
    place in the slot, ``staged`` ones go through a ring and are scattered; ``auto`` places where the
    contiguous runs have ``min_run_bytes`` on average. The receiver decides this and the ring: ``ring`` chunks
    of ``chunk_bytes`` each. A silent peer is an error after about 4.096 us * 2**timeout * (retries + 1):
    0.5 s with 14 and 6. Seven ``retries`` are for ever on soft-RoCE, seven ``rnr_retries`` everywhere; the
    deadline of the round ends those. ``mtu`` in bytes, 0: the smaller one of both ports. What is registered
    as one region has ``max_region_bytes`` at most; larger memory is several regions.
    """

    choice: Choice = Choice()
    rails: int = 1
    chunk_bytes: int = 1 << 20
    ring: int = 16
    queue_pairs: int = 2
    placement: Placement = "auto"
    min_run_bytes: int = 64 << 10
    timeout: int = 14
    retries: int = 6
    rnr_retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64
    mtu: int = 0
    max_region_bytes: int = 1 << 40
    backend: Literal["native", "pyverbs"] = "native"

    def __post_init__(self) -> None:
        limits = {
            "rails": (1, 16),
            "chunk_bytes": (4096, 64 << 20),
            "ring": (2, 1024),
            "queue_pairs": (1, 64),
            "min_run_bytes": (1, 1 << 40),
            "timeout": (1, 31),
            "retries": (0, 7),
            "rnr_retries": (0, 7),
            "traffic_class": (0, 255),
            "service_level": (0, 15),
            "hop_limit": (1, 255),
            "max_region_bytes": (4096, 1 << 48),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}, expected {low} to {high}")
        if self.mtu not in (0, 256, 512, 1024, 2048, 4096):
            raise ValueError(
                f"mtu={self.mtu}, expected 256, 512, 1024, 2048, 4096, or 0 for the smaller port's"
            )
        if self.placement not in ("auto", "placed", "staged"):
            raise ValueError(f"placement={self.placement!r}, expected auto, placed or staged")
