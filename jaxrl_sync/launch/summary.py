"""The last words of a run: ``summary.json`` as a few lines of text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def describe_summary(summary: Mapping[str, Any]) -> list[str]:
    """The lines that ``jaxrl-sync run`` prints when a run has ended well."""
    pause, stall = _table(summary, "pause_s"), _table(summary, "stall_s")
    evals, staleness = _table(summary, "eval"), _table(summary, "staleness")
    return [
        f"steps {_show(summary.get('steps'))}, syncs {_show(summary.get('syncs'))}, "
        f"wall time {_show(summary.get('wall_s'), '.1f')} s",
        f"eval exact match: before {_show(evals.get('before'), '.3f')}, "
        f"after {_show(evals.get('after'), '.3f')}",
        *_describe_mix(summary),
        f"tokens/s {_show(summary.get('tokens_per_s'), '.0f')}, "
        f"bytes per sync {_show(summary.get('bytes_per_sync'), ',.0f')}",
        f"swap pause: median {_ms(pause.get('median'))}, p99 {_ms(pause.get('p99'))}",
        f"trainer stall per publish: median {_ms(stall.get('median'))}, p99 {_ms(stall.get('p99'))}, "
        f"in all {_show(stall.get('total'), '.2f')} s",
        "staleness of trained samples: " + histogram(staleness),
        f"samples with two or more versions: {_percent(summary.get('multi_version_fraction'))}",
    ]


def _describe_mix(summary: Mapping[str, Any]) -> list[str]:
    """One line per task of a mix; nothing for a run of one task."""
    tasks, evals = _table(summary, "tasks"), summary.get("evals") or []
    if len(tasks) < 2:
        return []
    last = _table(evals[-1], "tasks") if evals else {}
    return [
        f"  {label}: {_percent(task.get('share'))} of the trained groups "
        f"(weight {_percent(task.get('weight'))}), "
        f"exact match {_show(_table(last, label).get('accuracy'), '.3f')}"
        for label, task in tasks.items()
    ]


def histogram(counts: Mapping[str, Any]) -> str:
    """``{"0": 2, "1": 6}`` as ``0: 2 (25 %)  1: 6 (75 %)``."""
    total = sum(counts.values()) or 1
    rows = sorted(counts.items(), key=lambda item: int(item[0]))
    return "  ".join(f"{key}: {count} ({100 * count / total:.0f} %)" for key, count in rows) or "none"


def _table(summary: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = summary.get(key)
    return value if isinstance(value, Mapping) else {}


def _show(value: Any, form: str = "") -> str:
    return "unknown" if value is None else format(value, form)


def _ms(seconds: Any) -> str:
    return "unknown" if seconds is None else f"{1000 * seconds:.2f} ms"


def _percent(value: Any) -> str:
    return "unknown" if value is None else f"{100 * value:.0f} %"
