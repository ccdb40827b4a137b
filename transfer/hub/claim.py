"""Who serves a folder: a lock on a file in it that ends with its process, whatever that one has forked."""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import threading
from pathlib import Path

LOCK_FILE = "hub.lock"
_NO_LOCKS = (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK)
_QUERY = "hhqqi"
"""struct flock of 64-bit Linux: type, whence, start, length, pid."""
_claimed: set[tuple[int, Path]] = set()
"""Process and folder: what is forked inherits the set, not the locks."""
_claiming = threading.Lock()


class Claim:
    """This process serves a folder, until ``close()``. Where a file system has no locks, anybody may."""

    def __init__(self, key: tuple[int, Path], fd: int) -> None:
        self._key, self._fd = key, fd

    @classmethod
    def of(cls, folder: Path) -> Claim | None:
        """None where a process serves the folder already, this one or another. OSError."""
        key = os.getpid(), folder.resolve()
        with _claiming:
            if key in _claimed:  # its own lock is no obstacle to a process
                return None
            fd = os.open(folder / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    os.close(fd)
                    if error.errno not in (errno.EACCES, errno.EAGAIN):
                        raise
                    return None
            _claimed.add(key)
        return cls(key, fd)

    def close(self) -> None:
        """Let go. Idempotent."""
        with _claiming:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                _claimed.discard(self._key)
                os.close(fd)


def is_deserted(folder: Path, boot_of: object) -> bool:
    """Whether nobody serves a folder any more whose server ran in that boot of a machine; False where nobody
    can tell: of other machines, and without locks."""
    if boot_of is None or boot_of != boot() or struct.calcsize("P") != 8:  # only Linux has a boot id
        return False
    with _claiming:  # whoever closes a file gives up the locks of its process on it
        if (os.getpid(), folder.resolve()) in _claimed:
            return False
        try:
            fd = os.open(folder / LOCK_FILE, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
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
    """Names this boot of this machine; None where that isn't known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip() or None
    except OSError:
        return None
