"""The config's [sync.file] table, and modes of new files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.config import load, parse_overrides
from jaxrl_sync.config.errors import ConfigError
from jaxrl_sync.config.file_channel import channel_path, to_file_source, to_file_writer
from jaxrl_sync.launch.preflight import check_rooms
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from tests.app.runs import ADDITION
from tests.files.channels import holds, reader, take, write, writer


def test_the_table_reaches_writer_and_reader(tmp_path: Path) -> None:
    words = ["--sync.transport=file", "--sync.file.path=weights", "--sync.file.anchor_every=5"]
    more = ["--sync.file.owners=[7]", "--sync.file.readable=group", "--sync.file.keep=9"]
    config = load(ADDITION, parse_overrides([*words, *more]))
    assert channel_path(config, tmp_path) == tmp_path / "weights"
    settings = to_file_writer(config)
    assert (settings.anchor_every, settings.keep) == (5, 9)
    assert settings.trust == Trust(frozenset({7}), True, 0o640)
    source = to_file_source(config, tmp_path, 0)
    assert source is not None and source.sealed and source.config.trust == settings.trust
    full = load(ADDITION, parse_overrides([*words, "--sync.payload=full"]))
    assert to_file_writer(full).anchor_every == 1
    beside = load(ADDITION, parse_overrides(["--sync.file.path=/abs"]))
    assert channel_path(beside, tmp_path) == Path("/abs") and to_file_source(beside, tmp_path, 0) is None
    with pytest.raises(ConfigError, match="needs sync.file.path"):
        load(ADDITION, parse_overrides(["--sync.transport=file"]))


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("--sync.slots=1", "needs sync.slots >= 2, found 1"),
        ("--eval.pin=true", "eval.pin=true needs a trainer"),
    ],
)
def test_what_a_folder_can_not_do_is_refused_with_the_config(word: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load(ADDITION, parse_overrides(["--sync.transport=file", "--sync.file.path=weights", word]))
    load(ADDITION, parse_overrides(["--sync.transport=tcp", "--sync.file.path=weights", word]))  # beside it


@pytest.mark.parametrize(
    "words",
    [
        ["--sync.relay=true"],
        ["--sync.fanout=tree", "--sync.fanout_degree=3"],
        ["--sync.site=a", '--sync.sites=["a", "b"]'],
        ["--sync.spot=[1]"],
        ["--sync.keep_versions=2", "--sync.offload_limit_mb=5"],
    ],
)
def test_a_run_through_a_folder_names_every_setting_that_it_would_ignore(words: list[str]) -> None:
    config = load(ADDITION, parse_overrides(["--sync.transport=file", "--sync.file.path=weights", *words]))
    with pytest.raises(ConfigError) as refused:
        check_rooms(config)
    keys = [word.removeprefix("--").partition("=")[0] for word in words]
    assert all(key in str(refused.value) for key in keys)
    check_rooms(load(ADDITION, parse_overrides(["--sync.transport=tcp", "--sync.file.path=weights", *words])))


def test_a_folder_that_can_not_be_used_ends_a_run_before_anything_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("no folder")
    (tmp_path / "open").mkdir(mode=0o777)
    (tmp_path / "open").chmod(0o777)
    with Channel.create(tmp_path / "foreign", Trust(), "ab" * 32, "policy"):
        pass
    cases = [("file", "no plain file or folder"), ("open", "others may write it"), ("foreign", "is of run")]
    for number, (name, message) in enumerate([*cases, ("file/below", "Not a directory")]):
        run_dir = tmp_path / f"run{number}"
        words = ["--sync.transport=file", f"--sync.file.path={tmp_path / name}"]
        assert main(["run", str(ADDITION), "--run-dir", str(run_dir), *words]) == 3
        error = capsys.readouterr().err
        assert f"sync.file.path={tmp_path / name}: " in error and message in error and error.count("\n") == 1
        assert not (run_dir / "logs").exists(), "something was started"


@pytest.mark.parametrize(("file_mode", "folder_mode"), [(0o600, 0o700), (0o640, 0o750), (0o644, 0o755)])
def test_new_files_have_the_mode_that_was_asked_for_whatever_the_umask_is(
    tmp_path: Path, file_mode: int, folder_mode: int
) -> None:
    before = os.umask(0o077)
    try:
        with writer(tmp_path / "c", trust=Trust(file_mode=file_mode)) as publisher:
            write(publisher, 0)
            with reader(tmp_path / "c") as subscriber:
                assert holds(take(subscriber)[1], 0)
    finally:
        os.umask(before)
    assert (tmp_path / "c" / "writer.lock").stat().st_mode & 0o777 == 0o600  # readers have no use for it
    for path in [tmp_path / "c", *(tmp_path / "c").rglob("[!w]*")]:
        assert path.stat().st_mode & 0o777 == (folder_mode if path.is_dir() else file_mode), path
    with pytest.raises(ValueError, match="only the owner writes"):
        Trust(file_mode=0o660)
