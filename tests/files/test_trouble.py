"""Disks that are full, file systems without hard links, folders that are removed, readers that are closed."""

from __future__ import annotations

import errno
import os
import shutil
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import FilePublisher, FileWriterConfig
from jaxrl_sync.transfer.files import channel as channel_module
from jaxrl_sync.transfer.files import writer as writer_module
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.collect import collect
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import ChannelError
from jaxrl_sync.transfer.files.folder import Folder
from jaxrl_sync.transfer.files.image import Image
from jaxrl_sync.transfer.files.leases import ReaderLease
from jaxrl_sync.transfer.files.replay import verify
from jaxrl_sync.transfer.files.turns import Turns
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, take, tree, write, writer
from tests.transfer.models import until


def test_a_full_disk_costs_a_version_by_name_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, full = tmp_path / "c", Folder.write, threading.Event()

    def write_some(self: Folder, name: str, parts: Iterable[Any], sync: bool = True) -> int:
        if full.is_set() and name.endswith("-table"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return real(self, name, parts, sync)

    monkeypatch.setattr(Folder, "write", write_some)
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0, 1)
        before = names(path, "objects")
        full.set()
        with pytest.raises(ChannelError, match="writing run:2: .* No space left on device"):
            publisher.publish(tree(2), Version("run", 2)).wait(30)
        assert publisher.drain(10)
        assert names(path, "objects") == before  # the frames of 2 are gone again
        full.clear()
        write(publisher, 3)
        assert holds(take(subscriber)[1], 3)
        assert [v.number for v in subscriber.versions()] == [0, 1, 3]
        assert publisher.stats()["failed"] == 1 and publisher.stats()["anchors"] == 1


def test_a_writer_of_another_schema_whose_first_version_fails_keeps_its_schema(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, full = tmp_path / "c", Folder.write, threading.Event()

    def write_some(self: Folder, name: str, parts: Iterable[Any], sync: bool = True) -> int:
        if full.is_set() and name.endswith("-table"):
            raise OSError(errno.ENOSPC, "No space left on device", name)
        return real(self, name, parts, sync)

    with writer(path) as publisher:
        write(publisher, 0)
    monkeypatch.setattr(Folder, "write", write_some)
    config = FileWriterConfig(fsync=False, keep=1)
    part = FilePublisher(path, tree(0), config=config, convert=lambda t: {"embed": t["embed"]})
    with part as publisher, Channel.open(path, Trust()) as channel:
        full.set()
        with pytest.raises(ChannelError, match="No space left"):
            publisher.publish(tree(1), Version("run", 1)).wait(30)
        assert publisher.drain(10) and len(names(path, "schemas")) == 2
        full.clear()
        write(publisher, 2)
        assert publisher.drain(10)
        assert [(v.version.number, v.wrong) for v in verify(channel)] == [(2, None)]
        assert len(names(path, "schemas")) == 1  # the other one went with its last version


def test_a_file_system_without_hard_links_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_link(*_: Any, **__: Any) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", no_link)
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        for number in range(4):
            write(publisher, number)
            assert holds(take(subscriber)[1], number)
    assert all(not n.startswith("tmp-") for n in names(tmp_path / "c", "versions"))


def test_a_writer_that_died_while_it_made_the_channel_blocks_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without hard links a file appears before it is whole."""
    monkeypatch.setattr(channel_module, "TORN_S", 0.1)
    for number, torn in enumerate(("CHANNEL", "schemas/*") * 3):
        path = tmp_path / f"c{number}"
        with writer(path):
            pass
        (file,) = path.glob(torn)
        whole = file.read_bytes()
        file.write_bytes(whole[: (0, len(whole) // 2, len(whole) - 1)[number // 2]])
        with reader(path) as subscriber:
            assert subscriber.poll() is None  # it waits
            with writer(path) as publisher:
                write(publisher, 1)
                assert holds(take(subscriber)[1], 1)


def test_a_reader_that_is_closed_while_it_reads_ends_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    load, held, go = Image.load, threading.Event(), threading.Event()

    def slow(self: Image, *args: Any) -> None:
        held.set()
        assert go.wait(60)
        load(self, *args)

    monkeypatch.setattr(Image, "load", slow)
    errors: list[BaseException] = []
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0)
        subscriber = reader(tmp_path / "c")
        update = subscriber.poll(10)
        assert update is not None

        def prepare() -> None:
            try:
                update.prepare()
            except TransferError as error:
                errors.append(error)

        thread = threading.Thread(target=prepare)
        thread.start()
        assert held.wait(20)
        closing = threading.Thread(target=subscriber.close)
        closing.start()
        until(subscriber._closed.is_set)  # else all may be read before it is closed
        go.set()
        thread.join(30)
        closing.join(30)
        assert len(errors) == 1 and "the reader is closed" in str(errors[0])
        with pytest.raises(TransferError, match="is closed"):
            subscriber.poll()


def test_a_writer_that_is_closed_says_so(tmp_path: Path) -> None:
    publisher = writer(tmp_path / "c")
    write(publisher, 0)
    publisher.close()
    publisher.close()
    with pytest.raises(TransferError, match="is closed"):
        publisher.publish(tree(1), Version("run", 1))
    assert names(tmp_path / "c", "epochs") == ["00000001", "00000001-closed", "00000001-sealed"]


def test_nothing_stays_open(tmp_path: Path) -> None:
    def cycle() -> None:
        with writer(tmp_path / "c", keep=2) as publisher, reader(tmp_path / "c") as subscriber:
            number = max((v.number for v in subscriber.versions()), default=-1) + 1
            write(publisher, number, number + 1)
            take(subscriber)

    cycle()
    fds, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    for _ in range(3):
        cycle()
    assert len(os.listdir("/proc/self/fd")) <= fds  # those of other tests may end meanwhile
    assert set(threading.enumerate()) <= threads


def test_a_folder_that_is_removed_is_named_by_its_writer_and_its_successor_is_read(tmp_path: Path) -> None:
    """The reader looked into what was gone for ever, and said nothing."""
    path = tmp_path / "c"
    with reader(path) as subscriber:
        for number, gone in enumerate((path, path / "versions", path)):
            with writer(path) as publisher:
                write(publisher, 3 * number)
                version, serving = take(subscriber)
                assert version.number == 3 * number
                shutil.rmtree(gone)
                assert subscriber.poll() is None and subscriber.versions() == []
                with pytest.raises(ChannelError, match="was removed while it was written"):
                    publisher.publish(tree(3 * number + 1), Version("run", 3 * number + 1)).wait(60)
            assert holds(serving, 3 * number) and subscriber.installed == Version("run", 3 * number)
    with pytest.raises(TransferError, match="is closed"):
        subscriber.versions()


def test_another_rank_says_once_what_keeps_it_from_reading_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It said so fifty times a second, as long as it lasted."""
    monkeypatch.setattr(writer_module, "TROUBLE_S", 0.01)
    bad, looks, real = threading.Event(), list[int](), Turns.next

    def troubled(self: Turns, at_least: int, wait_s: float) -> Any:
        looks.append(at_least)
        if bad.is_set():
            raise OSError(errno.EIO, "Input/output error")
        return real(self, at_least, 0.0)

    monkeypatch.setattr(Turns, "next", troubled)
    options: Any = {"config": FileWriterConfig(fsync=False), "size": 2, "world": "w"}
    lead = FilePublisher(tmp_path / "c", tree(0), rank=0, **options)
    with lead, FilePublisher(tmp_path / "c", tree(0), rank=1, **options) as other:
        bad.set()
        seen = len(looks)
        until(lambda: len(looks) > seen + 20, 60)
        bad.clear()
        tickets = [rank.publish(tree(0), Version("run", 0)) for rank in (lead, other)]
        assert [t.wait(60).state for t in tickets] == ["committed"] * 2
    lines = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(lines) == 1 and "Input/output error" in lines[0]


def test_a_disk_that_takes_no_file_at_all_is_read_and_cleared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not even an empty one, as over a quota: nothing was collected, and who came late read nothing."""
    path, real, full = tmp_path / "c", Folder._create, threading.Event()

    def no_room(self: Folder, name: str) -> int:
        if full.is_set():
            raise OSError(errno.EDQUOT, "Disk quota exceeded", name)
        return real(self, name)

    monkeypatch.setattr(Folder, "_create", no_room)
    with (
        writer(path, keep=9, anchor_every=1) as publisher,
        Channel.open(path, Trust()) as channel,
        ReaderLease(channel, 60.0) as lease,
    ):
        write(publisher, 0, 1, 2)
        lease.hold(channel.manifests()[:1])
        full.set()
        with reader(path) as late:
            assert holds(take(late)[1], 2)
        assert "can't be written (Disk quota exceeded): read without a lease" in caplog.text
        schema = publisher._stored.digest
        assert [v.number for v in collect(channel, 1, 1, 9, schema).versions] == [1]  # 0 is leased
        assert [n[:12] for n in names(path, "anchors")] == [f"{n:012d}" for n in (0, 2)]
        full.clear()
        write(publisher, 3)


def test_what_is_no_version_is_refused_by_name(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        with pytest.raises(TransferError, match="7 is a int, expected Version"):
            publisher.publish(tree(0), 7)  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="7 is a int, expected Version"):
            subscriber.offer(7)  # type: ignore[arg-type]
        with pytest.raises(TransferError, match="its number is too large, expected less than 1000000000000"):
            publisher.publish(tree(0), Version("run", 1 << 63))
        publisher.publish(tree(0), Version("run", 10**12 - 1)).wait(60)
        assert subscriber.versions() == [Version("run", 10**12 - 1)]


def test_a_file_that_finds_no_room_leaves_no_half_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reader tries to write its lease again and again."""
    with writer(tmp_path / "c") as publisher, reader(tmp_path / "c") as subscriber:
        write(publisher, 0)

        def no_room(*_: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", no_room)
        assert holds(take(subscriber)[1], 0)
        assert names(tmp_path / "c", "leases") == []


def test_names_that_no_writer_gives_end_no_rank(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, Channel.open(tmp_path / "c", Trust()) as channel:
        for name in ("e1-tx-order", "e1-t-order", "e1-t\u0663-order"):
            (tmp_path / "c" / "ranks" / name).write_bytes(b"")
        turns = Turns(channel, 1, 1, 2, threading.Event(), 5.0)
        assert turns.next(1, 0.0) is None
        write(publisher, 0)
