"""A lock on a file that ends with its process, whatever that one has forked (record locks of POSIX)."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_TAKEN = (errno.EACCES, errno.EAGAIN)
_QUERY = "hhqqi"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""

_Key = tuple[int, int, int, str]
"""Process, device and inode of the folder, the name. What is forked inherits the set, not the locks."""
_held: set[_Key] = set()
_holding = threading.Lock()


class ProcessLock:
    """This process holds a file of a folder until ``close()``. Anybody may, without locks."""

    def __init__(self, key: _Key, fd: int) -> None:
        self._key, self._fd = key, fd

    @classmethod
    def take(cls, folder: Path | int, name: str) -> ProcessLock | None:
        """None where a process holds it already, this one or another; doesn't wait. Makes the file.

        ``folder`` is a path or an open directory's descriptor. OSError where the file can't be opened, or the
        file system can't say whether it is locked.
        """
        with _holding:
            key = _key(folder, name)
            if key in _held:  # its own lock is no obstacle to a process
                return None
            fd = _open(folder, name, os.O_RDWR | os.O_CREAT)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(fd)
                    if error.errno not in _TAKEN:
                        raise
                    return None
            _held.add(key)
        return cls(key, fd)

    def close(self) -> None:
        """Let go. Idempotent."""
        with _holding:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                _held.discard(self._key)
                os.close(fd)


def is_let_go(folder: Path | int, name: str) -> bool:
    """Whether nobody holds the file any more; False where nobody can tell (no file, no locks)."""
    if struct.calcsize("P") != 8:
        return False
    with _holding:  # whoever closes a file gives up the locks of its process on it
        try:
            if _key(folder, name) in _held:
                return False
            fd = _open(folder, name, os.O_RDONLY)
        except OSError:
            return False
        try:
            query = struct.pack(_QUERY, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            return bool(struct.unpack(_QUERY, fcntl.fcntl(fd, fcntl.F_GETLK, query))[0] == fcntl.F_UNLCK)
        except OSError:
            return False
        finally:
            os.close(fd)


def boot() -> str | None:
    """Names this boot of this machine, which no lock outlives; None where that isn't known (not Linux)."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None


def _key(folder: Path | int, name: str) -> _Key:
    info = os.stat(folder)
    return os.getpid(), info.st_dev, info.st_ino, name


def _open(folder: Path | int, name: str, flags: int) -> int:
    flags |= os.O_NOFOLLOW | os.O_CLOEXEC
    if isinstance(folder, int):
        return os.open(name, flags, 0o600, dir_fd=folder)
    return os.open(folder / name, flags, 0o600)
