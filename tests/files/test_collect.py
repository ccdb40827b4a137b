"""Garbage collection beside readers: leases, pins, what the dead left."""

from __future__ import annotations

import os
import random
import threading
import time
from pathlib import Path

import pytest

from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import leases
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.collect import collect
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import NoVersion
from jaxrl_sync.transfer.files.image import Image
from jaxrl_sync.transfer.files.manifest import Manifest
from jaxrl_sync.transfer.files.replay import verify
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, write, writer
from tests.transfer.models import until


def numbers(path: Path) -> list[int]:
    """Numbers of the versions that are there."""
    return [int(n.split("-")[0]) for n in names(path, "versions")]


def test_the_newest_versions_stay_with_what_they_stand_on(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path, keep=2, anchor_every=4) as publisher:
        for number in range(12):
            write(publisher, number)
            assert {n for n in (number, number - 1) if n >= 0} <= set(numbers(path))
        # 8 has an anchor (0, 4, 8): 9 to 11 stand on it, 10 and 11 are kept
        publisher.drain(10)
    assert numbers(path) == [8, 9, 10, 11]
    assert [n[:12] for n in names(path, "anchors")] == [f"{8:012d}"]
    assert sorted({int(n[:12]) for n in names(path, "objects")}) == [8, 9, 10, 11]


def test_a_pinned_version_stays_until_it_is_unpinned(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path, keep=1, anchor_every=3) as publisher, Channel.open(path, Trust()) as channel:
        write(publisher, 0, 1)
        leases.pin(channel, Version("run", 1))
        write(publisher, *range(2, 9))
        publisher.drain(10)
        assert {0, 1} <= set(numbers(path)) and 4 not in numbers(path)
        with reader(path) as subscriber:
            update = subscriber.offer(Version("run", 1))
            update.prepare()
            assert holds(update.swap(), 1)
        leases.unpin(channel, Version("run", 1))
        write(publisher, 9)
        publisher.drain(10)
        assert not {0, 1} & set(numbers(path))
        with pytest.raises(NoVersion):
            leases.pin(channel, Version("run", 1))
        assert names(path, "pins") == []


def test_what_a_reader_reads_stays_while_it_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reader is held up between its lease and the first byte; the writer goes on and collects."""
    path = tmp_path / "c"
    load, held, go = Image.load, threading.Event(), threading.Event()

    def slow(self: Image, *args: object) -> None:
        held.set()
        assert go.wait(60)
        load(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Image, "load", slow)
    with writer(path, keep=1, anchor_every=2) as publisher, reader(path) as subscriber:
        write(publisher, 0, 1)
        update = subscriber.poll(10)
        assert update is not None
        thread = threading.Thread(target=update.prepare)
        thread.start()
        assert held.wait(20)
        write(publisher, *range(2, 9))
        publisher.drain(10)
        assert {0, 1} <= set(numbers(path)) and not {2, 3, 4, 5} & set(numbers(path))
        go.set()
        thread.join(60)
        assert holds(update.swap(), 1)
        assert names(path, "leases") == []  # nothing is held between two updates
        write(publisher, 9)
        publisher.drain(10)
        assert not {0, 1} & set(numbers(path))


def test_a_lease_whose_reader_died_expires(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path, keep=1, anchor_every=2) as publisher, Channel.open(path, Trust()) as channel:
        write(publisher, 0)
        lease = leases.ReaderLease(channel, 30.0)
        lease.hold(channel.manifests())
        write(publisher, 1, 2, 3, 4)
        publisher.drain(10)
        assert 0 in numbers(path)
        lease._closed.set()  # nobody touches it any more
        lease._thread.join(60)
        (name,) = names(path, "leases")
        long_ago = time.time() - 31
        os.utime(path / "leases" / name, (long_ago, long_ago))
        write(publisher, 5)
        publisher.drain(10)
        assert 0 not in numbers(path) and names(path, "leases") == []
        lease.close()


def test_nonsense_in_a_lease_and_a_folder_that_can_not_be_removed_end_neither_writing_nor_collecting(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c"
    with writer(path, keep=1, anchor_every=1) as publisher, Channel.open(path, Trust()) as channel:
        write(publisher, 0)
        value = {"ttl_s": 10**400, "versions": [["run", 0]], "stems": []}
        channel["leases"].commit("odd-1", channel.seal.document("lease", value))
        (first,) = names(path, "anchors")
        (path / "anchors" / first).chmod(0o770)  # somebody's, as far as the channel can tell
        write(publisher, 1, 2, 3)
        assert publisher.drain(10) and publisher.stats()["failed"] == 0
        assert numbers(path) == [3]
        assert [n[:12] for n in names(path, "anchors")] == [f"{n:012d}" for n in (0, 3)]


def test_what_is_collected_while_all_is_verified_is_not_called_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, hold, late = tmp_path / "c", leases.ReaderLease.hold, list[int]()
    with writer(path, keep=1, anchor_every=2) as publisher, Channel.open(path, Trust()) as channel:
        write(publisher, 0, 1)

        def too_late(self: leases.ReaderLease, manifests: list[Manifest]) -> None:
            late.append(len(manifests))
            write(publisher, 2)
            assert publisher.drain(10)
            hold(self, manifests)

        monkeypatch.setattr(leases.ReaderLease, "hold", too_late)
        assert list(verify(channel)) == [] and late == [2]
        monkeypatch.undo()
        assert [(v.version.number, v.wrong) for v in verify(channel)] == [(2, None)]


def test_a_lease_is_kept_alive_by_a_thread(tmp_path: Path) -> None:
    with writer(tmp_path / "c") as publisher, Channel.open(tmp_path / "c", Trust()) as channel:
        write(publisher, 0)
        with leases.ReaderLease(channel, 2.0) as lease:
            lease.hold(channel.manifests())
            (name,) = names(tmp_path / "c", "leases")
            path = tmp_path / "c" / "leases" / name
            for _ in range(3):
                os.utime(path, (1.0, 1.0))
                until(lambda: path.stat().st_mtime > time.time() - 60, 60)
        assert names(tmp_path / "c", "leases") == []
        assert leases.held(channel).versions == set()


def test_readers_beside_a_writer_that_collects_all_the_time_see_whole_versions_or_a_named_error(
    tmp_path: Path,
) -> None:
    path, stop, wrong = tmp_path / "c", threading.Event(), list[str]()
    taken = [0, 0]

    def read(index: int) -> None:
        rng = random.Random(index)
        with reader(path) as subscriber:
            while not stop.is_set():
                versions = subscriber.versions()
                if not versions:
                    continue
                version = rng.choice(versions)
                try:
                    update = subscriber.offer(version)
                    update.prepare()
                    if not holds(update.swap(), version.number):
                        wrong.append(f"bits of {version}")
                    taken[index] += 1
                except NoVersion:
                    continue
                except TransferError as error:
                    wrong.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=read, args=(i,)) for i in range(2)]
    with writer(path, keep=1, anchor_every=2) as publisher:
        for thread in threads:
            thread.start()
        try:
            number = 0
            while number < 30 or min(taken) < 5:
                write(publisher, number)
                number += 1
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert wrong == []


def test_half_written_files_of_older_writers_go_and_a_manifest_that_cannot_be_read_keeps_its_files(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c"
    with writer(path, keep=9) as publisher:
        write(publisher, 0, 1)
    (path / "objects" / "000000000002-e1-t3-r0-frames").write_bytes(b"half")
    (path / "anchors" / "000000000002-e1-t3").mkdir(mode=0o700)
    (path / "anchors" / "000000000002-e1-t3" / "w").mkdir(mode=0o700)
    (path / "anchors" / "000000000002-e1-t3" / "w" / "0").write_bytes(b"half")
    (path / "versions" / "tmp-00").write_bytes(b"half")
    os.utime(path / "versions" / "tmp-00", (0, 0))
    (path / "objects" / "note.txt").write_bytes(b"somebody's")
    manifest = path / "versions" / f"{1:012d}-run"
    sound = manifest.read_bytes()
    manifest.write_bytes(sound[:-1])
    with writer(path, keep=1, anchor_every=9) as publisher:
        write(publisher, 5, 6)
        publisher.drain(10)
        assert not [n for n in names(path, "objects") if n.startswith("000000000002")]
        assert not [n for n in names(path, "anchors") if n.startswith("000000000002")]
        assert "tmp-00" not in names(path, "versions")
        assert (path / "objects" / "note.txt").exists()
        assert [n for n in names(path, "objects") if n.startswith("000000000001")]
        assert numbers(path) == [1, 5, 6]


def test_a_manifest_that_can_not_be_read_just_now_costs_no_version_that_it_stands_on(tmp_path: Path) -> None:
    """As on a network: what was needed below it was collected, and its successors lost their anchor."""
    path = tmp_path / "c"
    with writer(path, keep=9, anchor_every=9) as publisher:
        write(publisher, *range(6))
        schema = publisher._stored.digest
    manifest = path / "versions" / f"{3:012d}-run"
    sound = manifest.read_bytes()
    manifest.write_bytes(sound[:-1])
    with Channel.open(path, Trust()) as channel:
        assert collect(channel, 1, 1, 99, schema).versions == ()
        manifest.write_bytes(sound)
        assert [v.wrong for v in verify(channel)] == [None] * 6
