"""A hub for a folder: one at a time, found by who has the folder, and no other hub's files touched."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.errors import DeadlineError, ResourceError
from jaxrl_sync.transfer.hub import local
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.hub.local import LocalHub, find_hub
from tests.ports import free_port

SERVE = """
import os, sys, time
from jaxrl_sync.transfer.hub.local import LocalHub
hub = LocalHub(sys.argv[1])
if os.fork() == 0:  # as data loaders do; it outlives its parent
    time.sleep(60)
print(hub.url, flush=True)
time.sleep(60)
"""


def members(folder: Path) -> list[str]:
    """Who is registered with the hub that is found in a folder."""
    found = find_hub(folder, 5)
    with HubClient(found.url, found.token_file, timeout_s=5) as client:
        return [m.name for m in client.members()]


def test_a_second_hub_is_refused_and_the_first_is_found_as_before(tmp_path: Path) -> None:
    """It took the address and the token away: engines that came later found nobody."""
    with LocalHub(tmp_path) as hub, HubClient(hub.url, hub.token_file) as client:
        client.register("engine", "e")
        (tmp_path / "other").symlink_to(tmp_path)
        for place in (tmp_path, tmp_path / "other"):
            with pytest.raises(ResourceError, match=f"has a hub already: pid {os.getpid()} serves it at"):
                LocalHub(place)
        assert members(tmp_path) == ["e"]
    with LocalHub(tmp_path):
        assert members(tmp_path) == []


def test_a_hub_of_another_process_is_named_and_its_death_makes_room(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, str(tmp_path)]
    first = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        assert first.stdout is not None
        url = first.stdout.readline().strip()
        with pytest.raises(ResourceError, match=f"has a hub already: pid {first.pid} serves it at {url}"):
            LocalHub(tmp_path, port=0)
        assert members(tmp_path) == []
        first.kill()
        first.wait(20)
        with pytest.raises(DeadlineError, match="within 0.1 s; what is there is of a hub that has died"):
            find_hub(tmp_path, 0.1)
        with LocalHub(tmp_path) as hub:  # although a child of the dead lives
            assert find_hub(tmp_path, 5).url == hub.url != url
    finally:
        os.killpg(first.pid, signal.SIGKILL)
        first.communicate(timeout=20)


def test_a_hub_that_ends_leaves_the_address_of_the_next_one(tmp_path: Path) -> None:
    """Where a file system has no locks, two may have followed each other."""
    hub = LocalHub(tmp_path)
    text = json.dumps({"url": "http://127.0.0.1:1", "pid": 1})
    (tmp_path / "hub.json").write_text(text)
    hub.close()
    hub.close()
    assert (tmp_path / "hub.json").read_text() == text
    with LocalHub(tmp_path) as fresh:
        assert find_hub(tmp_path, 5).url == fresh.url


def test_a_hub_that_fails_to_start_leaves_the_folder_to_another_one(tmp_path: Path) -> None:
    port = free_port()
    with LocalHub(tmp_path / "a", port=port):
        with pytest.raises(ResourceError, match="can't listen on"):
            LocalHub(tmp_path / "b", port=port)
    with LocalHub(tmp_path / "b", port=port) as other:
        assert find_hub(tmp_path / "b", 5).url == other.url


def test_an_address_that_goes_away_while_it_is_looked_for_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that starts removes what the one before it wrote."""
    (tmp_path / "hub.json").write_text("{}")
    opened, read, hubs = threading.Event(), local._read_own, list[LocalHub]()

    def late(file: Path) -> str | None:
        if not opened.is_set():
            opened.set()
            (tmp_path / "hub.json").unlink()
            hubs.append(LocalHub(tmp_path))
            hubs[0]._address.rename(tmp_path / "aside")
        elif (tmp_path / "aside").exists():
            (tmp_path / "aside").rename(tmp_path / "hub.json")
        return read(file)

    monkeypatch.setattr(local, "_read_own", late)
    try:
        assert find_hub(tmp_path, 20).url == hubs[0].url
    finally:
        monkeypatch.undo()
        hubs[0].close()


def test_an_address_of_another_machine_is_followed_whatever_its_locks_say(tmp_path: Path) -> None:
    """Locks may not reach beyond a machine."""
    auth.create_token(tmp_path / "token")
    (tmp_path / "hub.lock").touch(mode=0o600)
    for boot in ("another", None):
        text = json.dumps({"url": "http://10.0.0.1:7070", "pid": 1, "boot": boot})
        (tmp_path / "hub.json").write_text(text)
        assert find_hub(tmp_path, 5).url == "http://10.0.0.1:7070"
