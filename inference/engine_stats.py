"""An engine's counters and its scheduler's state as ``front.EngineStats``."""

from __future__ import annotations

import statistics
from collections import Counter, deque

import numpy as np

from jaxrl_sync.inference import scheduler
from jaxrl_sync.inference.front import EngineState, EngineStats
from jaxrl_sync.inference.plan import StepOutput, StepPlan


def engine_stats(
    name: EngineState,
    state: scheduler.State,
    slots: int,
    counts: Counter[str],
    decode_s: deque[float],
    poisoned: str | None,
) -> EngineStats:
    """The stats of this moment; the caller holds the engine's lock. ``counts`` and ``decode_s`` are what
    ``count_step`` keeps."""
    return EngineStats(
        state=name,
        version=state.version,
        running=state.running,
        waiting=sum(w.group.request.n - w.first for w in state.waiting),
        slots=slots,
        steps=state.steps,
        dispatches=state.dispatches,
        prefills=counts["prefills"],
        tokens_generated=counts["tokens"],
        samples_finished=counts["samples"],
        decode_step_s_median=statistics.median(decode_s) if decode_s else 0.0,
        swaps=counts["swaps"],
        mixed_version_steps=counts["mixed"],
        poison_reason=poisoned,
    )


def count_step(counts: Counter[str], decode_s: deque[float], plan: StepPlan, output: StepOutput) -> None:
    """Add one executed step; ``decode_s`` gets the seconds of one decode step."""
    counts["prefills"] += len(plan.prefills)
    counts["tokens"] += int(np.count_nonzero(output.tokens >= 0))
    if output.stamps is not None and output.stamps[0] != output.stamps[1]:
        counts["mixed"] += max(1, output.steps)
    if output.steps:
        decode_s.append(output.decode_s / output.steps)
