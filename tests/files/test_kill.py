"""Writers that are killed (kill -9) at any moment, or hang and come back, beside a reader."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import ChannelBusy
from jaxrl_sync.transfer.files.replay import verify
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, take, write, writer
from tests.transfer.models import until

KILLS = 6


def start(path: Path, lineage: str, first: int, count: int, *more: str) -> subprocess.Popen[str]:
    """A writer process that has the channel."""
    words = [str(path), lineage, str(first), str(count), *more]
    command = [sys.executable, "-m", "tests.files.child", *words]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "open\n"
    return child


def stands(pid: int) -> bool:
    """Whether a process is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_writer_killed_at_any_moment_leaves_a_channel_that_the_next_one_continues(tmp_path: Path) -> None:
    """Each writer is killed after a random part of its work. The reader never sees other bits than a
    version's, never an older one, and in the end nothing of the dead is left."""
    seed = 4
    rng = random.Random(seed)
    path, first, seen, least = tmp_path / "c", 0, list[Version](), 0
    with reader(path) as subscriber:
        for kill in range(KILLS):
            child = start(path, "run", first, 1000)
            lines = rng.randint(0, 3)
            least += lines > 0
            for _ in range(lines):
                assert child.stdout is not None
                child.stdout.readline()
            time.sleep(rng.random() * 0.2)
            child.kill()
            child.communicate(timeout=20)
            update = subscriber.poll(0.0)
            if update is not None:
                update.prepare()
                assert holds(update.swap(), update.version.number), (seed, kill)
                assert not seen or update.version.follows(seen[-1])
                seen.append(update.version)
            committed = subscriber.versions()
            first = max((v.number for v in committed), default=-1) + 1
        assert len(seen) >= least > 0
        with writer(path, keep=2, anchor_every=3) as publisher:
            write(publisher, first, first + 1, first + 2)
            version, found = take(subscriber)
            assert version.number == first + 2 and holds(found, first + 2)
            stems = {n.split("-r0")[0] for n in names(path, "objects")}
            there = {n.split("-")[0] for n in names(path, "versions") if not n.startswith("tmp-")}
            assert {s.split("-")[0] for s in stems} == there  # what the dead left half done is gone
            assert {n.split("-")[0] for n in names(path, "anchors")} <= there
    with Channel.open(path, Trust()) as channel:
        assert [v.wrong for v in verify(channel)] == [None] * len(there)


@pytest.mark.slow
def test_a_writer_that_hangs_and_comes_back_adds_nothing_to_a_channel_that_another_took_over(
    tmp_path: Path,
) -> None:
    path = tmp_path / "c"
    child = start(path, "run", 0, 3, "halt")
    try:
        assert child.stdout is not None
        assert [child.stdout.readline() for _ in range(3)] == ["0\n", "1\n", "halted\n"]
        until(lambda: stands(child.pid))  # it is about to: what continues it must come after that
        (path / "writer.lock").unlink()  # as on a file system without locks, or another machine
        with writer(path) as publisher, reader(path) as subscriber:
            write(publisher, 1, 2, lineage="other")
            child.send_signal(signal.SIGCONT)
            assert child.stdout.readline() == "failed Fenced\n"
            assert child.wait(30) == 0
            assert f"{2:012d}-run" in names(path, "versions")  # it did commit: for nobody
            assert Version("run", 2) not in subscriber.versions()
            version, found = take(subscriber)
            assert version == Version("other", 2) and holds(found, 2)
            write(publisher, 3, lineage="other")
            until(lambda: f"{2:012d}-run" not in names(path, "versions"))
    finally:
        child.kill()
        child.communicate(timeout=20)


FORKS = """
import sys, tests.conftest
from pathlib import Path
from jaxrl_sync.transfer.version import Version
from tests.files.channels import write, writer
import os, time
publisher = writer(Path(sys.argv[1]))
write(publisher, 0)
if os.fork() == 0:  # as data loaders do; it outlives its parent
    time.sleep(200)
print("forked", flush=True)
time.sleep(200)
"""


@pytest.mark.slow
def test_what_a_killed_writer_has_forked_does_not_hold_its_channel(tmp_path: Path) -> None:
    """The next one was refused, by the id of a process that was gone."""
    path = tmp_path / "c"
    child = subprocess.Popen(
        [sys.executable, "-c", FORKS, str(path)], stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        assert child.stdout is not None and child.stdout.readline() == "forked\n"
        with pytest.raises(ChannelBusy, match=f"is being written by pid {child.pid} on"):
            writer(path)
        child.kill()
        child.wait(20)
        with writer(path) as publisher:
            write(publisher, 1)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate(timeout=20)
