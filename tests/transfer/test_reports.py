"""What a subscriber tells the hub in the background: it is told until it arrives."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest

from jaxrl_sync.transfer import watching
from jaxrl_sync.transfer.errors import DeadlineError, PeerLost, ProtocolError
from jaxrl_sync.transfer.watching import Watching


class Reports:
    """A reporting thread, whose lease the test may lose."""

    def __init__(self) -> None:
        self.lost = threading.Event()
        lease: Any = SimpleNamespace(lost=self.lost)
        nobody: Any = None
        self.watching = Watching(lease, nobody, lambda offer: None, lambda: None)
        self.thread = threading.Thread(target=self.watching._report, daemon=True)
        self.made: list[str] = []
        self.done = threading.Event()

    def report(self, name: str, *errors: Exception, insist: bool = True) -> None:
        """A report that ends with these errors first."""
        left = list(errors)

        def call() -> None:
            self.made.append(name)
            if left:
                raise left.pop(0)

        self.watching.report(call, insist)

    def end(self) -> list[str]:
        """All that was made once the last one is."""
        self.watching.report(self.done.set)
        self.thread.start()
        assert self.done.wait(60)
        self.watching.stop()
        self.thread.join(90)
        assert not self.thread.is_alive()
        return self.made


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> Reports:
    monkeypatch.setattr(watching, "RETRY_S", 0.01)
    return Reports()


def test_a_report_that_did_not_reach_the_hub_is_made_again_before_those_after_it(reports: Reports) -> None:
    reports.report("installed", PeerLost("hub didn't answer for 30 s"), DeadlineError("no answer in time"))
    reports.report("failed")
    assert reports.end() == ["installed", "installed", "installed", "failed"]


def test_what_the_hub_refuses_or_nobody_waits_for_is_made_once(reports: Reports) -> None:
    reports.report("refused", ProtocolError("the hub refused it"))
    reports.report("broken", ValueError("a bug"))
    reports.report("follow", PeerLost("a reader is gone"), insist=False)
    assert reports.end() == ["refused", "broken", "follow"]


def test_without_a_lease_nothing_is_told_again(reports: Reports) -> None:
    reports.lost.set()
    reports.report("installed", *[PeerLost("hub didn't answer for 30 s")] * 5)
    assert reports.end() == ["installed"]


def test_close_ends_it(reports: Reports) -> None:
    reports.report("installed", *[PeerLost("hub didn't answer for 30 s")] * 100_000)
    reports.thread.start()
    reports.watching.stop()
    reports.thread.join(90)
    assert not reports.thread.is_alive() and len(reports.made) < 100_000
