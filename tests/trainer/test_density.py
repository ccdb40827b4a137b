"""The density log of a trainer: which updates it measures, and what it says of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

from jaxrl_sync.config import load
from jaxrl_sync.config.errors import ConfigError
from jaxrl_sync.trainer.density import DensityLog

ADDITION = Path(__file__).parents[2] / "experiments" / "addition" / "run.toml"


def convert(tree: Any) -> Any:
    return {"layers": {"0": {"w": tree["w"].astype(jnp.bfloat16)}}}


def test_every_third_update_is_compared_with_the_one_before(tmp_path: Path) -> None:
    log = DensityLog(tmp_path / "density.jsonl", 3, convert)
    for number in range(8):
        changed = {2: 5, 3: 7, 5: 50, 6: 0}.get(number, 1)
        weights = jnp.ones(100).at[:changed].set(2.0 + number)
        log.observe(number, {"w": weights})
    rows = [json.loads(line) for line in (tmp_path / "density.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [3, 6]
    assert [row["changed"] for row in rows] == [7, 50]  # ones again where the version before had others
    assert rows[0]["classes"]["layers/*/w"]["elements"] == 100 and rows[0]["full_bytes"] == 200
    assert rows[1]["overlap"] == pytest.approx(7 / 50)


def test_a_resumed_run_measures_nothing_across_the_break(tmp_path: Path) -> None:
    log = DensityLog(tmp_path / "density.jsonl", 2, convert)
    log.observe(4, {"w": jnp.ones(4)})  # version 3 was never seen
    assert not (tmp_path / "density.jsonl").exists()


def test_several_trainer_processes_are_refused() -> None:
    changes = {"sync.density_every_steps": 4, "trainer.processes": 2, "trainer.devices": 2}
    with pytest.raises(ConfigError, match=r"density_every_steps=4 needs trainer.processes=1, found 2"):
        load(ADDITION, changes)
