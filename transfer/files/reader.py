"""The reader of a channel: takes versions into its slots, whatever its own layout is, and swaps them in.

The same calls as of Subscriber: ``poll``, ``prepare``, ``swap``. Needs no hub and no other process: who comes
late, sits at another site or looks back after the run reads the same files.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jaxrl_sync.sharding import Copy, CopyTable, Layout, copies_digest, plan, trace
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import MismatchError, TransferError
from jaxrl_sync.transfer.files.chains import Chain
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import FileReaderConfig
from jaxrl_sync.transfer.files.errors import ChannelError, NoVersion
from jaxrl_sync.transfer.files.folder import as_channel_error
from jaxrl_sync.transfer.files.group import Group
from jaxrl_sync.transfer.files.image import Image, Read, bring, leased_chain, needed
from jaxrl_sync.transfer.files.leases import ReaderLease
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.files.stored import Stored
from jaxrl_sync.transfer.memory import PrivateMemory
from jaxrl_sync.transfer.pairing import Pairing
from jaxrl_sync.transfer.receiving import Prepared
from jaxrl_sync.transfer.slots import Slot, Target
from jaxrl_sync.transfer.version import Version, expect_version

CLOSE_S = 5.0
BACKOFF_S = (0.05, 0.2, 0.5, 1.0, 2.0)

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass
class FileReaderStats:
    """Counters since the start; bytes are those that were read, seconds those of whole preparations."""

    prepared: int = 0
    installed: int = 0
    failed: int = 0
    anchors: int = 0
    anchor_bytes: int = 0
    delta_bytes: int = 0
    prepare_s: float = 0.0


class FileUpdate:
    """A version that this reader may take. Not thread-safe: one thread prepares and swaps."""

    def __init__(self, subscriber: FileSubscriber, version: Version, number: int = 0) -> None:
        self._subscriber = subscriber
        self._number = number
        self.version = version
        self.report: Prepared | None = None

    def prepare(self, timeout_s: float | None = None) -> Prepared:
        """Read the version into a free slot and check it; with several ranks, wait until all have.

        Blocks: files can't be read with a deadline, only the wait for other ranks ends after ``timeout_s``
        (the config's by default). After an error the serving version is untouched and ``poll`` offers again.
        NoVersion where it was collected meanwhile, BrokenObject, FrameError and other kinds of TransferError.
        """
        if self.report is None:
            self.report = self._subscriber._prepare(self, timeout_s)
        return self.report

    def swap(self) -> Any:
        """Make the prepared version the serving one and return its tree of arrays (an assignment, no copy).

        Call it when the outputs of the last step are ready: the slot that served is overwritten later.
        """
        return self._subscriber._swap(self)

    def discard(self, reason: str) -> None:
        """Give the version up; ``poll`` may offer it again."""
        self._subscriber._discard(self, reason)


@dataclasses.dataclass(frozen=True, eq=False)
class _Pair:
    """One schema brought together with the target: what to copy from the image into a slot."""

    pairing: Pairing
    copies: tuple[Copy, ...]
    table: CopyTable
    constants: tuple[Copy, ...]
    image: Image


class FileSubscriber:
    """Reads the versions of a channel for one rank. Owns slots, files, threads: ``close()`` or ``with``.

    Arrays that ``swap`` returned stay valid after ``close``; their memory goes with them.
    """

    def __init__(
        self,
        path: str | Path,
        target: Any,
        convert: Callable[[Any], Any] | None = None,
        *,
        token_file: str | Path | None = None,
        config: FileReaderConfig | None = None,
    ) -> None:
        """Allocate the slots; the channel itself may come later.

        ``target`` is the tree of ``jax.ShapeDtypeStruct`` with shardings, ``convert`` makes it from the
        trainer's tree (None: it is the trainer's tree, on another mesh perhaps). ResourceError when the slots
        don't fit, AuthError for the token file.
        """
        self.config = config or FileReaderConfig()
        self._path = path
        self._token = auth.load_token(token_file) if token_file is not None else None
        self._convert = convert or (lambda tree: tree)
        self._target = Target.of(target, self.config.rank)
        self._slots: list[Slot] = []
        self._channel: Channel | None = None
        self._lease: ReaderLease | None = None
        self._group: Group | None = None
        self._pairs: dict[str, _Pair] = {}
        self._serving: int | None = None
        self._installed: Version | None = None
        self._prepared: tuple[FileUpdate, int | None] | None = None
        self._stats = FileReaderStats()
        self._lock = threading.RLock()
        self._reading = threading.Lock()
        self._closed = threading.Event()
        self._retry_at = 0.0
        self._failures = 0
        try:
            for _ in range(self.config.slots):
                self._slots.append(Slot(self._target, PrivateMemory(self._target.slot.total_bytes)))
        except BaseException:
            self.close()
            raise

    # What the engine calls.

    @property
    def installed(self) -> Version | None:
        """The version that serves, None before the first swap."""
        return self._installed

    def poll(self, timeout_s: float = 0.0) -> FileUpdate | None:
        """The newest version that may be taken, or None; looks again until ``timeout_s`` is over.

        ForeignChannel and UnsafePath are raised; a folder that isn't there yet is waited for. Another rank
        than 0 is offered what rank 0 prepares.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            self._check_open()
            if time.monotonic() >= self._retry_at:
                with as_channel_error(f"looking into {self._path}"):
                    found = self._look()
                if found is not None:
                    return found
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self._closed.wait(min(left, self.config.poll_s))

    def _look(self) -> FileUpdate | None:
        channel = self._open()
        if channel is None:
            return None
        if self._group is not None and self.config.rank:
            followed = self._group.follow()
            return None if followed is None else FileUpdate(self, followed[1], followed[0])
        if self._group is not None and not self._group.settled:
            return None
        manifests = channel.manifests()
        if not manifests:
            return None
        newest, have = manifests[-1].version, self._installed
        if newest == have or (have is not None and have.follows(newest)):
            return None
        return FileUpdate(self, newest)

    def offer(self, version: Version) -> FileUpdate:
        """An update for one version, the newest or not. NoVersion, other kinds of ChannelError."""
        expect_version(version)
        self._check_open()
        channel = self._open()
        if channel is None:
            raise NoVersion(f"{self._path} is no channel (yet)")
        return FileUpdate(self, channel.manifest(version).version)

    def versions(self) -> list[Version]:
        """All versions that can be offered, in the order in which they were committed."""
        channel = self._open()
        return [] if channel is None else [m.version for m in channel.manifests()]

    def _open(self) -> Channel | None:
        with self._lock:
            self._check_open()
            if self._channel is not None and self._channel.removed:
                logger.warning("%s was removed: waiting for another channel there", self._path)
                self._leave()
            if self._channel is None:
                config = self.config
                try:
                    self._channel = Channel.open(self._path, config.trust, self._token, config.model)
                except NoVersion:
                    return None
                self._lease = ReaderLease(self._channel, config.lease_ttl_s)
                if config.size > 1:
                    ranks = config.rank, config.size
                    self._group = Group(self._channel, config.world, *ranks, self._closed)
            return self._channel

    def _leave(self) -> None:
        """Let go of the channel; the slots, and what serves, stay."""
        if self._lease is not None:
            self._lease.close()
        if self._channel is not None:
            try:
                if self._group is not None:
                    self._group.close()
            except (OSError, ChannelError) as error:
                logger.info("%s: %s", self._path, error)
            self._channel.close()
        self._channel = self._lease = self._group = None
        self._pairs = {}

    def _check_open(self) -> None:
        if self._closed.is_set():
            raise TransferError("the file subscriber is closed")

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see FileReaderStats."""
        with self._lock:
            return dataclasses.asdict(self._stats)

    # Preparing.

    def _prepare(self, update: FileUpdate, timeout_s: float | None) -> Prepared:
        start = time.monotonic()
        deadline = start + (self.config.timeout_s if timeout_s is None else timeout_s)
        self._check_open()
        if self._prepared is not None:
            self._discard(self._prepared[0], f"{update.version} is prepared")
        try:
            with self._reading, as_channel_error(f"reading {update.version}"):
                report, slot = self._take_together(update, deadline)
        except BaseException:
            with self._lock:
                self._stats.failed += 1
                self._retry_at = time.monotonic() + BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)]
                self._failures += 1
            raise
        with self._lock:
            self._failures = 0
            self._prepared = update, slot
            self._stats.prepared += 1
            self._stats.prepare_s += time.monotonic() - start
        return dataclasses.replace(report, prepare_s=time.monotonic() - start)

    def _take_together(self, update: FileUpdate, deadline: float) -> tuple[Prepared, int | None]:
        group, lead = self._group, self.config.rank == 0
        if group is not None and lead:
            group.lead(update.version)
        try:
            found = self._take(update.version)
        except (UserError, OSError) as error:
            if group is not None and not lead:
                group.report(update._number, f"{type(error).__name__}: {error}")
            raise
        if group is not None:
            group.gather(deadline) if lead else group.report(update._number, None)
        return found

    def _take(self, version: Version) -> tuple[Prepared, int | None]:
        """Bring a version into a free slot: what was read, and the slot (None: it serves already)."""
        if version == self._installed:
            return Prepared(version, 0, 0.0, 0.0, 0.0, "file"), None
        channel, lease = self._channel, self._lease
        assert channel is not None and lease is not None
        start, read = time.monotonic(), Read()
        try:
            manifest, chain = self._leased(channel, lease, version)
            pair = self._pair(channel, manifest)
            bring(pair.image, chain, read)
            read_s = time.monotonic() - start
            pair.image.verify(manifest)
        finally:
            lease.release()
        with self._lock:
            self._stats.anchors += chain.anchor is not None
            self._stats.anchor_bytes += read.anchor_bytes
            self._stats.delta_bytes += read.delta_bytes
        number = next(i for i in range(len(self._slots)) if i != self._serving)
        filled = time.monotonic()
        moved = self._fill(pair, self._slots[number])
        now = time.monotonic()
        seconds = {"wire": read_s, "verify": filled - start - read_s, "apply": now - filled}
        return _prepared(version, chain, read, seconds, moved), number

    def _leased(self, channel: Channel, lease: ReaderLease, version: Version) -> tuple[Manifest, Chain]:
        """The cheapest chain from what this reader holds, under a lease."""
        pair = self._pairs.get(channel.manifest(version).schema)
        return leased_chain(channel, lease, version, pair.image if pair is not None else None)

    def _fill(self, pair: _Pair, slot: Slot) -> Mapping[str, int]:
        """Copy from the image into a slot, and see that what arrived is what was read. MismatchError."""
        if slot.constants_of != pair.pairing.digest:
            if pair.constants:
                values = {(-1, name): v for name, v in pair.pairing.plan.constant_values.items()}
                CopyTable.direct(pair.constants).execute(values, slot.views)
            slot.constants_of = pair.pairing.digest
        sums: dict[str, tuple[int, int]] = {}
        pair.table.execute(pair.image.boxes, slot.views, self.config.threads, sums)
        found = copies_digest(pair.copies, slot.views, "target", self.config.threads)
        wrong = sorted(p for p in found if found[p] != sums.get(p))
        if wrong:
            raise MismatchError(f"bits in the slot differ from those read in: {', '.join(wrong[:5])}")
        slot.fill_devices()
        return {"copied": pair.table.total_bytes}

    def _pair(self, channel: Channel, manifest: Manifest) -> _Pair:
        """The plan from a schema to the target; planned once per schema, the last one is kept."""
        if manifest.schema not in self._pairs:
            stored = channel.stored(manifest.schema)
            self._pairs = {manifest.schema: self._paired(channel, stored)}
        return self._pairs[manifest.schema]

    def _paired(self, channel: Channel, stored: Stored) -> _Pair:
        source = stored.correspondence.source
        assert source is not None
        mine = trace(self._convert, source, self._target.layout)
        _check_leaves(stored, mine)
        layout = Layout({leaf.name: stored.layout[leaf.name] for leaf in mine.exported})
        pairing = Pairing(self._target.layout, mine, plan(layout, self._target.layout, mine))
        rank = pairing.rank(self.config.rank, "target")
        copies = tuple(c for edge in rank.edges for c in edge.copies)
        image = Image(channel, stored, needed(stored, copies), self.config.threads, self._closed)
        return _Pair(pairing, copies, CopyTable.direct(copies), rank.constants, image)

    # The end of an update.

    def _swap(self, update: FileUpdate) -> Any:
        with self._lock:
            self._check_open()
            if self._prepared is None or self._prepared[0] is not update:
                raise TransferError(f"version {update.version} isn't prepared, it can't be swapped in")
            slot = self._prepared[1]
            self._prepared = None
            self._serving = self._serving if slot is None else slot
            self._installed = update.version
            self._stats.installed += 1
            assert self._serving is not None
            tree = self._slots[self._serving].tree()
        if self._group is not None and self.config.rank == 0:
            self._group.led()
        elif self._group is not None:  # a file system may be slow, and a step waits
            args = self._group, update._number
            threading.Thread(target=_tell_taken, args=args, name="file-group", daemon=True).start()
        return tree

    def _discard(self, update: FileUpdate, reason: str) -> None:
        with self._lock:
            if self._prepared is not None and self._prepared[0] is update:
                logger.info("%s is given up: %s", update.version, reason)
                self._prepared = None

    def close(self) -> None:
        """Give up the lease and the slots that nobody looks at; what is being read ends. Idempotent."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._reading.acquire(timeout=CLOSE_S)
        with self._lock:
            self._leave()
        for slot in self._slots:
            slot.close()

    def __enter__(self) -> FileSubscriber:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _tell_taken(group: Group, number: int) -> None:
    """Until it works: rank 0 prepares nothing before that."""
    for pause_s in (*BACKOFF_S, *BACKOFF_S[-1:] * 20):
        try:
            group.took(number)
            return
        except (OSError, ChannelError) as error:
            logger.warning("rank 0 isn't told of a swap: %s", error)
            time.sleep(pause_s)


def _check_leaves(stored: Stored, mine: Any) -> None:
    """MismatchError unless what this reader's conversion needs is what the channel stores.

    A computed leaf isn't known by its name: then both conversions must be the same.
    """
    theirs = {leaf.name: leaf for leaf in stored.correspondence.exported}
    for leaf in mine.exported:
        found = theirs.get(leaf.name)
        if found is None or (found.kind, found.shape, found.dtype) != (leaf.kind, leaf.shape, leaf.dtype):
            what = "isn't stored" if found is None else f"is stored as {found.dtype}{list(found.shape)}"
            raise MismatchError(
                f"the conversion needs {leaf.name!r} as {leaf.dtype}{list(leaf.shape)}, which {what} in the "
                f"channel; stored are {', '.join(sorted(theirs)[:4])}, ..."
            )
        if leaf.kind == "computed" and mine.digest != stored.correspondence.digest:
            raise MismatchError(
                f"the conversion computes {leaf.name!r} ({leaf.reason}): its digest is {mine.digest}, the "
                f"writer's {stored.correspondence.digest}"
            )


def _prepared(
    version: Version, chain: Chain, read: Read, seconds: Mapping[str, float], moved: Mapping[str, int]
) -> Prepared:
    """The report of one preparation. ``seconds``: reading, counting digests, copying into the slot."""
    kinds = (["full"] if chain.anchor is not None else []) + (["frame"] if chain.deltas else [])
    density = 1.0 if chain.anchor is not None else read.changed / max(1, read.elements)
    return Prepared(
        version=version,
        nbytes=read.anchor_bytes + read.delta_bytes,
        wire_s=seconds["wire"],
        verify_s=seconds["verify"] + seconds["apply"],
        prepare_s=0.0,
        transport="file",
        payload="+".join(kinds) or "full",
        coding=", ".join(sorted(read.codings)),
        density=density,
        moved=moved,
        seconds=seconds,
    )
