"""A Linen/optax loop and a hand-written decode loop, two processes, synced through `transfer` alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.traverse_util import unflatten_dict

from tests.adoption.examples import FOLDER, module, split, started

PROMPTS = [[0, 3], [5, 8], [13, 0]]

PATIENT = """
import sys
from pathlib import Path
sys.path.insert(0, {folder!r})
import linen_trainer

batch = linen_trainer.batch

def when_told(step):
    if step == 1:
        sys.stdin.readline()
    return batch(step)

linen_trainer.batch = when_told
linen_trainer.main(Path(sys.argv[1]))
"""
"""The example, which makes no first update before it is told to: an engine that starts slowly would see
none but the last weights, and no hub any more where the trainer had ended."""


def patient_trainer(folder: Path) -> Path:
    """The example, written there, with its patience."""
    file = folder / "patient_trainer.py"
    file.write_text(PATIENT.format(folder=str(FOLDER)), encoding="utf8")
    return file


def greedy(model: Any, params: Any, prompts: list[list[int]], length: int) -> list[list[int]]:
    """By the trainer's own forward pass, without a cache."""
    rows = jnp.asarray(prompts)
    while rows.shape[1] < length:
        following = jnp.argmax(model.apply(params, rows)[:, -1], axis=-1)
        rows = jnp.concatenate([rows, following[:, None]], axis=1)
    return [[int(token) for token in row] for row in rows]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_weights_and_tokens_follow_the_trainer(tmp_path: Path) -> None:
    """The engine ends with the trainer's last weights, bit for bit, and decodes what they say."""
    files = [patient_trainer(tmp_path), FOLDER / "linen_engine.py"]
    with started(files, tmp_path) as (trainer, engine):
        answers = [engine.ask(PROMPTS)]
        trainer.tell("train")
        while trainer.running:
            answers.append(engine.ask(PROMPTS))
            time.sleep(0.02)
        losses = [row["loss"] for row in trainer.end()]
        assert engine.end() == []
    assert losses[-1] < 0.1 < losses[0]

    saved = np.load(tmp_path / "trainer.npz")
    params = unflatten_dict({tuple(name.split("/")): jnp.asarray(saved[name]) for name in saved.files})
    with np.load(tmp_path / "engine.npz") as found:
        for path, want in jax.tree_util.tree_leaves_with_path(module("linen_engine").convert(params)):
            name = "/".join(str(key.key) for key in path)
            assert found[name].tobytes() == np.asarray(want).tobytes(), name
        assert len(found.files) == len(jax.tree.leaves(module("linen_engine").convert(params)))

    example = module("linen_trainer")
    assert answers[-1] == greedy(example.Model(), params, PROMPTS, example.LENGTH)
    assert answers[-1] == [[(row[0] + 3 * i) % example.VOCAB for i in range(12)] for row in PROMPTS]
    assert any(a != answers[-1] for a in answers), "every answer came from the last weights"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_programs_as_they_were_before(tmp_path: Path) -> None:
    """Without the marked lines both run by themselves, and the trainer's losses are the same numbers."""
    plain = tmp_path / "plain"
    plain.mkdir()
    for name in ("linen_trainer", "linen_engine"):
        (plain / f"{name}.py").write_text(split(name)[1], encoding="utf8")
    with started([plain / "linen_trainer.py", plain / "linen_engine.py"], tmp_path) as (trainer, engine):
        assert len(engine.ask(PROMPTS)) == len(PROMPTS)
        before = trainer.end()
        engine.end()
    adopted = tmp_path / "adopted"
    adopted.mkdir()
    files = [patient_trainer(adopted), FOLDER / "linen_engine.py"]
    with started(files, adopted) as (trainer, engine):
        engine.ask(PROMPTS)
        trainer.tell("train")
        while trainer.running:
            engine.ask(PROMPTS)
            time.sleep(0.02)
        assert trainer.end() == before
        engine.end()
