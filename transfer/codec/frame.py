"""Frames: one edge's changes from a base version to a version, self-describing, closed by a digest.

Little endian, in this order:

    prefix     "JXSD", format u16 (1), 0 u16, head bytes u32 (from the start to the body), body bytes u64
    head       plan digest, base lineage, lineage (each u8 length + bytes), base number u64, number u64,
               source process u32, target process u32, sections u32, then 48 bytes per section:
               elements, entries, gap words, position bytes, value bytes (u64 each); element bytes, position
               kind, Rice parameter, position zstd, value kind, value zstd (u8 each), 0 u16
    body       per section its positions, then its values
    digest     xxh3-128 of all before it, 16 bytes

A frame is checked in this order: size, digest, head, plan and edge, base, and only then are sections decoded,
each within what the receiver expects of it.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence

import xxhash

from jaxrl_sync.transfer.codec import positions as position_codings
from jaxrl_sync.transfer.codec import values as value_codings
from jaxrl_sync.transfer.codec.bits import ITEMSIZES, Bits, Positions
from jaxrl_sync.transfer.codec.errors import CorruptFrame, FrameError, TruncatedFrame, WrongBase, WrongPlan
from jaxrl_sync.transfer.version import Version

MAGIC = b"JXSD"
FORMAT = 1
DIGEST_BYTES = 16
MAX_SECTIONS = 1 << 20
MAX_ELEMENTS = 1 << 32
_PREFIX = struct.Struct("<4sHHIQ")
_NUMBERS = struct.Struct("<QQIII")
_SECTION = struct.Struct("<QQQQQBBBBBBH")
_POSITIONS: tuple[position_codings.Kind, ...] = ("none", "all", "bitmap", "u32", "gap16", "gap8", "rice")
_VALUES: tuple[value_codings.Kind, ...] = ("overwrite", "xor", "ulp")
_PACKABLE = ("bitmap", "gap16", "gap8")


@dataclasses.dataclass(frozen=True)
class Coding:
    """How one section is written."""

    positions: position_codings.Coding
    values: value_codings.Kind = "overwrite"
    zstd: bool = False

    def __str__(self) -> str:
        return f"{self.positions}/{self.values}{'+zstd' if self.zstd else ''}"


@dataclasses.dataclass(frozen=True, eq=False)
class Changes:
    """Changes of one flat buffer: ``positions`` ascending, ``codes`` as ``kind`` says, one per position.

    ``positions`` is None where every element is there.
    """

    elements: int
    positions: Positions | None
    codes: Bits
    kind: value_codings.Kind = "overwrite"

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return int(self.codes.dtype.itemsize)


@dataclasses.dataclass(frozen=True)
class Section:
    """One row of the head's table."""

    elements: int
    count: int
    words: int
    position_bytes: int
    value_bytes: int
    itemsize: int
    coding: Coding


@dataclasses.dataclass(frozen=True)
class Head:
    """What a frame says about itself. ``plan`` is the digest of the plan that both sides computed."""

    plan: str
    base: Version
    version: Version
    source_process: int
    target_process: int
    sections: tuple[Section, ...] = ()


def encode(head: Head, changes: Sequence[Changes], codings: Sequence[Coding]) -> bytearray:
    """A frame. ``changes[i].kind`` must be the value kind of ``codings[i]``."""
    sections, body = [], list[bytes]()
    for change, coding in zip(changes, codings, strict=True):
        if change.kind != coding.values:
            raise ValueError(f"changes hold {change.kind!r} codes, the coding says {coding.values!r}")
        where, words = position_codings.encode(change.positions, change.elements, coding.positions)
        what = value_codings.encode(change.codes, coding.values, coding.zstd)
        body += [where, what]
        sections.append(
            Section(change.elements, change.codes.size, words, len(where), len(what), change.itemsize, coding)
        )
    return seal(head, sections, body)


def seal(head: Head, sections: Sequence[Section], body: Sequence[bytes]) -> bytearray:
    """A frame of sections that are encoded already."""
    texts = [head.plan.encode(), head.base.lineage.encode(), head.version.lineage.encode()]
    parts = [bytes([len(t)]) + t for t in texts]
    parts.append(
        _NUMBERS.pack(
            head.base.number, head.version.number, head.source_process, head.target_process, len(sections)
        )
    )
    parts += [_pack_section(s) for s in sections]
    head_bytes = _PREFIX.size + sum(len(p) for p in parts)
    frame = bytearray(_PREFIX.pack(MAGIC, FORMAT, 0, head_bytes, sum(len(b) for b in body)))
    for part in (*parts, *body):
        frame += part
    frame += xxhash.xxh3_128_digest(frame)
    return frame


def _pack_section(s: Section) -> bytes:
    c = s.coding
    return _SECTION.pack(
        s.elements, s.count, s.words, s.position_bytes, s.value_bytes, s.itemsize,
        _POSITIONS.index(c.positions.kind), c.positions.parameter, c.positions.zstd,
        _VALUES.index(c.values), c.zstd, 0,
    )  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Frame:
    """A frame whose size, digest and head are sound; its sections are decoded one by one."""

    head: Head
    body: memoryview

    def check(self, plan: str, source_process: int, target_process: int) -> None:
        """WrongPlan unless the frame is for this plan and edge."""
        found = (self.head.plan, self.head.source_process, self.head.target_process)
        if found != (plan, source_process, target_process):
            raise WrongPlan(
                f"a frame of plan {found[0]} from process {found[1]} to {found[2]}, "
                f"expected plan {plan} from {source_process} to {target_process}"
            )

    def check_versions(self, base: Version | None, version: Version) -> None:
        """WrongBase unless the frame leads from ``base``, which the receiver holds, to ``version``."""
        if base is None or self.head.base != base:
            raise WrongBase(f"a frame on base {self.head.base}, expected {base or 'an anchor'}")
        if self.head.version != version:
            raise WrongBase(f"a frame for version {self.head.version}, expected {version}")

    def sections(self, expected: Sequence[tuple[int, int]]) -> list[Changes]:
        """Every section decoded. ``expected``: (elements, bytes per element) of each. FrameError."""
        return [c for c in self.some_sections(expected, [True] * len(expected)) if c is not None]

    def some_sections(
        self, expected: Sequence[tuple[int, int]], wanted: Sequence[bool]
    ) -> list[Changes | None]:
        """The same, with None for those that aren't wanted: they aren't decoded."""
        found = [(s.elements, s.itemsize) for s in self.head.sections]
        if found != list(expected):
            raise FrameError(f"sections {found[:4]} of {len(found)}, expected {list(expected)[:4]}")
        decoded, at = list[Changes | None](), 0
        for section, want in zip(self.head.sections, wanted, strict=True):
            middle = at + section.position_bytes
            end = middle + section.value_bytes
            body = self.body[at:middle], self.body[middle:end]
            decoded.append(_decode(section, *body) if want else None)
            at = end
        return decoded


def _decode(section: Section, where: memoryview, what: memoryview) -> Changes:
    coding = section.coding
    places = position_codings.decode(where, coding.positions, section.count, section.words, section.elements)
    codes = value_codings.decode(what, section.count, section.itemsize, coding.values, coding.zstd)
    return Changes(section.elements, places, codes, coding.values)


def decode(data: bytes | bytearray | memoryview) -> Frame:
    """The frame in ``data``, nothing more and nothing less. TruncatedFrame, CorruptFrame, FrameError."""
    view = memoryview(data).cast("B")
    if len(view) < _PREFIX.size + DIGEST_BYTES:
        raise TruncatedFrame(f"a frame of {len(view)} bytes, expected at least {_PREFIX.size + DIGEST_BYTES}")
    magic, version, zero, head_bytes, body_bytes = _PREFIX.unpack(view[: _PREFIX.size])
    if magic != MAGIC or version != FORMAT or zero:
        raise FrameError(f"a frame starts with {magic!r}, format {version}, expected {MAGIC!r}, {FORMAT}")
    total = head_bytes + body_bytes + DIGEST_BYTES
    if total != len(view) or head_bytes < _PREFIX.size:
        raise TruncatedFrame(f"a frame of {len(view)} bytes, its head says {total}")
    if xxhash.xxh3_128_digest(view[:-DIGEST_BYTES]) != bytes(view[-DIGEST_BYTES:]):
        raise CorruptFrame(f"a frame of {len(view)} bytes doesn't give its digest")
    head = _read_head(view[_PREFIX.size : head_bytes])
    used = sum(s.position_bytes + s.value_bytes for s in head.sections)
    if used != body_bytes:
        raise FrameError(f"sections take {used} bytes of a body of {body_bytes}")
    return Frame(head, view[head_bytes:-DIGEST_BYTES])


def _read_head(view: memoryview) -> Head:
    texts = []
    for name in ("plan digest", "base lineage", "lineage"):
        length = view[0] if len(view) else 0
        if not 0 < length < len(view):
            raise FrameError(f"the {name} of a frame has {length} bytes, {len(view)} are left")
        try:
            texts.append(str(view[1 : 1 + length], "utf-8"))
        except UnicodeDecodeError as error:
            raise FrameError(f"the {name} of a frame isn't text: {error}") from error
        view = view[1 + length :]
    if len(view) < _NUMBERS.size:
        raise FrameError(f"the head of a frame ends {_NUMBERS.size - len(view)} bytes early")
    base, number, source, target, count = _NUMBERS.unpack(view[: _NUMBERS.size])
    view = view[_NUMBERS.size :]
    if count > MAX_SECTIONS or len(view) != count * _SECTION.size:
        raise FrameError(f"{len(view)} bytes of section table, expected {count} x {_SECTION.size}")
    sections = tuple(_read_section(row) for row in _SECTION.iter_unpack(view))
    return Head(texts[0], Version(texts[1], base), Version(texts[2], number), source, target, sections)


def _read_section(row: tuple[int, ...]) -> Section:
    elements, count, words, where, what, itemsize, kind, parameter, packed, values, zstd, zero = row
    if itemsize not in ITEMSIZES or not count <= elements <= MAX_ELEMENTS:
        raise FrameError(f"a section of {count} entries in {elements} elements of {itemsize} bytes")
    if kind >= len(_POSITIONS) or values >= len(_VALUES) or max(packed, zstd) > 1 or zero:
        raise FrameError(f"codings {kind}, {values} with flags {packed}, {zstd}, {zero} are unknown")
    name = _POSITIONS[kind]
    if packed and name not in _PACKABLE or parameter and name != "rice":
        raise FrameError(f"positions {name!r} with zstd {packed} and parameter {parameter}")
    coding = Coding(position_codings.Coding(name, parameter, bool(packed)), _VALUES[values], bool(zstd))
    return Section(elements, count, words, where, what, itemsize, coding)


def num_changed(changes: Sequence[Changes]) -> int:
    """Entries over all sections."""
    return sum(c.codes.size for c in changes)
