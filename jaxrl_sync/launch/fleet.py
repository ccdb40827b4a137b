"""The fleet as text: versions, replicas, rounds, members and the last outcomes that a hub tells of."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]
SHOWN_OUTCOMES = 8
SHOWN_EDGES = 8
_KNOWN_EDGES = 512


def fleet_text(status: Row, edges: Sequence[Row] = (), *, t: float | None = None) -> str:
    """Tables of what ``GET /v1/status`` answers, and of the newest edge rows of the trace."""
    now = time.time() if t is None else t
    parts = [
        _table("versions", ("model", "newest", "MB", "age s", "held", "pinned by"), _versions(status, now)),
        _table(
            "replicas",
            ("model", "holder", "version", "lag", "state", "ranks", "source", "prefix", "site", "readers"),
            _replicas(status),
        ),
        _table("open rounds", ("round", "engine", "version", "source", "ranks"), _rounds(status)),
        _table(
            "last rounds",
            ("engine", "version", "source", "outcome", "repair", "why"),
            _outcomes(status),
        ),
        _table(
            "last edges",
            (
                "engine",
                "version",
                "source",
                "over",
                "payload",
                "MB",
                "queue s",
                "wire s",
                "verify s",
                "apply s",
                "commit s",
            ),
            _edges(edges),
        ),
        _table("members", ("role", "name", "ranks", "lease s", "site", "address"), _members(status)),
    ]
    return "\n\n".join(part for part in parts if part)


def merge_edges(known: Sequence[Row], rows: Iterable[Row]) -> list[Row]:
    """Edge rows seen so far and those among ``rows``, the last ones."""
    return [*known, *(r for r in rows if r.get("kind") == "edge")][-_KNOWN_EDGES:]


def _version(value: Row | None) -> str:
    return f"{str(value['lineage'])[:12]}:{value['number']}" if value else "-"


def _megabytes(nbytes: Any) -> str:
    return f"{float(nbytes or 0) / 1e6:.3f}"


def _holder(source: Row) -> str:
    return f"{source.get('role')} {source.get('name')}"


def _versions(status: Row, now: float) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for model, newest in sorted(status.get("newest", {}).items()):
        if newest is None:
            continue
        pins = [p for p in status.get("pins", []) if p["model"] == model]
        pinned = ", ".join(f"{_version(p['version'])} {'+'.join(p['by'])}" for p in pins)
        age = f"{max(0.0, now - newest['published_at']):.1f}"
        held = "yes" if newest["available"] else "NO"
        rows.append((model, _version(newest["version"]), _megabytes(newest["bytes"]), age, held, pinned))
    return rows


def _replicas(status: Row) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for model, replicas in sorted(status.get("replicas", {}).items()):
        newest = (status.get("newest", {}).get(model) or {}).get("version")
        for row in replicas:
            rows.append(
                (
                    model,
                    _holder(row["holder"]),
                    _version(row["version"]),
                    _lag(row["version"], newest),
                    row["state"],
                    _ranks(row["ranks"]),
                    _holder(row["source"]) if row.get("source") else "",
                    _prefix(row.get("prefix") or {}),
                    (row.get("site") or "-") + ("" if row.get("reliable", True) else " (spot)"),
                    ", ".join(row.get("readers") or []),
                )
            )
    return rows


def _lag(held: Row | None, newest: Row | None) -> str:
    """How many versions behind; another lineage has no distance."""
    if held is None or newest is None:
        return "-"
    return str(newest["number"] - held["number"]) if held["lineage"] == newest["lineage"] else "lineage"


def _ranks(ranks: Row) -> str:
    """The common state of all ranks as their number, else each."""
    states = set(ranks.values())
    return str(len(ranks)) if len(states) <= 1 else " ".join(f"{r}:{s}" for r, s in sorted(ranks.items()))


def _prefix(prefix: Row) -> str:
    have, of = (sum(int(p[i]) for p in prefix.values()) for i in (0, 1))
    return f"{have}/{of}" if of else ""


def _rounds(status: Row) -> list[tuple[str, ...]]:
    return [
        (
            row["id"],
            row["engine"],
            _version(row["version"]),
            _holder(row["source"]) if row.get("source") else "",
            " ".join(f"{rank}:{state}" for rank, state in sorted(row["ranks"].items())),
        )
        for row in status.get("rounds", [])
    ]


def _outcomes(status: Row) -> list[tuple[str, ...]]:
    last = status.get("closed", [])[-SHOWN_OUTCOMES:]
    return [
        (
            row["engine"],
            _version(row["version"]),
            _holder(row["source"]) if row.get("source") else "",
            row["state"],
            row.get("repair", ""),
            str(row.get("why", ""))[:80],
        )
        for row in reversed(last)
    ]


def _edges(edges: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            f"{row['engine']}.{row['rank']}",
            _version(row["version"]),
            row["source"],
            row["transport"],
            row["payload"],
            _megabytes(row["bytes_wire"]),
            *(f"{row[f'seconds_{phase}']:.4f}" for phase in ("queue", "wire", "verify", "apply", "commit")),
        )
        for row in reversed(list(edges)[-SHOWN_EDGES:])
    ]


def _members(status: Row) -> list[tuple[str, ...]]:
    worlds: dict[tuple[str, str], list[Row]] = {}
    for member in status.get("members", []):
        worlds.setdefault((member["role"], member["name"]), []).append(member)
    leases = status.get("leases", {})
    rows: list[tuple[str, ...]] = []
    for (role, name), members in sorted(worlds.items()):
        left = [leases[key] for m in members if (key := f"{role} {name}.{m['rank']}") in leases]
        info = members[0].get("info", {})
        address = str(info.get("address") or info.get("url") or info.get("data_url") or "")
        of = f"{len(members)}/{members[0]['size']}"
        rows.append((role, name, of, f"{min(left):.1f}" if left else "-", info.get("site") or "-", address))
    return rows


def shown(cell: object) -> str:
    """What came from others must not command the terminal."""
    return "".join(c if c.isprintable() else " " for c in str(cell))


def _table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest cell; nothing for no rows."""
    if not rows:
        return ""
    lines = [[shown(cell) for cell in row] for row in (head, *rows)]
    widths = [max(len(line[i]) for line in lines) for i in range(len(head))]
    text = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
    return "\n".join([f"{title}", *(f"  {line}" for line in text)])
