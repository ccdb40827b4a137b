"""What of NVIDIA's driver is needed to have an adapter write a GPU's memory: a dmabuf of it, and the flush.

The driver's library is opened at first use. Nothing here has run on hardware: the tests stand in for it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import mmap
from collections.abc import Callable
from typing import Any

from jaxrl_sync.transfer.verbs.errors import VerbsError

LIBRARY = "libcuda.so.1"
_DMABUF_SUPPORTED, _FLUSH_OPTIONS, _WRITES_ORDERING = 124, 117, 118
_HANDLE_DMABUF, _FLUSH_BY_HOST, _ORDERED_FOR_OWNER = 1, 1, 100
_TARGET_CONTEXT, _SCOPE_OWNER = 0, 100


@dataclasses.dataclass(frozen=True)
class Exported:
    """A dmabuf: the caller owns ``fd``; the memory begins ``offset`` bytes in it. ``flush``: see `Region`."""

    fd: int
    offset: int
    flush: Callable[[], None]


def export(ordinal: int, address: int, nbytes: int, library: Any = None) -> Exported:
    """A dmabuf of ``nbytes`` of the memory of GPU ``ordinal``. VerbsError says why there is none.

    A dmabuf has whole pages: it begins at the page of ``address``.
    """
    driver = Driver(library if library is not None else _library(), ordinal)
    if not driver.attribute(_DMABUF_SUPPORTED):
        raise VerbsError(0, f"GPU {ordinal} or its driver has no dmabufs (the open kernel modules do)")
    ordered = driver.attribute(_WRITES_ORDERING) >= _ORDERED_FOR_OWNER
    if not ordered and not driver.attribute(_FLUSH_OPTIONS) & _FLUSH_BY_HOST:
        raise VerbsError(0, f"an adapter's writes to GPU {ordinal} can't be flushed by the host")
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    pages = -(-(address + nbytes - start) // mmap.PAGESIZE) * mmap.PAGESIZE
    fd = driver.dmabuf(start, pages)
    return Exported(fd, address - start, _nothing if ordered else driver.flush)


def _nothing() -> None:
    """Writes are seen in order by the GPU that owns the memory."""


@functools.cache
def _library() -> Any:
    try:
        return ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise VerbsError(0, f"no NVIDIA driver here ({LIBRARY}: {error})") from error


class Driver:
    """Calls in the primary context of one GPU, which is the one that jax uses and which must be alive."""

    def __init__(self, library: Any, ordinal: int) -> None:
        """VerbsError names the call that failed."""
        self._library, self._device, self._context = library, ctypes.c_int(), ctypes.c_void_p()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(self._device), ordinal)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), self._device)

    def attribute(self, number: int) -> int:
        """An attribute of the GPU; 0 where the driver doesn't know it."""
        value = ctypes.c_int()
        failed = self._library.cuDeviceGetAttribute(ctypes.byref(value), number, self._device)
        return 0 if failed else value.value

    def dmabuf(self, address: int, nbytes: int) -> int:
        """A descriptor for whole pages of the GPU's memory."""
        fd = ctypes.c_int(-1)
        what = ctypes.c_uint64(address), ctypes.c_size_t(nbytes), _HANDLE_DMABUF, ctypes.c_uint64(0)
        self._inside("cuMemGetHandleForAddressRange", ctypes.byref(fd), *what)
        return fd.value

    def flush(self) -> None:
        """Until what adapters wrote is seen by this GPU."""
        self._inside("cuFlushGPUDirectRDMAWrites", _TARGET_CONTEXT, _SCOPE_OWNER)

    def _inside(self, name: str, *arguments: Any) -> None:
        self._call("cuCtxPushCurrent_v2", self._context)
        try:
            self._call(name, *arguments)
        finally:
            self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        call = getattr(self._library, name, None)
        if call is None:
            raise VerbsError(0, f"the NVIDIA driver here has no {name}: a newer one is needed")
        failed = call(*arguments)
        if failed:
            raise VerbsError(0, f"{name} failed with CUDA error {failed}")
