"""Manifests and tables: what a version consists of. Everything that comes from a file is checked here."""

from __future__ import annotations

import dataclasses
import re
from typing import Any, NoReturn

from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.errors import BrokenObject
from jaxrl_sync.transfer.version import Version

MAX_MANIFEST_BYTES = 16 << 20
MAX_TABLE_BYTES = 512 << 20
MAX_SCHEMA_BYTES = 512 << 20
MAX_PARTS = 1 << 16
MAX_BYTES = 1 << 50

_SCHEMA = re.compile(r"[0-9a-f]{32}\Z")

Pair = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Part:
    """What one rank wrote: its table, an object whose digest the manifest has."""

    rank: int
    table: str
    nbytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Manifest:
    """One committed version. ``sequence`` counts the channel's versions; ``base`` is what its frames are on.

    ``anchor`` names the folder with the whole of it; a version has an anchor, frames, or both.
    """

    channel: str
    epoch: int
    turn: int
    sequence: int
    version: Version
    base: Version | None
    anchor: str | None
    schema: str
    anchor_bytes: int
    delta_bytes: int
    time_s: float
    parts: tuple[Part, ...]

    @property
    def name(self) -> str:
        """Its file name."""
        return names.version_name(self.version)

    @property
    def nbytes(self) -> int:
        """All bytes that were written for it."""
        return self.anchor_bytes + self.delta_bytes

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        return {
            **{k: getattr(self, k) for k in _FIELDS},
            "version": [self.version.lineage, self.version.number],
            "base": None if self.base is None else [self.base.lineage, self.base.number],
            "parts": [[p.rank, p.table, p.nbytes, p.digest] for p in self.parts],
        }

    @classmethod
    def of_json(cls, data: dict[str, Any], where: str) -> Manifest:
        """BrokenObject names the field that no writer writes so."""
        get = _Fields(data, where)
        anchor = data.get("anchor")
        if anchor is not None and names.attempt_of(get.text("anchor")) is None:
            get.fail("anchor")
        rows = data.get("parts")
        if not isinstance(rows, list) or not 0 < len(rows) <= MAX_PARTS:
            get.fail("parts")
        parts = tuple(_part(row, get) for row in rows)
        if len({p.rank for p in parts}) != len(parts):
            get.fail("parts")
        made = cls(
            get.text("channel"),
            get.integer("epoch"),
            get.integer("turn"),
            get.integer("sequence"),
            get.version("version"),
            None if data.get("base") is None else get.version("base"),
            anchor,
            get.text("schema"),
            get.integer("anchor_bytes"),
            get.integer("delta_bytes"),
            float(get.integer("time_s", float)),
            parts,
        )
        if made.anchor is None and made.base is None:
            get.fail("base")
        if not _SCHEMA.match(made.schema):
            get.fail("schema")
        return made


_FIELDS = (
    "channel", "epoch", "turn", "sequence", "anchor", "schema", "anchor_bytes", "delta_bytes", "time_s",
)  # fmt: skip


def _part(row: Any, get: _Fields) -> Part:
    if not isinstance(row, list) or [type(x) for x in row] != [int, str, int, str]:
        get.fail("parts")
    part = Part(*row)
    if part.rank < 0 or not 0 < part.nbytes <= MAX_TABLE_BYTES or names.attempt_of(part.table) is None:
        get.fail("parts")
    return part


@dataclasses.dataclass(frozen=True)
class FrameRow:
    """One frame of a rank's frames object: where it is, and the slabs of the rank that it covers."""

    offset: int
    nbytes: int
    first: int
    count: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Table:
    """What one rank wrote of a version, slab by slab in the order of `Stored.of_rank`.

    ``sums``: the state digest of each slab at this version. ``digests`` of the slabs' bytes in the anchor.
    """

    rank: int
    sums: tuple[Pair, ...]
    digests: tuple[str, ...] | None
    frames_object: str | None
    frames: tuple[FrameRow, ...]

    def to_json(self) -> dict[str, Any]:
        """As it is written."""
        frames = [[f.offset, f.nbytes, f.first, f.count, f.digest] for f in self.frames]
        digests = None if self.digests is None else list(self.digests)
        sums = [list(s) for s in self.sums]
        return {"rank": self.rank, "sums": sums, "digests": digests, "object": self.frames_object,
                "frames": frames}  # fmt: skip

    @classmethod
    def of_json(cls, data: dict[str, Any], where: str, rank: int, slabs: int) -> Table:
        """BrokenObject unless it is the table of ``rank`` over ``slabs`` slabs."""
        get = _Fields(data, where)
        if data.get("rank") != rank:
            get.fail("rank")
        sums = data.get("sums")
        if not isinstance(sums, list) or len(sums) != slabs or not all(_is_pair(s) for s in sums):
            get.fail("sums")
        digests = data.get("digests")
        if digests is not None and not (
            isinstance(digests, list) and len(digests) == slabs and all(isinstance(d, str) for d in digests)
        ):
            get.fail("digests")
        name = data.get("object")
        if name is not None and names.attempt_of(get.text("object")) is None:
            get.fail("object")
        return cls(
            rank,
            tuple((s[0], s[1]) for s in sums),
            None if digests is None else tuple(digests),
            name,
            _frames(data.get("frames"), slabs, get) if name is not None else (),
        )


def _frames(rows: Any, slabs: int, get: _Fields) -> tuple[FrameRow, ...]:
    """Frames must cover the rank's slabs once, in order, and follow each other in the object."""
    if not isinstance(rows, list) or len(rows) > slabs:
        get.fail("frames")
    found, slab, at = [], 0, 0
    for row in rows:
        if not isinstance(row, list) or [type(x) for x in row] != [int, int, int, int, str]:
            get.fail("frames")
        frame = FrameRow(*row)
        if (frame.offset, frame.first) != (at, slab) or frame.nbytes < 1 or frame.count < 1:
            get.fail("frames")
        at, slab = at + frame.nbytes, slab + frame.count
        found.append(frame)
    if slab != slabs or at > MAX_BYTES:
        get.fail("frames")
    return tuple(found)


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, list)
        and len(value) == 2
        and all(type(v) is int and 0 <= v < 1 << 32 for v in value)
    )


class _Fields:
    """Typed access to the fields of a document."""

    def __init__(self, data: dict[str, Any], where: str) -> None:
        self._data = data
        self._where = where

    def fail(self, field: str) -> NoReturn:
        """BrokenObject for one field."""
        raise BrokenObject(f"{self._where}: field {field!r} is {str(self._data.get(field))[:200]}")

    def integer(self, field: str, kind: type = int) -> Any:
        """A number that isn't negative and not absurd."""
        value = self._data.get(field)
        if type(value) not in (int, kind) or not 0 <= value <= MAX_BYTES:  # type: ignore[operator]
            self.fail(field)
        return value

    def text(self, field: str) -> str:
        """A short text."""
        value = self._data.get(field)
        if not isinstance(value, str) or not 0 < len(value) <= 200:
            self.fail(field)
        return value

    def version(self, field: str) -> Version:
        """A version that can have a manifest."""
        value = self._data.get(field)
        if not isinstance(value, list) or [type(v) for v in value] != [str, int]:
            self.fail(field)
        try:
            made = Version(value[0], value[1])
            names.version_name(made)
        except Exception:
            self.fail(field)
        return made
