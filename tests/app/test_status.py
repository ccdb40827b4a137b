"""``jaxrl-sync status``: the fleet as tables or JSON, of a run or of a hub, once or again and again."""

from __future__ import annotations

import io
import itertools
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.cli import main
from jaxrl_sync.launch import status as status_module
from jaxrl_sync.launch.fleet import fleet_text, merge_edges
from jaxrl_sync.launch.status import Looker, describe, show
from jaxrl_sync.transfer import HubClient, Version, auth
from jaxrl_sync.transfer.hub.server import Routes
from tests.transfer.models import Rig, ServerThread, take, trainer_params, until

TOKEN = "a token file"
V1, V3 = {"lineage": "abcdefabcdefabcdef", "number": 1}, {"lineage": "abcdefabcdefabcdef", "number": 3}
FLEET: dict[str, Any] = {
    "newest": {"policy": {"version": V3, "bytes": 2_500_000, "published_at": 90.0, "available": True}},
    "pins": [{"model": "policy", "version": V1, "by": ["eval"]}],
    "replicas": {
        "policy": [
            {
                "holder": {"role": "publisher", "name": "trainer"},
                "version": V3,
                "state": "published",
                "ranks": {"0": "published"},
            },
            {
                "holder": {"role": "engine", "name": "e1"},
                "version": V1,
                "state": "published",
                "ranks": {"0": "published"},
                "reliable": False,
                "site": "west",
            },
            {
                "holder": {"role": "engine", "name": "e1"},
                "version": V3,
                "state": "replicating",
                "ranks": {"0": "begun", "1": "offered"},
                "source": {"role": "relay", "name": "e0"},
                "prefix": {"0": [3, 16], "1": [1, 16]},
                "readers": ["e2"],
            },
            {
                "holder": {"role": "engine", "name": "e9"},
                "version": {"lineage": "other", "number": 9},
                "state": "published",
                "ranks": {},
            },
        ]
    },
    "rounds": [
        {
            "id": "r-7",
            "engine": "e1",
            "version": V3,
            "ranks": {"0": "begun"},
            "source": {"role": "relay", "name": "e0"},
        }
    ],
    "closed": [
        {
            "id": "r-6",
            "engine": "e0",
            "version": V3,
            "source": {"role": "publisher", "name": "trainer"},
            "state": "committed",
            "repair": "none",
            "why": "every rank installed it",
        }
    ],
    "members": [
        {"role": "publisher", "name": "trainer", "rank": 0, "size": 1, "info": {"address": "127.0.0.1:9"}}
    ],
    "leases": {"publisher trainer.0": 7.25},
}


def row_of(text: str, *words: str) -> list[str]:
    """The one line of a text that starts with ``words``, as its words."""
    (line,) = [x.split() for x in text.splitlines() if x.split()[: len(words)] == list(words)]
    return line


def test_the_fleet_as_tables() -> None:
    text = fleet_text(FLEET, t=100.0)
    assert row_of(text, "policy", "abcdefabcdef:3") == [
        "policy",
        "abcdefabcdef:3",
        "2.500",
        "10.0",
        "yes",
        "abcdefabcdef:1",
        "eval",
    ]
    assert row_of(text, "policy", "publisher")[3:6] == ["abcdefabcdef:3", "0", "published"]
    assert row_of(text, "policy", "engine", "e1", "abcdefabcdef:1")[4:] == [
        "2",
        "published",
        "1",
        "west",
        "(spot)",
    ]
    replicating = row_of(text, "policy", "engine", "e1", "abcdefabcdef:3")
    assert replicating[4:] == ["0", "replicating", "0:begun", "1:offered", "relay", "e0", "4/32", "-", "e2"]
    assert row_of(text, "policy", "engine", "e9")[4] == "lineage"
    assert row_of(text, "e0")[1:6] == ["abcdefabcdef:3", "publisher", "trainer", "committed", "none"]
    assert row_of(text, "publisher", "trainer") == ["publisher", "trainer", "1/1", "7.2", "-", "127.0.0.1:9"]
    assert fleet_text({}) == ""


def test_words_of_others_do_not_command_the_terminal() -> None:
    bad = {**FLEET["closed"][0], "why": "refused: \x1b]0;owned\x07\x1b[2J\nlast rounds"}
    text = fleet_text({**FLEET, "closed": [bad]}, t=100.0)
    assert "refused:" in text and text.replace("\n", "").isprintable()
    assert text.count("\n") == fleet_text({**FLEET, "closed": FLEET["closed"][:1]}, t=100.0).count("\n")


def test_only_the_last_edges_are_kept() -> None:
    rows = [{"kind": "edge", "seq": n} for n in range(600)]
    kept = merge_edges(rows[:10], [{"kind": "round"}, *rows[10:]])
    assert len(kept) == 512 and kept[-1] == rows[-1]


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    auth.create_token(tmp_path / "token")
    return tmp_path / "token"


@pytest.fixture
def hub(token_file: Path) -> Iterator[ServerThread]:
    server = ServerThread(token_file)
    yield server
    server.close()


def test_a_fleet_is_shown_by_its_hub(
    hub: ServerThread, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = ["--hub", hub.url, "--token-file", str(token_file)]
    assert main(["status", *place]) == 0
    assert capsys.readouterr().out == "hub: nobody is registered\n"
    with Rig(hub, token_file) as rig, HubClient(hub.url, token_file) as client:
        params = trainer_params()
        rig.publisher(params).publish(params, Version("a", 4))
        take(rig.subscriber())
        until(lambda: bool(client.status()["closed"]) and client.trace().rows[-1]["kind"] != "publish")
        assert main(["status", *place]) == 0
        text = capsys.readouterr().out
        assert row_of(text, "policy", "engine", "engine-0")[3:6] == ["a:4", "0", "published"]
        assert row_of(text, "engine-0", "a:4", "publisher")[4] == "committed"
        assert main(["status", *place, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert found["hub"]["newest"]["policy"]["version"] == {"lineage": "a", "number": 4}
        assert found["hub"]["leases"].keys() == {"publisher trainer.0", "subscriber engine-0.0"}


def test_members_that_fit_and_one_that_does_not_by_name(
    hub: ServerThread, token_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["status", "--hub", hub.url, "--token-file", str(token_file), "--preflight"]
    assert main(words) == 1
    assert capsys.readouterr().out == (
        "model 'policy': publishers is none, expected a trainer that publishes it\n"
    )
    with Rig(hub, token_file) as rig, HubClient(hub.url, token_file) as client:
        rig.publisher(trainer_params())
        rig.subscriber()
        until(lambda: bool(client.preflight()["ok"]))
        assert main(words) == 0
        assert capsys.readouterr().out == "all fit: trainer, engine-0\n"
        small = {"model": "policy", "slot_bytes": 9, "free_bytes": 5, "correspondence": "c\x1b[2J"}
        client.register("subscriber", "small", info=small)
        client.register("subscriber", "late", info={"model": "policy"})
        assert main(words) == 1
        text = capsys.readouterr().out
        assert "subscriber small.0: memory is 5 bytes free, expected 9 (9 slot)\n" in text
        assert "subscriber late.0: hasn't planned with a trainer yet\n" in text
        assert text.replace("\n", "").isprintable()
        assert main([*words, "other", "--json"]) == 1
        assert json.loads(capsys.readouterr().out)["differences"][0]["who"] == "model 'other'"


def test_a_hub_without_a_trace_is_shown_all_the_same(
    token_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Routes.table
    monkeypatch.setattr(Routes, "table", lambda self: [r for r in table(self) if r.path != "/v1/trace"])
    old = ServerThread(token_file)
    try:
        assert main(["status", "--hub", old.url, "--token-file", str(token_file)]) == 0
    finally:
        old.close()
    assert capsys.readouterr().out == "hub: nobody is registered\n"


def test_watching_goes_on_over_a_restart_of_the_hub(
    token_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three looks: a hub, no answer, a hub that counts from 1 again."""
    (tmp_path / "config.toml").write_text("")
    (tmp_path / "proc").mkdir()
    hubs = [ServerThread(token_file)]

    def tell(url: str) -> None:
        row = {"name": "hub", "pid": os.getpid(), "url": url}
        (tmp_path / "proc" / "hub.json").write_text(json.dumps(row))

    def beats(watch_s: float | None) -> Iterator[None]:
        tell(hubs[0].url)
        yield
        hubs[0].close()
        yield
        hubs.append(ServerThread(token_file))
        tell(hubs[1].url)
        yield

    monkeypatch.setattr(status_module, "_beats", beats)
    monkeypatch.setattr(status_module, "ANSWER_S", 0.3)
    out = io.StringIO()
    with Looker(tmp_path, None, None) as looker:
        show(looker, as_json=True, watch_s=0.1, out=out)
        first, second, third = (json.loads(line) for line in out.getvalue().splitlines())
        assert first["hub"]["epoch"] != third["hub"]["epoch"]
        assert "does not answer" in second["hub"] and "does not answer" in describe(second)
    hubs[1].close()


def test_watching_ends_when_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    naps = itertools.count()

    def nap(seconds: float) -> None:
        if next(naps) == 2:
            raise KeyboardInterrupt

    monkeypatch.setattr("jaxrl_sync.launch.status.time.sleep", nap)
    assert len(list(status_module._beats(0.5))) == 3
    assert len(list(status_module._beats(None))) == 1


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["status"], 2, "needs RUN_DIR, or --hub with --token-file"),
        (["status", "--hub", "http://127.0.0.1:1"], 2, "needs RUN_DIR, or --hub with --token-file"),
        (
            ["status", "--hub", "nonsense", "--token-file", TOKEN],
            2,
            "'nonsense' is no URL, expected http://HOST",
        ),
        (["status", "--hub", "127.0.0.1:80", "--token-file", TOKEN], 2, "'127.0.0.1:80' is no URL"),
        (["status", "--hub", "http://", "--token-file", TOKEN], 2, "'http://' is no URL"),
        (["status", "--hub", "http://h:x", "--token-file", TOKEN], 2, "'http://h:x' is no URL"),
        (["status", "--hub", "ftp://h:1", "--token-file", TOKEN], 2, "'ftp://h:1' is no URL"),
        (["status", "/", "--watch", "0"], 2, "expected seconds above 0"),
        (["status", "/", "--watch", "inf"], 2, "expected seconds above 0, at most 1e+06"),
        (["status", "/", "--watch", "--preflight"], 2, "expected no --watch"),
        (["status", "/"], 2, "is not a run directory"),
    ],
)
def test_command_lines_that_can_not_be(
    words: list[str],
    code: int,
    line: str,
    token_file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each at once and by name: nobody waits for a hub at what is no address."""
    monkeypatch.setattr(status_module, "ANSWER_S", 60.0)
    started = time.monotonic()
    assert main([str(token_file) if word == TOKEN else word for word in words]) == code
    assert line in capsys.readouterr().err and time.monotonic() - started < 30


@pytest.mark.parametrize(
    ("cause", "phase", "said"),
    [("done", "ended", "finished"), ("InterruptedRunError: stop", "interrupted", "interrupted")],
)
def test_a_run_that_was_interrupted_is_not_finished(
    cause: str, phase: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.toml").touch()
    (tmp_path / "progress.json").write_text(json.dumps({"phase": phase, "step": 7, "steps": 45}))
    (tmp_path / "summary.json").write_text(json.dumps({"cause": cause, "steps": 7}))
    assert main(["status", str(tmp_path)]) == 0
    assert f": {said}, step 7 of 45;" in capsys.readouterr().out


def test_a_hub_that_is_not_there_or_not_ours_is_one_line(
    hub: ServerThread, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "ANSWER_S", 0.3)
    auth.create_token(tmp_path / "other")
    assert main(["status", "--hub", hub.url, "--token-file", str(tmp_path / "other")]) == 4
    assert capsys.readouterr().err.count("\n") == 1
    assert main(["status", "--hub", "http://127.0.0.1:9", "--token-file", str(tmp_path / "other")]) == 4
    assert "didn't answer" in capsys.readouterr().err
    assert main(["status", "--hub", hub.url, "--token-file", str(tmp_path / "none")]) == 3
    assert "can't read token file" in capsys.readouterr().err
