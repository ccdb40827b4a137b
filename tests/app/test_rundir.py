"""Run directories: fresh names, refusal of a used one, one supervisor at a time."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jaxrl_sync.config import load, parse_overrides
from jaxrl_sync.launch.run import forget_attempt, needs_token
from jaxrl_sync.launch.rundir import RunDirError, create, locked
from jaxrl_sync.orchestrator.rundir import MetricsFile, read_rows
from jaxrl_sync.transfer.auth import create_token, load_token
from jaxrl_sync.transfer.files.channel import Channel
from jaxrl_sync.transfer.files.config import Trust
from tests.app.runs import ADDITION


def test_two_runs_of_one_second_get_two_directories(tmp_path: Path) -> None:
    first, second = create(str(tmp_path / "runs"), "addition"), create(str(tmp_path / "runs"), "addition")
    assert first != second
    assert first.is_dir() and second.is_dir() and first.name.startswith("addition-20")


def test_a_used_directory_needs_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunDirError, match="is not empty; add --resume"):
        create("runs", "x", str(tmp_path))
    assert create("runs", "x", str(tmp_path), resume=True) == tmp_path


def test_resume_needs_a_directory_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(RunDirError, match="does not exist"):
        create("runs", "x", str(tmp_path / "none"), resume=True)


def test_a_directory_has_one_supervisor(tmp_path: Path) -> None:
    with locked(tmp_path), pytest.raises(RunDirError, match="in use by another"), locked(tmp_path):
        raise AssertionError("two supervisors hold one run directory")
    with locked(tmp_path):
        assert (tmp_path / ".lock").exists()


def test_an_earlier_attempt_leaves_its_history_but_not_its_addresses(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    for name in ("token", "progress.json", "summary.json", "metrics.jsonl", "proc/hub.json"):
        (tmp_path / name).write_text("{}")
    forget_attempt(tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["metrics.jsonl"]


def test_what_a_crash_left_of_the_metrics_is_kept_beside_their_whole_rows(tmp_path: Path) -> None:
    """A disk may leave any bytes behind: they ended a resumed run with a traceback."""
    rows = [{"kind": "step", "step": n} for n in (1, 2, 3)]
    whole = "".join(json.dumps(row) + "\n" for row in rows).encode()
    torn = whole + b'\x00\xf7\xff\n5\n{"kind": "step", "st'
    (tmp_path / "metrics.jsonl").write_bytes(torn)
    metrics = MetricsFile(tmp_path, resume_step=2)
    metrics.append({"kind": "step", "step": 3, "again": True})
    metrics.close()
    assert metrics.earlier == rows[:2]
    assert read_rows(tmp_path / "metrics.jsonl") == [*rows[:2], {"kind": "step", "step": 3, "again": True}]
    assert (tmp_path / "metrics.1.jsonl").read_bytes() == torn
    (tmp_path / "metrics.jsonl").write_bytes(whole)
    MetricsFile(tmp_path, resume_step=3).close()
    assert not (tmp_path / "metrics.2.jsonl").exists(), "nothing was cut off"


def test_a_resumed_run_keeps_the_token_that_sealed_its_channel(tmp_path: Path) -> None:
    """With another one nobody could read the channel, the run's own trainer included."""
    config = load(ADDITION, parse_overrides(["--sync.transport=file", "--sync.file.path=weights"]))
    assert not needs_token(config, tmp_path)
    token = create_token(tmp_path / "token")
    assert not needs_token(config, tmp_path)  # an attempt that wrote nothing
    with Channel.create(tmp_path / "weights", Trust(), token, "policy") as channel:
        first = channel.id
    assert needs_token(config, tmp_path)
    forget_attempt(tmp_path, keep_token=True)
    with Channel.create(tmp_path / "weights", Trust(), load_token(tmp_path / "token"), "policy") as channel:
        assert channel.id == first
    open_ = load(ADDITION, parse_overrides(["--sync.file.path=weights", "--sync.file.sealed=false"]))
    assert not needs_token(open_, tmp_path)
    assert not needs_token(load(ADDITION), tmp_path)
