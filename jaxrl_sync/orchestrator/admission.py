"""Staleness and capacity as plain arithmetic on step and version numbers.

Step x trains on version x-1 and makes version x; ``step`` is always the next batch to ship.
"""

from __future__ import annotations


def staleness(step: int, dispatch: int) -> int:
    """Updates between the weights a sample was dispatched on and those that step ``step`` trains."""
    return max(0, step - 1 - dispatch)


def split_staleness(step: int, dispatch: int, completion: int) -> tuple[int, int]:
    """(in-flight, in-queue) parts of the staleness at ship time; they sum to ``staleness``."""
    total = staleness(step, dispatch)
    in_flight = min(total, max(0, completion - dispatch))
    return in_flight, total - in_flight


def capacity(
    *, step: int, version: int, bound: int, samples_per_step: int, outstanding: int, last_step: int
) -> int:
    """Samples that may still be dispatched on ``version`` so that none is older than ``bound`` when shipped.

    With batches cut oldest first, the ``outstanding`` samples (running and queued) and the new ones fill
    the batches from ``step`` on; the last of those batches may be number version + 1 + bound, and never one
    after ``last_step``. This is accepted + running <= (bound + version + 1) x batch with the batches
    already shipped taken off both sides, so that it needs no counter that a resume would have to rebuild.
    """
    batches = min(bound + version + 1, last_step) - (step - 1)
    return batches * samples_per_step - outstanding
