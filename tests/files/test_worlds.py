"""A trainer of two processes writes, an engine of two processes reads: all of a version, or nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.replay import verify
from tests.files.channels import holds, reader, take, write, writer
from tests.ports import free_port

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


class World:
    """Two ranks that are told the same."""

    def __init__(self, role: str, path: Path, name: str) -> None:
        address = f"127.0.0.1:{free_port()}"
        command = [sys.executable, "-m", "tests.files.rank", role, str(path), address]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.ranks = [subprocess.Popen([*command, str(r), name], **pipes) for r in range(2)]  # type: ignore[call-overload]
        assert self.answers() == [["ready"]] * 2

    def say(self, rank: int, word: str) -> None:
        """A line to one rank."""
        pipe = self.ranks[rank].stdin
        assert pipe is not None
        pipe.write(word + "\n")
        pipe.flush()

    def hear(self, rank: int) -> list[str]:
        """A line from one rank."""
        pipe = self.ranks[rank].stdout
        assert pipe is not None
        return str(pipe.readline()).split()

    def tell(self, *words: str) -> None:
        """A line to each rank; one word for all, or one each."""
        for rank, word in enumerate(words if len(words) > 1 else words * 2):
            self.say(rank, word)

    def answers(self) -> list[list[str]]:
        """A line from each rank."""
        return [self.hear(rank) for rank in range(2)]

    def ask(self, *words: str) -> list[list[str]]:
        """Both."""
        self.tell(*words)
        return self.answers()

    def kill(self) -> None:
        """Both ranks, at once."""
        for rank in self.ranks:
            rank.kill()
            rank.communicate(timeout=20)


@pytest.fixture
def worlds() -> Iterator[list[World]]:
    found: list[World] = []
    yield found
    for world in found:
        world.kill()


def test_ranks_write_their_parts_and_ranks_read_theirs(tmp_path: Path, worlds: list[World]) -> None:
    path = tmp_path / "c"
    worlds.append(World("write", path, "first"))
    worlds.append(World("read", path, "engine"))
    writers, readers = worlds
    with reader(path) as single:
        for number in range(4):
            (state, anchor, delta), (other, *_) = writers.ask(str(number))
            assert state == other == "committed"
            assert readers.ask("next") == [["took", str(number), "True"]] * 2
            assert holds(take(single)[1], number)
        # rank 1 can't write its part: the version doesn't exist for anybody, the next one does
        assert writers.ask("4", "lose 4") == [["failed", "ChannelError"]] * 2
        assert [v.number for v in single.versions()] == [0, 1, 2, 3]
        assert [row[0] for row in writers.ask("5")] == ["committed"] * 2
        assert readers.ask("next") == [["took", "5", "True"]] * 2
        assert holds(take(single)[1], 5)
        with Channel.open(path, Trust()) as channel:
            assert [(v.version.number, v.wrong) for v in verify(channel)] == [
                (n, None) for n in (0, 1, 2, 3, 5)
            ]
            assert [len(m.parts) for m in channel.manifests()] == [2] * 5
        sizes = [sum(f.stat().st_size for f in (path / "objects").glob(f"*-r{r}-frames")) for r in range(2)]
        assert min(sizes) > max(sizes) / 3  # replicas are shared out
        writers.kill()
        worlds.append(World("write", path, "second"))
        assert [row[0] for row in worlds[-1].ask("6")] == ["committed"] * 2
        assert readers.ask("next") == [["took", "6", "True"]] * 2
        assert holds(take(single)[1], 6)


def test_no_version_is_prepared_before_every_rank_has_the_one_before(
    tmp_path: Path, worlds: list[World]
) -> None:
    """A rank that executes the leader's plans late finds what it has to swap in."""
    path = tmp_path / "c"
    worlds.append(World("read", path, "engine"))
    (readers,) = worlds
    with writer(path) as publisher:
        write(publisher, 0)
        readers.tell("prepare")
        assert readers.answers() == [["prepared", "0"]] * 2
        readers.say(0, "swap")
        assert readers.hear(0) == ["took", "0", "True"]
        write(publisher, 1)
        readers.say(0, "look")
        assert readers.hear(0) == ["nothing"]
        readers.say(1, "swap")
        assert readers.hear(1) == ["took", "0", "True"]
        assert readers.ask("next") == [["took", "1", "True"]] * 2
