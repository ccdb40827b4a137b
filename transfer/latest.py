"""Taking the newest weights in one call, for a decode loop that has no thread to prepare them in."""

from __future__ import annotations

import logging
import time
from typing import Any

from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.subscriber import Subscriber

logger = logging.getLogger("jaxrl_sync.transfer")


def take_latest(subscriber: Subscriber, timeout_s: float | None = None) -> Any:
    """Move, verify and serve the version on offer; its tree, or None where there is nothing new.

    Without ``timeout_s`` nothing is waited for but the transfer itself: ``params = take_latest(s) or params``
    between two batches. A transfer that fails is logged, what serves stays, and the next call tries again.
    With ``timeout_s`` it waits so long for a version (the first one), and DeadlineError says why none came.

    Call it when the outputs of the last step are ready: it frees the slot that served, so drop the old tree.
    Blocks for one transfer, at most ``SubscriberConfig.timeout_s``. Raises what ``poll`` raises.
    """
    deadline = time.monotonic() + (timeout_s or 0.0)
    cause: TransferError | None = None
    while True:
        left = max(0.0, deadline - time.monotonic())
        update = subscriber.poll(left)
        if update is not None:
            try:
                update.prepare(left if timeout_s else None)
                return update.swap()
            except TransferError as error:
                logger.warning("version %s isn't taken: %s", update.version, error)
                cause = error
        if not timeout_s:
            return None
        if time.monotonic() >= deadline:
            raise DeadlineError(f"no version within {timeout_s:g} s: {cause or 'none was published'}")
