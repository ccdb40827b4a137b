"""Folders and files of a channel, opened without following links and only where they are whose they must be.

Everything goes through descriptors of folders, so that a folder that is replaced meanwhile changes nothing.
Content is written under a name that nothing else has, and what must appear whole appears by a hard link (or,
where a file system has none, by the creation of a file that says itself whether it is whole).
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import BrokenObject, ChannelError, NoVersion, UnsafePath

MAX_NAMES = 1 << 20
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
_NO_SYNC = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.EROFS)


class File:
    """A file that is open for reading, checked. ``close()`` or ``with``."""

    def __init__(self, fd: int, where: str, info: os.stat_result) -> None:
        self._fd = fd
        self.where = where
        self.nbytes = info.st_size
        self.mtime_s = info.st_mtime

    def read_into(self, memory: Any, offset: int) -> None:
        """Fill ``memory`` from ``offset`` on. BrokenObject where the file ends before that."""
        view = memoryview(memory).cast("B")
        while len(view):
            try:
                count = os.preadv(self._fd, [view], offset)
            except OSError as error:
                raise BrokenObject(f"{self.where} can't be read: {error.strerror}") from error
            if count == 0:
                raise BrokenObject(f"{self.where} ends at byte {offset}, {len(view)} more are expected")
            view, offset = view[count:], offset + count

    def read(self, nbytes: int, offset: int = 0) -> bytearray:
        """``nbytes`` from ``offset`` on."""
        data = bytearray(nbytes)
        self.read_into(data, offset)
        return data

    def close(self) -> None:
        """Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> File:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Folder:
    """One folder. Thread-safe but for ``close()``."""

    def __init__(self, fd: int, where: str, trust: Trust) -> None:
        self.fd = fd
        self.where = where
        self.trust = trust
        try:
            info = os.fstat(fd)
            self._check(info, where, stat.S_ISDIR)
        except BaseException:
            os.close(fd)
            raise
        self._linked = info.st_nlink > 0  # as file systems count that do

    @classmethod
    def root(cls, path: str | Path, trust: Trust, create: bool = False) -> Folder:
        """The channel's folder itself; parents of it may be links, it may not. ChannelError."""
        where = os.fspath(path)
        made = create and not os.path.lexists(where)
        if made:
            os.makedirs(where, mode=_folder_mode(trust), exist_ok=True)
        found = cls(_open_folder(where, None, where), where, trust)
        if made and trust.file_mode != 0o600:
            os.fchmod(found.fd, _folder_mode(trust))
        return found

    def child(self, name: str, create: bool = False) -> Folder:
        """A folder in this one. UnsafePath, NoVersion where there is none."""
        where = f"{self.where}/{names.check(name)}"
        made = False
        if create:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, _folder_mode(self.trust), dir_fd=self.fd)
                made = True
        found = Folder(_open_folder(name, self.fd, where), where, self.trust)
        if made and self.trust.file_mode != 0o600:
            os.fchmod(found.fd, _folder_mode(self.trust))
        return found

    def _check(self, info: os.stat_result, where: str, kind: Any) -> None:
        if not kind(info.st_mode):
            raise UnsafePath(f"{where} is {stat.filemode(info.st_mode)}, expected a plain file or folder")
        if not self.trust.check_owner:
            return
        allowed = {os.geteuid(), 0, *self.trust.owners}
        if info.st_uid not in allowed:
            raise UnsafePath(f"{where} belongs to uid {info.st_uid}, expected {sorted(allowed)}")
        if stat.S_IMODE(info.st_mode) & 0o022:
            raise UnsafePath(f"{where} has mode {stat.filemode(info.st_mode)}: others may write it")

    @property
    def removed(self) -> bool:
        """Whether the folder that is open here was removed since."""
        try:
            return self._linked and self.fd >= 0 and os.fstat(self.fd).st_nlink == 0
        except OSError as error:
            if error.errno == errno.ESTALE:  # by another host
                return True
            raise

    def names(self) -> list[str]:
        """All names in the folder, sorted."""
        with os.scandir(self.fd) as entries:
            found = []
            for entry in entries:
                found.append(entry.name)
                if len(found) > MAX_NAMES:
                    raise ChannelError(f"{self.where} holds more than {MAX_NAMES} files")
        return sorted(found)

    def open(self, name: str) -> File:
        """A plain file, for reading. NoVersion where there is none, UnsafePath for anything else."""
        where = f"{self.where}/{names.check(name)}"
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
        try:
            fd = os.open(name, flags, dir_fd=self.fd)
        except OSError as error:
            raise _open_error(error, where) from error
        try:
            info = os.fstat(fd)
            self._check(info, where, stat.S_ISREG)
        except BaseException:
            os.close(fd)
            raise
        return File(fd, where, info)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """The whole of a file of at most ``limit_bytes``; BrokenObject for a larger one."""
        with self.open(name) as file:
            if file.nbytes > limit_bytes:
                raise BrokenObject(f"{file.where} has {file.nbytes} bytes, expected at most {limit_bytes}")
            return bytes(file.read(file.nbytes))

    def write(self, name: str, parts: Iterable[Any], sync: bool = True) -> int:
        """A new file of the parts one after the other; its bytes. ChannelError if the name is taken."""
        fd, total = self._create(name), 0
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                total += len(view)
                while len(view):
                    view = view[os.write(fd, view) :]
            if sync:
                _sync(fd)
        finally:
            os.close(fd)
        return total

    def _create(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        try:
            fd = os.open(names.check(name), flags, self.trust.file_mode, dir_fd=self.fd)
        except FileExistsError as error:
            raise ChannelError(f"{self.where}/{name} is there already, it is never written again") from error
        if self.trust.file_mode != 0o600:
            os.fchmod(fd, self.trust.file_mode)  # whatever the umask is
        return fd

    def commit(self, name: str, data: bytes, sync: bool = True) -> None:
        """A new file that appears whole, in one step. ChannelError if there is one of that name already."""
        names.check(name)
        temporary = names.temporary()
        try:
            self.write(temporary, [data], sync=sync)
            os.link(temporary, name, src_dir_fd=self.fd, dst_dir_fd=self.fd, follow_symlinks=False)
        except FileExistsError as error:
            raise ChannelError(f"{self.where}/{name} is there already, it is never written again") from error
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            self.write(name, [data], sync=sync)
        finally:
            self.remove(temporary)
        if sync:
            self.sync()

    def sync(self) -> None:
        """Wait until the disk has the folder's names."""
        _sync(self.fd)

    def mtime_s(self, name: str) -> float | None:
        """When a file was last touched, by the clock of its file system; None without it."""
        try:
            info = os.stat(names.check(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return None
        return info.st_mtime if stat.S_ISREG(info.st_mode) else None

    def touch(self, name: str) -> bool:
        """Set a file's time to now; False where it is gone."""
        try:
            os.utime(names.check(name), dir_fd=self.fd, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return True

    def now_s(self) -> float:
        """The time by the clock of this file system, which other hosts see too."""
        name = names.temporary()
        self.write(name, [], sync=False)
        try:
            found = self.mtime_s(name)
        finally:
            self.remove(name)
        assert found is not None
        return found

    def remove(self, name: str) -> None:
        """Remove a file or a link; nothing where it is gone."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(names.check(name), dir_fd=self.fd)

    def remove_folder(self, name: str) -> None:
        """Remove a folder with what is in it; links in it go, what they point to stays."""
        try:
            below = self.child(name)
        except NoVersion:
            return
        with below:
            for entry in below.names():
                info = os.stat(entry, dir_fd=below.fd, follow_symlinks=False)
                if stat.S_ISDIR(info.st_mode):
                    below.remove_folder(entry)
                else:
                    with contextlib.suppress(FileNotFoundError):
                        os.unlink(entry, dir_fd=below.fd)
        with contextlib.suppress(FileNotFoundError):
            os.rmdir(name, dir_fd=self.fd)

    def close(self) -> None:
        """Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> Folder:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _folder_mode(trust: Trust) -> int:
    return 0o700 | (trust.file_mode & 0o044) | (trust.file_mode & 0o044) >> 2


def _open_folder(name: str, dir_fd: int | None, where: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        return os.open(name, flags, dir_fd=dir_fd)
    except OSError as error:
        raise _open_error(error, where) from error


def _open_error(error: OSError, where: str) -> ChannelError:
    if error.errno == errno.ENOENT:
        return NoVersion(f"{where} doesn't exist")
    if error.errno in (errno.ELOOP, errno.ENOTDIR, errno.EISDIR, errno.ENXIO):
        return UnsafePath(f"{where} is a link or no plain file or folder: {error.strerror}")
    return ChannelError(f"{where} can't be opened: {error.strerror}")


def _sync(fd: int) -> None:
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in _NO_SYNC:
            raise


@contextlib.contextmanager
def as_channel_error(what: str) -> Iterator[None]:
    """What the file system refuses (no room, no permission, gone) as a ChannelError that says while doing
    what."""
    try:
        yield
    except OSError as error:
        where = f" {error.filename}" if error.filename is not None else ""
        raise ChannelError(f"{what}:{where} {error.strerror or error}") from error
