"""The fake libibverbs for every test of this folder but those marked ``rdma``, which want real devices."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from jaxrl_sync.transfer import auth
from jaxrl_sync.transfer.verbs import rail
from jaxrl_sync.transfer.verbs.native import is_built
from tests import verification
from tests.conftest import share_seed
from tests.verbs import fakelib, soft


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--vm-share``."""
    parser.addoption(
        "--vm-share",
        action="store_true",
        help="of the slow tests on real verbs only the pairings and what the seed chooses",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Whole trainers and engines take minutes in an emulated guest: CI runs a third of them each time."""
    if not config.getoption("--vm-share", default=False):
        return
    left_out = [item for item in items if _waits(item)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _waits(item: pytest.Item) -> bool:
    slow = {"rdma", "slow"} <= {mark.name for mark in item.iter_markers()}
    chosen = verification.is_chosen(share_seed(), item.nodeid, 1 / 3)
    return slow and "pairings" not in item.name and not chosen


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """In the VM the devices are there: tests that were left out for lack of them would be a hole."""
    if "RDMA_VM" in os.environ:
        passed = [
            r for r in terminalreporter.stats.get("passed", []) if "rdma" in r.keywords and r.when == "call"
        ]
        terminalreporter.write_line(f"{len(passed)} tests passed on real verbs")
        for reason in sorted(soft.LEFT_OUT):  # a test itself can't: what it prints is captured
            terminalreporter.write_line(f"##  NOT TESTED: {reason}")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """See above: such a skip fails the run, and every other for which there is no reason in the VM."""
    error = call.excinfo.value if call.excinfo is not None else None
    if isinstance(error, pytest.skip.Exception) and "rdma" in item.keywords:
        _left_out(item.session, str(error))


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """The same of a module that is skipped as a whole."""
    report = yield
    if report.skipped:
        _left_out(collector.session, f"{collector.nodeid}: {report.longreprtext}")
    return report


def _left_out(session: pytest.Session, reason: str) -> None:
    if "RDMA_VM" in os.environ and reason not in soft.LEFT_OUT:
        session.shouldfail = f"in the VM nothing is to be left out, but a test was: {reason}"


@pytest.fixture(scope="session")
def fake_path() -> str:
    """Path of the fake library, chosen for this process before the extension opens any."""
    path = fakelib.build()
    if path is None:
        pytest.skip("needs a C compiler for the fake libibverbs")
    if not is_built():
        pytest.skip("the extension jaxrl_sync.transfer._verbs was not built")
    os.environ["JAXRL_SYNC_IBVERBS"] = path
    return path


@pytest.fixture
def fake(fake_path: str) -> Iterator[fakelib.Fake]:
    """The fake with all faults off; afterwards nothing may be left open or unacknowledged."""
    library = fakelib.Fake(fake_path)
    library.set()
    before = library.alive()
    overruns = library.counts.overruns
    yield library
    library.set()
    assert library.alive() == before, "something was left open"
    assert library.counts.overruns == overruns, "a completion queue overran"


@pytest.fixture
def token_file(tmp_path: Path, fake: fakelib.Fake, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run token; and the fake's devices in place of the kernel's."""
    ports = [fakelib.made_up_port("fake0", 1), fakelib.made_up_port("fake1", 2)]
    monkeypatch.setattr(rail, "scan", lambda: ports)
    auth.create_token(tmp_path / "token")
    return tmp_path / "token"
