"""Bodies of calls become events field by field; what isn't one is refused by name and changes nothing."""

from __future__ import annotations

import json
from typing import Any

import pytest

from jaxrl_sync.transfer.hub import bodies, events
from jaxrl_sync.transfer.hub.state import Fanout, Holding, MemberKey
from jaxrl_sync.transfer.version import Version

ME = {"role": "publisher", "name": "trainer", "rank": 0, "incarnation": "i"}
A1 = {"lineage": "a", "number": 1}
KEY = MemberKey("publisher", "trainer", 0)
VERSION = Version("a", 1)


@pytest.mark.parametrize(
    ("kind", "body", "expected"),
    [
        ("heartbeat", ME, events.Heartbeat(KEY, "i")),
        ("leave", ME, events.Leave(KEY, "i")),
        (
            "hold",
            ME | {"model": "m", "held": [A1 | {"state": "offloaded", "pinned": True}], "sequence": 3},
            events.Hold(KEY, "i", "m", {VERSION: Holding("offloaded", True)}, 3),
        ),
        (
            "unpublish",
            ME | {"model": "m", "version": A1, "force": True},
            events.Unpublish(KEY, "i", "m", VERSION, True),
        ),
        (
            "advance",
            ME | {"round": "r", "to": "begun", "timeout_s": 2, "parts": [1, 4]},
            events.Advance(KEY, "i", "r", "begun", 2.0, (1, 4)),
        ),
        ("fail", ME | {"round": "r", "reason": "x" * 5000}, events.Fail(KEY, "i", "r", "x" * 2000)),
        ("pin", {"model": "m", "version": A1, "by": "me"}, events.Pin("m", VERSION, "me")),
        (
            "pin",
            ME | {"model": "m", "version": A1, "by": "me", "again": True},
            events.Pin("m", VERSION, "me", (KEY, "i"), True),
        ),
        ("unpin", {"model": "m", "version": A1, "by": "me"}, events.Unpin("m", VERSION, "me")),
    ],
)
def test_events(kind: str, body: dict[str, Any], expected: events.Event) -> None:
    assert bodies.event_of(kind, body, 10.0) == expected


def test_reasons_are_one_printable_line() -> None:
    event = bodies.event_of("fail", ME | {"round": "r", "reason": "no\x1b[2J\nhub refused \ud800"}, 10.0)
    assert isinstance(event, events.Fail) and event.reason == "no [2J hub refused  "


def test_announce_says_what_is_held_and_how_copies_spread() -> None:
    body = ME | {"model": "m", "version": A1, "bytes": 7, "held": [A1], "sequence": 2}
    event = bodies.event_of("announce", body | {"fanout": {"kind": "tree", "degree": 3}}, 10.0)
    assert isinstance(event, events.Announce)
    assert (event.held, event.sequence, event.fanout) == ({VERSION: Holding()}, 2, Fanout("tree", 3))
    plain = bodies.event_of("announce", ME | {"model": "m", "version": A1}, 10.0)
    assert isinstance(plain, events.Announce) and plain.held is None and plain.fanout is None


ANNOUNCE = ME | {"model": "m", "version": A1}
ADVANCE = ME | {"round": "r", "to": "begun"}


@pytest.mark.parametrize(
    ("kind", "body", "message"),
    [
        ("dance", ME, "unknown call"),
        ("heartbeat", ME | {"rank": "0"}, "a member is role, name and rank"),
        ("heartbeat", ME | {"incarnation": "x" * (1 << 20)}, "1048576 characters"),
        ("register", ME | {"info": {"load": float("nan")}}, "isn't JSON in UTF-8"),
        ("register", ME | {"info": {"load": float("inf")}}, "isn't JSON in UTF-8"),
        ("register", ME | {"info": {"site": "\ud800"}}, "isn't JSON in UTF-8"),
        (
            "announce",
            ME | {"model": "m", "version": {"lineage": "a", "number": 10**400}},
            "a version's number is at most",
        ),
        ("announce", ME | {"model": "m", "version": {"lineage": "a\n", "number": 1}}, "a version's lineage"),
        (
            "announce",
            ME | {"model": "m", "version": {"lineage": "a" * 999, "number": 1}},
            "a version's lineage is printable and of at most 256",
        ),
        ("advance", ME | {"round": "r", "to": "begun", "parts": [10**400, 1]}, "parts is"),
        ("heartbeat", ME | {"name": "a\nb"}, "must be printable"),
        ("register", ME | {"size": 0}, "0 <= rank < size"),
        ("register", ME | {"info": {"model": ["m"]}}, "'model' is list, expected text"),
        ("register", ME | {"info": {"x": "y" * (65 << 10)}}, "bytes of JSON"),
        ("register", ME | {"info": {"x": json.loads("[" * 32 + "]" * 32)}}, "nested deeper than 32"),
        ("announce", ME | {"model": "m"}, "names no version"),
        ("announce", ANNOUNCE | {"model": "a\nb"}, "printable name"),
        ("announce", ANNOUNCE | {"bytes": "7"}, "expected a number"),
        ("announce", ANNOUNCE | {"held": [A1] * 257}, "at most 256 versions"),
        ("announce", ANNOUNCE | {"held": [A1 | {"state": "dead"}]}, "published or offloaded"),
        ("announce", ANNOUNCE | {"held": [None]}, "published or offloaded"),
        ("announce", ANNOUNCE | {"held": {}}, "expected a list"),
        ("announce", ANNOUNCE | {"fanout": {"kind": "ring"}}, "star, chain or tree"),
        ("announce", ANNOUNCE | {"fanout": {"kind": "tree", "degree": 0}}, "with a degree"),
        ("announce", ANNOUNCE | {"fanout": "star"}, "star, chain or tree"),
        ("hold", ME | {"model": "m"}, "expected a list"),
        ("advance", ADVANCE | {"to": "gave_up"}, "begun, prepared or installed"),
        ("advance", ADVANCE | {"timeout_s": float("nan")}, "expected at most"),
        ("advance", ADVANCE | {"parts": [1]}, "how many, of how many"),
        ("advance", ADVANCE | {"parts": [-1, 4]}, "how many, of how many"),
        ("pin", {"model": "m", "version": A1}, "'by' is NoneType"),
        ("pin", {"model": "m", "version": A1, "by": ""}, "1 to 256 characters"),
        ("unpin", {"model": "m", "by": "me"}, "names no version"),
    ],
)
def test_what_is_no_event_is_refused_by_name(kind: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises((bodies.BadRequest, ValueError), match=message):
        bodies.event_of(kind, body, 10.0)
