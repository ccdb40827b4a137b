"""Half of the share that the seed chooses elsewhere: a case of the matrix takes some seconds of real time."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import verification
from tests.conftest import share_seed

SHARE = 0.5


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out half of the cases that are still there, by the same seed."""
    if config.getoption("--all-full"):
        return
    here = Path(__file__).parent
    full = [i for i in items if here in i.path.parents and i.get_closest_marker("full") is not None]
    left_out = [i for i in full if not verification.is_chosen(f"faults {share_seed()}", i.nodeid, SHARE)]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [i for i in items if i not in left_out]
