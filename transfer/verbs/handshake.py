"""What the two sides of a verbs edge tell each other, and its checks: JSON over the link's connection.

The receiver describes how the edge moves (placement, chunks, ring), its rails and the memory to write to; the
sender answers with its rails. See docs/architecture.md.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from jaxrl_sync.transfer.errors import ProtocolError

PROTOCOL = 2
MTU_BYTES = {1: 256, 2: 512, 3: 1024, 4: 2048, 5: 4096}
MAX_RAILS = 16
MAX_PAIRS = 64
MAX_PARTS = 1 << 16
MAX_CHUNK_BYTES = 64 << 20
MAX_RING = 1024
"""As in `VerbsSettings`: the sender allocates an arena of this shape."""


@dataclasses.dataclass(frozen=True)
class Remote:
    """Memory of the peer: per rail the keys of its parts, each of ``part_bytes[rail]`` bytes but the last."""

    address: int
    nbytes: int
    part_bytes: tuple[int, ...]
    rkeys: tuple[tuple[int, ...], ...]


def integer(where: dict[str, Any], name: str, low: int, high: int, what: str = "the peer's") -> int:
    """A field that must be an integer within limits. ProtocolError that names it."""
    value = where.get(name)
    if type(value) is not int or not low <= value <= high:
        raise ProtocolError(f"{what} {name} is {value!r}, expected {low} to {high}")
    return value


def listed(where: dict[str, Any], name: str, low: int, high: int, what: str = "the peer's") -> list[Any]:
    """A field that must be a list of so many entries. ProtocolError that names it."""
    value = where.get(name)
    if not isinstance(value, list) or not low <= len(value) <= high:
        raise ProtocolError(f"{what} {name} is {str(value)[:100]}, expected a list of {low} to {high}")
    return value


def check_common(other: object) -> dict[str, Any]:
    """The fields of both sides' descriptions. ProtocolError naming the first one that can't be right."""
    if not isinstance(other, dict):
        raise ProtocolError(f"the peer describes itself as {str(other)[:100]!r}, expected an object")
    integer(other, "protocol", PROTOCOL, PROTOCOL)
    if other.get("byte_order") != sys.byteorder:
        raise ProtocolError(
            f"the peer's byte_order is {other.get('byte_order')!r}, expected {sys.byteorder!r}"
        )
    for rail in listed(other, "rails", 1, MAX_RAILS):
        check_rail(rail)
    counts = {len(rail["pairs"]) for rail in other["rails"]}
    if len(counts) != 1:
        raise ProtocolError(f"the peer's rails have {sorted(counts)} queue pairs, expected equal numbers")
    remote_of(other.get("doorbell"), len(other["rails"]), "the peer's doorbell")
    return other


def check_offer(other: object) -> dict[str, Any]:
    """A receiver's description. ProtocolError naming the first field that can't be right."""
    found = check_common(other)
    if found.get("placement") not in ("placed", "staged"):
        raise ProtocolError(f"the peer's placement is {found.get('placement')!r}, expected placed or staged")
    chunk, ring = integer(found, "chunk_bytes", 64, MAX_CHUNK_BYTES), integer(found, "ring", 1, MAX_RING)
    memory = remote_of(found.get("memory"), len(found["rails"]), "the peer's ring")
    if memory.nbytes != chunk * ring:
        raise ProtocolError(f"the peer's ring has {memory.nbytes} bytes, expected ring * chunk_bytes")
    for slot in listed(found, "slots", int(found["placement"] == "placed"), 64):
        remote_of(slot, len(found["rails"]), "the peer's slot")
    return found


def check_rail(rail: object) -> None:
    """One port of a description. ProtocolError."""
    if not isinstance(rail, dict):
        raise ProtocolError(f"the peer's rail is {str(rail)[:100]!r}, expected an object")
    integer(rail, "lid", 0, 0xFFFF)
    integer(rail, "mtu", 1, 5)
    gid = rail.get("gid")
    if not isinstance(gid, str) or len(gid) != 32 or set(gid) - set("0123456789abcdef"):
        raise ProtocolError(f"the peer's gid is {gid!r}, expected 32 hexadecimal digits")
    for name in ("device", "link_layer"):
        if not isinstance(rail.get(name), str):
            raise ProtocolError(f"the peer's {name} is {rail.get(name)!r}, expected text")
    for pair in listed(rail, "pairs", 1, MAX_PAIRS):
        if not (isinstance(pair, list) and len(pair) == 2 and all(map(_is_24_bit, pair))):
            raise ProtocolError(f"the peer's queue pair is {str(pair)[:100]}, expected [qpn, psn]")
    for ece in listed(rail, "ece", len(rail["pairs"]), len(rail["pairs"])):
        if ece is not None and not (
            isinstance(ece, list | tuple) and len(ece) == 3 and all(map(_is_32_bit, ece))
        ):
            raise ProtocolError(f"the peer's ece is {str(ece)[:100]}, expected null or three of 32 bits")


def remote_of(value: object, rails: int, what: str) -> Remote:
    """The description of memory, checked: every part has a key on every rail. ProtocolError."""
    if not isinstance(value, dict):
        raise ProtocolError(f"{what} is {str(value)[:100]!r}, expected an object")
    address = integer(value, "address", 1, 2**64 - 1, what)
    nbytes = integer(value, "nbytes", 1, min(2**48, 2**64 - address), what)
    keys = []
    for rail in listed(value, "rails", rails, rails, what):
        if not isinstance(rail, dict):
            raise ProtocolError(f"{what} has the rail {str(rail)[:100]!r}, expected an object")
        part = integer(rail, "part_bytes", 1, 2**48, what)
        count = -(-nbytes // part)
        found = listed(rail, "rkeys", count, min(count, MAX_PARTS), what)
        if not all(type(key) is int and 0 <= key < 1 << 32 for key in found):
            raise ProtocolError(f"{what} has the keys {str(found)[:100]}, expected 32 bits each")
        keys.append((part, tuple(found)))
    return Remote(address, nbytes, tuple(k[0] for k in keys), tuple(k[1] for k in keys))


def _is_24_bit(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 24


def _is_32_bit(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 32
