"""The place of a channel: the file that says whose it is, and whether a writer can use the folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import ResourceError
from jaxrl_sync.transfer.files import names
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import ChannelError, ForeignChannel, NoVersion
from jaxrl_sync.transfer.files.folder import Folder, as_channel_error
from jaxrl_sync.transfer.files.seal import Seal, is_whole

MAX_CHANNEL_BYTES = 1 << 16


def check_place(what: str, path: str | Path, trust: Trust, token: str | None) -> None:
    """Make the folder at ``path`` if need be and write in it, before a run depends on it.

    ResourceError, which begins with ``what`` (the setting that named it), where that can't be done, where the
    folder isn't safe, or where it holds the channel of another run than ``token``'s.
    """
    try:
        with as_channel_error("can't be used"), Folder.root(path, trust, create=True) as root:
            root.now_s()  # makes a file and removes it
            if root.mtime_s(names.CHANNEL) is not None:
                _described_if_whole(root, token)
    except ChannelError as error:
        raise ResourceError(f"{what}={os.fspath(path)}: {error}") from error


def _described_if_whole(root: Folder, token: str | None) -> None:
    try:
        described(root, token)
    except NoVersion:
        return  # of a writer that died while it made the channel; the next one makes it again


def described(root: Folder, token: str | None) -> dict[str, Any]:
    """What the channel's own file says. ForeignChannel, BrokenObject, NoVersion where it isn't whole."""
    data = root.read(names.CHANNEL, MAX_CHANNEL_BYTES)
    where = f"{root.where}/{names.CHANNEL}"
    if not is_whole(data):
        raise NoVersion(f"{where} isn't whole (yet)")
    sealed = _run_id_unproved(data)
    if token is None and sealed is not None:
        raise ForeignChannel(f"{where} is sealed with the token of run {sealed[:32]!r}, found no token")
    if token is not None and sealed != (mine := auth.run_id_of(token)):
        raise ForeignChannel(f"{where} is of run {(sealed or 'none')[:32]!r}, expected {mine!r}")
    return Seal.of(token).open("channel", data, where)


def _run_id_unproved(data: bytes) -> str | None:
    """The run that a CHANNEL file says it is of, without any proof: for messages and to choose a key."""
    try:
        value = json.loads(data.partition(b"\n")[2])
        found = value.get("run_id")
    except (ValueError, RecursionError, AttributeError):
        return None
    return found if isinstance(found, str) else None
