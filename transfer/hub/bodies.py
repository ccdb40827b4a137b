"""Bodies of calls to the hub, checked field by field, and the events that they describe."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from typing import Any

from jaxrl_sync.transfer.hub import events
from jaxrl_sync.transfer.hub.state import MAX_NUMBER, Fanout, Holding, MemberKey, version_of
from jaxrl_sync.transfer.version import Version

MAX_WORLD = 1 << 16
MAX_INFO_BYTES = 64 << 10
MAX_INFO_DEPTH = 32
"""Of lists and objects in each other: what could just be read as JSON could not be written in an answer."""
MAX_TEXT = 1 << 10
MAX_REASON = 2000
MAX_HELD = 256
MAX_DEGREE = 1024
_MAX_NUMBER = 1e18


class BadRequest(Exception):
    """A body that the hub can't take."""


def member_key(body: dict[str, Any]) -> MemberKey:
    """Who calls: role, name and rank."""
    role, name, rank = body.get("role"), body.get("name"), body.get("rank")
    if not isinstance(role, str) or not isinstance(name, str) or type(rank) is not int:
        raise BadRequest(f"a member is role, name and rank, got {role!r}, {name!r}, {rank!r}")
    if not role or not name or len(role) > 64 or len(name) > 256:
        raise BadRequest("role and name must be short and not empty")
    if not (role.isprintable() and name.isprintable()):  # they get into logs and tables
        raise BadRequest(f"role {role!r} and name {name!r} must be printable")
    return MemberKey(role, name, rank)


def text(body: dict[str, Any], field: str) -> str:
    """A field that is text, short and of whole characters: it gets into answers to others."""
    value = body.get(field)
    if not isinstance(value, str):
        raise BadRequest(f"field {field!r} is {type(value).__name__}, expected text")
    if len(value) > MAX_TEXT:
        raise BadRequest(f"field {field!r} has {len(value)} characters, expected at most {MAX_TEXT}")
    value.encode()  # half a surrogate pair has no UTF-8: a ValueError
    return value


def model_name(body: dict[str, Any], field: str = "model") -> str:
    """The model that a call is about: a name of a line, as it gets into logs, tables and file names."""
    name = text(body, field)
    if not 0 < len(name) <= 256 or not name.isprintable():
        raise BadRequest(f"{field} {name[:80]!r} must be a printable name of 1 to 256 characters")
    return name


def number(body: dict[str, Any], field: str, default: float) -> float:
    """A field that is a number of sensible size."""
    value = body.get(field, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise BadRequest(f"field {field!r} is {type(value).__name__}, expected a number")
    if not abs(value) <= _MAX_NUMBER:  # nan too
        raise BadRequest(f"field {field!r} is {str(value)[:40]}, expected at most {_MAX_NUMBER:.0e}")
    return float(value)


def version(body: dict[str, Any]) -> Version:
    """The version that a call is about."""
    found = version_of(body.get("version"))
    if found is None:
        raise BadRequest("the call names no version")
    return found


def event_of(kind: str, body: dict[str, Any], ttl_s: float) -> events.Event:
    """The event that a call's body describes. BadRequest or ValueError when it describes none."""
    if kind == "pin":
        return events.Pin(
            model_name(body), version(body), model_name(body, "by"), _owner(body), body.get("again") is True
        )
    if kind == "unpin":
        return events.Unpin(model_name(body), version(body), model_name(body, "by"))
    make = _EVENTS.get(kind)
    if make is not None:
        return make(member_key(body), text(body, "incarnation"), body)
    if kind == "register":
        return _register(member_key(body), text(body, "incarnation"), body, ttl_s)
    raise BadRequest(f"unknown call {kind!r}")


def _register(key: MemberKey, incarnation: str, body: dict[str, Any], ttl_s: float) -> events.Register:
    info = body.get("info", {})
    if not isinstance(info, dict):
        raise BadRequest(f"info is {type(info).__name__}, expected an object")
    if _deeper(info, MAX_INFO_DEPTH):
        raise BadRequest(f"info is nested deeper than {MAX_INFO_DEPTH} levels")
    try:  # it gets into answers to everyone: a nan or half a surrogate pair would spoil them all
        told = len(json.dumps(info, allow_nan=False, ensure_ascii=False).encode())
    except ValueError as error:
        raise BadRequest(f"info isn't JSON in UTF-8: {error}") from error
    if told > MAX_INFO_BYTES:
        raise BadRequest(f"info is {told} bytes of JSON, expected at most {MAX_INFO_BYTES}")
    if "model" in info:
        model_name(info)
    size = int(number(body, "size", 1))
    if not 0 <= key.rank < size <= MAX_WORLD:
        raise BadRequest(f"rank {key.rank} of {size}, expected 0 <= rank < size <= {MAX_WORLD}")
    ttl = min(max(number(body, "ttl_s", ttl_s), 0.5), 600.0)
    sequence = int(number(body, "sequence", 0))
    return events.Register(key, size, incarnation, info, ttl, version_of(body.get("installed")), sequence)


def _deeper(value: Any, most: int) -> bool:
    """Whether more than so many lists and objects are in each other."""
    level: list[Any] = [value]
    for _ in range(most):
        held = (v.values() if isinstance(v, dict) else v for v in level)
        level = [v for inner in held for v in inner if isinstance(v, (dict, list))]
    return bool(level)


def _announce(key: MemberKey, incarnation: str, body: dict[str, Any]) -> events.Announce:
    nbytes = int(number(body, "bytes", 0))
    held = _held(body) if "held" in body else None
    sequence = int(number(body, "sequence", 0))
    told = model_name(body), version(body), nbytes, time.time()
    return events.Announce(key, incarnation, *told, held, sequence, _fanout(body.get("fanout")))


def _hold(key: MemberKey, incarnation: str, body: dict[str, Any]) -> events.Hold:
    return events.Hold(key, incarnation, model_name(body), _held(body), int(number(body, "sequence", 0)))


def _held(body: dict[str, Any]) -> events.Held:
    rows = body.get("held")
    if not isinstance(rows, list) or len(rows) > MAX_HELD:
        raise BadRequest(f"held is {str(rows)[:80]}, expected a list of at most {MAX_HELD} versions")
    held: events.Held = {}
    for row in rows:
        found = version_of(row)
        state = row.get("state", "published") if isinstance(row, dict) else None
        if found is None or state not in ("published", "offloaded"):
            raise BadRequest(f"held has {str(row)[:80]}, expected a version that is published or offloaded")
        held[found] = Holding(state, row.get("pinned") is True)
    return held


def _fanout(value: object) -> Fanout | None:
    if value is None:
        return None
    kind = value.get("kind") if isinstance(value, dict) else None
    degree = value.get("degree", 2) if isinstance(value, dict) else None
    if kind not in ("star", "chain", "tree") or type(degree) is not int or not 1 <= degree <= MAX_DEGREE:
        raise BadRequest(f"fanout is {str(value)[:80]}, expected star, chain or tree with a degree")
    return Fanout(kind, degree)


def _unpublish(key: MemberKey, incarnation: str, body: dict[str, Any]) -> events.Unpublish:
    force = body.get("force") is True
    return events.Unpublish(key, incarnation, model_name(body), version(body), force)


def _advance(key: MemberKey, incarnation: str, body: dict[str, Any]) -> events.Advance:
    to = text(body, "to")
    if to not in ("begun", "prepared", "installed"):
        raise BadRequest(f"to is {to!r}, expected begun, prepared or installed")
    limit_s, parts = number(body, "timeout_s", 60.0), body.get("parts")
    if parts is not None and not (
        isinstance(parts, list)
        and len(parts) == 2
        and all(type(p) is int and 0 <= p <= MAX_NUMBER for p in parts)
    ):
        raise BadRequest(f"parts is {str(parts)[:80]}, expected [how many, of how many]")
    pair = None if parts is None else (parts[0], parts[1])
    return events.Advance(key, incarnation, text(body, "round"), to, limit_s, pair)  # type: ignore[arg-type]


def _fail(key: MemberKey, incarnation: str, body: dict[str, Any]) -> events.Fail:
    reason = body.get("reason")
    if not isinstance(reason, str):
        raise BadRequest(f"field 'reason' is {type(reason).__name__}, expected text")
    line = "".join(c if c.isprintable() else " " for c in reason[:MAX_REASON])  # for logs and tables
    return events.Fail(key, incarnation, text(body, "round"), line)


def _owner(body: dict[str, Any]) -> tuple[MemberKey, str] | None:
    return (member_key(body), text(body, "incarnation")) if "role" in body else None


_EVENTS: dict[str, Callable[[MemberKey, str, dict[str, Any]], events.Event]] = {
    "heartbeat": lambda key, incarnation, _: events.Heartbeat(key, incarnation),
    "leave": lambda key, incarnation, _: events.Leave(key, incarnation),
    "announce": _announce,
    "hold": _hold,
    "unpublish": _unpublish,
    "advance": _advance,
    "fail": _fail,
}
