"""The writer of a channel: exports a version on the training thread, writes and commits it in another.

One FilePublisher per trainer process, as with Publisher. Rank 0 decides what is written, commits the manifest
once every rank's part is there, and collects garbage; see `turns`. While a version is being written only the
newest one published meanwhile waits: the others are superseded.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jaxrl_sync.sharding import Layout, trace
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.sharding.paths import nested
from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import DeadlineError, TransferError
from jaxrl_sync.transfer.exports import Exported, export, shards_of
from jaxrl_sync.transfer.files import anchors, names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.collect import collect
from jaxrl_sync.transfer.files.config import FileWriterConfig
from jaxrl_sync.transfer.files.epochs import Rules
from jaxrl_sync.transfer.files.errors import ChannelError, Fenced
from jaxrl_sync.transfer.files.folder import as_channel_error
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.files.part import Order, PartWriter, Written
from jaxrl_sync.transfer.files.stored import Stored
from jaxrl_sync.transfer.files.ticket import FileOutcome, FileTicket, FileWriterStats
from jaxrl_sync.transfer.files.turns import LOOK_S, Turns
from jaxrl_sync.transfer.pairing import compare_layouts
from jaxrl_sync.transfer.process_lock import ProcessLock
from jaxrl_sync.transfer.version import Version, expect_version, new_lineage

UNDECIDED = 3
"""Exports that a rank other than 0 keeps until rank 0 says which one is written: it picks its newest, and the
ranks of one trainer are never two updates apart."""

TROUBLE_S = 1.0
"""Until a rank that can't read the channel looks again."""

logger = logging.getLogger("jaxrl_sync.transfer")


@dataclasses.dataclass(eq=False)
class _Pending:
    version: Version
    exported: Exported
    ticket: FileTicket


class FilePublisher:
    """Writes the versions of one trainer process. Owns threads, files, buffers: ``close()`` or ``with``."""

    def __init__(
        self,
        path: str | Path,
        source: Any,
        *,
        token_file: str | Path | None = None,
        config: FileWriterConfig | None = None,
        convert: Callable[[Any], Any] | None = None,
        rank: int | None = None,
        size: int | None = None,
        world: str = "",
        on_committed: Callable[[Version], None] | None = None,
    ) -> None:
        """Open the channel, or make it, and take it over from a writer that is gone.

        ``source`` is the trainer tree's Layout (or a tree that has one). With ``convert`` the leaves that it
        needs are stored, in the dtype that it casts them to; readers then give a conversion that needs the
        same ones. Without, the tree is stored as it is. ``rank`` and ``size`` default to those of the JAX
        world; with several ranks, ``world`` is a text that they share and no other start of them had.
        ``on_committed`` is called, in the writing thread, once a version exists. ChannelBusy while another
        writer lives, UnsafePath, ForeignChannel, MismatchError, DeadlineError without rank 0.
        """
        self.config = config or FileWriterConfig()
        self.source = source if isinstance(source, Layout) else Layout.of(source)
        self.rank = jax.process_index() if rank is None else rank
        self.size = jax.process_count() if size is None else size
        if self.size > 1 and not world:
            raise ValueError(f"world is empty, expected a text that the {self.size} ranks share")
        self._correspondence = trace(convert or (lambda tree: tree), self.source)
        self._stored = Stored.of(self._correspondence)
        self._on_committed = on_committed
        self._stats = FileWriterStats()
        self._changed = threading.Condition()
        self._pending: collections.deque[_Pending] = collections.deque()
        self._spare: Exported | None = None
        self._last: Version | None = None
        self._checked = False
        self._busy = False
        self._error: Exception | None = None
        self._trouble = ""
        self._stop = threading.Event()
        self._lock: ProcessLock | None = None
        token = auth.load_token(token_file) if token_file is not None else None
        with as_channel_error(f"opening {path}"):
            self._channel = Channel.create(path, self.config.trust, token, self.config.model)
        try:
            with as_channel_error(f"taking over {path}"):
                epoch = self._take_over(world or new_lineage()) if self.rank == 0 else self._follow(world)
                self._channel.add_schema(self._stored)
        except BaseException:
            self._release()
            raise
        self._turns = Turns(self._channel, epoch, self.rank, self.size, self._stop, self.config.timeout_s)
        self._part = PartWriter(self._channel, self._stored, self.rank, self.config)
        self._turn = 0
        self._since_anchor: tuple[int, int] = (0, 0)
        self._threads = [threading.Thread(target=self._run, name="file-writer", daemon=True)]
        if self.rank == 0:
            self._threads.append(threading.Thread(target=self._beat, name="file-writer-beat", daemon=True))
        for thread in self._threads:
            thread.start()

    # Opening.

    def _take_over(self, world: str) -> int:
        """Lock the channel, claim its next epoch, seal what the writers before have committed."""
        epochs = self._channel.epochs
        self._lock = epochs.lock(self._channel.root)
        epochs.check_free(self.config.holder_ttl_s)
        claimed = time.monotonic()
        epoch = epochs.claim(world)
        survey = self._channel.survey()
        sealed = Rules({e: s for e, s in survey.rules.sealed.items() if s is not None})  # without ours
        found = [m for m in (*survey.manifests, *survey.fenced) if sealed.valid(m.epoch, m.sequence)]
        self._sequence = max((m.sequence for m in found), default=0)
        epochs.seal(epoch, self._sequence, claimed)
        self._existing = {m.version for m in self._channel.manifests()}
        return epoch

    def _follow(self, world: str) -> int:
        """Wait for rank 0 of this world to have taken the channel over."""
        deadline = time.monotonic() + self.config.timeout_s
        while time.monotonic() < deadline:
            epoch = self._channel.epochs.of_world(world)
            if epoch is not None:
                return epoch
            time.sleep(LOOK_S)
        raise DeadlineError(
            f"rank 0 of world {world!r} didn't open {self._channel.where} within {self.config.timeout_s:g} s"
        )

    # What the training thread calls.

    def publish(self, tree: Any, version: Version) -> FileTicket:
        """Publish a tree of arrays (or an iterator of (path, array)) as ``version``.

        Returns once the export is computed: the caller may then donate the tree. MismatchError when the tree
        isn't what ``source`` says; TransferError when ``version`` doesn't come after the last one, or after
        those in the channel; Fenced, once another writer has taken over. All ranks call it for all versions.
        """
        start = time.monotonic()
        self._check(version)
        if isinstance(tree, Iterator):
            tree = nested(dict(tree))
        if not self._checked:
            compare_layouts(self.source, Layout.of(tree), "the published tree")
            self._checked = True
        with self._changed:
            spare, self._spare = self._spare, None
        exported = export(self._correspondence, tree, spare)
        export_s = time.monotonic() - start
        ticket = FileTicket(version, export_s)
        with self._changed:
            self._pending.append(_Pending(version, exported, ticket))
            over = [self._pending.popleft() for _ in range(len(self._pending) - self._room)]
            self._last = version
            self._stats.published += 1
            self._stats.stall_s += export_s
            self._changed.notify_all()
        self._supersede(over)
        return ticket

    @property
    def _room(self) -> int:
        return 1 if self.rank == 0 else UNDECIDED

    def _check(self, version: Version) -> None:
        expect_version(version)
        names.version_name(version)
        if self._error is not None:
            raise self._error
        if self._stop.is_set():
            raise TransferError("the file publisher is closed")
        last = self._last
        if last is not None and last.lineage == version.lineage and not version.follows(last):
            raise TransferError(f"version {version} doesn't come after {last}, which was published")
        if self.rank == 0:
            for old in self._existing:
                if old == version or old.follows(version):
                    raise TransferError(f"version {version} doesn't come after {old}, which the channel has")

    def _supersede(self, pending: list[_Pending]) -> None:
        for item in pending:
            with self._changed:
                self._stats.superseded += 1
                self._spare = item.exported
            item.ticket.settle(FileOutcome(item.version, "superseded"))

    def stats(self) -> dict[str, float]:
        """Counters as a dictionary: see FileWriterStats."""
        with self._changed:
            self._stats.baseline_bytes = self._part.baseline_bytes
            return dataclasses.asdict(self._stats)

    def drain(self, timeout_s: float) -> bool:
        """Wait until what was published is written, or has failed; False when time ran out."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._pending and not self._busy, timeout_s)

    # The writing thread.

    def _run(self) -> None:
        while not self._stop.is_set():
            self._turn += 1
            order, item = self._lead() if self.rank == 0 else self._followed()
            if order is None:
                self._turn -= 1
                continue
            self._turn = order.turn
            start = time.monotonic()
            try:
                with as_channel_error(f"writing {order.version}"):
                    outcome = self._write(order, item)
                if item is not None:
                    item.ticket.settle(dataclasses.replace(outcome, write_s=time.monotonic() - start))
                self._tell(order.version)
            except Exception as error:  # later versions need this thread, whatever this one met
                self._failed(order, item, error)
            with self._changed:
                self._stats.write_s += time.monotonic() - start
                self._spare = item.exported if item is not None else self._spare
                self._busy = False
                self._changed.notify_all()

    def _tell(self, version: Version) -> None:
        """Whatever the caller's function does, the version exists."""
        try:
            if self._on_committed is not None:
                self._on_committed(version)
        except Exception:
            logger.exception("%s is written, telling so failed", version)

    def _lead(self) -> tuple[Order | None, _Pending | None]:
        """Rank 0: what to write next, once something was published."""
        with self._changed:
            self._changed.wait_for(lambda: bool(self._pending) or self._stop.is_set())
            if self._stop.is_set():
                return None, None
            item = self._pending.popleft()
            self._busy = True
        base = self._part.base
        if base is not None and not item.version.follows(base):
            base = None
        count, nbytes = self._since_anchor
        large = nbytes >= self.config.anchor_share * self._stored.total_bytes
        anchor = base is None or count + 1 >= self.config.anchor_every or large
        stem = names.stem(item.version.number, self._turns.epoch, self._turn)
        return Order(self._turn, item.version, base, anchor, stem), item

    def _followed(self) -> tuple[Order | None, _Pending | None]:
        """Another rank: what rank 0 ordered, and the export of that version if this rank (still) has it."""
        try:
            order = self._turns.next(self._turn, 0.5)
        except (UserError, OSError) as error:
            if str(error) != self._trouble:  # it may last
                logger.warning("%s: %s", self._channel.where, error)
            self._trouble = str(error)
            self._stop.wait(TROUBLE_S)
            return None, None
        self._trouble = ""
        if order is None:
            return None, None
        with self._changed:
            self._busy = True
            self._changed.wait_for(lambda: self._has(order.version), self.config.timeout_s)
            over = [p for p in self._pending if not p.version.follows(order.version)]
            item = next((p for p in over if p.version == order.version), None)
            self._pending = collections.deque(p for p in self._pending if p not in over)
        self._supersede([p for p in over if p is not item])
        return order, item

    def _has(self, version: Version) -> bool:
        """Whether that version was published on this rank, or a later one."""
        return self._stop.is_set() or any(
            p.version == version or p.version.follows(version) for p in self._pending
        )

    def _write(self, order: Order, item: _Pending | None) -> FileOutcome:
        if self._channel.removed:
            raise ChannelError(f"{self._channel.where} was removed while it was written")
        if self.rank == 0:
            self._turns.order(order)
        if item is None:
            reason = f"version {order.version} isn't held here (any more)"
            self._turns.report(order.turn, reason)
            raise ChannelError(reason)
        boxes = shards_of(item.exported)
        if self.rank == 0:
            written = self._commit(order, boxes)
        else:
            written = [self._report(order, boxes)]
            if (failed := self._turns.outcome(order.turn)) is not None:
                raise ChannelError(failed)
        self._part.committed(order, boxes)
        with self._changed:
            self._stats.committed += 1
            self._stats.anchors += order.anchor
            self._stats.anchor_bytes += written[0].anchor_bytes
            self._stats.delta_bytes += written[0].delta_bytes
        if self.rank == 0:
            self._tidy(order)
        return FileOutcome(
            order.version,
            "committed",
            sum(w.anchor_bytes for w in written),
            sum(w.delta_bytes for w in written),
            sum(w.changed for w in written) / max(1, sum(w.elements for w in written)) if order.base else 1.0,
        )

    def _report(self, order: Order, boxes: Any) -> Written:
        """Another rank's part of a turn."""
        try:
            with as_channel_error(f"writing {order.version}"):
                written = self._part.write(order, boxes)
        except UserError as error:
            self._turns.report(order.turn, str(error))
            raise
        self._turns.report(order.turn, written)
        return written

    def _commit(self, order: Order, boxes: Any) -> list[Written]:
        """Rank 0: write, wait for the others, make the version exist."""
        written = self._turns.gather(order.turn, self._part.write(order, boxes))
        if order.anchor:
            with self._channel["anchors"].child(order.stem, create=True) as folder:
                anchors.finish(folder, self._stored, self.config.fsync)
            if self.config.fsync:
                self._channel["anchors"].sync()
        manifest = Manifest(
            self._channel.id,
            self._turns.epoch,
            order.turn,
            self._sequence + 1,
            order.version,
            order.base,
            order.stem if order.anchor else None,
            self._stored.digest,
            sum(w.anchor_bytes for w in written),
            sum(w.delta_bytes for w in written),
            time.time(),
            tuple(w.part for w in written),
        )
        self._sequence += 1  # whatever becomes of it, no other version gets this number
        self._check_not_fenced(manifest.sequence)
        document = self._channel.seal.document("manifest", manifest.to_json())
        self._channel["versions"].commit(manifest.name, document, self.config.fsync)
        self._check_not_fenced(manifest.sequence)
        count, nbytes = self._since_anchor
        self._since_anchor = (0, 0) if order.anchor else (count + 1, nbytes + manifest.delta_bytes)
        self._turns.done(order.turn, None)
        return written

    def _check_not_fenced(self, sequence: int) -> None:
        """Fenced if another writer has taken over and ``sequence`` doesn't count. Waits while that isn't
        known."""
        epoch = self._turns.epoch
        while True:
            later = {e: s for e, s in self._channel.epochs.rules().sealed.items() if e > epoch}
            if all(s is not None and sequence <= s for s in later.values()):
                return
            if any(s is not None and sequence > s for s in later.values()) or self._stop.is_set():
                raise Fenced(
                    f"{self._channel.where} was taken over by {self._channel.epochs.holder()} "
                    f"(epoch {max(later)}, this writer has {epoch}): nothing more is written"
                )
            time.sleep(LOOK_S)

    def _failed(self, order: Order, item: _Pending | None, error: Exception) -> None:
        """The version doesn't exist, or nobody knows: the next one is written on what is sure."""
        with self._changed:
            self._stats.failed += 1
        if not self._stop.is_set():
            logger.error("%s: version %s isn't written: %s", self._channel.where, order.version, error)
        if isinstance(error, DeadlineError) and self.rank != 0:
            self._part.forget()
        else:
            self._part.discarded()
        if self.rank == 0:
            with contextlib.suppress(UserError, OSError):
                self._turns.done(order.turn, str(error))
        if isinstance(error, Fenced):
            self._error = error
        elif self.rank == 0 and not self._stop.is_set():
            self._tidy(order)  # what is half written may be what fills the disk
        if item is not None:
            item.ticket.settle(error if isinstance(error, UserError) else _wrapped(order, error))

    def _tidy(self, order: Order) -> None:
        """Collect garbage; what that meets is no fault of the version."""
        try:
            with as_channel_error("collecting"):
                turn, schema = order.turn + 1, self._stored.digest
                collect(self._channel, self.config.keep, self._turns.epoch, turn, schema)
        except UserError as error:
            logger.warning("%s: %s", self._channel.where, error)

    def _beat(self) -> None:
        """Signs of life for writers on other hosts."""
        while not self._stop.wait(self.config.holder_ttl_s / 4):
            with contextlib.suppress(OSError):
                self._channel.epochs.touch(self._turns.epoch)

    # The end.

    def close(self) -> None:
        """Give up what isn't written yet (see `drain`), leave the channel. Idempotent."""
        if self._stop.is_set():
            return
        self._stop.set()
        with self._changed:
            over = list(self._pending)
            self._pending.clear()
            self._changed.notify_all()
        for item in over:
            item.ticket.settle(TransferError(f"the file publisher was closed before {item.version}"))
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(self.config.timeout_s)
        if self.rank == 0 and self._error is None:
            with contextlib.suppress(UserError, OSError):
                self._channel.epochs.end(self._turns.epoch)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.close()
        self._channel.close()

    def __enter__(self) -> FilePublisher:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _wrapped(order: Order, error: Exception) -> TransferError:
    return TransferError(f"writing {order.version}: {type(error).__name__}: {error}")
