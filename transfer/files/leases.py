"""Leases of readers: which versions must stay while somebody reads them; and pins, until they are taken off.

A lease is a small file that its reader touches; what it covers never changes, a reader that moves on writes
another one. Whether it has expired is told by the clock of the file system alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import logging
import secrets
import threading
from collections.abc import Iterable

from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.errors import ChannelError, NoVersion
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.version import Version

MAX_LEASE_BYTES = 1 << 20
MAX_TTL_S = 3600.0
_NO_LEASE = (errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOSPC, errno.EDQUOT)

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(frozen=True)
class Held:
    """What unexpired leases cover: versions, and stems of the names of their files."""

    versions: frozenset[Version]
    stems: frozenset[str]


class ReaderLease:
    """One reader's lease. Owns a thread that touches it: ``close()`` or ``with``."""

    def __init__(self, channel: Channel, ttl_s: float) -> None:
        self._folder = channel["leases"]
        self._seal = channel.seal
        self._ttl_s = min(ttl_s, MAX_TTL_S)
        self._id = secrets.token_hex(8)
        self._number = 0
        self._name: str | None = None
        self._warned = False
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="file-lease", daemon=True)
        self._thread.start()

    def hold(self, manifests: Iterable[Manifest]) -> None:
        """Cover these versions and nothing else. A folder that is read-only here, or full, is read without a
        lease: what is collected meanwhile is then found missing.
        """
        held = list(manifests)
        value = {
            "ttl_s": self._ttl_s,
            "versions": [[m.version.lineage, m.version.number] for m in held],
            "stems": [names.stem(m.version.number, m.epoch, m.turn) for m in held],
        }
        with self._lock:
            before = self._name
            self._number += 1
            self._name = f"{self._id}-{self._number}"
            try:
                self._folder.commit(self._name, self._seal.document("lease", value), sync=False)
            except OSError as error:
                if error.errno not in _NO_LEASE:
                    raise
                if not self._warned:
                    why = error.strerror
                    logger.warning("%s can't be written (%s): read without a lease", self._folder.where, why)
                self._name, self._warned = None, True
            if before is not None:
                self._folder.remove(before)

    def release(self) -> None:
        """Cover nothing any more; until the next `hold`."""
        with self._lock:
            name, self._name = self._name, None
            if name is not None:
                self._folder.remove(name)

    def _beat(self) -> None:
        while not self._closed.wait(self._ttl_s / 4):
            with self._lock:
                if self._name is not None:
                    with contextlib.suppress(OSError):  # the next beat may find the folder again
                        self._folder.touch(self._name)

    def close(self) -> None:
        """Give the lease up. Idempotent."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(5.0)
        with contextlib.suppress(OSError):
            self.release()

    def __enter__(self) -> ReaderLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def held(channel: Channel) -> Held:
    """What the leases of live readers cover; expired leases, and what isn't one, are removed.

    Where nothing can be written, as on a full disk, nobody can tell the time: no lease has expired then.
    """
    folder = channel["leases"]
    found = folder.names()
    versions, stems = set[Version](), set[str]()
    try:
        now_s = folder.now_s() if found else 0.0
    except OSError as error:
        if error.errno not in _NO_LEASE:
            raise
        now_s = 0.0
    for name in found:
        touched_s = folder.mtime_s(name) if name == _plain(name) else None
        if touched_s is None:
            continue
        silent_s = now_s - touched_s
        try:
            value = channel.seal.open("lease", folder.read(name, MAX_LEASE_BYTES), f"{folder.where}/{name}")
            alive = silent_s < min(float(value["ttl_s"]), MAX_TTL_S)
            covered = {Version(lineage, number) for lineage, number in value["versions"]}
            named = {names.check(str(s)) for s in value["stems"]}
        except NoVersion:
            continue
        except (ChannelError, ArithmeticError, ValueError, TypeError, KeyError):
            alive, covered, named = silent_s < MAX_TTL_S, set(), set()  # perhaps one that is being written
        if alive:
            versions |= covered
            stems |= named
        else:
            folder.remove(name)
    return Held(frozenset(versions), frozenset(stems))


def _plain(name: str) -> str | None:
    try:
        return names.check(name)
    except ChannelError:
        return None


def pin(channel: Channel, version: Version) -> None:
    """Keep a version until it is unpinned. NoVersion if it isn't there (any more)."""
    name = names.version_name(version)
    with contextlib.suppress(ChannelError):  # pinned already
        channel["pins"].commit(name, b"")
    try:
        channel.manifest(version)
    except NoVersion:
        channel["pins"].remove(name)
        raise


def unpin(channel: Channel, version: Version) -> None:
    """Let a version go when its time comes."""
    channel["pins"].remove(names.version_name(version))


def pinned(channel: Channel) -> frozenset[Version]:
    """All pinned versions."""
    found = (names.version_of(n) for n in channel["pins"].names())
    return frozenset(v for v in found if v is not None)
