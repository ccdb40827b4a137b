"""Memory that holds one slot: a shared segment under /dev/shm, or private memory where nothing is shared.

A segment starts with one page of header (who made it, a nonce that proves that two processes see the same
memory, an answer of the one who opened it); the slot starts at the second page.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import struct
import threading
from collections.abc import Callable
from pathlib import Path

from jaxrl_sync.transfer.errors import ResourceError, TransferError

SHM_DIR = Path("/dev/shm")
PREFIX = "jaxrl_sync-"
HEADER_BYTES = 4096
NONCE_BYTES = 32
RESERVED_AT_ONCE = 256 << 10
"""On older kernels a call that a signal interrupts gives back all it had reserved and begins anew: under a
profiler's timer, one for a whole slot never came to its end."""

_MAGIC = b"jaxrlseg"
_HEAD = struct.Struct("<8sQQ32s32s")
_ANSWER_AT = _HEAD.size - 32
_NAME = re.compile(r"jaxrl_sync-[A-Za-z0-9_]{1,64}-[0-9]{1,12}_[0-9]{1,10}-[0-9a-f]{16}\Z")


def shm_prefix(run_id: str) -> str:
    """What the names of a run's segments start with."""
    return f"{PREFIX}{run_id}-"


def pid_namespace() -> int:
    """Names the space in which this process's id means something; 0 where the kernel doesn't tell."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


class Closing:
    """What holds the memory in some other way (a registration with a device) gives it up before it closes."""

    def __init__(self) -> None:
        self._before_close: list[Callable[[], None]] = []
        self._closing = False
        self._lock = threading.Lock()

    def before_close(self, give_up: Callable[[], None]) -> bool:
        """Have ``give_up`` called when this memory is closed; False if it is already."""
        with self._lock:
            if not self._closing:
                self._before_close.append(give_up)
            return not self._closing

    def _let_go(self) -> None:
        with self._lock:
            self._closing = True
            told, self._before_close = self._before_close, []
        for give_up in told:
            give_up()


class SharedMemory(Closing):
    """A segment of its own under /dev/shm. ``data`` is the slot; ``close()`` removes the name at once.

    The mapping itself goes when the last array over it is gone: views keep it alive.
    """

    def __init__(self, run_id: str, nbytes: int) -> None:
        """Reserve ``nbytes`` now, so that no later write can fail. ResourceError when there isn't room."""
        super().__init__()
        self.nbytes = nbytes
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.name = f"{shm_prefix(run_id)}{pid_namespace()}_{os.getpid()}-{secrets.token_hex(8)}"
        if not _NAME.match(self.name):
            raise ResourceError(f"run id {run_id!r} can't be part of a file name: letters, digits, _ only")
        path = SHM_DIR / self.name
        total = HEADER_BYTES + nbytes
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ResourceError(f"can't create shared memory in {SHM_DIR}: {error.strerror}") from error
        try:
            os.fchmod(fd, 0o600)
            for start in range(0, total, RESERVED_AT_ONCE):
                os.posix_fallocate(fd, start, min(RESERVED_AT_ONCE, total - start))
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self._map = mmap.mmap(fd, total, flags)
        except BaseException as error:
            os.unlink(path)
            if not isinstance(error, OSError):
                raise
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                why = f"can't map a slot of {total} bytes of {SHM_DIR}: {error.strerror}"
                raise ResourceError(why) from error
            free = os.statvfs(SHM_DIR).f_bavail * os.statvfs(SHM_DIR).f_frsize
            raise ResourceError(
                f"{SHM_DIR} is too small: a slot needs {total} bytes, {free} are free ({error.strerror}); "
                "enlarge it or set sync.transport = 'tcp'"
            ) from error
        finally:
            os.close(fd)
        self._map[: _HEAD.size] = _HEAD.pack(_MAGIC, nbytes, os.getpid(), self.nonce, bytes(32))
        self.data = memoryview(self._map)[HEADER_BYTES:]
        self._linked = True

    def answered_with(self, answer: str) -> bool:
        """Whether the process that opened the segment wrote ``answer``, in hexadecimal here, into it."""
        with contextlib.suppress(ValueError):  # the segment was replaced while the link was being opened
            return self._map[_ANSWER_AT : _HEAD.size].hex() == answer
        return False

    def close(self) -> None:
        """Remove the name; unmap unless arrays still look at it. Idempotent."""
        self._let_go()
        if self._linked:
            self._linked = False
            with contextlib.suppress(FileNotFoundError):
                os.unlink(SHM_DIR / self.name)
        with contextlib.suppress(BufferError):  # arrays over it are alive: the last one unmaps it
            self.data.release()
            self._map.close()

    @property
    def linked(self) -> bool:
        """Whether others can still open it."""
        return self._linked

    def describe(self) -> dict[str, str | int]:
        """What another process needs to open it."""
        return {"name": self.name, "nonce": self.nonce.hex(), "nbytes": self.nbytes}


class PrivateMemory(Closing):
    """Anonymous memory with the interface of SharedMemory; nobody else can write it."""

    name = ""

    def __init__(self, nbytes: int) -> None:
        """ResourceError when there isn't room."""
        super().__init__()
        self.nbytes = nbytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        try:
            self._map = mmap.mmap(-1, nbytes, flags)
        except OSError as error:
            raise ResourceError(f"a slot needs {nbytes} bytes of memory: {error.strerror}") from error
        self.data = memoryview(self._map)

    def close(self) -> None:
        """Unmap unless arrays still look at it. Idempotent."""
        self._let_go()
        with contextlib.suppress(BufferError):
            self.data.release()
            self._map.close()


class ForeignMemory:
    """A segment that another process made, opened for writing. ``close()`` unmaps it."""

    def __init__(self, name: str, nonce: str, nbytes: int, run_id: str) -> None:
        """Map it if it is what it is said to be; TransferError names what isn't."""
        if not _NAME.match(name) or not name.startswith(shm_prefix(run_id)):
            raise TransferError(f"shared memory {name!r} isn't of this run")
        self.name = name
        try:
            fd = os.open(SHM_DIR / name, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise TransferError(f"shared memory {name} can't be opened here: {error.strerror}") from error
        try:
            self._map = _map_checked(fd, name, nbytes)
        finally:
            os.close(fd)
        magic, size, _, found, _ = _HEAD.unpack(self._map[: _HEAD.size])
        if magic != _MAGIC or size != nbytes or found.hex() != nonce:
            self._map.close()
            raise TransferError(f"shared memory {name} holds another nonce: not the same memory")
        self.data = memoryview(self._map)[HEADER_BYTES:]

    def answer(self) -> bytes:
        """Write a fresh nonce for the owner to see and return it."""
        answer = secrets.token_bytes(NONCE_BYTES)
        self._map[_ANSWER_AT : _HEAD.size] = answer
        return answer

    def close(self) -> None:
        """Unmap it. Idempotent."""
        with contextlib.suppress(BufferError):
            self.data.release()
            self._map.close()


def _map_checked(fd: int, name: str, nbytes: int) -> mmap.mmap:
    info = os.fstat(fd)
    mode = stat.S_IMODE(info.st_mode)
    if not stat.S_ISREG(info.st_mode) or mode & 0o077 or info.st_uid not in (os.geteuid(), 0):
        raise TransferError(
            f"shared memory {name} belongs to uid {info.st_uid} with mode {mode:o}, not to us"
        )
    if info.st_size != HEADER_BYTES + nbytes or info.st_blocks * 512 < info.st_size:
        raise TransferError(
            f"shared memory {name} has {info.st_size} bytes ({info.st_blocks * 512} reserved), "
            f"expected {HEADER_BYTES + nbytes}"
        )
    try:
        return mmap.mmap(fd, info.st_size, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:  # of descriptors it takes another one
        raise TransferError(f"shared memory {name} can't be mapped here: {error.strerror}") from error
