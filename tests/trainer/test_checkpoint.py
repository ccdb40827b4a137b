"""Checkpoints: the same bits on another mesh, the last K, nothing incomplete, nothing that does not fit."""

from __future__ import annotations

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxrl_sync.inference.checkpoint import load_trainer, save_trainer
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.checkpoint import CheckpointError, Checkpoints, Meta
from jaxrl_sync.transfer.version import Version
from tests.ports import free_port
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


def test_updates_that_donate_the_state_go_on_while_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, state = build(trainer_config(1, 2, 2))
    batch = packed(samples(6))
    accumulator, fields = step.zeros(), micros(step, batch)
    go_on, rename = threading.Event(), os.rename
    with Checkpoints(tmp_path / "c") as checkpoints:
        monkeypatch.setattr(os, "rename", lambda *args, **more: go_on.wait(60) and rename(*args, **more))
        state, accumulator, _ = step.update(state, accumulator, fields, batch.num_valid_tokens)
        saved = host(state)
        checkpoints.save(state, _meta(1))
        for _ in range(3):
            state, accumulator, _ = step.update(state, accumulator, fields, batch.num_valid_tokens)
        assert not (tmp_path / "c" / "1").exists(), "it appears when it is complete"
        go_on.set()
        assert checkpoints.newest() == 1
        found, meta, _ = checkpoints.restore(_target(2, 2))
    assert meta == _meta(1) and same_bits(saved, found) and not same_bits(saved, state)


def test_a_checkpoint_that_could_not_be_written_is_an_error_of_the_next_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*args: Any, **more: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    _, state = build(trainer_config(1, 2, 2))
    checkpoints = Checkpoints(tmp_path / "c")
    monkeypatch.setattr(os, "rename", full)
    checkpoints.save(state, _meta(1))
    with pytest.raises(CheckpointError, match="a checkpoint was not written: .*No space left on device"):
        checkpoints.wait()
    monkeypatch.undo()
    assert checkpoints.newest() is None
    checkpoints.save(state, _meta(2))
    checkpoints.close()
    assert [p.name for p in (tmp_path / "c").iterdir() if p.name.isdigit()] == ["2"]


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_checkpoint_of_a_4x1_mesh_restores_bit_for_bit_on_two_processes(tmp_path: Path) -> None:
    """Every shard that each rank holds, read in its own process, against the state that was saved."""
    step, state = build(trainer_config(1, 4, 1))
    batch = packed(samples(6))
    state, _, _ = step.update(state, step.zeros(), micros(step, batch), batch.num_valid_tokens)
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state, _meta(1))
    leaves = jax.tree.leaves(host(state))
    covered = [np.zeros(leaf.shape, bool) for leaf in leaves]
    for shards in _two_ranks(tmp_path / "c", tmp_path):
        for name, raw in shards.items():
            number, _, box = name.partition("|")
            spans = [span.split(":") for span in box.split(",") if span]
            index = tuple(slice(int(a), int(b)) for a, b in spans)
            assert np.ascontiguousarray(leaves[int(number)][index]).tobytes() == raw.tobytes(), name
            covered[int(number)][index] = True
    assert all(mask.all() for mask in covered)


def _two_ranks(folder: Path, out: Path) -> list[dict[str, Any]]:
    """The shards of each rank of a two-process world that restores ``folder``."""
    coordinator = f"127.0.0.1:{free_port()}"
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    root = Path(__file__).resolve().parents[2]
    base = [sys.executable, "-m", "tests.trainer.restore_child", str(folder), coordinator]
    ranks = [
        subprocess.Popen(
            [*base, str(rank), str(out / f"{rank}.npz")], cwd=root, env=env, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    try:
        errors = [rank.communicate(timeout=200)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], errors
    return [dict(np.load(out / f"{rank}.npz")) for rank in range(2)]


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


@pytest.mark.parametrize("part", ["state", "meta"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_is_named(tmp_path: Path, part: str, how: str) -> None:
    _, state = build(trainer_config(1, 2, 1))
    with Checkpoints(tmp_path / "c") as checkpoints:
        checkpoints.save(state, _meta(1))
    for file in [f for f in (tmp_path / "c" / "1" / part).rglob("*") if f.is_file()]:
        if how == "gone":
            file.unlink()
        elif how == "cut":
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        else:
            file.write_bytes(bytes(b ^ 0x5A for b in file.read_bytes()))
    with (
        Checkpoints(tmp_path / "c") as checkpoints,
        pytest.raises(CheckpointError, match=rf"checkpoint {tmp_path}/c/1: {part}"),
    ):
        checkpoints.restore(_target(2, 1))
