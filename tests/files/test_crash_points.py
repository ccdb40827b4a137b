"""A writer that dies at any one of its calls to the file system, all of them in turn.

From that call on nothing of it reaches the disk any more, and what it was just writing is there by half: what
a killed process leaves behind.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import folder
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.replay import verify
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, take, tree, write, writer

SHARES = 8
"""Every so many calls share a test."""

CHANGES = ("write", "link", "unlink", "mkdir", "rmdir", "fsync")


class Dying:
    """The module ``os`` as a process sees it that dies at its ``last`` change of the disk."""

    def __init__(self, last: int) -> None:
        self.last, self.count = last, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        creates = name == "open"
        if name not in CHANGES and not creates:
            return real

        def call(*args: Any, **options: Any) -> Any:
            if creates and not args[1] & os.O_CREAT:
                return real(*args, **options)
            self.count += 1
            if self.count == self.last and name == "write":
                real(args[0], args[1][: len(args[1]) // 2])
            if self.count >= self.last:
                raise OSError(errno.EIO, "the process is dead")
            return real(*args, **options)

        return call


def crash(path: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> tuple[list[int], bool]:
    """Write version 0, then 1 and 2 by a writer that dies: what it said is committed, whether it lived on."""
    publisher = writer(path, anchor_every=2, keep=2, fsync=True)
    write(publisher, 0)
    publisher.drain(10)
    dying, said = Dying(at), [0]
    with monkeypatch.context() as patch:
        patch.setattr(folder, "os", dying)
        for number in (1, 2):
            try:
                publisher.publish(tree(number), Version("run", number)).wait(30)
                said.append(number)
            except TransferError:
                break
        publisher.drain(10)
        publisher.close()
    return said, dying.count < at


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize("share", range(SHARES))
def test_whatever_call_a_writer_dies_at_the_channel_is_whole_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, share: int
) -> None:
    at, lived = 1 + share - SHARES, False
    while not lived:
        at += SHARES
        path = tmp_path / str(at)
        said, lived = crash(path, at, monkeypatch)
        with reader(path) as subscriber:
            version, found = take(subscriber)
            assert version.number in (said[-1], said[-1] + 1) and holds(found, version.number), at
            with writer(path, anchor_every=2, keep=2) as publisher:
                write(publisher, 3, 4)
                publisher.drain(10)
                assert holds(take(subscriber)[1], 4), at
                there = {n.split("-")[0] for n in names(path, "versions") if not n.startswith("tmp-")}
                assert {n.split("-")[0] for n in names(path, "objects")} == there, at
        with Channel.open(path, Trust()) as channel:
            assert [v.wrong for v in verify(channel)] == [None] * len(channel.versions()), at
    assert at > 60
