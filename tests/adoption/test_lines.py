"""What adoption costs, in lines; nothing of it stands outside the markers."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.adoption.examples import split

PROGRAMS = ("linen_trainer", "linen_engine", "tunix_trainer", "tunix_rollout")
MOST = 15


@pytest.mark.parametrize("name", PROGRAMS)
def test_at_most_fifteen_lines_a_side(name: str) -> None:
    marked, plain = split(name)
    assert 0 < len(marked) <= MOST, f"{name} needs {len(marked)} lines"
    assert all(";" not in line for line in marked), "two statements in one line"
    code = plain.split('"""', 2)[2]
    assert "jaxrl_sync" not in code, f"{name}: something of it stands outside the markers"


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_outside_the_markers_uses_what_they_define(name: str) -> None:
    pytest.importorskip("ruff")
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--select", "F821,E9", "-"]
    done = subprocess.run(ruff, input=split(name)[1], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout
