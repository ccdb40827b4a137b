"""Moves weights from a trainer to engines: versions, hub, publisher, subscriber, transports.

Names load on first use: hub, client, auth, wire and versions need no jax.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxrl_sync.transfer.config import PublisherConfig as PublisherConfig
    from jaxrl_sync.transfer.config import SubscriberConfig as SubscriberConfig
    from jaxrl_sync.transfer.errors import TransferError as TransferError
    from jaxrl_sync.transfer.hub.client import HubClient as HubClient
    from jaxrl_sync.transfer.hub.local import LocalHub as LocalHub
    from jaxrl_sync.transfer.hub.local import find_hub as find_hub
    from jaxrl_sync.transfer.hub.server import run_hub as run_hub
    from jaxrl_sync.transfer.latest import take_latest as take_latest
    from jaxrl_sync.transfer.outcome import Outcome as Outcome
    from jaxrl_sync.transfer.outcome import Ticket as Ticket
    from jaxrl_sync.transfer.payload.marks import Marked as Marked
    from jaxrl_sync.transfer.publisher import Publisher as Publisher
    from jaxrl_sync.transfer.subscriber import Subscriber as Subscriber
    from jaxrl_sync.transfer.subscriber import Update as Update
    from jaxrl_sync.transfer.version import Version as Version

_HOME = {
    "PublisherConfig": "config",
    "SubscriberConfig": "config",
    "TransferError": "errors",
    "HubClient": "hub.client",
    "LocalHub": "hub.local",
    "find_hub": "hub.local",
    "run_hub": "hub.server",
    "take_latest": "latest",
    "Outcome": "outcome",
    "Ticket": "outcome",
    "Marked": "payload.marks",
    "Publisher": "publisher",
    "Subscriber": "subscriber",
    "Update": "subscriber",
    "Version": "version",
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value
