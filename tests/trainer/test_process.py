"""The trainer as real processes: one rank and two, drained, resumed, disagreeing, bereaved."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxrl_sync.batch.connection import Ack
from jaxrl_sync.trainer import axes
from jaxrl_sync.trainer import state as train_state
from jaxrl_sync.trainer.checkpoint import Checkpoints, Meta
from jaxrl_sync.trainer.config import MeshConfig
from jaxrl_sync.transfer.errors import TransferError
from tests.trainer.batches import MODEL, host, same_bits, trainer_config
from tests.trainer.worlds import TrainerWorld, frames_of, hub, send_all, settings, train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = (1, 2, 3)


@dataclasses.dataclass(frozen=True)
class OneRank:
    """What a run of one process on a 4x1 mesh left behind."""

    run_dir: Path
    acks: list[Ack]
    codes: list[int]


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRank]:
    run_dir = tmp_path_factory.mktemp("one") / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, settings(1, {"fsdp": 4}), url) as world:
        with world.senders() as senders:
            acks = train(senders, STEPS)
            again = senders[0].send(3, frames_of(3, 1)[0], 30.0)
        assert again == acks[-1], "a step that is committed is acknowledged, not trained again"
        yield OneRank(run_dir, acks, world.stop())


def _load(run_dir: Path, mesh: MeshConfig) -> tuple[Any, Meta]:
    config = trainer_config(mesh.dp, mesh.fsdp, mesh.tp)
    import jax

    target = train_state.abstract(MODEL, config, axes.make_mesh(mesh, jax.devices()[: mesh.num_devices]))
    with Checkpoints(run_dir / "checkpoints") as checkpoints:
        state, meta, _ = checkpoints.restore(target)
    return host(state), meta


@pytest.mark.invariant(59)
def test_a_drained_trainer_acknowledged_published_and_saved_what_it_committed(one_rank: OneRank) -> None:
    assert one_rank.codes == [0]
    assert [(a.step, a.number) for a in one_rank.acks] == [(1, 1), (2, 2), (3, 3)]
    metrics = one_rank.acks[-1].metrics
    assert metrics["tokens"] > 0 and metrics["publish_s"] > 0 and metrics["nonfinite_metrics"] == 0
    _, meta = _load(one_rank.run_dir, MeshConfig(fsdp=4))
    assert (meta.version.number, meta.parent, meta.cursor) == (3, None, {"prompts": 72})
    rows = [json.loads(x) for x in (one_rank.run_dir / "timeline/trainer-0.jsonl").read_text().splitlines()]
    kinds = [row["kind"] for row in rows]
    assert kinds.count("train") == 3 and kinds.count("publish") == 4 and kinds.count("checkpoint") == 1
    assert json.loads((one_rank.run_dir / "proc/trainer-0.json").read_text())["role"] == "trainer"


@pytest.mark.invariant(46)
def test_two_processes_give_the_loss_curve_of_one(one_rank: OneRank, tmp_path: Path) -> None:
    """Gradient sums are added in another order: relative 1e-4 on the curve after three updates."""
    run_dir = tmp_path / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, settings(2, {"fsdp": 4}), url) as world:
        with world.senders() as senders:
            acks = train(senders, STEPS)
        assert world.stop() == [0, 0], world.log()
    for name in ("loss", "nll", "grad_norm", "mismatch_k3", "entropy"):
        mine = [a.metrics[name] for a in acks]
        np.testing.assert_allclose(mine, [a.metrics[name] for a in one_rank.acks], rtol=1e-4, atol=1e-5)
    assert [a.metrics["tokens"] for a in acks] == [a.metrics["tokens"] for a in one_rank.acks]


@pytest.mark.invariant(60)
@pytest.mark.parametrize(("processes", "mesh"), [(1, {"fsdp": 2, "tp": 2}), (2, {"fsdp": 4})])
def test_a_resume_elsewhere_continues_the_same_state_in_a_new_lineage(
    one_rank: OneRank, tmp_path: Path, processes: int, mesh: dict[str, int]
) -> None:
    run_dir = tmp_path / "run"
    with hub(run_dir) as url:
        (run_dir / "checkpoints").symlink_to(one_rank.run_dir / "checkpoints")
        saved, before = _load(one_rank.run_dir, MeshConfig(fsdp=4))
        with TrainerWorld(run_dir, settings(processes, mesh), url, resume=True) as world:
            with world.senders() as senders:
                states = [sender.connect() for sender in senders]
                assert {s.number for s in states} == {3}
                assert {s.lineage for s in states} != {before.version.lineage}
                assert [dict(s.cursor) for s in states] == [{"prompts": 72}] * processes
            assert world.stop() == [0] * processes, world.log()
    same, meta = _load(one_rank.run_dir, MeshConfig(fsdp=2, tp=2))
    assert meta.version == before.version, "what was resumed and not trained on is not saved again"
    assert same_bits(saved, same)


def test_ranks_with_different_steps_end_with_a_named_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, settings(2, {"fsdp": 4}), url) as world:
        with world.senders() as senders:
            first, second = frames_of(1, 2, checkpoint=False), frames_of(1, 2, checkpoint=True)
            with pytest.raises(TransferError):
                send_all(senders, [(1, first[0]), (1, second[1])])
        assert {p.wait(240) for p in world.processes} == {4}
        assert "trainer ranks hold different batches" in world.log()


def test_the_death_of_a_rank_ends_the_other_with_a_named_error(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    with hub(run_dir) as url, TrainerWorld(run_dir, settings(2, {"fsdp": 4}), url) as world:
        with world.senders() as senders:
            train(senders, [1])
            world.processes[1].kill()
            with pytest.raises(TransferError):
                senders[0].send(2, frames_of(2, 2)[0], 60.0)
        assert world.processes[0].wait(240) != 0
        assert "did not reach" in world.log() or "rank" in world.log()
