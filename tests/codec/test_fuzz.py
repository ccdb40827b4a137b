"""The frame decoder under fuzzing: no crash, no hang, nothing out of bounds, only named errors."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.codec import hostile

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.invariant(39)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [30, pytest.param(300, marks=pytest.mark.full(share=0))])
def test_mutations_of_sound_frames(seconds: float) -> None:
    """Also under the address sanitizer, where the C coders are then instrumented."""
    least = int(100 * seconds)  # on a machine that is slow it takes longer
    tried, taken = hostile.run(seconds, int(os.environ.get("JAXRL_SYNC_FUZZ_SEED", "0")), least)
    print(f"{tried} frames in {seconds:g} s, {taken} taken")
    assert tried >= least and 0 < taken < tried


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seconds", [30, pytest.param(300, marks=pytest.mark.full(share=0))])
@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs atheris")
@pytest.mark.skipif("JAXRL_SYNC_SANITIZED" in os.environ, reason="libFuzzer brings its own sanitizer")
def test_coverage_guided_fuzzing(seconds: int) -> None:
    command = [sys.executable, "-m", "tests.codec.fuzz", f"-max_total_time={seconds}", "-print_final_stats=1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 300)
    assert done.returncode == 0, done.stderr[-4000:]
    units = re.search(r"number_of_executed_units: (\d+)", done.stderr)
    assert units is not None and int(units[1]) > 1000, done.stderr[-2000:]
    print(f"{units[1]} frames in {seconds} s")
