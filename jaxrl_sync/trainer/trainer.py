"""One trainer on one mesh: state, compiled functions, stages; a batch goes in, the next version comes out."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from jaxrl_sync.batch.frame import BatchFrame
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.sharding.presets.qwen3 import DecoderConfig
from jaxrl_sync.trainer.axes import Tree, batch_sharding
from jaxrl_sync.trainer.config import LossConfig, TrainerConfig
from jaxrl_sync.trainer.losses import Batch
from jaxrl_sync.trainer.offload import Offloaded
from jaxrl_sync.trainer.stages import build_stages
from jaxrl_sync.trainer.state import TrainState
from jaxrl_sync.trainer.step import Accumulator, build_step


class BatchError(UserError, ValueError):
    """A batch that does not have the trainer's shape or step; names what was found and what is expected."""


class Record(Protocol):
    """Where spans go: ``config.process.Timeline.record``."""

    def __call__(self, kind: str, t0: float, t1: float, *, step: int | None = None) -> None: ...


def no_record(kind: str, t0: float, t1: float, *, step: int | None = None) -> None:
    """Keeps no spans."""


def data_rank(mesh: Mesh, rows: int) -> tuple[int, int]:
    """Which share of a micro-batch's rows this process feeds: (data rank, number of data ranks).

    Processes whose devices differ only along tp feed the same rows and have the same data rank.
    """
    shape = (rows, 1)
    mine = batch_sharding(mesh).addressable_devices_indices_map(shape).values()
    spans = sorted({index[0].indices(rows)[:2] for index in mine if index is not None})
    start, stop = spans[0][0], spans[-1][1]
    if sum(b - a for a, b in spans) != stop - start or rows % (stop - start) or start % (stop - start):
        raise BatchError(f"this process holds rows {spans} of {rows}: expected one equal contiguous share")
    return start // (stop - start), rows // (stop - start)


class Trainer:
    """Owns a state on its mesh and advances it one batch at a time. Used by one thread."""

    def __init__(
        self,
        model: DecoderConfig,
        config: TrainerConfig,
        loss: LossConfig,
        mesh: Mesh,
        state: TrainState,
        reference: Tree | None = None,
        record: Record = no_record,
    ) -> None:
        self.config, self.loss, self.state = config, loss, state
        self.step = build_step(model, config, loss, mesh)
        self.stages = build_stages(model, config, loss, mesh, reference)
        self.data_rank, self.data_ranks = data_rank(mesh, config.rows)
        self.rows = config.rows // self.data_ranks
        self._accumulator: Accumulator = self.step.zeros()
        self._record = record
        self._offloaded: Offloaded | None = None

    @property
    def params(self) -> Tree:
        """The live fp32 masters. The next ``train`` donates them: keep no reference."""
        return self.state.params

    def offload(self) -> int:
        """Optimizer state to host memory; bytes of this process's shards. ``reload`` must come before
        ``train``."""
        if self._offloaded is None:
            self._offloaded = Offloaded(self.state.opt_state)
            self.state = dataclasses.replace(self.state, opt_state=self._offloaded.tree)
        return self._offloaded.nbytes

    def reload(self) -> None:
        """Optimizer state back to its devices; nothing to do where it is there."""
        if self._offloaded is not None:
            self.state = dataclasses.replace(self.state, opt_state=self._offloaded.restore())
            self._offloaded = None

    @property
    def reference(self) -> Tree | None:
        """The frozen reference weights, if the loss uses them."""
        return next((s.frozen for s in self.stages if s.frozen is not None), None)

    def warm_up(self, barrier: Callable[[], object] = lambda: None) -> float:
        """Compile everything, meet the other ranks in ``barrier``, rehearse on an empty batch; seconds.

        The rehearsal changes nothing.
        """
        began = time.perf_counter()
        empty = self.step.empty(self.rows)
        full = {**empty, **{stage.field: empty["rollout_logprobs"] for stage in self.stages}}
        for stage in self.stages:
            stage.compile(self.params, empty)
        self.step.compile(self.state, self._accumulator, full)
        barrier()
        self._advance(self._staged([empty]), float("nan"))
        return time.perf_counter() - began

    def train(self, frame: BatchFrame) -> dict[str, float]:
        """One update on this process's share of a batch; returns the metrics of the whole batch.

        Collective over the processes of the mesh. Blocks until the update is done.
        """
        header = frame.header
        if (header.rows, header.seq_len, header.data_rank) != (
            self.rows,
            self.config.seq_len,
            self.data_rank,
        ):
            raise BatchError(
                f"batch of step {header.step} has rows={header.rows}, seq_len={header.seq_len}, "
                f"data_rank={header.data_rank}; expected {self.rows}, {self.config.seq_len}, {self.data_rank}"
            )
        if header.num_valid_tokens < 1:
            raise BatchError(f"batch of step {header.step} has num_valid_tokens=0, expected at least 1")
        missing = sorted(self.step.fields.keys() - frame.fields.keys())
        if missing:
            wanted = ", ".join(self.step.fields)
            raise BatchError(f"batch of step {header.step} has no field {missing[0]!r}, expected {wanted}")
        micros = [self.step.put(fields) for fields in split(frame.fields, header.micro_batches)]
        with self._span("stage", header.step) as staged:
            micros = self._staged(micros)
            jax.block_until_ready([m[s.field] for m in micros for s in self.stages])
        with self._span("train", header.step) as trained:
            metrics = self._advance(micros, header.num_valid_tokens)
        return {**metrics, "stage_s": staged[0], "train_s": trained[0], "micro_batches": header.micro_batches}

    def _staged(self, micros: list[Batch]) -> list[Batch]:
        for stage in self.stages:
            micros = stage.run(self.params, micros)
        return micros

    def _advance(self, micros: Sequence[Batch], denominator: float) -> dict[str, float]:
        self.state, self._accumulator, metrics = self.step.update(
            self.state, self._accumulator, micros, denominator
        )
        return metrics

    @contextlib.contextmanager
    def _span(self, kind: str, step: int) -> Iterator[list[float]]:
        seconds, began = [0.0], time.time()
        yield seconds
        ended = time.time()
        seconds[0] = ended - began
        if kind != "stage" or self.stages:
            self._record(kind, began, ended, step=step)


def split(fields: Mapping[str, np.ndarray[Any, Any]], micro_batches: int) -> list[dict[str, Any]]:
    """Views of the micro-batches ``[rows, S]`` of fields ``[micro, rows, S]``."""
    return [{name: array[i] for name, array in fields.items()} for i in range(micro_batches)]
