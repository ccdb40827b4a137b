"""Memory that may be registered: of the host, page-locked by jax, or of a GPU.

A GPU's memory is registered by a dmabuf, a file descriptor that the driver gives for it, or by its address
where a peer memory module lets the kernel resolve that. Where neither will do, the reason is known in words
and edges are staged through host memory, which is also what a subscriber's own slots are: device memory is
for those who keep arrays that nothing ever donates and hand them in themselves.
"""

from __future__ import annotations

import ctypes
import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jaxrl_sync.transfer.errors import MismatchError
from jaxrl_sync.transfer.memory import Closing
from jaxrl_sync.transfer.verbs import cuda
from jaxrl_sync.transfer.verbs.errors import VerbsError

if TYPE_CHECKING:
    import jax

Kind = Literal["host", "pinned_host", "cuda"]

PEER_MODULES = ("nvidia_peermem", "nv_peer_mem", "ib_peer_mem")
MODULES = Path("/sys/module")


def _nothing() -> None:
    """Host memory is ready when whoever wrote it has returned."""


@dataclasses.dataclass(frozen=True, eq=False)
class Region:
    """``nbytes`` at ``address``, kept alive by ``owner``.

    ``ready()`` blocks until what computes the content is through: before it is sent. ``flush()`` blocks
    until what an adapter wrote can be seen by the owner's next kernel: before it is used. ``dmabuf`` is a
    descriptor, which the region doesn't own, and the offset of the first byte in it; -1 without one, and
    ``why`` says why.
    """

    kind: Kind
    address: int
    nbytes: int
    owner: Any = None
    ready: Callable[[], None] = _nothing
    flush: Callable[[], None] = _nothing
    dmabuf: tuple[int, int] = (-1, 0)
    why: str = ""

    @classmethod
    def of_buffer(cls, buffer: memoryview) -> Region:
        """Host memory: contiguous and writable. ValueError where it was released."""
        where = ctypes.addressof(ctypes.c_char.from_buffer(buffer)) if buffer.nbytes else 0
        return cls("host", where, buffer.nbytes, buffer)

    def buffer(self, start: int = 0, nbytes: int | None = None) -> memoryview:
        """A part as a buffer object. Of a GPU's memory only the address may be taken, never the content."""
        stop = self.nbytes if nbytes is None else min(self.nbytes, start + nbytes)
        if isinstance(self.owner, memoryview):
            return self.owner[start:stop]
        return memoryview((ctypes.c_char * (stop - start)).from_address(self.address + start)).cast("B")


def region_of(array: jax.Array) -> Region:
    """The memory of an array on one device. Nobody may donate or delete it while the region is in use.

    On a GPU that asks for a dmabuf: its descriptor belongs to the caller (see `DeviceMemory`). MismatchError
    where the array lies on several devices or on others than CPUs and GPUs.
    """
    devices = array.devices()
    if len(devices) != 1:
        raise MismatchError(f"an array on {len(devices)} devices has no single region, expected one device")
    (device,) = devices
    address, nbytes, kind = array.unsafe_buffer_pointer(), array.nbytes, array.sharding.memory_kind

    def ready() -> None:
        array.block_until_ready()

    if kind == "pinned_host" or device.platform == "cpu":
        name: Kind = "pinned_host" if kind == "pinned_host" else "host"
        return Region(name, address, nbytes, array, ready)
    if device.platform not in ("gpu", "cuda"):
        raise MismatchError(f"memory of {device.platform} can't be registered, expected cpu or gpu")
    try:
        found = cuda.export(device.local_hardware_id or 0, address, nbytes)
    except VerbsError as error:
        return Region("cuda", address, nbytes, array, ready, why=str(error))
    return Region("cuda", address, nbytes, array, ready, found.flush, (found.fd, found.offset))


def peer_module() -> str:
    """The loaded kernel module that resolves a GPU's addresses for adapters; empty without one."""
    return next((name for name in PEER_MODULES if (MODULES / name).exists()), "")


class DeviceMemory(Closing):
    """A slot's memory that lies on a GPU: a region of it, with its dmabuf. ``close()`` gives both up."""

    name = ""

    def __init__(self, region: Region) -> None:
        """Takes over the region's descriptor."""
        super().__init__()
        self.region = region
        self.nbytes = region.nbytes
        self.data = memoryview(b"")  # nothing here can be read or written by the host

    def close(self) -> None:
        """Whoever registered it gives that up first; no array stays alive for it. Idempotent."""
        self._let_go()
        old = self.region
        self.region = Region(old.kind, old.address, old.nbytes, why="it was closed")
        if (fd := old.dmabuf[0]) >= 0:
            os.close(fd)
