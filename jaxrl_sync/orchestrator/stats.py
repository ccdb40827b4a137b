"""Numbers of the run: one metrics row per step and per evaluation, the progress and the summary."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from jaxrl_sync.batch.connection import Ack
from jaxrl_sync.orchestrator.book import Book
from jaxrl_sync.orchestrator.errors import FlowError
from jaxrl_sync.orchestrator.eval_sink import EvalResult
from jaxrl_sync.orchestrator.logger import percentile, rss_bytes, spread
from jaxrl_sync.orchestrator.policy import Policy
from jaxrl_sync.orchestrator.train_sink import BatchFacts
from jaxrl_sync.orchestrator.weight_watcher import Swap
from jaxrl_sync.tasks.mixture import Mixture

STALL_KEY = "publish_s"
_KEPT = 20_000  # the latest swaps and stalls that percentiles are taken over


class RunStats:
    """Accumulates over one attempt. No I/O; the caller writes what it returns."""

    def __init__(self, book: Book, policy: Policy, steps: int, mixture: Mixture) -> None:
        self._book, self._policy, self._steps, self._mixture = book, policy, steps, mixture
        self._groups_of: collections.Counter[str] = collections.Counter()
        self.began_at, self._began = time.time(), time.monotonic()
        self._first_sync: float | None = None
        self.swaps: collections.deque[Swap] = collections.deque(maxlen=_KEPT)
        self.swap_count = self.syncs = 0
        self._newest_swapped = -1
        self._new_swaps: list[Swap] = []
        self.stalls_s: collections.deque[float] = collections.deque(maxlen=_KEPT)
        self.stall_total_s = 0.0
        self.staleness: collections.Counter[int] = collections.Counter()
        self.samples = self.multi_version = self.loss_tokens = 0
        self.evals: list[EvalResult] = []
        self.reward: float | None = None
        self.steps_done = 0
        self._last_step_t = time.monotonic()

    def on_swap(self, swap: Swap) -> None:
        """An engine took a version."""
        self._first_sync = self._first_sync or time.monotonic()
        self.swaps.append(swap)
        self.swap_count += 1
        self.syncs += swap.number > self._newest_swapped
        self._newest_swapped = max(self._newest_swapped, swap.number)
        self._new_swaps.append(swap)

    def on_step(self, facts: BatchFacts, ack: Ack, ack_s: float, extra: Mapping[str, Any]) -> dict[str, Any]:
        """The metrics row of one acknowledged step."""
        self.staleness.update(facts.staleness)
        self.samples += facts.samples
        self.multi_version += facts.multi_version
        self.loss_tokens += facts.loss_tokens
        self._groups_of.update({label: task.groups for label, task in facts.tasks.items()})
        self.reward, self.steps_done = facts.reward_mean, self.steps_done + 1
        if ack.metrics.get(STALL_KEY):
            self.stalls_s.append(float(ack.metrics[STALL_KEY]))
            self.stall_total_s += float(ack.metrics[STALL_KEY])
        now = time.monotonic()
        step_s, self._last_step_t = now - self._last_step_t, now
        swaps, self._new_swaps = self._new_swaps, []
        return {
            "kind": "step",
            "t": time.time(),
            "step": facts.step,
            "lineage": ack.lineage,
            "version": ack.number,
            "reward": facts.reward_mean,
            "components": dict(facts.components),
            "extras": dict(facts.extras),
            "tasks": {
                label: {
                    "groups": task.groups,
                    "samples": task.samples,
                    "loss_tokens": task.tokens,
                    "reward": task.reward_mean,
                    "components": dict(task.components),
                }
                for label, task in facts.tasks.items()
            },
            "samples": facts.samples,
            "groups": facts.groups,
            "tokens": facts.tokens,
            "loss_tokens": facts.loss_tokens,
            "tokens_per_s": facts.loss_tokens / step_s if step_s > 0 else 0.0,
            "step_s": step_s,
            "staleness": {str(k): n for k, n in facts.staleness.items()},
            "staleness_mean": sum(k * n for k, n in facts.staleness.items()) / max(1, facts.samples),
            "staleness_in_flight": facts.in_flight_mean,
            "staleness_in_queue": facts.in_queue_mean,
            "staleness_token": facts.token_staleness_mean,
            "staleness_newest": facts.newest_staleness_mean,
            "staleness_oldest": facts.oldest_staleness_mean,
            "multi_version_fraction": facts.multi_version / max(1, facts.samples),
            "truncated_fraction": facts.truncated / max(1, facts.samples),
            "uniform_groups": facts.uniform_groups,
            "wait": {"batch_s": facts.wait_batch_s, "policy_s": facts.wait_policy_s, "ack_s": ack_s},
            "sync": _sync(swaps),
            "trainer": dict(ack.metrics),
            "flow": self.flow(),
            "permits": dataclasses.asdict(self._book.permits),
            "queue": self.queue(),
            **extra,
        }

    def on_eval(self, result: EvalResult) -> dict[str, Any]:
        """The metrics row of one evaluation."""
        self.evals.append(result)
        return {
            "kind": "eval",
            "t": time.time(),
            "step": result.version.number,
            "trigger": result.trigger,
            "lineage": result.version.lineage,
            "version": result.version.number,
            "accuracy": result.accuracy,
            "reward": result.reward,
            "samples": result.samples,
            "missing": result.missing,
            "errored": result.errored,
            "tasks": _accuracies(result),
            "seconds": result.seconds,
        }

    def _rate(self, tokens: int) -> float:
        """Tokens per second since the first engine had weights."""
        since = self._first_sync
        return 0.0 if since is None else tokens / max(1e-9, time.monotonic() - since)

    def _balanced(self) -> bool:
        try:
            self._book.check()
        except FlowError:
            return False
        return True

    def flow(self) -> dict[str, Any]:
        """Counters by kind, and why samples ended without training."""
        counts: dict[str, Any] = {kind: dataclasses.asdict(flow) for kind, flow in self._book.flow.items()}
        counts["reasons"] = dict(self._book.reasons)
        counts["late"] = self._book.late
        counts["prompts_given_up"] = self._book.prompts_given_up
        return counts

    def queue(self) -> dict[str, int]:
        """What waits and how many bytes that holds."""
        book = self._book
        return {
            "open_groups": len(book.open),
            "ready_groups": len(book.queue),
            "retries": len(book.retries),
            "bytes": sum(g.nbytes for g in book.queue),
        }

    def _shares(self) -> dict[str, dict[str, float]]:
        """Of each task: its weight and its share of the trained groups, and how many those were."""
        weights = sum(part.weight for part in self._mixture.parts)
        groups = max(1, sum(self._groups_of.values()))
        return {
            part.label: {
                "weight": part.weight / weights,
                "share": self._groups_of[part.label] / groups,
                "groups": self._groups_of[part.label],
            }
            for part in self._mixture.parts
        }

    def progress(self, phase: str, tokens_generated: int) -> dict[str, Any]:
        """What ``progress.json`` holds; ``samples`` grows while anything moves."""
        book = self._book
        flows = book.flow.values()
        label = self._policy.label
        total = sum(self.staleness.values())
        return {
            "t": time.time(),
            "phase": phase,
            "step": self._policy.committed,
            "steps": self._steps,
            "version": None if label is None else label.number,
            "reward": self.reward,
            "eval_accuracy": self.evals[-1].accuracy if self.evals else None,
            "tokens_per_s": self._rate(tokens_generated),
            "staleness_mean": sum(k * n for k, n in self.staleness.items()) / total if total else None,
            "inflight": book.permits.held,
            "samples": sum(f.submitted - f.running for f in flows),
            "queued": book.flow["train"].queued,
            "swaps": self.swap_count,
            "rss_bytes": rss_bytes(),
        }

    def summary(self, tokens_generated: int, cause: str, before: float | None) -> dict[str, Any]:
        """What ``summary.json`` holds. ``before`` is the first evaluation of an earlier attempt, if any."""
        wall_s = time.monotonic() - self._began
        real = [s for s in self.swaps if s.pause_s > 0]
        accuracies = [e.accuracy for e in self.evals]
        per_sync: collections.Counter[int] = collections.Counter()
        for swap in real:
            per_sync[swap.number] += swap.bytes
        first = before if before is not None else next(iter(accuracies), None)
        stale = sum(n for k, n in self.staleness.items() if k >= 1)
        return {
            "cause": cause,
            "steps": self.steps_done,
            "version": self._policy.committed,
            "syncs": self.syncs,
            "swaps": self.swap_count,
            "wall_s": wall_s,
            "eval": {"before": first, "after": accuracies[-1] if accuracies else None},
            "evals": [
                {"version": e.version.number, "accuracy": e.accuracy, "tasks": _accuracies(e)}
                for e in self.evals
            ],
            "tasks": self._shares(),
            "tokens_per_s": self._rate(tokens_generated),
            "tokens_generated": tokens_generated,
            "tokens_trained": self.loss_tokens,
            "bytes_per_sync": percentile([float(b) for b in per_sync.values()], 0.5) if real else None,
            "bytes_per_swap": percentile([float(s.bytes) for s in real], 0.5) if real else None,
            "pause_s": spread([s.pause_s for s in real]),
            "stall_s": {**spread(self.stalls_s), "total": self.stall_total_s},
            "staleness": {str(k): n for k, n in sorted(self.staleness.items())},
            "stale_fraction": stale / max(1, self.samples),
            "multi_version_fraction": self.multi_version / max(1, self.samples),
            "samples": self.samples,
            "flow": self.flow(),
            "permits": dataclasses.asdict(self._book.permits),
            "identities_ok": self._balanced(),
        }


def _accuracies(result: EvalResult) -> dict[str, dict[str, float]]:
    return {label: dataclasses.asdict(score) for label, score in result.tasks.items()}


def _sync(swaps: list[Swap]) -> dict[str, Any]:
    """The swaps since the last row."""
    return {
        "swaps": len(swaps),
        "bytes": sum(s.bytes for s in swaps),
        "pause_s": max((s.pause_s for s in swaps), default=0.0),
        "prepare_s": max((s.prepare_s for s in swaps), default=0.0),
        "verify_s": max((s.verify_s for s in swaps), default=0.0),
        "engines": [
            {
                "engine": s.engine,
                "version": s.number,
                "pause_s": s.pause_s,
                "bytes": s.bytes,
                "transport": s.transport,
                "payload": s.payload,
                "coding": s.coding,
                "density": s.density,
                "moved": dict(s.moved),
            }
            for s in swaps
        ],
    }
