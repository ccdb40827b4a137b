"""What changed between the exports of one kind, found on their devices: once per version, for all edges.

The baseline is the export of the version before, kept by reference; only counts, positions, old and new bits
of shards that edges read come to the host. A shard that is too dense for the encoders is read whole.
"""

from __future__ import annotations

import dataclasses
import threading
import time

import numpy as np

from jaxrl_sync.sharding.native import flat_bytes
from jaxrl_sync.transfer.codec.bits import Bits, bits_dtype
from jaxrl_sync.transfer.delta.bits import CHUNK_ELEMENTS
from jaxrl_sync.transfer.delta.shards import ShardEncoders, Shards
from jaxrl_sync.transfer.delta.sparse import Delta
from jaxrl_sync.transfer.lazy import DeviceShards
from jaxrl_sync.transfer.payload.entries import Entries, compare
from jaxrl_sync.transfer.payload.inverse import Changes, Key, Local
from jaxrl_sync.transfer.payload.marks import CHECK_EVERY, Marks
from jaxrl_sync.transfer.payload.settings import sender_room_bytes
from jaxrl_sync.transfer.version import Version


@dataclasses.dataclass(frozen=True, eq=False)
class Difference:
    """What changed in these shards from ``base`` to ``version``."""

    base: Version
    version: Version
    changes: Changes

    @property
    def nbytes(self) -> int:
        """Host memory that it takes."""
        return sum(a.nbytes for local in self.changes.values() for a in local)


@dataclasses.dataclass
class _User:
    """Shards that somebody follows, and the version up to which it knows them."""

    keys: frozenset[Key]
    version: Version


class Differences:
    """Thread-safe; a comparison is made under the lock, so that whoever asks second finds it done.

    At most ``history`` differences are kept for users that lag, and half an export's worth of bytes. Shards
    that are marked (``marks``) aren't compared, but for the first time and every `CHECK_EVERY` times. Where
    marks turn out to be wrong after some were used unchecked, every user has to follow anew.
    """

    def __init__(
        self, encoders: ShardEncoders, history: int, threads: int = 1, marks: Marks | None = None
    ) -> None:
        self.compares = 0
        """Comparisons that were made: of all shards that are followed, between two versions."""
        self.marked = 0
        """Those of them for which marks were used."""
        self._marks = marks or Marks()
        self._unproven = False  # whether marks were used that weren't held against a comparison
        self.compare_s = 0.0
        self._encoders = encoders
        self._history = history
        self._threads = threads
        self._lock = threading.Lock()
        self._baseline: DeviceShards | None = None
        self._steps: list[Difference] = []
        self._users: dict[object, _User] = {}

    @property
    def head(self) -> Version | None:
        """The version that the next one is compared with."""
        baseline = self._baseline
        return None if baseline is None else baseline.version

    @property
    def step_bytes(self) -> int:
        """Host memory of the differences that are kept."""
        with self._lock:
            return sum(s.nbytes for s in self._steps)

    def follow(self, user: object, keys: frozenset[Key], shards: DeviceShards) -> None:
        """``user`` wants to know what changes in these shards after the version of ``shards``. Blocks."""
        with self._lock:
            self._users.pop(user, None)
            self._move_to(shards)
            self._users[user] = _User(keys, shards.version)
            self._encoders.prepare(shards.parts, self._followed)
            self._tidy()

    def since(self, user: object, shards: DeviceShards) -> list[Changes] | None:
        """What changed since the version that ``user`` knows, in order; it then knows the one of ``shards``.

        None where that isn't known (any more): the user has to follow anew. Blocks for a comparison if it is
        the first to ask.
        """
        with self._lock:
            known = self._users.get(user)
            if known is None:
                return None
            head = self.head
            if head is not None and shards.version.follows(head):
                self._move_to(shards)
            found = self._between(known, shards.version)
            if found is not None:
                known.version = shards.version
                self._tidy()
            return found

    def leave(self, user: object) -> None:
        """``user`` wants nothing any more; without any the baseline goes."""
        with self._lock:
            self._users.pop(user, None)
            self._tidy()

    @property
    def _followed(self) -> frozenset[Key]:
        return frozenset[Key]().union(*(u.keys for u in self._users.values()))

    def _move_to(self, shards: DeviceShards) -> None:
        """Make a version the baseline, by a comparison where it follows the old one; an older one doesn't."""
        baseline = self._baseline
        if baseline is not None and (
            baseline.version == shards.version or baseline.version.follows(shards.version)
        ):
            return
        if baseline is None or not shards.version.follows(baseline.version):
            self._steps = []
        elif self._users:
            start = time.perf_counter()
            changes = self._compare(baseline, shards)
            self._steps.append(Difference(baseline.version, shards.version, changes))
            self.compares += 1
            self.compare_s += time.perf_counter() - start
            if self._unproven and not self._marks.trusted:
                # What marks have missed before is in no step. Without steps users follow anew, and whatever
                # their receivers hold, they get everything.
                self._steps, self._unproven = [], False
        self._baseline = shards

    def _compare(self, old: DeviceShards, new: DeviceShards) -> dict[Key, Local]:
        keys = sorted(k for k in self._followed if k in old.parts and k in new.parts)
        marks = self._marks.between(old.version, new.version, new.parts, keys)
        found = self._found(old, new, keys, marks)
        if marks:
            self.marked += 1
            self._unproven |= self.marked % CHECK_EVERY != 1
            if self.marked % CHECK_EVERY == 1:
                compared = self._found(old, new, list(marks), {})
                wrong = sorted(k for k in marks if not _equal(found[k], compared[k]))
                if wrong:
                    self._marks.distrust(f"those of {new.version} miss changes in {wrong[0][1]!r}")
                found.update(compared)
        return found

    def _found(
        self, old: DeviceShards, new: DeviceShards, keys: list[Key], marks: Shards
    ) -> dict[Key, Local]:
        found: dict[Key, Local] = {}
        for key, deltas in self._encoders.compare(old.parts, new.parts, keys, marks).items():
            if deltas is None:
                found[key] = _local_of_parts(_on_host(old, new, key, self._threads))
            else:
                found[key] = _local(deltas)
        return found

    def _between(self, known: _User, version: Version) -> list[Changes] | None:
        at, found = known.version, list[Changes]()
        for step in self._steps:
            if at == version:
                break
            if step.base == at:
                if not known.keys <= step.changes.keys():
                    return None
                found.append(step.changes)
                at = step.version
        return found if at == version else None

    def _tidy(self) -> None:
        """Let go of what no user needs, of the oldest where it is too much, of all where there is no user."""
        if not self._users:
            self._baseline, self._steps = None, []
            return
        assert self._baseline is not None
        room = sender_room_bytes(sum(self._baseline.parts[k].nbytes for k in self._followed))
        lags = [u.version for u in self._users.values()]
        while self._steps:
            base = self._steps[0].base
            needed = any(v == base or base.follows(v) for v in lags)
            large = sum(s.nbytes for s in self._steps) > room
            if needed and len(self._steps) <= self._history and not large:
                return
            self._steps.pop(0)


def _local(deltas: list[Delta]) -> Local:
    """The chunks of one shard as one list in host memory of its own: no buffer of a device stays for it."""
    parts = []
    for delta in deltas:
        assert delta.old is not None
        parts.append((delta.positions, delta.new, delta.old))
    return _local_of_parts(parts)


def _local_of_parts(parts: list[Entries]) -> Local:
    if len(parts) == 1:
        positions, new, old = parts[0]
        return np.array(positions), _bits(new), _bits(old)
    shifted = [p.astype(np.uint64) + np.uint64(i * CHUNK_ELEMENTS) for i, (p, _, _) in enumerate(parts)]
    joined = np.concatenate(shifted)
    if len(parts) * CHUNK_ELEMENTS <= 1 << 32:
        joined = joined.astype(np.uint32)
    return (
        joined,
        _bits(np.concatenate([n for _, n, _ in parts])),
        _bits(np.concatenate([o for _, _, o in parts])),
    )


def _equal(a: Local, b: Local) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def _bits(values: Bits) -> Bits:
    return np.array(values, bits_dtype(values.dtype.itemsize))


def _on_host(old: DeviceShards, new: DeviceShards, key: Key, threads: int) -> list[Entries]:
    """Both shards read whole and compared, chunk by chunk."""
    itemsize = new.parts[key].dtype.itemsize
    before, after = (flat_bytes(shards[key]).view(bits_dtype(itemsize)) for shards in (old, new))
    cuts = range(0, max(1, after.size), CHUNK_ELEMENTS)
    return [compare(before[i : i + CHUNK_ELEMENTS], after[i : i + CHUNK_ELEMENTS], threads) for i in cuts]
