"""Eight virtual CPU devices and one compilation cache for a test run, and which of the long sizes run.

What one test has compiled, another one or a process that it starts finds in the cache, a folder of this run
alone (``JAX_COMPILATION_CACHE_DIR``, where it is set, is taken instead).

Tests marked ``full`` are the long sizes. A plain run takes a share of them (``full(share=...)``; a tenth),
chosen by a seed (the commit), so that over time CI sees them all but those with a share of 0; ``--all-full``
takes them all, ``--verification FILE`` writes what ran.

Hypothesis judges no test by how fast this machine is just now.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path

import hypothesis
import pytest

from tests import verification

_FLAG = "--xla_force_host_platform_device_count=8"
if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAG}".strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
_OWN_CACHE = None
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _OWN_CACHE = tempfile.mkdtemp(prefix="jaxrl_sync-tests-xla-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _OWN_CACHE

hypothesis.settings.register_profile(
    "any machine", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any machine")

FULL_SHARE = 0.1


def pytest_addoption(parser: pytest.Parser) -> None:
    """``--all-full`` and ``--verification``."""
    parser.addoption("--all-full", action="store_true", help="run every test marked full, not a seeded share")
    parser.addoption("--verification", metavar="FILE", help="write what ran of the full tests into FILE")


def pytest_configure(config: pytest.Config) -> None:
    """Record results where ``--verification`` asks for it."""
    path = config.getoption("--verification")
    if path:
        config.pluginmanager.register(verification.Recorder(Path(path), share_seed()), "verification")


def pytest_unconfigure() -> None:
    """Remove the compilation cache of this run."""
    if _OWN_CACHE is not None:
        shutil.rmtree(_OWN_CACHE, ignore_errors=True)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the long sizes that the seed does not choose; skip GPU tests where there is no GPU."""
    full = {i.nodeid: mark for i in items if (mark := i.get_closest_marker("full")) is not None}
    shares = {nodeid: float(mark.kwargs.get("share", FULL_SHARE)) for nodeid, mark in full.items()}
    left_out: set[str] = set()
    if not config.getoption("--all-full"):
        left_out = set(full) - verification.choose(share_seed(), shares)
    for item in items:
        if item.get_closest_marker("gpu") is not None and not Path("/dev/nvidia0").exists():
            item.add_marker(pytest.mark.skip(reason="needs one GPU: /dev/nvidia0 does not exist"))
    if left_out:
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
        items[:] = [item for item in items if item.nodeid not in left_out]


def pytest_report_header() -> str:
    """The seed that chose the share of long sizes."""
    return f"seed of the share of long sizes: {share_seed()} (JAXRL_SYNC_TEST_SEED)"


def share_seed() -> str:
    """What chooses the share; ``./dev test`` sets it to the commit."""
    return os.environ.get("JAXRL_SYNC_TEST_SEED", "0")
