"""The ranks of an engine take a version together, or none does: the hub knows how far each of them is."""

from __future__ import annotations

import time

from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.hub.client import POLL_S, HubClient
from jaxrl_sync.transfer.receiving import Offer

HUB_GRACE_S = 5.0
"""A hub that is slow, or starts again, may take so much longer than a round's deadline."""


def wait_prepared(hub: HubClient, offer: Offer, engine: str, deadline: float) -> None:
    """Block until all ranks of ``engine`` hold the version of a round.

    TransferError when the round ended otherwise, DeadlineError at ``deadline`` (monotonic seconds).
    """
    while (left := deadline - time.monotonic()) > 0:
        body = {"round": offer.round, "timeout_s": min(left, POLL_S)}
        status = hub.call("/v1/round", body, min(left, POLL_S), within_s=left + HUB_GRACE_S)
        if status["state"] not in ("open", "committed"):
            raise TransferError(f"version {offer.version} is {status['state']}: {status['reason']}")
        if status["prepared"]:
            return
    raise DeadlineError(f"other ranks of {engine} weren't prepared for {offer.version} in time")
