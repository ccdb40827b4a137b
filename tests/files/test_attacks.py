"""What somebody who can write the folder, or a part of it, can do: nothing but refusals with names.

After each of them the reader serves what it served.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.codec.errors import FrameError, WrongBase
from jaxrl_sync.transfer.errors import TransferError
from jaxrl_sync.transfer.files import FileSubscriber
from jaxrl_sync.transfer.files import names as file_names
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from jaxrl_sync.transfer.files.errors import BrokenObject, ForeignChannel, NoVersion, UnsafePath
from jaxrl_sync.transfer.files.manifest import Manifest, Table
from jaxrl_sync.transfer.files.seal import Seal
from jaxrl_sync.transfer.version import Version
from tests.files.channels import holds, names, reader, take, write, writer


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    auth.create_token(tmp_path / "token")
    return tmp_path / "token"


def file_of(path: Path, folder: str, start: str, end: str = "") -> Path:
    """The file of a channel whose name starts and ends like this."""
    (found,) = [p for p in (path / folder).iterdir() if p.name.startswith(start) and p.name.endswith(end)]
    return found


def refused(subscriber: FileSubscriber, kind: type[Exception], match: str | None = None) -> None:
    """The newest version is refused with this error, the serving one stays."""
    before = subscriber.installed
    update = subscriber.poll(10)
    assert update is not None
    with pytest.raises(kind, match=match):
        update.prepare()
    assert subscriber.installed == before


def replace_by_link(file: Path) -> None:
    """The file elsewhere, a link in its place."""
    elsewhere = file.parent.parent.parent / f"elsewhere-{file.name}"
    shutil.move(file, elsewhere)
    file.symlink_to(elsewhere)


def cut(file: Path) -> None:
    """Without its last byte."""
    file.write_bytes(file.read_bytes()[:-1])


def longer(file: Path) -> None:
    """With one byte more."""
    file.write_bytes(file.read_bytes() + b"\0")


def flip(file: Path) -> None:
    """One bit differs."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def fifo(file: Path) -> None:
    """A pipe in its place."""
    file.unlink()
    os.mkfifo(file, 0o600)


def folder(file: Path) -> None:
    """A folder in its place."""
    file.unlink()
    file.mkdir()


def open_to_all(file: Path) -> None:
    """Others may write it."""
    file.chmod(0o666)


HARM: list[tuple[Callable[[Path], None], type[Exception]]] = [
    (replace_by_link, UnsafePath),
    (cut, BrokenObject),
    (flip, BrokenObject),
    (fifo, UnsafePath),
    (folder, UnsafePath),
    (open_to_all, UnsafePath),
    (Path.unlink, NoVersion),
]


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize(("harm", "kind"), HARM, ids=[h.__name__ for h, _ in HARM])
@pytest.mark.parametrize(
    ("where", "start", "end"),
    [("objects", "000000000001", "-frames"), ("objects", "000000000001", "-table")],
    ids=["frames", "table"],
)
def test_harmed_files_of_a_delta_are_refused(
    tmp_path: Path,
    token_file: Path,
    sealed: bool,
    harm: Callable[[Path], None],
    kind: type[Exception],
    where: str,
    start: str,
    end: str,
) -> None:
    path, token = tmp_path / "c", token_file if sealed else None
    with writer(path, token) as publisher, reader(path, token) as subscriber:
        write(publisher, 0)
        _, serving = take(subscriber)
        write(publisher, 1)
        harm(file_of(path, where, start, end))
        refused(subscriber, kind)
        assert holds(serving, 0)
        write(publisher, 2, 3, 4)  # 4 has an anchor: what came before it doesn't matter any more
        assert holds(take(subscriber)[1], 4)


@pytest.mark.parametrize("sealed", [False, True], ids=["plain", "sealed"])
@pytest.mark.parametrize(
    ("harm", "kind"), [*HARM, (longer, BrokenObject)], ids=[*(h.__name__ for h, _ in HARM), "longer"]
)
def test_harmed_files_of_an_anchor_are_refused(
    tmp_path: Path, token_file: Path, sealed: bool, harm: Callable[[Path], None], kind: type[Exception]
) -> None:
    path, token = tmp_path / "c", token_file if sealed else None
    with writer(path, token) as publisher, reader(path, token) as subscriber:
        write(publisher, 0)
        anchor = file_of(path, "anchors", "000000000000")
        harm(anchor / "layers.q" / "0.0.0.0")
        refused(subscriber, kind, r"layers\.q/0\.0\.0\.0")
        assert subscriber.installed is None


def test_a_manifest_that_is_a_link_is_no_version_and_the_others_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        take(subscriber)
        write(publisher, 1)
        replace_by_link(file_of(path, "versions", "000000000001"))
        for _ in range(3):
            assert subscriber.poll() is None
        lines = [r.getMessage() for r in caplog.records]
        assert sum("000000000001-run is a link" in line for line in lines) == 1  # logged once
        write(publisher, 2, 3, 4)
        assert holds(take(subscriber)[1], 4)


def test_folders_that_are_links_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        anchor = file_of(path, "anchors", "000000000000")
        shutil.move(anchor / "bytes", tmp_path / "elsewhere")
        (anchor / "bytes").symlink_to(tmp_path / "elsewhere")
        refused(subscriber, UnsafePath, "is a link")
    shutil.move(path / "objects", tmp_path / "objects")
    (path / "objects").symlink_to(tmp_path / "objects")
    with reader(path) as subscriber, pytest.raises(UnsafePath, match="objects is a link"):
        subscriber.poll()
    (tmp_path / "link").symlink_to(path)
    with reader(tmp_path / "link") as subscriber, pytest.raises(UnsafePath, match="link is a link"):
        subscriber.poll()
    with pytest.raises(UnsafePath, match="link is a link"):
        writer(tmp_path / "link")


def test_a_torn_manifest_is_no_version(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        take(subscriber)
        write(publisher, 1)
        manifest = file_of(path, "versions", "000000000001")
        data = manifest.read_bytes()
        for size in (0, 1, 30, len(data) // 2, len(data) - 1):
            manifest.write_bytes(data[:size])
            assert subscriber.poll() is None
        manifest.write_bytes(data)
        assert holds(take(subscriber)[1], 1)


def test_a_foreign_owner_is_refused_unless_configured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writer(tmp_path / "c") as publisher:
        write(publisher, 0)
    mine = os.geteuid()
    if mine == 0:
        os.chown(tmp_path / "c", 12345, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 12346)
    owner = 12345 if mine == 0 else mine
    with reader(tmp_path / "c") as subscriber, pytest.raises(UnsafePath, match=f"belongs to uid {owner}"):
        subscriber.poll()
    trust = Trust(owners=frozenset({owner}))
    with reader(tmp_path / "c", trust=trust) as subscriber:
        assert holds(take(subscriber)[1], 0)


def test_a_channel_of_another_run_or_model_is_refused(tmp_path: Path, token_file: Path) -> None:
    path, other = tmp_path / "c", tmp_path / "other-token"
    auth.create_token(other)
    with writer(path, token_file) as publisher:
        write(publisher, 0)
        with reader(path, other) as subscriber, pytest.raises(ForeignChannel, match="is of run"):
            subscriber.poll()
        with reader(path) as subscriber, pytest.raises(ForeignChannel, match="found no token"):
            subscriber.poll()
        with reader(path, token_file, model="critic") as subscriber:
            with pytest.raises(ForeignChannel, match="is of model 'policy', expected 'critic'"):
                subscriber.poll()
    with pytest.raises(ForeignChannel):
        writer(path, other)
    with writer(tmp_path / "plain") as publisher:
        write(publisher, 0)
    with reader(tmp_path / "plain", token_file) as subscriber:
        with pytest.raises(ForeignChannel, match="is of run 'none'"):
            subscriber.poll()
    text = token_file.read_text().strip()
    for file in (p for p in path.rglob("*") if p.is_file()):
        assert text.encode() not in file.read_bytes()


def test_who_lacks_the_token_cannot_pass_weights_off(tmp_path: Path, token_file: Path) -> None:
    """The forger knows everything but the token: it makes versions with digests that are sound."""
    path, forged = tmp_path / "c", tmp_path / "forged"
    with writer(path, token_file) as publisher, reader(path, token_file) as subscriber:
        write(publisher, 0)
        _, serving = take(subscriber)
        write(publisher, 1)
        auth.create_token(tmp_path / "forger")
        with writer(forged, tmp_path / "forger") as forger:
            write(forger, 0, 5)
        for part in ("versions", "objects"):
            for name in names(forged, part):
                shutil.copy(forged / part / name, path / part / name)
        assert Version("run", 5) not in subscriber.versions()
        assert holds(serving, 0)
        assert holds(take(subscriber)[1], 1)  # sound, on what this reader holds
        with reader(path, token_file) as late:
            assert late.versions() == [Version("run", 1)]  # 0 is the forger's now
            refused(late, NoVersion, "run:0 is missing below it")


def test_the_seal_of_one_epoch_says_nothing_of_another(tmp_path: Path, token_file: Path) -> None:
    path = tmp_path / "c"
    with writer(path, token_file) as publisher:
        write(publisher, 0, 1, 2)
    with writer(path, token_file) as publisher:
        write(publisher, 3)
    epochs = path / "epochs"
    sealed = (epochs / "00000001-sealed").read_bytes()  # of a channel that had no version yet
    (epochs / "00000002-sealed").unlink()
    (epochs / "00000002-sealed").write_bytes(sealed)
    (epochs / "00000002-sealed").chmod(0o600)
    with Channel.open(path, Trust(), auth.load_token(token_file)) as channel:
        assert channel.epochs.rules().sealed == {1: 0, 2: None}  # as if it weren't sealed, not sealed at 0


def rewrite(path: Path, version: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a manifest of a channel without a token and seal it again, as anybody could."""
    file = file_of(path, "versions", f"{version:012d}")
    value = json.loads(file.read_bytes().partition(b"\n")[2])
    change(value)
    file.write_bytes(Seal().document("manifest", value))


def retable(path: Path, version: int, file: Path, table: dict[str, Any]) -> None:
    """The same with a table: its digest in the manifest is right."""
    data = json.dumps(table).encode()
    file.write_bytes(data)
    row = [0, file.name, len(data), Seal().of_object(data)]
    rewrite(path, version, lambda value: value.update(parts=[row]))


TRAVERSALS: list[tuple[str, Any]] = [
    ("anchor", "../../etc"),
    ("anchor", "/etc"),
    ("anchor", "000000000001-e1-t2/../x"),
    ("schema", "../CHANNEL"),
    ("version", ["../../x", 1]),
    ("parts", [[0, "../CHANNEL", 10, "00"]]),
    ("parts", [[0, "000000000001-e1-t2-r0-table", 1 << 60, "00"]]),
    ("parts", []),
    ("parts", [[0, "000000000001-e1-t2-r0-table", 10, "00"]] * 2),
    ("sequence", -1),
    ("epoch", "1"),
    ("delta_bytes", 1 << 60),
    ("base", ["run"]),
    ("channel", "another"),
]


@pytest.mark.parametrize(("field", "value"), TRAVERSALS)
def test_a_manifest_that_no_writer_writes_is_no_version(tmp_path: Path, field: str, value: Any) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        _, serving = take(subscriber)
        write(publisher, 1)
        rewrite(path, 1, lambda row: row.update({field: value}))
        assert subscriber.poll() is None
        with pytest.raises((BrokenObject, ForeignChannel)):
            subscriber.offer(Version("run", 1))
        assert holds(serving, 0)


def test_a_replayed_older_version_under_a_newer_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path, keep=9) as publisher, reader(path) as subscriber:
        write(publisher, 0, 1)
        take(subscriber)
        write(publisher, 2)
        newer, older = (file_of(path, "versions", f"{n:012d}") for n in (2, 1))
        newer.write_bytes(older.read_bytes())
        assert subscriber.poll() is None  # it says that it is version 1
        write(publisher, 3)
        shutil.copy(
            file_of(path, "objects", f"{1:012d}", "-frames"), file_of(path, "objects", f"{3:012d}", "-frames")
        )
        refused(subscriber, TransferError)


def test_frames_on_another_base_are_refused_before_anything_is_applied(tmp_path: Path) -> None:
    """A table and a manifest with sound digests over frames of another version."""
    path = tmp_path / "c"
    with writer(path, keep=9) as publisher, reader(path) as subscriber:
        write(publisher, 0, 1)
        take(subscriber)
        write(publisher, 2)
        table = json.loads(file_of(path, "objects", f"{1:012d}", "-table").read_bytes())
        retable(path, 2, file_of(path, "objects", f"{2:012d}", "-table"), table)
        refused(subscriber, WrongBase, "on base run:0")


def test_frames_larger_than_what_they_change_are_refused_before_they_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        take(subscriber)
        write(publisher, 1)
        file = file_of(path, "objects", f"{1:012d}", "-table")
        table = json.loads(file.read_bytes())
        table["frames"][0][1] = 1 << 40
        data = json.dumps(table).encode()
        file.write_bytes(data)
        rewrite(
            path, 1, lambda value: value.update(parts=[[0, file.name, len(data), Seal().of_object(data)]])
        )
        refused(subscriber, BrokenObject, "a frame of 1099511627776 bytes")


def test_sums_that_differ_are_refused_and_an_anchor_mends_it(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path, anchor_every=2) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        _, serving = take(subscriber)
        write(publisher, 1)
        file = file_of(path, "objects", f"{1:012d}", "-table")
        table = json.loads(file.read_bytes())
        table["sums"][0][0] ^= 1
        data = json.dumps(table).encode()
        file.write_bytes(data)
        rewrite(
            path, 1, lambda value: value.update(parts=[[0, file.name, len(data), Seal().of_object(data)]])
        )
        refused(subscriber, BrokenObject, "has state digest")
        assert holds(serving, 0)
        write(publisher, 2)
        assert holds(take(subscriber)[1], 2)


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "/etc/passwd", ".hidden", "a\0b", "a\n", "x" * 201, "ä", "-rf", "a b"],
)
def test_only_plain_names_are_opened(tmp_path: Path, name: str) -> None:
    with writer(tmp_path / "c") as publisher:
        for folder_name in file_names.FOLDERS:
            with pytest.raises(UnsafePath, match="isn't one that a channel uses"):
                publisher._channel[folder_name].open(name)
            with pytest.raises(UnsafePath):
                publisher._channel[folder_name].child(name, create=True)


def test_tables_and_manifests_refuse_any_other_shape() -> None:
    sound = {"rank": 0, "sums": [[1, 2]], "digests": None, "object": None, "frames": []}
    assert Table.of_json(sound, "here", 0, 1).sums == ((1, 2),)
    for field, value in [
        ("rank", 1), ("sums", []), ("sums", [[1, -2]]), ("sums", [[1, 2, 3]]), ("digests", ["a", "b"]),
        ("digests", [1]), ("object", "../x"), ("object", 7),
    ]:  # fmt: skip
        with pytest.raises(BrokenObject, match="here"):
            Table.of_json({**sound, field: value}, "here", 0, 1)
    name = "000000000001-e1-t2-r0-frames"
    for rows in ([[0, 5, 0, 2, "d"]], [[1, 5, 0, 1, "d"]], [[0, 0, 0, 1, "d"]], [[0, 5, 0, 1]], "x", []):
        with pytest.raises(BrokenObject, match="frames"):
            Table.of_json({**sound, "object": name, "frames": rows}, "here", 0, 1)
    with pytest.raises(BrokenObject):
        Manifest.of_json({}, "here")


def test_a_frame_with_a_sound_outer_digest_is_still_checked_inside(tmp_path: Path) -> None:
    path = tmp_path / "c"
    with writer(path) as publisher, reader(path) as subscriber:
        write(publisher, 0)
        take(subscriber)
        write(publisher, 1)
        frames = file_of(path, "objects", f"{1:012d}", "-frames")
        flip(frames)
        file = file_of(path, "objects", f"{1:012d}", "-table")
        table = json.loads(file.read_bytes())
        table["frames"][0][4] = Seal().of_object(frames.read_bytes())
        data = json.dumps(table).encode()
        file.write_bytes(data)
        rewrite(
            path, 1, lambda value: value.update(parts=[[0, file.name, len(data), Seal().of_object(data)]])
        )
        refused(subscriber, FrameError)
