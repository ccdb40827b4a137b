"""An engine's metrics for Prometheus: a pure function of its stats."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

from jaxrl_sync.inference.front import EngineState
from jaxrl_sync.transfer.exposition import Family, Sample, counter, gauge

GAUGES = {
    "running": ("jaxrl_sync_engine_running_requests", "Requests that are decoded now."),
    "waiting": ("jaxrl_sync_engine_waiting_requests", "Requests that wait for a slot."),
    "slots": ("jaxrl_sync_engine_slots", "Samples that can be decoded at a time."),
    "decode_step_s_median": ("jaxrl_sync_engine_decode_step_seconds", "Median time of a decode step."),
}
COUNTERS = {
    "steps": ("jaxrl_sync_engine_steps_total", "Decode steps."),
    "dispatches": ("jaxrl_sync_engine_dispatches_total", "Programs given to the device."),
    "prefills": ("jaxrl_sync_engine_prefills_total", "Prompts that were computed."),
    "tokens_generated": ("jaxrl_sync_engine_tokens_total", "Tokens that were sampled."),
    "samples_finished": ("jaxrl_sync_engine_samples_total", "Samples that ended."),
    "swaps": ("jaxrl_sync_engine_swaps_total", "Versions that were swapped in."),
    "mixed_version_steps": ("jaxrl_sync_engine_mixed_version_steps_total", "Steps that saw two versions."),
}
SYNC = {
    "prepared": ("jaxrl_sync_sync_prepared_total", "Versions that were brought and verified."),
    "installed": ("jaxrl_sync_sync_installed_total", "Versions that were installed."),
    "failed": ("jaxrl_sync_sync_failed_total", "Rounds that were given up."),
    "quarantined": ("jaxrl_sync_sync_quarantined_total", "Slots whose memory was replaced."),
    "frames": ("jaxrl_sync_sync_frames_total", "Versions that came as frames of what changed."),
    "resumed": ("jaxrl_sync_sync_resumed_total", "Rounds that went on where an earlier one had ended."),
    "rollbacks": ("jaxrl_sync_sync_rollbacks_total", "Times that the version before was restored."),
    "relayed": ("jaxrl_sync_sync_relayed_total", "Edges that were sent on to other engines."),
    "relayed_bytes": ("jaxrl_sync_sync_relayed_bytes_total", "Bytes that were sent on to other engines."),
    "bytes_received": ("jaxrl_sync_sync_received_bytes_total", "Bytes of versions that arrived."),
    "wire_s": ("jaxrl_sync_sync_wire_seconds_total", "Time that versions took to arrive."),
    "verify_s": ("jaxrl_sync_sync_verify_seconds_total", "Time that their check took."),
    "prepare_s": ("jaxrl_sync_sync_prepare_seconds_total", "Time from the offer to a verified version."),
}


def families(stats: Mapping[str, Any], refused: Mapping[str, int]) -> list[Family]:
    """Every metric of one engine; ``stats`` is what ``GET /stats`` answers."""
    labels = {"engine": stats.get("engine", "")}
    states = [Sample(stats.get("state") == s, {**labels, "state": s}) for s in get_args(EngineState)]
    found = [gauge("jaxrl_sync_engine_state", "1 for the state that the engine is in.", *states)]
    version = stats.get("version")
    if isinstance(version, Mapping):
        number = Sample(version["number"], {**labels, "lineage": version["lineage"]})
        found.append(gauge("jaxrl_sync_engine_version_number", "The version that it serves.", number))
    sync = stats.get("sync")
    tables = ((GAUGES, stats, gauge), (COUNTERS, stats, counter), (SYNC, sync or {}, counter))
    for names, values, make in tables:
        for key, (name, text) in names.items():
            if isinstance(values.get(key), (int, float)):
                found.append(make(name, text, Sample(values[key], labels)))
    reasons = [Sample(n, {**labels, "reason": kind}) for kind, n in sorted(refused.items())]
    found.append(counter("jaxrl_sync_engine_refused_total", "Requests that were refused.", *reasons))
    return found
