"""Attacks on a file channel by somebody who can write its folder: named errors, and the channel serves on."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import Version, auth
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import FilePublisher, FileSubscriber, FileWriterConfig
from jaxrl_sync.transfer.files.errors import ForeignChannel, UnsafePath
from tests.transfer.models import convert, engine_target, trainer_params

V0 = Version("a", 0)


@pytest.fixture
def channel(tmp_path: Path, token_file: Path) -> Path:
    """A channel that holds version 0."""
    publish(tmp_path / "channel", token_file, V0)
    return tmp_path / "channel"


def publish(path: Path, token_file: Path, version: Version) -> None:
    params = trainer_params()
    config = FileWriterConfig(fsync=False)
    with FilePublisher(path, params, token_file=token_file, config=config, convert=convert) as publisher:
        publisher.publish(params, version)
        assert publisher.drain(20)


def take(path: Path, token_file: Path, version: Version = V0) -> Any:
    with FileSubscriber(path, engine_target(), convert, token_file=token_file) as subscriber:
        update = subscriber.offer(version)
        update.prepare(20)
        return update.swap()


def one(folder: Path) -> Path:
    """The first file below a folder."""
    return next(p for p in sorted(folder.rglob("*")) if p.is_file())


def link_file(path: Path, elsewhere: Path) -> None:
    """A file moved away and a link to it in its place: the same bytes, reached over a link."""
    target = elsewhere / path.name
    path.rename(target)
    path.symlink_to(target)


def link_manifest(channel: Path, elsewhere: Path) -> None:
    link_file(one(channel / "versions"), elsewhere)


def link_object(channel: Path, elsewhere: Path) -> None:
    link_file(one(channel / "objects"), elsewhere)


def link_chunk(channel: Path, elsewhere: Path) -> None:
    for path in sorted((channel / "anchors").rglob("*")):
        if path.is_file() and not path.name.startswith((".", "_")):
            link_file(path, elsewhere)
            return


def link_folder(channel: Path, elsewhere: Path) -> None:
    link_file(channel / "versions", elsewhere)


def link_root(channel: Path, elsewhere: Path) -> None:
    link_file(channel, elsewhere)


def writable_by_others(channel: Path, elsewhere: Path) -> None:
    one(channel / "versions").chmod(0o666)


def pipe(channel: Path, elsewhere: Path) -> None:
    """A pipe must not block who opens it."""
    path = one(channel / "versions")
    path.rename(elsewhere / path.name)
    os.mkfifo(path, 0o600)


def device(channel: Path, elsewhere: Path) -> None:
    path = one(channel / "versions")
    path.rename(elsewhere / path.name)
    path.symlink_to("/dev/zero")


ATTACKS = [link_manifest, link_object, link_chunk, link_folder, link_root, writable_by_others, pipe, device]


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda a: a.__name__)
def test_what_is_no_plain_file_of_ours_is_refused(
    channel: Path, token_file: Path, tmp_path: Path, attack: Callable[[Path, Path], None]
) -> None:
    shutil.copytree(channel, tmp_path / "sound", copy_function=shutil.copy2)
    (tmp_path / "elsewhere").mkdir()
    attack(channel, tmp_path / "elsewhere")
    with pytest.raises(UnsafePath) as caught:
        take(channel, token_file)
    assert "\n" not in str(caught.value)
    if channel.is_symlink():
        channel.unlink()
    else:
        shutil.rmtree(channel)
    (tmp_path / "sound").rename(channel)
    take(channel, token_file)


def test_a_writer_follows_no_link_out_of_the_channel(channel: Path, token_file: Path, tmp_path: Path) -> None:
    """Links planted at every name that the next writer will use: what they point to stays as it is."""
    victim = tmp_path / "victim"
    victim.write_text("precious")
    number = max(int(p.name) for p in (channel / "epochs").iterdir() if p.name.isdecimal()) + 1
    (channel / "epochs" / f"{number:08d}").symlink_to(victim)
    (channel / "versions" / f"{1:012d}-a").symlink_to(victim)
    try:
        publish(channel, token_file, Version("a", 1))
    except (TransferError, AssertionError):
        pass  # it may give up, by name, or find other names
    assert victim.read_text() == "precious"
    for planted in [p for p in channel.rglob("*") if p.is_symlink()]:
        planted.unlink()
    take(channel, token_file)


def test_who_has_another_token_or_none_gets_nothing(channel: Path, tmp_path: Path) -> None:
    auth.create_token(tmp_path / "other")
    with pytest.raises(ForeignChannel):
        take(channel, tmp_path / "other")
    with FileSubscriber(channel, engine_target(), convert) as subscriber:
        with pytest.raises(ForeignChannel, match="found no token"):
            subscriber.offer(V0).prepare(20)


def test_weights_that_were_written_without_the_token_are_not_taken(
    channel: Path, token_file: Path, tmp_path: Path
) -> None:
    """A forger with a channel of his own, of the same shape, puts his files in place of ours, one or all."""
    auth.create_token(tmp_path / "other")
    publish(tmp_path / "forged", tmp_path / "other", V0)
    theirs = one(tmp_path / "forged" / "versions")
    ours = channel / "versions" / theirs.name
    kept = ours.read_bytes()
    ours.write_bytes(theirs.read_bytes())
    with pytest.raises(TransferError):
        take(channel, token_file)
    ours.write_bytes(kept)
    take(channel, token_file)
    for path in (tmp_path / "forged").rglob("*"):
        if path.is_file():
            target = channel / path.relative_to(tmp_path / "forged")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    with pytest.raises(ForeignChannel):
        take(channel, token_file)


@pytest.mark.parametrize("lineage", ["../../evil", "/etc/evil", "a/b", "", ".hidden", "a\x00b", "x" * 100])
def test_lineages_are_no_paths(token_file: Path, tmp_path: Path, lineage: str) -> None:
    before = sorted(p.name for p in tmp_path.iterdir())
    params = trainer_params()
    with FilePublisher(tmp_path / "channel", params, token_file=token_file, convert=convert) as publisher:
        with pytest.raises((TransferError, ValueError)):
            publisher.publish(params, Version(lineage, 1)).wait(20)
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted([*before, "channel"])
    assert not Path("/etc/evil").exists()
