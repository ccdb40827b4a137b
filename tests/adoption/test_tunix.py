"""A Tunix trainer and Tunix's vanilla rollout, two processes, synced through `transfer` alone.

They run in an environment of their own, which ``./dev tunix`` makes and runs this file with. Where there is
none it says so aloud in every run; that it passed where there was one is a row of docs/verification.md
(``./dev tunix --verification docs/verification.md``).
"""

from __future__ import annotations

import json
import subprocess
import time
import warnings
from pathlib import Path

import numpy as np
import pytest

from tests.adoption.examples import FOLDER, LIMIT_S, environment, started

PYTHON = FOLDER.parents[1] / ".venv-bench" / "tunix" / "bin" / "python"
PROMPTS = ["ad", "be", "mp"]


@pytest.mark.slow
@pytest.mark.full(share=1.0)
def test_tunix_rollout_follows_the_tunix_trainer(tmp_path: Path) -> None:
    """The rollout ends with the trainer's last weights, bit for bit, and says what Tunix itself would."""
    if not PYTHON.exists():
        warnings.warn("NOT TESTED: Tunix. Make its environment with ./dev tunix", stacklevel=1)
        pytest.skip(f"NOT TESTED: Tunix has no environment ({PYTHON}): run ./dev tunix")
    files = [FOLDER / "tunix_trainer.py", FOLDER / "tunix_rollout.py"]
    with started(files, tmp_path, str(PYTHON)) as (trainer, rollout):
        answers = [rollout.ask(PROMPTS)]
        while trainer.running:
            answers.append(rollout.ask(PROMPTS))
            time.sleep(0.05)
        losses = [row["loss"] for row in trainer.end()]
        assert rollout.end() == []
    assert len(losses) == 40 and losses[-1] < 0.5 < losses[0]

    with np.load(tmp_path / "trainer.npz") as want, np.load(tmp_path / "engine.npz") as found:
        assert sorted(found.files) == sorted(want.files)
        for name in want.files:
            assert found[name].tobytes() == want[name].tobytes(), name

    arguments = [str(FOLDER), str(tmp_path / "trainer.npz"), json.dumps(PROMPTS)]
    script = Path(__file__).parent / "tunix_reference.py"
    done = subprocess.run(
        [str(PYTHON), str(script), *arguments],
        capture_output=True, text=True, timeout=LIMIT_S, env=environment(),
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert answers[-1] == json.loads(done.stdout.splitlines()[-1])
    assert answers[0] != answers[-1], "every answer came from the last weights"
