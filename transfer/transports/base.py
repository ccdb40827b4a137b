"""What every transport offers to the two ends of a link, and the messages that they exchange around it.

A link is one authenticated connection between a publisher process and a subscriber process; one edge of the
plan belongs to it. Per round the subscriber says ``ready`` (with what ``Receiver.ready`` adds), the publisher
answers ``begin`` (with the payload kind that it chose among those of the link's terms) or ``refused``, the
transport moves the bytes, and the publisher confirms with ``done``: from then on it won't write again before
the next ``ready``. A slot without confirmation is quarantined: the link is closed, which fences (sockets and
queue pairs are gone) and the slot gets new memory.
``sums`` follows: the keyed sums of what it read, which the subscriber compares with a recount of its slot.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from jaxrl_sync.sharding.native import kernels
from jaxrl_sync.transfer.transports.parts import WHOLE, Flow

Shards = Mapping[tuple[int, str], npt.NDArray[np.generic]]
"""(device, path) -> one shard; `transports.pinned.Pinned` where shards stay in place between rounds."""


Moved = dict[str, int]
"""Bytes of one full version by how they moved. Sender: ``copied`` from shards into the slot, ``packed`` into
chunks, ``direct`` from the shards by the socket calls themselves. Receiver: ``read`` into the slot by the
socket calls, ``scattered`` into it from chunks. ``numpy``: those of them for which no C kernel was there."""


class Sender(Protocol):
    """The publisher's end of one edge."""

    name: str
    moved: Moved
    pack_s: float
    """Seconds of the last send that went into packing chunks, of all lanes together."""

    def send(self, ready: dict[str, Any], sources: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Move the edge's bytes from ``sources`` to where ``ready`` says; blocks until ours is done.

        ``flow`` says what may be read when. ``deadline`` is on the monotonic clock. PeerLost, DeadlineError,
        TransferError.
        """

    def close(self) -> None:
        """Give up mappings and lanes; idempotent."""


class Receiver(Protocol):
    """The subscriber's end of one edge."""

    name: str
    moved: Moved

    def ready(self, slot: Any) -> dict[str, Any]:
        """What the sender must know to write this slot."""
        ...

    def receive(self, views: Shards, deadline: float, flow: Flow = WHOLE) -> None:
        """Take in the edge's bytes (nothing to do where the sender writes the slot itself)."""

    def close(self) -> None:
        """Close lanes; idempotent. Nothing arrives through this edge afterwards."""


def counted(moved: Moved) -> Moved:
    """With ``numpy`` where the C kernels are missing."""
    return moved if kernels() is not None else {**moved, "numpy": sum(moved.values())}


def remaining(deadline: float) -> float:
    """Seconds until ``deadline`` on the monotonic clock, at least a millisecond."""
    return max(0.001, deadline - time.monotonic())


def raise_first(errors: list[BaseException]) -> None:
    """Raise the first of errors that threads left here, if there is one, and empty the list.

    In a cycle with its own traceback an error would keep a slot's memory until the collector runs.
    """
    try:
        if errors:
            raise errors[0]
    finally:
        errors.clear()
