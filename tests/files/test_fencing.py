"""Two writers of one channel: locks, signs of life, epochs."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
import time
from pathlib import Path

import pytest

from jaxrl_sync.transfer.files import epochs
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.collect import collect
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import ChannelBusy, ChannelError, Fenced
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, take, tree, write, writer


def test_a_second_writer_is_refused_while_the_first_lives(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0)
        with pytest.raises(ChannelBusy, match=r"is being written by pid \d+ on"):
            writer(tmp_path / "c")
        write(publisher, 1)
    with writer(tmp_path / "c") as publisher:
        write(publisher, 2)


def test_a_lock_that_fails_is_no_other_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(fd: int, how: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", broken)
        with pytest.raises(ChannelError, match="taking over .*Input/output error") as caught:
            writer(tmp_path / "c")
        assert not isinstance(caught.value, ChannelBusy)
    with writer(tmp_path / "c") as publisher:  # nothing holds it
        write(publisher, 0)


def test_a_writer_on_another_host_counts_as_alive_until_it_is_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = writer(tmp_path / "c", holder_ttl_s=0.8)
    write(first, 0)
    assert first._lock is not None
    first._lock.close()  # one of another machine isn't seen here
    monkeypatch.setattr(epochs, "boot", lambda: "another machine")
    with pytest.raises(ChannelBusy, match="counts as dead after 300 s"):  # however slow its threads are
        writer(tmp_path / "c", holder_ttl_s=300.0)
    first._stop.set()  # it gives no sign of life any more, and never says that it leaves
    deadline = time.monotonic() + 20
    while True:
        try:
            second = writer(tmp_path / "c", holder_ttl_s=0.8)
            break
        except ChannelBusy:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    with second:
        write(second, 1)


def test_a_writer_that_was_taken_over_says_so(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as old:
        write(old, 0)
        assert old._lock is not None
        old._lock.close()
        (tmp_path / "c" / "writer.lock").unlink()
        with writer(tmp_path / "c") as new, reader(tmp_path / "c") as subscriber:
            write(new, 1)
            with pytest.raises(Fenced, match="was taken over by pid"):
                old.publish(tree(1), Version("run", 1)).wait(30)
            with pytest.raises(Fenced):
                old.publish(tree(2), Version("run", 2))
            assert holds(take(subscriber)[1], 1)
            assert subscriber.versions() == [Version("run", 0), Version("run", 1)]


def test_between_claim_and_seal_nothing_counts_and_nothing_is_collected(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0, 1)
        with Channel.open(tmp_path / "c", Trust()) as channel:
            before = names(tmp_path / "c", "versions"), names(tmp_path / "c", "objects")
            claimed = time.monotonic()
            epoch = channel.epochs.claim("somebody")
            assert channel.manifests() == []
            assert collect(channel, 1, 1, 99, publisher._stored.digest).versions == ()
            assert (names(tmp_path / "c", "versions"), names(tmp_path / "c", "objects")) == before
            channel.epochs.seal(epoch, 2, claimed)
            assert [m.version.number for m in channel.manifests()] == [0, 1]


def test_a_claim_whose_writer_died_before_it_sealed_is_as_if_it_had_never_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0)
    with Channel.open(tmp_path / "c", Trust()) as channel:
        epoch = channel.epochs.claim("somebody")
        assert channel.manifests() == []
        monkeypatch.setattr(epochs, "UNSEALED_S", 0.0)
        assert [m.version.number for m in channel.manifests()] == [0]
        monkeypatch.undo()
        with writer(tmp_path / "c") as publisher:
            write(publisher, 1)
            assert [m.version.number for m in channel.manifests()] == [0, 1]
            channel.epochs.seal(epoch, 1, time.monotonic())  # it comes back, with what it saw
            assert [m.version.number for m in channel.manifests()] == [0, 1]
        with pytest.raises(Fenced, match="took too long"):
            channel.epochs.seal(epoch + 9, 0, time.monotonic() - 1000)


def test_writers_that_claim_at_once_get_different_epochs(tmp_path: Path) -> None:
    with writer(tmp_path / "c"):
        pass
    with Channel.open(tmp_path / "c", Trust()) as channel:
        found: list[int] = []
        threads = [threading.Thread(target=lambda: found.append(channel.epochs.claim("x"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
        assert sorted(found) == list(range(2, 10))


def test_names_are_never_written_twice(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0)
        folder = publisher._channel["versions"]
        for call in (
            lambda: folder.commit(f"{0:012d}-run", b"other"),
            lambda: folder.write(f"{0:012d}-run", [b"x"]),
        ):
            with pytest.raises(ChannelError, match="is never written again"):
                call()
        with reader(tmp_path / "c") as subscriber:
            assert holds(take(subscriber)[1], 0)
