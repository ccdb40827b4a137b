"""The prompts of a run's tasks: which task a group belongs to, and which prompt of it."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Mapping
from typing import Any

from jaxrl_sync.orchestrator.config import LoopConfig
from jaxrl_sync.orchestrator.errors import LoopError
from jaxrl_sync.orchestrator.groups import OpenGroup
from jaxrl_sync.orchestrator.source import DataSource, MixedSource, Source
from jaxrl_sync.sharding.errors import UserError
from jaxrl_sync.tasks.mixture import Mixture
from jaxrl_sync.tasks.protocol import Dataset, Split, Task


class Prompts:
    """Train and eval data of every task. Evaluation asks each task for ``eval.prompts`` prompts, one task
    after the other: its item numbers go through all of them."""

    def __init__(self, mixture: Mixture, seed: int, eval_prompts: int) -> None:
        self.mixture = mixture
        self._train = [_dataset(part.task, "train", seed) for part in mixture.parts]
        self._eval = [_dataset(part.task, "eval", seed) for part in mixture.parts]
        sizes = [eval_prompts if d.size is None else min(eval_prompts, d.size) for d in self._eval]
        self._eval_starts = [0, *itertools.accumulate(sizes)]

    @property
    def eval_items(self) -> int:
        """Prompts of one evaluation, of all tasks together."""
        return self._eval_starts[-1]

    @property
    def eval_sizes(self) -> dict[str, int]:
        """Prompts of one evaluation by task."""
        pairs = itertools.pairwise(self._eval_starts)
        return {label: b - a for label, (a, b) in zip(self.mixture.labels, pairs, strict=True)}

    def source(self, config: LoopConfig, cursor: Mapping[str, Any] | None) -> Source:
        """The stream of training prompts, from the beginning or from a saved cursor."""
        sizes = [data.size for data in self._train]
        if len(sizes) == 1:
            return DataSource(sizes[0], config.seed, epochs=config.epochs, cursor=cursor)
        weights = [part.weight for part in self.mixture.parts]
        return MixedSource.make(
            self.mixture.labels, weights, sizes, config.seed, epochs=config.epochs, cursor=cursor
        )

    def part_of_eval(self, item: int) -> int:
        """Which task an evaluation's item belongs to."""
        return bisect.bisect_right(self._eval_starts, item) - 1

    def label_of_eval(self, item: int) -> str:
        """The label of that task."""
        return self.mixture.labels[self.part_of_eval(item)]

    def task(self, group: OpenGroup) -> Task:
        """The task that a group's prompt is of."""
        return self.mixture.parts[self._part(group)].task

    def uid(self, group: OpenGroup) -> str:
        """The prompt's name within its task."""
        if group.kind == "train":
            return self._train[group.draw.part][group.draw.item]
        part = self._part(group)
        return self._eval[part][group.draw.item - self._eval_starts[part]]

    def _part(self, group: OpenGroup) -> int:
        return group.draw.part if group.kind == "train" else self.part_of_eval(group.draw.item)


def _dataset(task: Task, split: Split, seed: int) -> Dataset:
    try:
        return task.dataset(split, seed)
    except UserError:
        raise
    except Exception as error:
        raise LoopError(f"the task's dataset({split!r}) raised {type(error).__name__}: {error}") from error
