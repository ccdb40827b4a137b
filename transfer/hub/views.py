"""What the hub answers: pure functions over its state, as JSON. A long poll asks them after every change."""

from __future__ import annotations

from typing import Any

from jaxrl_sync.transfer.hub import fleet
from jaxrl_sync.transfer.hub.events import Refused
from jaxrl_sync.transfer.hub.state import HubState, Member, MemberKey, Round, Tag, version_json, whole
from jaxrl_sync.transfer.version import Version

SHOWN_CLOSED = 32


def _order(version: Version) -> tuple[str, int]:
    return version.lineage, version.number


def accepts(installed: Version | None, offered: Version) -> bool:
    """The lineage rule: a later number of the same lineage, or any number of another lineage (an anchor)."""
    return installed is None or installed.lineage != offered.lineage or offered.follows(installed)


def offer_json(state: HubState, entry: Round) -> dict[str, Any]:
    """A round as a subscriber rank is offered it: ``sources`` names the world that it reads from.

    ``relays`` are the members of that world where its role is relay. Until the round has begun the source is
    a proposal; the answer to the first rank that begins has the one that counts.
    """
    relays = []
    if entry.role == "relay":
        keys = [MemberKey("relay", entry.world, rank) for rank in sorted(entry.sources)]
        relays = [state.members[k].public() for k in keys if k in state.members]
    return {
        "round": entry.id,
        "version": version_json(entry.version),
        "role": entry.role,
        "sources": entry.world,
        "relays": relays,
    }


def unknown(state: HubState, key: MemberKey, incarnation: str) -> Refused | None:
    """Why a process isn't the member that it says it is; None where it is."""
    member = state.members.get(key)
    if member is None:
        return Refused("unknown_member", f"{key} isn't registered here")
    if member.incarnation != incarnation:
        return Refused("replaced", f"{key} was replaced by another process")
    return None


def watch(state: HubState, key: MemberKey, incarnation: str) -> dict[str, Any] | Refused:
    """What a subscriber rank needs to know: the publisher ranks of its model and the round it is offered.

    ``begun`` where that has begun for it: the answer that said so may have been lost.
    """
    refused = unknown(state, key, incarnation)
    if refused is not None:
        return refused
    model = state.members[key].info.get("model")
    publishers = [
        m.public()
        for m in state.members.values()
        if m.key.role == "publisher" and m.info.get("model") == model
    ]
    offer = None
    for entry in state.rounds.values():
        if entry.engine == key.name and entry.model == model and key.rank in entry.ranks:
            begun = {"begun": True} if entry.ranks[key.rank] != "offered" else {}
            offer = {**offer_json(state, entry), **begun}
    return {"publishers": sorted(publishers, key=lambda p: (p["name"], p["rank"])), "offer": offer}


def round_status(state: HubState, round_id: str) -> dict[str, Any] | Refused:
    """How a round stands: {"state", "reason", "repair", "prepared": whether every rank is}."""
    entry = state.rounds.get(round_id) or state.closed.get(round_id)
    if entry is None:
        return Refused("unknown_round", f"round {round_id} isn't known here")
    prepared = entry.all_at_least(("prepared", "installed"))
    return {"state": entry.state, "reason": entry.reason, "repair": entry.repair, "prepared": prepared}


def newest_version(state: HubState, model: str) -> dict[str, Any] | None:
    """The newest published version of a model, or None."""
    entry = state.newest.get(model)
    if entry is None:
        return None
    held = fleet.holders(state, Tag(model, entry.version))
    return {
        "model": model,
        "version": version_json(entry.version),
        "bytes": entry.nbytes,
        "published_at": entry.at,
        "available": any(h.complete for h in held),
    }


def pinned(state: HubState, model: str) -> list[Version]:
    """Versions of a model that somebody wants kept."""
    return sorted((tag.version for tag in state.pins if tag.model == model), key=_order)


def pin_state(state: HubState, tag: Tag) -> dict[str, Any]:
    """Whether a version is held, and whether a reliable publisher has confirmed that it keeps it."""
    held = [h for h in fleet.holders(state, tag) if h.complete]
    confirmed = any(h.reliable and h.source.role == "publisher" and _confirmed(state, tag, h) for h in held)
    names = [f"{h.source.role} {h.source.name}" for h in held]
    return {"held": bool(held), "confirmed": confirmed, "holders": names, "pinned": tag in state.pins}


def _confirmed(state: HubState, tag: Tag, holder: fleet.Holder) -> bool:
    return all(state.holdings[m.key][tag].pinned for m in holder.members.values())


def unpublished(state: HubState, key: MemberKey, tag: Tag) -> dict[str, Any]:
    """Who still reads a version from a holder that withdraws it; ``withdrawn`` False where a hub that has
    restarted doesn't know that it does."""
    holding = state.holdings.get(key, {}).get(tag)
    withdrawn = holding is None or holding.state == "draining"
    names = sorted({r.engine for r in fleet.readers(state, fleet.Source(key.role, key.name), tag)})
    last = fleet.is_last_reliable(state, tag, key)
    drained = withdrawn and not names
    return {"drained": drained, "withdrawn": withdrawn, "readers": names, "last_reliable": last}


def replicas(state: HubState, model: str) -> list[dict[str, Any]]:
    """The directory: one row per version and world that holds, receives, drains or lost it.

    ``state`` is absent, replicating, published, draining, offloaded or dead; ``ranks`` says the same by rank,
    ``prefix`` how many of how many parts a replicating one has, where it told.
    """
    rows = [row for name in sorted(state.worlds("publisher", model)) for row in _held(state, model, name)]
    engines = state.engine_ranks(model)
    for name in sorted(engines):
        rows += _engine_rows(state, model, name, engines[name])
    dead = [k for k in state.dead if k.role in ("subscriber", "publisher")]
    rows += [_row(k.role, k.name, None, "dead", {k.rank: "dead"}) for k in sorted(dead)]
    return rows


def _row(role: str, name: str, version: Version | None, state: str, ranks: dict[int, str]) -> dict[str, Any]:
    return {
        "holder": {"role": role, "name": name},
        "version": version_json(version),
        "state": state,
        "ranks": {str(r): s for r, s in sorted(ranks.items())},
    }


def _held(state: HubState, model: str, name: str) -> list[dict[str, Any]]:
    ranks = state.worlds("publisher", model)[name]
    versions = {t.version for m in ranks.values() for t in state.holdings.get(m.key, {}) if t.model == model}
    rows = []
    for tag in (Tag(model, v) for v in sorted(versions, key=_order)):
        by_rank = {r: state.holdings.get(m.key, {}).get(tag) for r, m in ranks.items()}
        states = {r: "absent" if h is None else str(h.state) for r, h in by_rank.items()}
        worst = next(s for s in ("absent", "draining", "offloaded", "published") if s in states.values())
        row = _row("publisher", name, tag.version, worst, states)
        pin = sorted(state.pins.get(tag, {}))
        reading = fleet.readers(state, fleet.Source("publisher", name), tag)
        rows.append(row | _traits(ranks) | {"readers": sorted({r.engine for r in reading}), "pinned_by": pin})
    return rows


def _engine_rows(state: HubState, model: str, name: str, ranks: dict[int, Member]) -> list[dict[str, Any]]:
    held = {r: state.installed.get(m.key) for r, m in ranks.items()}
    source, traits = fleet.Source("relay", name), _traits(ranks)
    reads = fleet.readers(state, source)
    rows = []
    for version in sorted({v for v in held.values() if v is not None}, key=_order):
        states = {r: "published" if v == version else "absent" for r, v in held.items()}
        word = "published" if whole(ranks) and set(states.values()) == {"published"} else "absent"
        rows.append(_row("engine", name, version, word, states))
    for version in sorted({r.version for r in reads if r.model == model} - set(held.values()), key=_order):
        if fleet.own_round(state, Tag(model, version), name) is None:
            rows.append(_row("engine", name, version, "draining", dict.fromkeys(ranks, "draining")))
    for entry in state.rounds.values():
        if entry.engine == name and entry.model == model and entry.begun:
            row = _row("engine", name, entry.version, "replicating", {r: s for r, s in entry.ranks.items()})
            source_of = {"role": entry.role, "name": entry.world}
            prefix = {str(r): list(p) for r, p in sorted(entry.parts.items())}
            rows.append(row | {"source": source_of, "prefix": prefix})
    if not rows:
        rows.append(_row("engine", name, None, "absent", dict.fromkeys(ranks, "absent")))
    for row in rows:
        version = row["version"]
        names = {r.engine for r in reads if version_json(r.version) == version}
        row |= traits | {"readers": sorted(names)}
    return rows


def _traits(ranks: dict[int, Member]) -> dict[str, Any]:
    first = next(iter(ranks.values()))
    return {"site": first.site, "reliable": all(m.reliable for m in ranks.values())}


def status(state: HubState) -> dict[str, Any]:
    """Everything an operator wants to see, as JSON."""
    engines: dict[str, Any] = {}
    for key, member in state.members.items():
        if key.role == "subscriber":
            entry = engines.setdefault(key.name, {"size": member.size, "ranks": {}})
            entry["ranks"][str(key.rank)] = version_json(state.installed.get(key))
    models = sorted(
        {*state.newest, *(m for x in state.members.values() if isinstance(m := x.info.get("model"), str))}
    )
    return {
        "epoch": state.epoch,
        "newest": {m: newest_version(state, m) for m in state.newest},
        "engines": engines,
        "replicas": {m: replicas(state, m) for m in models},
        "pins": [
            {"model": t.model, "version": version_json(t.version), "by": sorted(by)}
            for t, by in state.pins.items()
        ],
        "fanout": {m: {"kind": f.kind, "degree": f.degree} for m, f in state.fanouts.items()},
        "members": [m.public() for m in state.members.values()],
        "rounds": [_round_row(r) for r in state.rounds.values()],
        "closed": [
            {
                "id": r.id,
                "engine": r.engine,
                "version": version_json(r.version),
                "source": {"role": r.role, "name": r.world},
                "state": r.state,
                "why": r.reason,
                "repair": r.repair,
            }
            for r in list(state.closed.values())[-SHOWN_CLOSED:]
        ],
    }


def _round_row(entry: Round) -> dict[str, Any]:
    return {
        "id": entry.id,
        "engine": entry.engine,
        "version": version_json(entry.version),
        "ranks": {str(k): v for k, v in entry.ranks.items()},
        "source": {"role": entry.role, "name": entry.world},
    }
