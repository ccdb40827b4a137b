"""What files of a channel are called. Nothing else is opened, whatever a manifest says.

CHANNEL                                  what the channel is: made once, never changed
writer.lock                              held by the writer's rank 0 as long as it lives
epochs/00000003                          one per writer, in the order in which they took the channel over
versions/000000000017-LINEAGE            the manifests: a version exists if and only if its manifest does
schemas/DIGEST                           correspondence and source layout that stored tensors follow from
objects/000000000017-e3-t5-r0-table      what rank 0 wrote of a version: digests and sums per slab
objects/000000000017-e3-t5-r0-frames     its frames
anchors/000000000017-e3-t5/              a whole version, as an orbax checkpoint
leases/..., pins/..., ranks/..., groups/...
"""

from __future__ import annotations

import re
import secrets

from jaxrl_sync.transfer.files.errors import ChannelError, UnsafePath
from jaxrl_sync.transfer.version import Version

CHANNEL = "CHANNEL"
LOCK = "writer.lock"
FOLDERS = ("epochs", "versions", "schemas", "objects", "anchors", "leases", "pins", "ranks", "groups")
TEMPORARY = "tmp-"
MAX_NUMBER = 10**12
"""Numbers have twelve digits in names, so that names sort as versions do."""

_SAFE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,199}\Z")
_VERSION = re.compile(r"([0-9]{12})-([A-Za-z0-9_][A-Za-z0-9_.\-]{0,63})\Z")
_LINEAGE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]{0,63}\Z")
_STEM = re.compile(r"([0-9]{12})-e([0-9]{1,9})-t([0-9]{1,12})(-r[0-9]{1,6}-(table|frames))?\Z")


def check(name: str) -> str:
    """``name`` if it is a plain file name that a channel may use; UnsafePath. ``.zarray`` is one."""
    if name != ".zarray" and not _SAFE.match(name):
        raise UnsafePath(f"file name {name[:200]!r} isn't one that a channel uses")
    return name


def version_name(version: Version) -> str:
    """The manifest's name. ChannelError for a lineage or a number that can't be part of a file name."""
    if not _LINEAGE.match(version.lineage):
        raise ChannelError(
            f"version {version}: its lineage can't be part of a file name, expected at most 64 letters, "
            "digits, . _ -"
        )
    if version.number >= MAX_NUMBER:
        raise ChannelError(f"version {version}: its number is too large, expected less than {MAX_NUMBER}")
    return f"{version.number:012d}-{version.lineage}"


def version_of(name: str) -> Version | None:
    """The version that a manifest of this name is of, None for another file."""
    found = _VERSION.match(name)
    return Version(found[2], int(found[1])) if found else None


def stem(number: int, epoch: int, turn: int) -> str:
    """What the names of one attempt to write a version start with; never used twice."""
    return f"{number:012d}-e{epoch}-t{turn}"


def attempt_of(name: str) -> tuple[int, int] | None:
    """(epoch, turn) of an object or an anchor, None for another file."""
    found = _STEM.match(name)
    return (int(found[2]), int(found[3])) if found else None


def temporary() -> str:
    """A name of a file that isn't complete yet."""
    return TEMPORARY + secrets.token_hex(8)


def stem_of(name: str) -> str:
    """The stem of an object's or an anchor's name."""
    found = _STEM.match(name)
    return name[: found.start(4)] if found and found[4] else name
