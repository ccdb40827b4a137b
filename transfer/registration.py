"""What a subscriber rank tells the hub about itself when it joins."""

from __future__ import annotations

from typing import Any

from jaxrl_sync.transfer.config import SubscriberConfig
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
