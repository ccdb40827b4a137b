"""Descriptions of verbs edges: what can't be is refused by name; splitting at regions and messages."""

from __future__ import annotations

import copy
import sys
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.transfer.errors import ProtocolError
from jaxrl_sync.transfer.verbs.handshake import Remote, check_offer, remote_of
from jaxrl_sync.transfer.verbs.rail import calls


def memory(nbytes: int = 8192) -> dict[str, Any]:
    return {"address": 4096, "nbytes": nbytes, "rails": [{"part_bytes": nbytes, "rkeys": [1]}]}


def describe(placement: str) -> dict[str, Any]:
    rail = {
        "device": "x:1",
        "gid": "00" * 16,
        "lid": 0,
        "link_layer": "Ethernet",
        "mtu": 3,
        "pairs": [[1, 2]],
        "ece": [[0x15B3, 7, 0]],
    }
    common = {
        "protocol": 2,
        "byte_order": sys.byteorder,
        "rails": [rail],
        "doorbell": memory(4096),
        "placement": placement,
        "reason": "",
        "chunk_bytes": 4096,
        "ring": 2,
    }
    return {**common, "memory": memory(), "slots": [memory(100)] if placement == "placed" else []}


@pytest.mark.parametrize(
    ("placement", "path", "value", "words"),
    [
        ("staged", ("protocol",), 1, "protocol is 1, expected 2 to 2"),
        ("staged", ("byte_order",), "big", "byte_order is 'big', expected 'little'"),
        ("staged", ("placement",), "direct", "placement is 'direct'"),
        ("staged", ("rails",), [], "rails is .*, expected a list of 1 to 16"),
        ("staged", ("rails", 0), 5, "rail is '5', expected an object"),
        ("staged", ("rails", 0, "mtu"), 6, "mtu is 6, expected 1 to 5"),
        ("staged", ("rails", 0, "mtu"), True, "mtu is True"),
        ("staged", ("rails", 0, "gid"), "zz", "gid is 'zz', expected 32 hexadecimal"),
        ("staged", ("rails", 0, "pairs", 0), [1 << 24, 2], "queue pair is"),
        ("staged", ("rails", 0, "ece", 0), [1, 2], "ece is .*, expected null or three of 32 bits"),
        ("staged", ("rails", 0, "ece"), [], "ece is .*, expected a list of 1 to 1"),
        ("staged", ("rails", 0, "link_layer"), 3, "link_layer is 3"),
        ("staged", ("ring",), None, "ring is None"),
        ("staged", ("ring",), 1025, "ring is 1025, expected 1 to 1024"),
        ("staged", ("chunk_bytes",), 1 << 31, "chunk_bytes is 2147483648, expected 64 to 67108864"),
        ("staged", ("memory", "address"), -1, "address is -1"),
        ("staged", ("memory", "nbytes"), 8191, "ring has 8191 bytes"),
        ("staged", ("memory", "rails", 0, "rkeys"), [1 << 32], "expected 32 bits"),
        ("staged", ("memory", "rails"), [], "rails is .*, expected a list of 1 to 1"),
        ("placed", ("slots",), [], r"slots is \[\], expected a list of 1 to 64"),
        ("placed", ("slots", 0, "rails", 0, "part_bytes"), 50, "expected a list of 2 to 2"),
        ("placed", ("slots", 0, "nbytes"), 1 << 49, "nbytes is"),
        ("placed", ("doorbell",), None, "doorbell is 'None', expected an object"),
    ],
)
def test_descriptions_that_can_not_be_are_refused_by_name(
    placement: str, path: tuple[Any, ...], value: object, words: str
) -> None:
    check_offer(describe(placement))
    changed = copy.deepcopy(describe(placement))
    where: Any = changed
    for key in path[:-1]:
        where = where[key]
    where[path[-1]] = value
    with pytest.raises(ProtocolError, match=words):
        check_offer(changed)
    with pytest.raises(ProtocolError, match="expected an object"):
        check_offer([placement])


def test_noise_in_a_description_is_never_another_error() -> None:
    """Every field replaced by every kind of value: accepted or a ProtocolError, nothing else."""
    noise: list[object] = [None, True, -1, 1 << 70, 1.5, "", "x" * 300, [], [[]], {}, {"a": 1}, [None] * 20]

    def spots(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        items = (
            value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
        )
        return [p for key, inner in items for p in [(*path, key), *spots(inner, (*path, key))]]

    refused = 0
    for placement in ("placed", "staged"):
        for path in spots(describe(placement)):
            for value in noise:
                changed = copy.deepcopy(describe(placement))
                where: Any = changed
                for key in path[:-1]:
                    where = where[key]
                where[path[-1]] = value
                try:
                    check_offer(changed)
                except ProtocolError:
                    refused += 1
    assert refused > 400


@pytest.mark.parametrize("seed", range(30))
def test_writes_are_cut_where_regions_and_messages_end(seed: int) -> None:
    """Parts of both sides and the largest message at random: every byte once, each piece within one part."""
    rng = np.random.default_rng(seed)
    local_bytes, remote_bytes = (int(n) for n in rng.integers(100, 5000, 2))
    local_part, remote_part, largest = (int(n) for n in rng.integers(7, 2000, 3))
    count = -(-remote_bytes // remote_part)
    remote = Remote(4096, remote_bytes, (remote_part,), (tuple(range(count)),))
    rows, at, to = [], 0, 0
    while at < local_bytes and to < remote_bytes:
        n = int(rng.integers(1, min(local_bytes - at, remote_bytes - to) + 1))
        rows.append((at, to, n))
        at, to = at + n, to + n + int(rng.integers(0, 50))
    moved = {}
    for a, b, cut in calls(np.array(rows, np.uint64), local_part, remote, 0, largest):
        for x, y, n in cut.tolist():
            assert 0 < n <= largest and x + n <= local_part and y + n <= remote_part
            for i in range(n):
                assert b * remote_part + y + i not in moved
                moved[b * remote_part + y + i] = a * local_part + x + i
    assert moved == {to + i: at + i for at, to, n in rows for i in range(n)}


def test_memory_is_described_with_a_key_for_every_part() -> None:
    found = remote_of(
        {"address": 8192, "nbytes": 100, "rails": [{"part_bytes": 64, "rkeys": [1, 2]}]}, 1, "the slot"
    )
    assert found == Remote(8192, 100, (64,), ((1, 2),))
