"""Checkpoints: the same bits on another mesh, the last K, nothing incomplete, nothing that does not fit."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

from jaxrl_sync.inference.checkpoint import load_trainer, save_trainer
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.checkpoint import CheckpointError, Checkpoints, Meta
from jaxrl_sync.transfer.version import Version
from tests.trainer.batches import MODEL, build, host, micros, packed, same_bits, samples, trainer_config


def _meta(number: int) -> Meta:
    return Meta(Version("aaaa", number), Version("bbbb", 0), {"prompts": 7 * number, "rng": [1, 2]})


def _target(fsdp: int, tp: int, model: Any = MODEL) -> Any:
    step, _ = build(trainer_config(1, fsdp, tp))
    return train_state.abstract(model, step.config, step.mesh)


@pytest.mark.invariant(58)
def test_a_checkpoint_of_a_4x1_mesh_restores_bit_for_bit_on_2x2(tmp_path: Path) -> None:
    step, state = build(trainer_config(1, 4, 1))
    batch = packed(samples(6))
    state, _, _ = step.update(state, step.zeros(), micros(step, batch), batch.num_valid_tokens)
    reference = jax.tree.map(lambda x: x * 2, state.params)
    saved = host((state, reference))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state, _meta(1), reference)
    target = _target(2, 2)
    with Checkpoints(tmp_path / "c") as checkpoints:
        found, meta, again = checkpoints.restore(target, reference=target.params)
        alone, _, _ = checkpoints.restore(target)
    assert meta == _meta(1)
    assert same_bits(saved, (found, again)) and same_bits(saved[0], alone)
    for leaf, wanted in zip(jax.tree.leaves(found), jax.tree.leaves(target), strict=True):
        assert leaf.sharding == wanted.sharding and leaf.committed


def test_published_weights_make_the_same_first_state_on_any_mesh(tmp_path: Path) -> None:
    """A folder of safetensors: the weights bit for bit, moments and counters as in a fresh state."""
    step, fresh = build(trainer_config(1, 4, 1))
    save_trainer(tmp_path / "w", host(fresh.params), MODEL, dtype="float32")
    target = _target(2, 2)
    other, _ = build(trainer_config(1, 2, 2))
    params = load_trainer(tmp_path / "w", MODEL, target.params)
    state = train_state.from_params(MODEL, other.config, other.mesh, params, seed=0)
    created = train_state.create(MODEL, step.config, step.mesh, 0)
    assert same_bits(fresh.params, state.params)
    assert same_bits(created.opt_state, state.opt_state) and same_bits(created.rng, state.rng)
    assert [x.sharding for x in jax.tree.leaves(state)] == [x.sharding for x in jax.tree.leaves(target)]


@pytest.mark.invariant(61)
def test_only_the_last_complete_ones_are_seen(tmp_path: Path) -> None:
    _, state = build(trainer_config(1, 2, 2))
    folder = tmp_path / "c"
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest() is None
        with pytest.raises(
            CheckpointError, match="no complete checkpoint in .*, expected one to resume from"
        ):
            checkpoints.meta()
        for number in (1, 2, 3):
            checkpoints.save(state, _meta(number))
    assert sorted(p.name for p in folder.iterdir()) == ["2", "3"]
    shutil.copytree(folder / "3", folder / "9.orbax-checkpoint-tmp-1")
    shutil.copytree(folder / "3", folder / "8")
    shutil.rmtree(folder / "8" / "meta")
    with Checkpoints(folder, keep=2) as checkpoints:
        assert checkpoints.newest() == 3
        assert checkpoints.meta().cursor == {"prompts": 21, "rng": [1, 2]}
        with pytest.raises(CheckpointError, match=r"checkpoint 4 was not written: .* has \[2, 3, 8\]"):
            checkpoints.save(state, _meta(4))
        checkpoints.drop_after(2)
        assert checkpoints.newest() == 2
        checkpoints.save(state, _meta(4))
        assert checkpoints.newest() == 4
    assert not (folder / "3").exists()


def test_a_checkpoint_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    _, state = build(trainer_config(1, 2, 2))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state, _meta(1))
        wider = dataclasses.replace(MODEL, d_ff=48)
        with pytest.raises(CheckpointError, match=r"has shape \(2, .*expected \(2, "):
            checkpoints.restore(_target(2, 2, wider))
        target = _target(2, 2)
        with pytest.raises(CheckpointError, match=r"reference/.* has shape None, expected"):
            checkpoints.restore(target, reference=target.params)
