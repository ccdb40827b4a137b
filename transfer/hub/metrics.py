"""The hub's metrics for Prometheus: a pure function of its state and its trace."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from jaxrl_sync.transfer.exposition import Family, Sample, counter, gauge
from jaxrl_sync.transfer.hub import views
from jaxrl_sync.transfer.hub.state import HubState
from jaxrl_sync.transfer.hub.trace import Total, Trace


def families(
    state: HubState, trace: Trace, *, now: float, t: float, refused: Mapping[str, int], blobs_bytes: int
) -> list[Family]:
    """Every metric. ``now`` is on the clock of the leases, ``t`` is ``time.time()`` seconds."""
    return [
        gauge("jaxrl_sync_hub_info", "This life of the hub.", Sample(1, {"epoch": state.epoch})),
        gauge("jaxrl_sync_hub_blob_bytes", "Layouts and the like that the hub keeps.", Sample(blobs_bytes)),
        counter(
            "jaxrl_sync_hub_refused_total",
            "Requests that were refused, by reason.",
            *(Sample(n, {"reason": kind}) for kind, n in sorted(refused.items())),
        ),
        *_members(state, now),
        *_versions(state, t),
        *_engines(state),
        *_replicas(state),
        *_rounds(state, trace, t),
        *_phases(trace),
    ]


def _members(state: HubState, now: float) -> list[Family]:
    roles = collections.Counter(key.role for key in state.members)
    leases = [
        Sample(member.expires - now, {"role": key.role, "name": key.name, "rank": key.rank})
        for key, member in sorted(state.members.items())
    ]
    return [
        gauge("jaxrl_sync_members", "Processes under lease.", *_by("role", roles)),
        gauge("jaxrl_sync_member_lease_seconds", "Until a lease ends unless it is renewed.", *leases),
        gauge(
            "jaxrl_sync_members_dead",
            "Members whose lease ran out and who did not come back.",
            Sample(len(state.dead)),
        ),
    ]


def _versions(state: HubState, t: float) -> list[Family]:
    rows = [(model, entry) for model, entry in sorted(state.newest.items())]
    numbers = [Sample(e.version.number, {"model": model, "lineage": e.version.lineage}) for model, e in rows]
    shown = {model: views.newest_version(state, model) or {} for model, _ in rows}
    return [
        gauge("jaxrl_sync_version_number", "The newest published version.", *numbers),
        gauge(
            "jaxrl_sync_version_age_seconds",
            "Since the newest version was published.",
            *(Sample(max(0.0, t - e.at), {"model": model}) for model, e in rows),
        ),
        gauge(
            "jaxrl_sync_version_bytes",
            "Size of the newest version at the publisher.",
            *(Sample(e.nbytes, {"model": model}) for model, e in rows),
        ),
        gauge(
            "jaxrl_sync_version_available",
            "Whether somebody holds the newest version.",
            *(Sample(bool(shown[model].get("available")), {"model": model}) for model, _ in rows),
        ),
        gauge("jaxrl_sync_pinned_versions", "Versions that somebody wants kept.", Sample(len(state.pins))),
    ]


def _engines(state: HubState) -> list[Family]:
    numbers, lags = [], []
    for key, member in sorted(state.members.items()):
        if key.role != "subscriber":
            continue
        held, model = state.installed.get(key), str(member.info.get("model", ""))
        labels = {"model": model, "engine": key.name, "rank": key.rank}
        if held is not None:
            numbers.append(Sample(held.number, {**labels, "lineage": held.lineage}))
        newest = state.newest.get(model)
        if newest is not None and held is not None and held.lineage == newest.version.lineage:
            lags.append(Sample(newest.version.number - held.number, labels))
    return [
        gauge("jaxrl_sync_installed_version_number", "The version that a rank serves.", *numbers),
        gauge("jaxrl_sync_installed_lag_versions", "How many versions a rank is behind the newest.", *lags),
    ]


def _replicas(state: HubState) -> list[Family]:
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    models = {m for x in state.members.values() if isinstance(m := x.info.get("model"), str)}
    for model in sorted({*state.newest, *models}):
        counts.update((model, row["state"]) for row in views.replicas(state, model))
    samples = [Sample(n, {"model": m, "state": s}) for (m, s), n in sorted(counts.items())]
    return [gauge("jaxrl_sync_replicas", "Copies of versions by state.", *samples)]


def _rounds(state: HubState, trace: Trace, t: float) -> list[Family]:
    open_, ages, ratios = [], [], []
    begun = collections.Counter("begun" if r.begun else "offered" for r in state.rounds.values())
    open_ = _by("state", begun)
    for entry in state.rounds.values():
        labels = {"engine": entry.engine, "source": f"{entry.role} {entry.world}"}
        ages.append(Sample(max(0.0, t - trace.opened.get(entry.id, t)), labels))
        have, of = (
            (sum(column) for column in zip(*entry.parts.values(), strict=True)) if entry.parts else (0, 0)
        )
        if of:
            ratios.append(Sample(have / of, labels))
    return [
        gauge("jaxrl_sync_rounds_open", "Rounds that are under way.", *open_),
        gauge("jaxrl_sync_round_age_seconds", "Since a round was opened.", *ages),
        gauge("jaxrl_sync_round_parts_ratio", "Share of a version that its engine has.", *ratios),
        counter("jaxrl_sync_rounds_total", "Rounds that ended.", *_by("outcome", trace.outcomes)),
    ]


def _phases(trace: Trace) -> list[Family]:
    phases = sorted(trace.phases.items())
    summary = [
        s
        for key, total in phases
        for s in _summary(total, dict(zip(("phase", "transport"), key, strict=True)))
    ]
    moved = [
        Sample(total.nbytes, {"transport": transport, "payload": payload})
        for (transport, payload), total in sorted(trace.payloads.items())
    ]
    sizes = [
        Sample(total.nbytes, {"phase": phase, "transport": transport})
        for (phase, transport), total in phases
        if total.nbytes
    ]
    return [
        Family(
            "jaxrl_sync_phase_seconds",
            "summary",
            "Phases of edges of rounds that were installed.",
            tuple(summary),
        ),
        counter("jaxrl_sync_phase_bytes_total", "Bytes that passed through a phase.", *sizes),
        counter("jaxrl_sync_wire_bytes_total", "Bytes that travelled, by payload.", *moved),
    ]


def _summary(total: Total, labels: Mapping[str, object]) -> list[Sample]:
    return [Sample(total.seconds, labels, "_sum"), Sample(total.count, labels, "_count")]


def _by(label: str, counts: Mapping[str, int]) -> list[Sample]:
    return [Sample(n, {label: key}) for key, n in sorted(counts.items())]
