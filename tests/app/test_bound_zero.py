"""Bound 0 in deterministic mode against a plain synchronous loop: samples, batches, updates, bit for bit.

The run is the whole application: hub, orchestrator, a trainer and two engine replicas in processes of their
own. ``tests/app/plain_loop.py`` is the other side.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.app.runs import CACHE, ROOT, Run

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.invariant(12)]

STEPS = 6
BOUND_ZERO = (
    f"--run.steps={STEPS}",
    "--run.keep_batches=true",
    "--loop.staleness_bound=0",
    "--engine.deterministic=true",
    "--engine.slots=32",
    "--loop.prompts_per_step=8",
    "--loop.group_size=8",
    "--eval.prompts=16",
)


PLACEMENTS = {
    "disaggregated": (),
    "colocated": (
        "--engine.placement=colocated",
        "--engine.replicas=1",
        "--engine.dtype=float32",
        "--trainer.offload=optimizer",
    ),
}


@pytest.mark.timeout(280)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_bound_zero_equals_a_plain_synchronous_loop_bit_for_bit(tmp_path: Path, placement: str) -> None:
    with Run(tmp_path / "run", *BOUND_ZERO, *PLACEMENTS[placement]) as run:
        code, _, err = run.finish(timeout_s=200)
        assert code == 0, err
    env = {
        **os.environ,
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(CACHE),
    }
    command = [sys.executable, "-m", "tests.app.plain_loop", str(run.run_dir)]
    plain = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=150)
    assert plain.returncode == 0, plain.stderr
    assert plain.stdout == f"{STEPS} steps equal\n"
