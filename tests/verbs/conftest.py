"""The fake libibverbs for every test of this folder but those marked ``rdma``, which want real devices."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from jaxrl_sync.transfer.verbs.native import is_built
from tests.verbs import fakelib


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    """In the VM the devices are there: tests that were left out for lack of them would be a hole."""
    if "RDMA_VM" in os.environ:
        passed = [
            r for r in terminalreporter.stats.get("passed", []) if "rdma" in r.keywords and r.when == "call"
        ]
        terminalreporter.write_line(f"{len(passed)} tests passed on real verbs")


def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """See above: such a skip fails the run."""
    skipped = call.excinfo is not None and call.excinfo.errisinstance(pytest.skip.Exception)
    if skipped and "RDMA_VM" in os.environ and "needs the RDMA devices" in str(call.excinfo.value):
        item.session.shouldfail = "the devices of the VM are missing"


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
