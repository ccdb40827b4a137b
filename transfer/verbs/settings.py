"""What a user can say about verbs edges."""

from __future__ import annotations

import dataclasses
from typing import Literal

from jaxrl_sync.transfer.verbs.devices import Choice


@dataclasses.dataclass(frozen=True)
class VerbsSettings:
    """Settings of one side of verbs edges.

    The receiver decides on the ring: ``ring`` chunks of ``chunk_bytes`` each, shared by ``queue_pairs``.
    A silent peer is an error after about 4.096 us * 2**timeout * (retries + 1): 0.5 s with 14 and 6. Seven
    ``retries`` are for ever on soft-RoCE, seven ``rnr_retries`` everywhere; the round's deadline ends those.
    """

    choice: Choice = Choice()
    chunk_bytes: int = 1 << 20
    ring: int = 16
    queue_pairs: int = 2
    timeout: int = 14
    retries: int = 6
    rnr_retries: int = 6
    traffic_class: int = 0
    service_level: int = 0
    hop_limit: int = 64
    backend: Literal["native", "pyverbs"] = "native"

    def __post_init__(self) -> None:
        limits = {
            "chunk_bytes": (4096, 64 << 20),
            "ring": (2, 1024),
            "queue_pairs": (1, 64),
            "timeout": (1, 31),
            "retries": (0, 7),
            "rnr_retries": (0, 7),
            "traffic_class": (0, 255),
            "service_level": (0, 15),
            "hop_limit": (1, 255),
        }
        for name, (low, high) in limits.items():
            if not low <= getattr(self, name) <= high:
                raise ValueError(f"{name}={getattr(self, name)}, expected {low} to {high}")
