"""What a trainer without a data plane tells the hub."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer.files.announcing import Announcer
from jaxrl_sync.transfer.hub.client import HubClient
from jaxrl_sync.transfer.hub.local import LocalHub
from jaxrl_sync.transfer.version import Version


def test_a_version_that_comes_while_an_older_one_is_told_again_is_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The older one was refused, which ended the lease, and was told again after the next restart."""
    with LocalHub(tmp_path) as hub, HubClient(hub.url, hub.token_file) as client:
        about: Any = {"model": "policy", "nbytes": 8, "rank": 0, "size": 1, "ttl_s": 60.0, "timeout_s": 60.0}
        with Announcer(hub.url, hub.token_file, **about) as trainer:
            trainer.announce(Version("a", 5))
            call = trainer._lease.call

            def overtaken(path: str, body: dict[str, Any]) -> dict[str, Any]:
                monkeypatch.setattr(trainer._lease, "call", call)
                trainer.announce(Version("a", 6))
                return call(path, body)

            monkeypatch.setattr(trainer._lease, "call", overtaken)
            trainer._again()
            for _ in range(2):
                newest = client.newest()
                assert newest is not None and newest.version == Version("a", 6)
                trainer._again()
            assert not trainer._lease.lost.is_set()
