"""A group between its submission and its result, and a swap between its request and its report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from jaxrl_sync.inference.front import OnTokens, SwapReport
from jaxrl_sync.inference.request import GroupResult, Request, Sample, Timing
from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass
class PendingGroup:
    """Collects the samples of one group; owned by the engine's thread once submitted."""

    request: Request
    future: Future[GroupResult]
    on_tokens: OnTokens | None
    submitted_s: float
    entered_s: float | None = None
    prefill_s: float = 0.0
    samples: dict[int, Sample] = dataclasses.field(default_factory=dict)
    lineages: dict[str, None] = dataclasses.field(default_factory=dict)

    def add(self, index: int, sample: Sample, lineages: tuple[str, ...]) -> bool:
        """Keep one finished sample; True when it was the last one."""
        self.samples[index] = sample
        self.lineages.update(dict.fromkeys(lineages))
        return len(self.samples) == self.request.n

    def result(self, now: float) -> GroupResult:
        """The result of a group whose samples are all there."""
        entered = now if self.entered_s is None else self.entered_s
        timing = Timing(
            queue_s=entered - self.submitted_s,
            prefill_s=self.prefill_s,
            decode_s=max(0.0, now - entered - self.prefill_s),
        )
        samples = tuple(self.samples[i] for i in range(self.request.n))
        return GroupResult(self.request.request_id, samples, tuple(self.lineages), timing)


@dataclasses.dataclass(frozen=True)
class PendingSwap:
    """A requested swap: ``take`` gives the tree when its turn has come."""

    version: Version
    take: Callable[[], Any]
    future: Future[SwapReport]


def settle(future: Future[Any], value: Any) -> None:
    """Give a future its value, unless its owner has cancelled it."""
    if future.set_running_or_notify_cancel():
        future.set_result(value)


def fail(future: Future[Any], error: Exception) -> None:
    """Give a future its error, unless its owner has cancelled it or it is done."""
    if not future.done() and future.set_running_or_notify_cancel():
        future.set_exception(error)
