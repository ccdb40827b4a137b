"""What members tell the hub about the memory that they take: preflight looks whether it is there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jaxrl_sync.sharding import Edge
from jaxrl_sync.transfer import placement
from jaxrl_sync.transfer.config import PublisherConfig, SubscriberConfig
from jaxrl_sync.transfer.free import free_bytes


def subscriber_info(config: SubscriberConfig, slot_bytes: int) -> dict[str, Any]:
    """``slot_bytes`` is what its slots, which are there already, take: preflight looks whether that fits."""
    free = free_bytes()
    memory = {} if free is None else {"free_bytes": free + slot_bytes}
    return {
        "model": config.model,
        "slots": config.slots,
        "slot_bytes": slot_bytes,
        "site": config.site,
        "reliable": config.reliable,
        "relay": config.relay,
        **memory,
    }


def publisher_memory(config: PublisherConfig, export_bytes: int, form: str) -> dict[str, Any]:
    """``baselines``: ``form``, where versions are compared, if it surely keeps a baseline of every edge."""
    used = placement.NAMES if config.transport == "auto" else (config.transport,)
    frames = all(config.payload.frames_over(transport) for transport in used)
    told = {"export_bytes": export_bytes, "free_bytes": free_bytes()}
    return {**told, "baselines": form if frames else ""}


def edges_info(config: SubscriberConfig, edges: Iterable[Edge]) -> dict[str, Any]:
    """What a rank takes from each process of its publisher: bytes of a whole version, and rings for them.

    Rings are told where edges surely go over verbs; with ``auto`` that is known only once a link opens.
    """
    sizes = {str(edge.source_process): int(edge.total_bytes) for edge in edges}
    chunk = config.verbs.chunk_bytes
    rings = {p: max(1, min(config.verbs.ring, -(-n // chunk))) * chunk for p, n in sizes.items()}
    return {"edges": sizes, "rings": rings if config.transport == "verbs" else {}}
