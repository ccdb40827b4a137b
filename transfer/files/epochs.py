"""Who writes a channel: epochs, one per writer, in the order in which they took it over.

A writer claims the next epoch by creating its file, then looks what its predecessors have committed, and
*seals* the epoch with the highest sequence number that it found. From the claim on, whatever an older writer
commits with a higher number than that doesn't exist, for any reader; so a writer that was taken for dead
can't add to a channel that another one continues. Between claim and seal readers take nothing new.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import socket
import time
import uuid
from typing import Any

from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.errors import (
    BrokenObject,
    ChannelBusy,
    ChannelError,
    Fenced,
    ForeignChannel,
    NoVersion,
)
from jaxrl_sync.transfer.files.folder import Folder
from jaxrl_sync.transfer.files.seal import Seal
from jaxrl_sync.transfer.process_lock import ProcessLock, boot

MAX_EPOCH_BYTES = 1 << 16
UNSEALED_S = 30.0
"""A claim that isn't sealed after so long is of a writer that died: it is as if it had never been."""

_NAME = re.compile(r"([0-9]{8})(-sealed|-closed)?\Z")


@dataclasses.dataclass(frozen=True)
class Rules:
    """Epoch -> the highest sequence that counts of the epochs before it; None while that isn't known."""

    sealed: dict[int, int | None]

    def valid(self, epoch: int, sequence: int) -> bool:
        """Whether a manifest of that epoch counts."""
        later = [s for e, s in self.sealed.items() if e > epoch]
        return epoch in self.sealed and all(s is not None and sequence <= s for s in later)

    @property
    def newest(self) -> int:
        """The newest epoch, 0 before the first."""
        return max(self.sealed, default=0)


class Epochs:
    """The folder of epochs. Files of it never change, so each is read once."""

    def __init__(self, folder: Folder, seal: Seal) -> None:
        self._folder = folder
        self._seal = seal
        self._known: dict[str, dict[str, Any]] = {}
        self._never: set[int] = set()

    def _read(self, name: str) -> dict[str, Any]:
        """An epoch's file; BrokenObject for a copy of another one's, which has a seal too."""
        if name not in self._known:
            where = f"{self._folder.where}/{name}"
            found = self._seal.open("epoch", self._folder.read(name, MAX_EPOCH_BYTES), where)
            if found.get("epoch") != int(name[:8]):
                raise BrokenObject(f"{where} speaks of epoch {str(found.get('epoch'))[:32]}")
            self._known[name] = found
        return self._known[name]

    def rules(self) -> Rules:
        """What counts now."""
        found = [m for m in map(_NAME.match, self._folder.names()) if m is not None]
        sealed: dict[int, int | None] = {}
        for match in found:
            if match[2] is None:
                sealed[int(match[1])] = None
        for match in found:
            if match[2] == "-sealed" and int(match[1]) in sealed:
                with contextlib.suppress(BrokenObject, ForeignChannel, NoVersion):
                    sealed[int(match[1])] = _integer(self._read(match[0]).get("sequence"))
        last = max((e for e, s in sealed.items() if s is not None), default=0)
        for epoch in [e for e, s in sealed.items() if s is None]:
            if epoch < last:  # its writer never wrote anything, and what it may write doesn't count
                del sealed[epoch]
                continue
            if epoch in self._never or self._given_up(epoch):
                self._never.add(epoch)
                del sealed[epoch]
        return Rules(sealed)

    def _given_up(self, epoch: int) -> bool:
        """Whether a claim is so old that its writer can't seal it any more. A reader that can't write has
        only its own clock to tell."""
        since_s = self._folder.mtime_s(_name(epoch))
        try:
            now_s = self._folder.now_s()
        except OSError:
            now_s = time.time()
        return since_s is None or now_s - since_s >= UNSEALED_S

    def numbers(self) -> list[int]:
        """All epochs that were ever claimed and are still known."""
        found = map(_NAME.match, self._folder.names())
        return sorted({int(m[1]) for m in found if m is not None and m[2] is None})

    def claim(self, world: str) -> int:
        """Create the next epoch."""
        while True:
            epoch = max(self.numbers(), default=0) + 1
            about = {"epoch": epoch, "world": world, "pid": os.getpid(), "host": host(), "boot": _boot()}
            document = self._seal.document("epoch", {**about, "time_s": time.time()})
            try:
                self._folder.commit(_name(epoch), document)
            except ChannelError as error:
                if "is there already" not in str(error):
                    raise
                continue
            return epoch

    def seal(self, epoch: int, sequence: int, claimed: float) -> None:
        """Say what counts of the epochs before; ``claimed``: ``time.monotonic()`` before the claim."""
        if time.monotonic() - claimed > UNSEALED_S / 2:
            raise Fenced(f"epoch {epoch} of {self._folder.where} took too long to begin; open it again")
        document = self._seal.document("epoch", {"epoch": epoch, "sequence": sequence})
        self._folder.commit(_name(epoch) + "-sealed", document)

    def of_world(self, world: str) -> int | None:
        """The newest epoch, if rank 0 of this world claimed and sealed it."""
        numbers = self.numbers()
        if not numbers:
            return None
        with contextlib.suppress(BrokenObject, ForeignChannel, NoVersion):
            if self._read(_name(numbers[-1])).get("world") == world and self._is_sealed(numbers[-1]):
                return numbers[-1]
        return None

    def _is_sealed(self, epoch: int) -> bool:
        return self._folder.mtime_s(_name(epoch) + "-sealed") is not None

    def touch(self, epoch: int) -> None:
        """A sign of life."""
        self._folder.touch(_name(epoch))

    def end(self, epoch: int) -> None:
        """The writer leaves: whoever comes next needn't wait."""
        with contextlib.suppress(ChannelError):
            self._folder.commit(_name(epoch) + "-closed", self._seal.document("epoch", {"epoch": epoch}))

    def check_free(self, ttl_s: float) -> None:
        """ChannelBusy while a writer on another host gives signs of life."""
        numbers = self.numbers()
        if not numbers or self._folder.mtime_s(_name(numbers[-1]) + "-closed") is not None:
            return
        newest = _name(numbers[-1])
        try:
            about = self._read(newest)
        except (BrokenObject, ForeignChannel, NoVersion):
            return
        seen_s = self._folder.mtime_s(newest)
        silent_s = self._folder.now_s() - (seen_s or 0.0)
        if about.get("boot") != _boot() and silent_s < ttl_s:
            raise ChannelBusy(
                f"{self._folder.where} is written by {self.holder()}, "
                f"seen {silent_s:.1f} s ago; it counts as dead after {ttl_s:g} s"
            )

    def holder(self) -> str:
        """Who claimed the newest epoch, in words."""
        with contextlib.suppress(BrokenObject, ForeignChannel, NoVersion, ValueError):
            about = self._read(_name(max(self.numbers())))
            return f"pid {about.get('pid')} on {str(about.get('host'))[:64]}"
        return "somebody"

    def lock(self, root: Folder) -> ProcessLock:
        """The lock of a channel's folder that a writer's rank 0 holds while it lives. ChannelBusy."""
        if (lock := ProcessLock.take(root.fd, names.LOCK)) is None:
            raise ChannelBusy(f"{root.where} is being written by {self.holder()}")
        return lock

    def forget(self, oldest: int) -> None:
        """Remove epochs that no manifest needs: those before ``oldest``, the first one with a manifest."""
        for name in self._folder.names():
            match = _NAME.match(name)
            if match is not None and int(match[1]) < oldest:
                self._folder.remove(name)


def _name(epoch: int) -> str:
    return f"{epoch:08d}"


def _integer(value: object) -> int:
    if type(value) is not int or value < 0:
        raise BrokenObject(f"a sealed epoch says {str(value)[:64]}, expected a sequence number")
    return value


def host() -> str:
    """This machine's name, for people."""
    return socket.gethostname()


def _boot() -> str:
    """Names this boot of this machine: processes of another one can't hold a lock of ours."""
    return boot() or f"{uuid.getnode():x}"
