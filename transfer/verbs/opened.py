"""The RDMA devices that this process has open, shared by all its edges, and memory registered with them.

A device is opened once, with one protection domain: a slot is registered once, however many senders write it.
Destroying a queue pair fences what was connected to it; a registration may stay for the others.
"""

from __future__ import annotations

import collections
import logging
import os
import threading
import time
from typing import Any

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.memory import PrivateMemory, SharedMemory
from jaxrl_sync.transfer.verbs.errors import VerbsError
from jaxrl_sync.transfer.verbs.events import AsyncEvent, EventWatcher
from jaxrl_sync.transfer.verbs.native import backend
from jaxrl_sync.transfer.verbs.regions import DeviceMemory, Region, peer_module

logger = logging.getLogger("jaxrl_sync.transfer")

_lock = threading.RLock()
_devices: dict[tuple[int, str, str], OpenDevice] = {}


class SlotClosed(TransferError):
    """The memory of a slot was closed before it could be registered."""


class OpenDevice:
    """An open device. Counted: `borrow` it, and ``give_back`` as often; the last one closes it."""

    def __init__(self, kind: str, name: str) -> None:
        self._key = (os.getpid(), kind, name)
        self.module = backend(kind)
        self.name = name
        self.context: Any = self.module.Context(name)
        self._users = 0
        self._slots: dict[int, Registered] = {}
        self._events: collections.deque[tuple[float, AsyncEvent]] = collections.deque(maxlen=64)
        self._watcher = None
        try:
            self.limits: dict[str, Any] = self.context.query_device()
            if hasattr(self.context, "async_fd"):  # pyverbs can't wait for events with a limit
                self._watcher = EventWatcher(self.context, self._note)
        except BaseException:
            self.context.close()
            raise

    def borrow(self) -> OpenDevice:
        """One user more."""
        with _lock:
            self._users += 1
        return self

    def give_back(self) -> None:
        """One user less; the last one closes the device."""
        with _lock:
            self._users -= 1
            if self._users == 0:
                _devices.pop(self._key, None)
                if self._watcher is not None:
                    self._watcher.close()
                self.context.close()

    def _note(self, event: AsyncEvent) -> None:
        self._events.append((time.monotonic(), event))
        if event.meaning != "information":
            logger.warning("RDMA device %s: %s", self.name, event)

    def events(self, since_s: float) -> list[AsyncEvent]:
        """Asynchronous events of the device since then (on the monotonic clock), the newest 64 of them."""
        return [event for at, event in list(self._events) if at >= since_s]

    def refusal(self, region: Region) -> str:
        """Why a region can't be registered here, in words; empty where nothing speaks against it."""
        if region.kind != "cuda" or (region.dmabuf[0] < 0 and peer_module()):
            return ""
        if region.dmabuf[0] < 0:
            why = region.why or "none was given"
            return f"GPU memory without a dmabuf ({why}) or a peer memory module"
        if not hasattr(self.context, "dmabuf_supported"):
            return "GPU memory takes the native backend of verbs"
        if not self.context.dmabuf_supported():
            return f"{self.name} or this libibverbs takes no dmabufs"
        return ""

    def register_slot(
        self, memory: SharedMemory | PrivateMemory | DeviceMemory, part_bytes: int
    ) -> Registered:
        """A slot's registration, made the first time; it goes when its memory is closed.

        VerbsError; SlotClosed when the slot is being replaced right now.
        """
        with _lock:
            found = self._slots.get(id(memory))
            if found is not None:
                return found
            try:
                what = memory.region if isinstance(memory, DeviceMemory) else memory.data
                found = Registered(self.borrow(), what, part_bytes, remote_write=True)
            except ValueError as error:  # its view was released
                raise SlotClosed("the slot's memory was closed") from error
            self._slots[id(memory)] = found
            if not memory.before_close(lambda: self._forget(id(memory))):
                self._forget(id(memory))
                raise SlotClosed("the slot's memory was closed")
            return found

    def _forget(self, key: int) -> None:
        with _lock:
            self._slots.pop(key).close()


def open_device(kind: str, name: str) -> OpenDevice:
    """The device, opened if it isn't yet, with the caller as one more user. VerbsError."""
    with _lock:
        key = (os.getpid(), kind, name)  # a forked child can't use what its parent opened
        if key not in _devices:
            _devices[key] = OpenDevice(kind, name)
        return _devices[key].borrow()


class Registered:
    """Memory registered with one device, as one region or as several of ``part_bytes`` each.

    A buffer of the host, or any `Region`. Owns the registrations and one use of the device.
    """

    def __init__(
        self, device: OpenDevice, what: memoryview | Region, part_bytes: int, *, remote_write: bool
    ) -> None:
        """Register. VerbsError; then nothing stays registered and the device is given back."""
        self.parts: list[Any] = []
        self._device: OpenDevice | None = device
        try:
            self.region = what if isinstance(what, Region) else Region.of_buffer(what)
            self.nbytes = self.region.nbytes
            if refusal := device.refusal(self.region):
                raise VerbsError(0, f"{self.nbytes} bytes can't be registered with {device.name}: {refusal}")
            self.part_bytes = min(part_bytes, usable_bytes(device), -(-self.nbytes // 4096) * 4096)
            for start in range(0, self.nbytes, self.part_bytes):
                self.parts.append(self._part(device, start, remote_write))
        except BaseException:
            self.close()
            raise
        self.address: int = self.parts[0].address

    def _part(self, device: OpenDevice, start: int, remote_write: bool) -> Any:
        """One region of the device, from ``start`` on."""
        region, make = self.region, device.module.MemoryRegion
        (fd, offset), nbytes = region.dmabuf, min(self.part_bytes, self.nbytes - start)
        if fd >= 0:
            where = {"offset": offset + start, "length": nbytes, "iova": region.address + start}
            return make(device.context, dmabuf_fd=fd, remote_write=remote_write, **where)
        # Only completions say here that data is in place, so PCIe may reorder it on the way.
        options = {"remote_write": remote_write, "relaxed_ordering": True}
        return make(device.context, region.buffer(start, nbytes), **options)

    def describe(self) -> dict[str, Any]:
        """What a peer needs to write here, beside address and length; JSON."""
        return {"part_bytes": self.part_bytes, "rkeys": [part.rkey for part in self.parts]}

    def close(self) -> None:
        """Deregister. Idempotent. BufferError while work requests in flight read it."""
        while self.parts:
            self.parts[-1].close()
            self.parts.pop()
        device, self._device = self._device, None
        if device is not None:
            device.give_back()


def usable_bytes(device: OpenDevice) -> int:
    """The largest region that the device takes, in whole pages. VerbsError where that is none."""
    most = int(device.limits["max_mr_size"]) // 4096 * 4096
    if most <= 0:
        raise VerbsError(0, f"{device.name} takes regions of {device.limits['max_mr_size']} bytes at most")
    return most
